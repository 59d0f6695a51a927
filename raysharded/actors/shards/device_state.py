"""The training state on the device, and its copies to and from a flat host buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.constants import Constants
from raysharded.actors.model.inventory import Inventory
from raysharded.actors.model.param_layout import BUFFER, CONSTANT, MODEL, NUMBER, OPTIM, ParamLayout
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.actors.numerics.bit_digest import combined, tensor_digest
from raysharded.actors.optimizer.inner_optimizers import bits_of
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.shards.async_copy import AsyncHostCopy
from raysharded.actors.shards.store import ShardBuffer, torch_dtype
from raysharded.errors import CheckpointError, InexactError
from raysharded.layout import Piece, ShardMap, StateSpec, TensorSpec
from raysharded.layout.sharding import ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


class DeviceState:
    """Parameters, persistent buffers and optimizer state of one worker in one generation."""

    def __init__(self, sharded: ShardedModel, optimizer: ShardOptimizer) -> None:
        self._sharded, self._optimizer = sharded, optimizer
        self._carried: dict[str, torch.Tensor] = {}
        """Path -> value in host memory of each constant that is part of the state: the model may change its own."""
        self._filler = AsyncHostCopy(self._device())
        self._num_tensors: dict[str, int] = {}

    @property
    def cuts(self) -> ParamLayout:
        """Layout of the parameters over the workers."""
        return self._sharded.cuts

    @property
    def carried(self) -> Collection[str]:
        """Paths of the constants that are part of the state."""
        return self._carried.keys()

    @property
    def inventory(self) -> Inventory:
        """Inventory of the built model."""
        return self._sharded.inventory

    def carry(self, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Make constants of the model part of the state: path -> (dtype, shape). Paths that do not exist are skipped.

        Raises CheckpointError if the model's constant has another dtype or shape, or cannot be written.
        """
        for path, kind in found.items():
            here = self.inventory.constants.get(path)
            if here is None:
                continue
            own = dtype_name(here.value.dtype), tuple(here.value.shape)
            if own != kind or here.write is None:
                raise CheckpointError(
                    f"the saved state has {path!r} as {kind[0]} {list(kind[1])}, which the constructor drew when the "
                    f"run began, and it is {own[0]} {list(own[1])} in the task's model now. Restore the model that the "
                    "run was started with, or give the run another name."
                )
            self._carried[path] = here.value.cpu().clone()

    def spec(self, *, with_optimizer: bool = True) -> StateSpec:
        """The current global state by name. Without optimizer state before the first step, which makes it."""
        params = self._sharded.parameters
        found = {MODEL + name: (param.dtype, param.shape) for name, param in params.items()}
        found |= {BUFFER + name: (b.dtype, b.shape) for name, b in self._sharded.persistent_buffers.items()}
        found |= {CONSTANT + path: (value.dtype, value.shape) for path, value in self._carried.items()}
        numbers = self._optimizer.number_names()
        self._num_tensors = self._optimizer.num_tensors()
        for full_name, value in self._optimizer.state().items() if with_optimizer else ():
            shape = params[full_name.rpartition(".")[0]].shape if value.dim() else torch.Size()
            found[(NUMBER if full_name in numbers else OPTIM) + full_name] = (value.dtype, shape)
        return state_spec(
            {name: (dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in found.items()}, self.cuts
        )

    def check_spec(self, begun: Collection[str] = ()) -> None:
        """Raise `InexactError` if the optimizer keeps more or less of a parameter than at the last `spec`.

        Parameters in `begun` are exempt: their state has begun since.
        """
        now = self._optimizer.num_tensors()
        if now == self._num_tensors:
            return
        for name, count in now.items():
            known = self._num_tensors.get(name, 0)
            if count < known:
                raise InexactError(
                    f"entries of the optimizer's state of {name!r} were deleted, as after optimizer.state.clear(). A "
                    "parameter's state begins once in a run: set its tensors to 0 in place."
                )
            if count > known and name not in begun:
                raise InexactError(
                    f"the optimizer's state of {name!r} has other keys than after that parameter's first step: the new "
                    "entries would be lost with a worker. Let it make all state of a parameter in the first step in "
                    "which that has a gradient."
                )

    def forms(self) -> list[str]:
        """The optimizer's state of each parameter in words, without values; equal on all workers."""
        numbers = self._optimizer.number_names()
        kept: dict[str, list[str]] = {name: [] for name in self._sharded.parameters}
        for full_name, value in self._optimizer.state().items():
            name, _, key = full_name.rpartition(".")
            kind = "number" if full_name in numbers else "tensor" if value.dim() else "0-dim tensor"
            kept[name].append(f"{key!r} (a {kind} of {dtype_name(value.dtype)})")
        return [f"{', '.join(keys) or 'nothing'} for {name!r}" for name, keys in kept.items()]

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = self._model_tensors()
        numbers = self._optimizer.number_names()
        found |= {(NUMBER if k in numbers else OPTIM) + k: v for k, v in self._optimizer.state().items()}
        return found

    def copy_to(self, buffer: ShardBuffer) -> None:
        """Start to copy the live state into a buffer of host memory.

        Parameters and optimizer state must not change until `buffer.wait` has returned. The model may change its own
        buffers earlier. Raises InexactError for state of the optimizer that has another type than at the last `spec`.
        """
        live = self._tensors()
        into: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        with torch.no_grad():
            for view, piece in buffer.tensors:
                name = piece.tensor.name
                if name not in live or live[name].dtype is not view.dtype:
                    raise _turned(piece.tensor, live)
                source = _part(live[name], piece, buffer.pieces)
                if name.startswith(BUFFER):
                    view.copy_(source, non_blocking=True)
                else:
                    into.append(view)
                    sources.append(source.detach())
        buffer.fill(self._filler.begin(into, sources))

    def digest(self, spec: StateSpec, pieces: ShardMap) -> int:
        """Digest of the live state, in the order of `pieces`; equal to `digest_of_copy` of an equal copy."""
        live = self._tensors()
        parts = (_part(live[piece.tensor.name], piece, pieces) for piece in pieces.pieces(spec))
        return combined(numbers_of(map(tensor_digest, parts)))

    @staticmethod
    def digest_of_copy(buffer: ShardBuffer) -> int:
        """Digest of a buffer that `copy_to` filled, on any worker."""
        return combined(numbers_of(tensor_digest(view) for view, _ in buffer.tensors))

    def load_from(self, buffer: ShardBuffer) -> frozenset[str]:
        """Make the live state equal to a buffer that `copy_to` filled, at any number of workers.

        Optimizer state of parameters that are frozen now, and in no group, is left out; returns their names. Raises
        CheckpointError for another model, or one of another dtype, or one that lost values of the state.
        """
        spec = buffer.spec
        self._check_same_model(spec)
        _refuse_lost(buffer, self._model_tensors().keys(), self.inventory.constants)
        kept = [t for t in spec.tensors if t.name.startswith((OPTIM, NUMBER))]
        left_out = {t.name for t in kept if self._is_frozen(_parameter_of(t.name))}
        optim = {t.name: self._optimizer_tensor(t) for t in kept if t.name not in left_out}
        live = self._model_tensors() | optim
        with torch.no_grad():
            for view, piece in buffer.tensors:
                if piece.tensor.name in live:
                    _part(live[piece.tensor.name], piece, buffer.pieces).copy_(view)
        self._put_constants()
        if kept:  # at the start an optimizer keeps its constructor's state
            numbers = frozenset(name.removeprefix(NUMBER) for name in optim if name.startswith(NUMBER))
            self._optimizer.load_state({name.partition(".")[2]: value for name, value in optim.items()}, numbers)
        return frozenset(map(_parameter_of, left_out))

    def _is_frozen(self, name: str) -> bool:
        """True for a parameter of the model that the optimizer lacks: trainable ones were rejected."""
        return name in self._sharded.parameters and not self._optimizer.has(name)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {MODEL + k: local_of(v) for k, v in self._sharded.parameters.items()}
        found |= {BUFFER + k: v for k, v in self._sharded.persistent_buffers.items()}
        return found | {CONSTANT + k: v for k, v in self._carried.items()}

    def _put_constants(self) -> None:
        for path, value in self._carried.items():
            write = self._sharded.inventory.constants[path].write
            assert write is not None  # checked when the constant became part of the state
            write(value)

    def _optimizer_tensor(self, spec: TensorSpec) -> torch.Tensor:
        """An empty tensor for the optimizer's state of this worker's part."""
        key = spec.name.partition(".")[2]
        dtype = torch_dtype(spec.dtype)
        if not spec.shape:
            return torch.empty((), dtype=dtype, device=self._optimizer.step_device(key, self._device()))
        return torch.empty_like(local_of(self._sharded.parameters[_parameter_of(spec.name)]), dtype=dtype)

    def _device(self) -> torch.device:
        return next(iter(self._sharded.parameters.values())).device

    def added_to(self, state: StateSpec) -> frozenset[str]:
        """Parameters and persistent buffers that the model has and a state lacks, by their names in the state.

        Empty if the state has parameters that the model lacks: it is another model's.
        """
        have = {tensor.name for tensor in state.tensors}
        need = {MODEL + name for name in self._sharded.parameters}
        if {name for name in have if name.startswith(MODEL)} - need:
            return frozenset()
        return frozenset((need | {BUFFER + name for name in self._sharded.persistent_buffers}) - have)

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
        self._check_same_dtypes(spec)

    def _check_same_dtypes(self, spec: StateSpec) -> None:
        saved = {t.name: f"{t.dtype} {t.shape}" for t in spec.tensors}
        params = {MODEL + name: param for name, param in self._sharded.parameters.items()}
        buffers = {BUFFER + name: buffer for name, buffer in self._sharded.persistent_buffers.items()}
        now = {name: f"{dtype_name(one.dtype)} {tuple(one.shape)}" for name, one in (params | buffers).items()}
        if other := sorted(name for name in now if saved.get(name, now[name]) != now[name]):
            first = other[0]
            kind = "parameter" if first.startswith(MODEL) else "buffer"
            raise CheckpointError(
                f"the saved state does not fit the task's model: the {kind} {first.partition('.')[2]!r} is "
                f"{saved[first]} in the state and {now[first]} in the model ({len(other)} such in all). Converting it "
                "would change the run's numbers. Let build_model make what the run was started with (EngineConfig."
                "param_dtype sets the dtype to compute in), or give the run another name and start from exported "
                "weights."
            )


def _refuse_lost(saved: ShardBuffer, taken: Collection[str], here: Constants) -> None:
    """Raise CheckpointError for saved buffers and constants whose values the model has not now.

    `taken`: names in the state that the model takes. A value is no loss if the model has it under the same name, as a
    constant or a buffer. Under another name it may be a coincidence, unless its elements differ.
    """
    lost = {piece.tensor.name: view for view, piece in saved.tensors if _is_lost(piece.tensor.name, taken)}
    if not lost:
        return
    now = [(CONSTANT + path, constant.value) for path, constant in here.items()]
    now += [(piece.tensor.name, view) for view, piece in saved.tensors if piece.tensor.name.startswith(BUFFER)]
    now = [(name, value) for name, value in now if name not in lost and value.layout is torch.strided]
    gone = [name for name, value in lost.items() if not any(_is_kept(name, value, *one) for one in now)]
    if gone:
        first, value = gone[0], lost[gone[0]]
        name = first.partition(".")[2]
        kind, remedy = (
            ("buffer", "as a persistent buffer") if first.startswith(BUFFER) else ("drawn constant", "as it was")
        )
        raise CheckpointError(
            f"the saved state has the {kind} {name!r}, {dtype_name(value.dtype)} {list(value.shape)}, and the task's "
            f"model has neither a place for it nor the same values ({len(gone)} such in all). The run would continue "
            f"with other values, or without them. Keep {name!r} in the model {remedy}, or give the run another name "
            "and begin from its weights with RunConfig.start_from."
        )


def _is_lost(name: str, taken: Collection[str]) -> bool:
    return name.startswith((BUFFER, CONSTANT)) and name not in taken


def _is_kept(name: str, value: torch.Tensor, name_now: str, now: torch.Tensor) -> bool:
    """True if a saved value of this name is the one that the model has under that name."""
    if (value.dtype, value.shape) != (now.dtype, now.shape) or now.is_meta or now.is_quantized:
        return False
    flat = value.reshape(-1)
    if name.partition(".")[2] != name_now.partition(".")[2] and not (flat != flat[:1]).any():
        return False
    return bits_of(value) == bits_of(now.resolve_conj().resolve_neg())


def _turned(kept: TensorSpec, live: Mapping[str, torch.Tensor]) -> InexactError:
    """Error for an entry of the state that would be converted. `kept`: as it was at first."""
    _, _, name = kept.name.partition(".")
    now = next((_form(one, dtype_name(live[one].dtype)) for one in _names_of(kept.name) if one in live), "gone")
    return InexactError(
        f"{name!r} of the state was {_form(kept.name, kept.dtype)} at first, and is {now} now: where workers change, "
        "it would be converted back. Let each entry of optimizer.state[parameter] have one type from its first step "
        "on, as 0.0 for a number that becomes a fraction."
    )


def _names_of(name: str) -> tuple[str, ...]:
    """The names in the state under which an entry may be."""
    kind, _, rest = name.partition(".")
    return (NUMBER + rest, OPTIM + rest) if f"{kind}." in (NUMBER, OPTIM) else (name,)


def _form(name: str, dtype: str) -> str:
    return f"a {'number' if name.startswith(NUMBER) else 'tensor'} of {dtype}"


def _parameter_of(name: str) -> str:
    """The parameter of a tensor of optimizer state, by the tensor's name in the state."""
    return name.partition(".")[2].rpartition(".")[0]


def shard_bytes(sharded: ShardedModel, keeps: Mapping[str, Collection[str]]) -> int:
    """About the size of a worker's shard once the optimizer has state: `keeps` are the keys that it makes for each
    parameter, by name. A key counts as large as its parameter, but for the number of steps."""
    found = sum(buffer.nbytes + ALIGNMENT for buffer in sharded.persistent_buffers.values())
    for name, param in sharded.parameters.items():
        local = local_of(param)
        copies = 1 + len(set(keeps.get(name, ())) - {"step"})
        found += copies * (local.numel() * local.element_size() + ALIGNMENT)
    return found


def state_spec(tensors: Mapping[str, tuple[str, tuple[int, ...]]], cuts: ParamLayout | None = None) -> StateSpec:
    """Spec of a state of these tensors, name -> (dtype, shape), in the order of live states."""
    cuts = cuts or ParamLayout()
    return StateSpec(tensors=tuple(spec for name in sorted(tensors) for spec in cuts.specs(name, *tensors[name])))


def _part(local: torch.Tensor, piece: Piece, pieces: ShardMap) -> torch.Tensor:
    """A piece's part of this worker's local tensor: all of it, or one of its strips."""
    strips = piece.tensor.strips // pieces.degree
    if strips <= 1:
        return local
    dim = piece.tensor.tensor_dim
    assert dim is not None
    width = local.shape[dim] // strips
    return local.narrow(dim, piece.tensor.strip % strips * width, width)


def fill_initial(buffer: ShardBuffer, initial: Mapping[str, torch.Tensor]) -> None:
    """Copy this shard's parts of the given whole tensors into the buffer."""
    for view, piece in buffer.tensors:
        whole = initial.get(piece.tensor.name)
        if whole is not None:
            box = tuple(slice(start, start + n) for start, n in zip(piece.offsets, piece.sizes, strict=True))
            view.copy_(whole.detach()[box])
