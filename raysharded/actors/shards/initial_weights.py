"""A run's first weights from another checkpoint: of a run, of `checkpoint.save`, or imported.

Parameters and buffers are matched by name and shape. Floating-point values are converted to the model's dtype, each by
itself, so that the bits do not depend on how the model is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raysharded.actors.model.param_layout import BUFFER, MODEL
from raysharded.actors.shards.store import ShardBuffer, torch_dtype
from raysharded.checkpoint import Checkpoint, open_checkpoint, open_storage
from raysharded.display.quantities import count
from raysharded.errors import ConfigError
from raysharded.layout import Piece, StateSpec, TensorSpec
from raysharded.protocol.job import InitialWeights

_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The checkpoint, and the tensors taken from it."""

    checkpoint: Checkpoint
    names: Mapping[str, str]
    """Name of a tensor of the run's state -> its name in the checkpoint."""
    missing: frozenset[str]
    """Names of tensors of the state that the checkpoint lacks: they keep the values of a run's start."""
    uri: str
    """`RunConfig.start_from`, for messages."""

    def sentence(self) -> str:
        """The tensors that the run begins with, and those that it leaves out: their numbers, and the first of each."""
        unused = sorted(self.checkpoint.tensors.keys() - set(self.names.values()))
        foreign = [name for name in unused if name.startswith((MODEL, BUFFER))]
        others = [name for name in unused if not name.startswith((MODEL, BUFFER))]
        of_all = len(self.names) + len(self.missing)
        told = f"RunConfig.start_from: {len(self.names)} of {of_all} parameters and buffers are those of {self.uri}."
        if self.missing:
            told += f" As in a new run: {len(self.missing)} that are not in it, first {min(self.missing)!r}."
        if foreign:
            told += f" Left out: {len(foreign)} of it that the model lacks, first {foreign[0]!r}."
        if others:
            told += (
                f" Left out: {count(len(others), 'other tensor')} (of an optimizer, or values), first {others[0]!r}."
            )
        return f"{told} The optimizer, the count of steps and the data begin anew."


def find(weights: InitialWeights, state: StateSpec) -> Source:
    """Match a run's first state with the checkpoint.

    Raises ConfigError if no parameter is in the checkpoint, or if one has another shape or kind there.
    """
    checkpoint = open_checkpoint(open_storage(weights.url), weights.prefix, digest=weights.digest)
    wanted = [tensor for tensor in state.tensors if tensor.name.startswith((MODEL, BUFFER))]
    names = {tensor.name: name for tensor in wanted if (name := _name_in(checkpoint, tensor.name)) is not None}
    if not any(name.startswith(MODEL) for name in names):
        ours = next((tensor.name for tensor in wanted if tensor.name.startswith(MODEL)), MODEL)
        theirs = min(checkpoint.tensors, default="none")
        raise ConfigError(
            f"RunConfig.start_from: none of the model's parameters is in {weights.uri}. The model's first is {ours!r}, "
            f"the checkpoint's first is {theirs!r}. Import it with a map: `raysharded checkpoint import --map`."
        )
    for tensor in wanted:
        if tensor.name in names:
            _require_same(checkpoint, names[tensor.name], tensor, weights.uri)
    missing = frozenset(tensor.name for tensor in wanted if tensor.name not in names)
    return Source(checkpoint=checkpoint, names=names, missing=missing, uri=weights.uri)


def _name_in(checkpoint: Checkpoint, name: str) -> str | None:
    """A tensor's name in the checkpoint; `checkpoint.save` stores buffers among the parameters."""
    candidates = (name, MODEL + name.removeprefix(BUFFER) if name.startswith(BUFFER) else name)
    return next((one for one in candidates if one in checkpoint.tensors), None)


def _require_same(checkpoint: Checkpoint, name: str, tensor: TensorSpec, uri: str) -> None:
    info = checkpoint.tensors[name]
    if tuple(info.shape) != tensor.shape:
        raise ConfigError(
            f"RunConfig.start_from: {name!r} has the shape {tuple(info.shape)} in {uri}, {tensor.shape} in the model."
        )
    if info.dtype != tensor.dtype and not (info.dtype in _FLOATS and tensor.dtype in _FLOATS):
        raise ConfigError(f"RunConfig.start_from: {name!r} is {info.dtype} in {uri} and {tensor.dtype} in the model.")


def read_into(own: ShardBuffer, source: Source, reads: Callable[[Piece], bool]) -> int:
    """Overwrite those pieces of a worker's shard that the checkpoint has and `reads` accepts.

    Returns the bytes read from storage.
    """
    data = own.data.numpy()
    requests = []
    converted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for view, piece in own.tensors:
        name = source.names.get(piece.tensor.name)
        if name is None or not reads(piece):
            continue
        dtype = source.checkpoint.tensors[name].dtype
        if dtype == piece.tensor.dtype:
            into = data[piece.place]
        else:
            given = torch.empty(view.shape, dtype=torch_dtype(dtype))
            converted.append((view, given))
            into = given.view(-1).view(torch.uint8).numpy()
        requests.append((name, piece.offsets, piece.sizes, into))
    read = source.checkpoint.read_many(requests)
    for view, given in converted:
        view.copy_(given)
    return read
