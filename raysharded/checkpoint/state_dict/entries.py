"""Top-level entries of a state: modules and optimizers as named live tensors, and other values as they are.

Names are those of `torch.distributed.checkpoint.state_dict`, however the module is wrapped. They are a parameter's or
persistent buffer's full name, and for optimizers `state.<parameter>.<key>` and `param_groups.<number>.<key>`. The
trainer's names for the same are `model.<name>`, `buffer.<name>` and `optim.<name>.<key>`. A plain number of an
optimizer is `number.<name>.<key>`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from raysharded.checkpoint.state_dict.optimizers import (
    Blank,
    OptimizerEntry,
    local_part,
    nothing,
    require_parameters_alone,
)
from raysharded.checkpoint.state_dict.tree import Path
from raysharded.errors import CheckpointError, ConfigError

_MOST_SHOWN = 8


class Entry(Protocol):
    """One part of a state."""

    @property
    def levels(self) -> int:
        """Number of levels of keys below the entry's own that are compared key by key.

        Below them, parts without tensors are taken as they were stored.
        """
        ...

    @property
    def state(self) -> Any:
        """Nested dicts of live tensors and values, as they are saved."""
        ...

    def to_fill(self, blank: Blank = nothing) -> Any:
        """The part of the entry that a load fills. Missing state is created, until `undo` or `apply`.

        `blank` provides the checkpoint's contents for this entry.
        """
        ...

    def undo(self) -> None:
        """Remove what `to_fill` created."""
        ...

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        """Names that the trainer uses for the tensor of that name within the entry at `key`."""
        ...

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        """Paths at which the checkpoint has nothing for this entry, which is at `key`.

        `stored`: the checkpoint's leaves by path.
        """
        ...

    def is_optional(self, path: Path, *, without_tree: bool) -> bool:
        """True if the checkpoint and the entry need not both have the value at a path within the entry.

        `without_tree`: the checkpoint has the entry, and no tree, as the trainer's.
        """
        ...

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        """Sentences on why the checkpoint's values, by path, do not fit this entry at `key`."""
        ...

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> Any:
        """Apply the values in the state that `to_fill` returned, after its tensors are filled.

        Returns the loaded entry.

        `filled`: paths, within the entry, of tensors and values from the checkpoint. `emptied`: paths at which the
        checkpoint has nothing, as in `left_out`.
        """
        ...


def entry_of(state: Mapping[Any, Any], key: Any) -> Entry:
    """The entry under a key. Raises ConfigError for an optimizer without the one module that it belongs to."""
    value = state[key]
    if isinstance(value, nn.Module):
        return ModuleEntry(value)
    if isinstance(value, torch.optim.Optimizer):
        module = _only_module(state, key)
        _require_own(value, module, key)
        return OptimizerEntry(value, module, fresh=not value.state)
    return PlainEntry(value)


def saved_form(state: Any) -> Any:
    """The state as nested dicts of live tensors and values. Nothing in it changes. Raises as `entry_of`."""
    if isinstance(state, nn.Module):
        return ModuleEntry(state).state
    if isinstance(state, Mapping):
        return {key: entry_of(state, key).state for key in state}
    return state


@contextmanager
def later_form(state: Any) -> Iterator[Any]:
    """The `saved_form` of the state once every optimizer has stepped. Afterwards the state is unchanged."""
    if not isinstance(state, Mapping):
        yield saved_form(state)
        return
    entries = {key: entry_of(state, key) for key in state}
    try:
        yield {key: entry.to_fill() for key, entry in entries.items()}
    finally:
        for entry in entries.values():
            entry.undo()


@dataclass(frozen=True, slots=True)
class PlainEntry:
    """Tensors and values, nested."""

    state: Any

    @property
    def levels(self) -> int:
        return 0

    def to_fill(self, blank: Blank = nothing) -> Any:
        return self.state

    def undo(self) -> None:
        pass

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        return ()

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        return set()

    def is_optional(self, path: Path, *, without_tree: bool) -> bool:
        return False

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        return []

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> Any:
        return state


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """Parameters and persistent buffers of a module."""

    module: nn.Module

    @property
    def levels(self) -> int:
        return 1

    @property
    def state(self) -> Any:
        if not any(True for _ in self.module.parameters()) and not self.module.state_dict():
            return {}  # torch rejects it: a loss, or a stage of a pipeline without weights
        values = get_model_state_dict(self.module)
        lazy = [name for name, value in values.items() if isinstance(value, torch.Tensor) and is_lazy(value)]
        if lazy:
            raise ConfigError(
                f"{len(lazy)} tensors of the module are lazy and have no shape yet: {', '.join(lazy[:_MOST_SHOWN])}. "
                "Call the module once with a batch, then save or load."
            )
        return values

    def to_fill(self, blank: Blank = nothing) -> Any:
        return self.state

    def undo(self) -> None:
        pass

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        """Trainer names. The trainer does not know modules other than the model, such as its moving average."""
        return (f"model.{name}", f"buffer.{name}") if key in ((), ("model",)) else ()

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        return set()

    def is_optional(self, path: Path, *, without_tree: bool) -> bool:
        return False

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        return []

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> nn.Module:
        """Give the module's `load_state_dict` the filled values that are not in its own memory: extra state, and copies
        that `state_dict` hooks made. Raises CheckpointError for those that it does not take.
        """
        names = {path[0] for path in filled}
        own = _storages(self.module)
        apart = {n: value for n, value in state.items() if n in names and not _is_in_place(str(n), value, own)}
        if apart:
            _give(self.module, apart)
        return self.module


def _is_in_place(name: str, value: Any, own: Collection[int]) -> bool:
    """True for a value that is in the module's own memory, given its storages, and so needs no `load_state_dict`."""
    is_extra_state = name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
    return not is_extra_state and isinstance(value, torch.Tensor) and _storage(value) in own


def _storages(module: nn.Module) -> set[int]:
    return {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory that the tensor, or its part on this rank, is a view of."""
    identity: int = local_part(tensor).untyped_storage()._cdata
    return identity


def _give(module: nn.Module, values: Mapping[Any, Any]) -> None:
    """Load values by their names without the prefixes of wrappers."""
    wrapped = {name: key for key in module.state_dict() for name in _get_fqns(module, key)}
    refused = module.load_state_dict({wrapped[name]: values[name] for name in values}, strict=False)[1]
    if refused:
        raise CheckpointError(
            f"the module's load_state_dict does not take {len(refused)} values that its state_dict has: "
            f"{', '.join(refused[:_MOST_SHOWN])}. A state_dict hook replaced or added them. Register the "
            "load_state_dict hook that is its inverse, or leave them out by choosing the rest with names=[...]."
        )


def _only_module(state: Mapping[Any, Any], key: Any) -> nn.Module:
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(modules) != 1:
        raise ConfigError(
            f"state[{key!r}] is an optimizer, and beside it there are {len(modules)} modules. Give it with the one "
            "module that it belongs to: {'model': module, 'optimizer': optimizer}."
        )
    return modules[0]


def _require_own(optimizer: torch.optim.Optimizer, module: nn.Module, key: Any) -> None:
    own = set(map(id, module.parameters()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(id(param) not in own for param in params)
    if foreign:
        raise ConfigError(
            f"state[{key!r}] is an optimizer, and {foreign} of its {len(params)} parameters are not those of the "
            "module beside it. Give it with the module that it belongs to, and make it after what replaces parameters, "
            "such as fully_shard."
        )
    require_parameters_alone(optimizer)
