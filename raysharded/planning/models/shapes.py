"""The planner's view of a model: FSDP2 units of named parameters, buffers, and the optimizer's state. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raysharded.actors.model.param_layout import BUFFER, MODEL, NUMBER, OPTIM, ParamLayout
from raysharded.errors import ConfigError
from raysharded.layout.sharding import row_range
from raysharded.layout.state import ITEM_BYTES, StateSpec
from raysharded.task import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """An entry of the optimizer's state of a parameter, such as `exp_avg`."""

    key: str
    dtype: str
    scalar: bool = False
    """True for one value; otherwise it has the parameter's shape."""
    is_number: bool = False
    """True for a Python number: in snapshots, but not a tensor on the device."""


ADAMW = (
    Slot(key="exp_avg", dtype="float32"),
    Slot(key="exp_avg_sq", dtype="float32"),
    Slot(key="step", dtype="float32", scalar=True),
)
"""The state of torch's AdamW for a float32 parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """A whole parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    slots: tuple[Slot, ...] = ()
    tensor_dim: int | None = None
    """The dimension that tensor parallelism shards, at this or a higher degree; None: the parameter stays whole."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def local(self, degree: int, tensor_rank: int) -> ParameterShape:
        """The part of one worker of a tensor parallel group, which FSDP2 then shards along dimension 0."""
        if self.tensor_dim is None:
            return self
        dim, shape = self.tensor_dim, list(self.shape)
        start, stop = row_range(shape[dim], degree, tensor_rank)
        shape[dim] = stop - start
        return replace(self, shape=tuple(shape), tensor_dim=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferShape:
    """A buffer; every worker has it whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    persistent: bool = True
    item_bytes: int = 4
    """Bytes per element. A buffer that is not persistent may have a dtype that no state holds."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShape:
    """A set of parameters that FSDP2 gathers and reduces together; empty if the unit directly holds none."""

    name: str
    parameters: tuple[ParameterShape, ...]
    strategy: Strategy | None = None
    """The sharding, as in `Task.strategy`; None: as set in the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transient:
    """Temporary allocations of the optimizer's step, in bytes per element of a worker's shards."""

    of_largest: float = 8.0
    """Bytes for one parameter at a time (torch's single-tensor AdamW: two float32)."""
    of_all: float = 0.0
    """Bytes for all parameters at once (`foreach=True`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShapes:
    """A model's units in the order of their forward, the root last. Raises ConfigError for a duplicate name."""

    units: tuple[UnitShape, ...]
    buffers: tuple[BufferShape, ...] = ()
    transient: Transient = field(default_factory=Transient)

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"ModelShapes: two parameters are named {twice!r}; give each a unique name.")
        if not names:
            raise ConfigError("the model has no parameters; give one that can be trained.")

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        return tuple(p for unit in self.units for p in unit.parameters)

    @cached_property
    def replicated(self) -> frozenset[str]:
        """The parameters that every worker has whole."""
        return frozenset(p.name for unit in self.units if unit.strategy == "replicate" for p in unit.parameters)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.size_bytes for p in self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buffers)

    @property
    def state(self) -> StateSpec:
        """The training state in snapshots without tensor parallelism."""
        return self.state_at(1)

    def state_at(self, degree: int) -> StateSpec:
        """The training state of a run that begins with this tensor parallel degree. Raises ConfigError for an invalid
        degree."""
        if degree not in self._states:
            self._states[degree] = self._state(degree)
        return self._states[degree]

    def local(self, degree: int, tensor_rank: int) -> ModelShapes:
        """The model as FSDP2 sees it on one worker of each tensor parallel group."""
        units = tuple(
            replace(unit, parameters=tuple(p.local(degree, tensor_rank) for p in unit.parameters))
            for unit in self.units
        )
        return replace(self, units=units)

    @cached_property
    def _states(self) -> dict[int, StateSpec]:
        return {}

    def _state(self, degree: int) -> StateSpec:
        dims = {p.name: p.tensor_dim for p in self.parameters if p.tensor_dim is not None}
        cuts = ParamLayout(degree=degree, tensor_dims=dims, replicated=self.replicated)
        tensors = [cuts.specs(f"{MODEL}{p.name}", p.dtype, p.shape) for p in self.parameters]
        tensors += [cuts.specs(f"{BUFFER}{b.name}", b.dtype, b.shape) for b in self.buffers if b.persistent]
        for p in self.parameters:
            for slot in p.slots:
                name = f"{NUMBER if slot.is_number else OPTIM}{p.name}.{slot.key}"
                tensors.append(cuts.specs(name, slot.dtype, () if slot.scalar else p.shape))
        return StateSpec(tensors=tuple(tensor for specs in tensors for tensor in specs))

    @cached_property
    def columns(self) -> Columns:
        """The parameters as arrays, in the order of `parameters`."""
        params = self.parameters
        unit = [i for i, u in enumerate(self.units) for _ in u.parameters]
        full = [sum(ITEM_BYTES[s.dtype] for s in p.slots if not s.scalar) for p in params]
        single = [sum(ITEM_BYTES[s.dtype] for s in p.slots if s.scalar and not s.is_number) for p in params]
        return Columns(
            unit=np.array(unit, np.int64),
            rows=np.array([p.shape[0] if p.shape else 1 for p in params], np.int64),
            row_numel=np.array([math.prod(p.shape[1:]) for p in params], np.int64),
            itemsize=np.array([ITEM_BYTES[p.dtype] for p in params], np.int64),
            trainable=np.array([p.trainable for p in params], np.bool_),
            replicated=np.array([p.name in self.replicated for p in params], np.bool_),
            state_per_element=np.array(full, np.int64),
            state_once=np.array(single, np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Columns:
    """One entry per parameter; in bytes unless stated otherwise."""

    unit: NDArray[np.int64]
    rows: NDArray[np.int64]
    row_numel: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    trainable: NDArray[np.bool_]
    replicated: NDArray[np.bool_]
    """Whether every worker has the parameter whole."""
    state_per_element: NDArray[np.int64]
    state_once: NDArray[np.int64]

    def chunk(self, shards: int) -> NDArray[np.int64]:
        """The elements of one worker's part, with FSDP2's padding."""
        return np.where(self.replicated, self.rows, -(-self.rows // shards)) * self.row_numel

    def held(self, shards: int, shard: int) -> NDArray[np.int64]:
        """The elements of one worker's part, without padding."""
        part = -(-self.rows // shards)
        rows = np.minimum((shard + 1) * part, self.rows) - np.minimum(shard * part, self.rows)
        return np.where(self.replicated, self.rows, rows) * self.row_numel
