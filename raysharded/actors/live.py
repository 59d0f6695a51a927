"""The training state as it lies on the device, and its copies to and from a flat host buffer.

Names in the state: `model.<parameter>`, `buffer.<buffer>`, `optim.<parameter>.<key>`, and `number.<parameter>.<key>`
for what an optimizer keeps as a Python number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from raysharded.actors.bits import combined, tensor_digest
from raysharded.actors.build import ShardedModel, local_of
from raysharded.actors.optimizer import ShardOptimizer
from raysharded.errors import CheckpointError
from raysharded.layout import Piece, ShardMap, StateSpec, TensorSpec, shard_map

MODEL, BUFFER, OPTIM, NUMBER = "model.", "buffer.", "optim.", "number."


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class LiveState:
    """Parameters, persistent buffers and optimizer state of one worker in one generation."""

    def __init__(self, sharded: ShardedModel, optimizer: ShardOptimizer, shard: int, shards: int) -> None:
        self._optimizer = optimizer
        self._sharded = sharded
        self._shard, self._shards = shard, shards

    @property
    def replicated(self) -> frozenset[str]:
        """The names of the parameters that every worker has whole."""
        return self._sharded.replicated

    def spec(self, *, with_optimizer: bool = True) -> StateSpec:
        """The global state as it is now, by name. Without optimizer state before the first step: it is made then."""
        params = self._sharded.parameters
        tensors = [_spec_of(MODEL + name, param, whole=name in self.replicated) for name, param in params.items()]
        tensors += [
            TensorSpec(name=BUFFER + name, dtype=dtype_name(b.dtype), shape=tuple(b.shape), replicated=True)
            for name, b in self._sharded.persistent_buffers.items()
        ]
        numbers = self._optimizer.number_names()
        for full_name, value in self._optimizer.state().items() if with_optimizer else ():
            name = full_name.rpartition(".")[0]
            shape = tuple(params[name].shape) if value.dim() else ()
            prefix = NUMBER if full_name in numbers else OPTIM
            whole = name in self.replicated
            dtype = dtype_name(value.dtype)
            tensors.append(TensorSpec(name=prefix + full_name, dtype=dtype, shape=shape, replicated=whole))
        return StateSpec(tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)))

    def shard_map(self, spec: StateSpec) -> ShardMap:
        """This worker's part of the state."""
        return shard_map(spec, self._shards, self._shard)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {MODEL + k: local_of(v) for k, v in self._sharded.parameters.items()}
        found |= {BUFFER + k: v for k, v in self._sharded.persistent_buffers.items()}
        numbers = self._optimizer.number_names()
        found |= {(NUMBER if k in numbers else OPTIM) + k: v for k, v in self._optimizer.state().items()}
        return found

    def copy_to(self, buffer: torch.Tensor, spec: StateSpec, pieces: ShardMap) -> None:
        """Copy the live state into a uint8 host buffer laid out as `pieces`; returns when it is there."""
        live = self._tensors()
        on_gpu = False
        with torch.no_grad():
            for view, name in _views(buffer, spec, pieces):
                source = live[name]
                on_gpu |= source.is_cuda
                view.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    def digest(self, spec: StateSpec, pieces: ShardMap) -> int:
        """Of the live state, in the order of `pieces`; equal to `digest_of_copy` of an equal copy."""
        live = self._tensors()
        return combined(int(tensor_digest(live[piece.tensor.name]).item()) for piece in pieces.pieces(spec))

    @staticmethod
    def digest_of_copy(buffer: torch.Tensor, spec: StateSpec, pieces: ShardMap) -> int:
        """Of a buffer that `copy_to` filled, on any worker."""
        return combined(int(tensor_digest(view).item()) for view, _ in _views(buffer, spec, pieces))

    def load_from(self, buffer: torch.Tensor, spec: StateSpec, pieces: ShardMap) -> None:
        """Make the live state equal to a buffer that `copy_to` filled, at any number of workers."""
        views = {name: view for view, name in _views(buffer, spec, pieces)}
        self._check_same_model(spec)
        optim: dict[str, torch.Tensor] = {}
        numbers: set[str] = set()
        with torch.no_grad():
            for name, live in self._model_tensors().items():
                if name in views:
                    live.copy_(views[name])
            for tensor in spec.tensors:
                prefix, _, key = tensor.name.partition(".")
                if prefix + "." in (OPTIM, NUMBER):
                    optim[key] = self._optimizer_tensor(key, tensor, views.get(tensor.name))
                    if prefix + "." == NUMBER:
                        numbers.add(key)
        if optim:  # at the start an optimizer keeps what its constructor made
            self._optimizer.load_state(optim, frozenset(numbers))

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {MODEL + k: local_of(v) for k, v in self._sharded.parameters.items()}
        return found | {BUFFER + k: v for k, v in self._sharded.persistent_buffers.items()}

    def _optimizer_tensor(self, key: str, spec: TensorSpec, view: torch.Tensor | None) -> torch.Tensor:
        if not spec.shape:
            assert view is not None
            return view.clone().to(self._optimizer.step_device(key, self._device()))
        like = local_of(self._sharded.parameters[key.rpartition(".")[0]])
        value = torch.empty_like(like, dtype=torch_dtype(spec.dtype))
        if view is not None:
            value.copy_(view)
        return value

    def _device(self) -> torch.device:
        return next(iter(self._sharded.parameters.values())).device

    def _check_same_model(self, spec: StateSpec) -> None:
        have = {t.name: t.shape for t in spec.tensors if t.name.startswith(MODEL)}
        need = {MODEL + name: tuple(param.shape) for name, param in self._sharded.parameters.items()}
        if have != need:
            names = sorted(name for name in have.keys() | need.keys() if have.get(name) != need.get(name))
            first = names[0]
            raise CheckpointError(
                f"the saved state does not fit the task's model: {len(names)} parameters differ, first {first!r} "
                f"(saved {have.get(first)}, model {need.get(first)}). Give the run another name, or restore the model "
                "it was started with."
            )


def _spec_of(name: str, param: nn.Parameter, *, whole: bool) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype_name(param.dtype), shape=tuple(param.shape), replicated=whole)


def is_replicated(tensor: str, replicated: Collection[str]) -> bool:
    """Whether every worker has a tensor of the state whole, given the names of such parameters."""
    prefix, _, name = tensor.partition(".")
    param = name if prefix + "." == MODEL else name.rpartition(".")[0]
    return prefix + "." == BUFFER or param in replicated


def _view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a flat buffer as a tensor of its dtype and local shape."""
    return buffer[piece.place].view(torch_dtype(piece.tensor.dtype)).view(piece.sizes)


def _views(buffer: torch.Tensor, spec: StateSpec, pieces: ShardMap) -> list[tuple[torch.Tensor, str]]:
    """Every piece of a flat buffer, with its name."""
    return [(_view(buffer, piece), piece.tensor.name) for piece in pieces.pieces(spec)]


def fill_initial(buffer: torch.Tensor, spec: StateSpec, pieces: ShardMap, initial: Mapping[str, torch.Tensor]) -> None:
    """Copy this shard's rows of the whole tensors that are given into the buffer."""
    for piece in pieces.pieces(spec):
        whole = initial.get(piece.tensor.name)
        if whole is not None:
            rows = slice(piece.offsets[0], piece.offsets[0] + piece.sizes[0]) if piece.sizes else ...
            _view(buffer, piece).copy_(whole.detach()[rows])
