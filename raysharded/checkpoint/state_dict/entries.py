"""What a state has at its top: modules and optimizers, taken apart into named live tensors, and anything else as it is.

Names are those of `torch.distributed.checkpoint.state_dict`, whatever wraps the module: a parameter's or persistent
buffer's full name, and for optimizers `state.<parameter>.<key>` and `param_groups.<number>.<key>`. raysharded's
trainer calls the same `model.<name>`, `buffer.<name>` and `optim.<name>.<key>`, or `number.<name>.<key>` where an
optimizer has a plain number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from raysharded.checkpoint.state_dict.optimizers import Blank, OptimizerEntry, nothing
from raysharded.checkpoint.state_dict.tree import Path
from raysharded.errors import ConfigError


class Entry(Protocol):
    """One part of a state."""

    @property
    def state(self) -> Any:
        """Nested dicts of live tensors and values, as it is saved."""
        ...

    def to_fill(self, blank: Blank = nothing) -> Any:
        """What of it a load fills; made where there is none yet, until `undo` or `apply`. `blank` gives what the
        checkpoint has for this entry."""
        ...

    def undo(self) -> None:
        """Takes back what `to_fill` made."""
        ...

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        """What the trainer calls the tensor of that name (within the entry, which is at `key`)."""
        ...

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        """Where the checkpoint, its leaves given by path, says that this entry, which is at `key`, has nothing."""
        ...

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        """Sentences on why the checkpoint's values, by path, cannot be this entry's, which is at `key`."""
        ...

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> Any:
        """Takes over the values in what `to_fill` gave, its tensors being filled already; what stands for the entry.

        `filled` are the paths, within the entry, of tensors and values that are the checkpoint's; `emptied` those
        where it has nothing, as in `left_out`.
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
    """As `saved_form` will be once every optimizer has stepped; afterwards the state is as it was."""
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

    def to_fill(self, blank: Blank = nothing) -> Any:
        return self.state

    def undo(self) -> None:
        pass

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        return ()

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        return set()

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        return []

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> Any:
        return state


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """Parameters and persistent buffers."""

    module: nn.Module

    @property
    def state(self) -> Any:
        if not any(True for _ in self.module.parameters()) and not self.module.state_dict():
            return {}  # torch refuses it: a loss, or a stage of a pipeline without weights
        return get_model_state_dict(self.module)

    def to_fill(self, blank: Blank = nothing) -> Any:
        return self.state

    def undo(self) -> None:
        pass

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        """A module beside the model, such as its moving average, is none that the trainer knows."""
        return (f"model.{name}", f"buffer.{name}") if key in ((), ("model",)) else ()

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        return set()

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        return []

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> nn.Module:
        values = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        if values:  # what get_extra_state() gave
            self.module.load_state_dict(values, strict=False)
        return self.module


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
