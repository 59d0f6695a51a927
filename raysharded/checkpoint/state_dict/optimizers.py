"""Optimizers in a state: taken apart without changing them, and filled. An unstepped optimizer stays unstepped.

torch creates the state of an optimizer in its first step. To match a checkpoint's contents, a load creates the state by
a step without effect, and removes afterwards what the checkpoint did not fill. An optimizer whose step needs a closure
gets the state that the checkpoint has.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from raysharded.checkpoint.state_dict.tree import Path
from raysharded.errors import ConfigError

Blank = Callable[[Path, torch.device], Any]
"""Function that returns a checkpoint's contents at a path within an entry; None if it has nothing there.

Its tensors are new ones on the device, without the checkpoint's values.
"""

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""Settings that schedulers add to an optimizer's groups."""
_OF_VERSIONS = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Settings that versions of torch added to its optimizers. Their defaults are what older versions did."""
_MOST_SHOWN = 8
_OPTIONAL = frozenset(("params", *_OF_SCHEDULERS, *_OF_VERSIONS))


def nothing(_path: Path, _device: torch.device) -> Any:
    """A `Blank` without a checkpoint."""
    return None


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """An optimizer's state and its groups' settings."""

    optimizer: torch.optim.Optimizer
    module: nn.Module
    fresh: bool
    """Whether the optimizer had no state when the entry was made."""

    @property
    def levels(self) -> int:
        return 3  # state.<parameter>.<key>, param_groups.<number>.<key>

    @property
    def state(self) -> Any:
        """Current state. It is empty for an optimizer that has not stepped."""
        with _unable_to_step(self.optimizer):
            return get_optimizer_state_dict(self.module, self.optimizer)

    def to_fill(self, blank: Blank = nothing) -> Any:
        """The state to fill, without the groups' parameters: those are compared, not loaded.

        The groups have in addition what a scheduler added to the checkpoint's groups.
        """
        if self.fresh and _needs_closure(self.optimizer):
            self._take_state(blank)
        elif self.fresh:
            _make_state(self.optimizer, self.module)
        state = self.state
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        for group, added in zip(groups, _added_by_schedulers(blank), strict=False):
            group.update({key: value for key, value in added.items() if key not in group})
        return {**state, "param_groups": groups}

    def _take_state(self, blank: Blank) -> None:
        """Create the checkpoint's state. Raises ConfigError if the checkpoint has none, or for DTensors."""
        params = {name: param for names, group in self._groups() for name, param in zip(names, group, strict=True)}
        if blank(("state",), torch.device("meta")) is None or any(isinstance(p, DTensor) for p in params.values()):
            raise ConfigError(
                f"the optimizer is a {type(self.optimizer).__qualname__} that has not stepped, and its step needs a "
                "closure: what it will hold is not known. Give one that has stepped, or leave it out."
            )
        for name, param in params.items():
            state = blank(("state", name), param.device)
            if isinstance(state, dict) and state:
                self.optimizer.state[param] = _of_dtype(param.dtype, state)

    def undo(self) -> None:
        if self.fresh:
            self.optimizer.state.clear()

    def other_names(self, key: Path, name: str) -> tuple[str, ...]:
        inside = name.removeprefix("state.")
        known = inside != name and key in ((), ("optimizer",))
        return (f"optim.{inside}", f"number.{inside}") if known else ()

    def left_out(self, key: Path, stored: Mapping[Path, Any]) -> set[Path]:
        """Paths of parameters of the checkpoint's optimizer that had no state yet.

        There are none if its settings are those of another kind of optimizer, which keeps another state.
        """
        if self._is_of_another_kind(key, stored):
            return set()
        at = len(key)
        states = {path[at + 1] for path in stored if path[: at + 1] == (*key, "state") and len(path) > at + 1}
        names = set().union(*_params_of_groups(key, stored).values())
        return {(*key, "state", name) for name in names - states}

    def _is_of_another_kind(self, key: Path, stored: Mapping[Path, Any]) -> bool:
        settings = _settings_of_groups(key, stored)
        return any(
            (_settings_with_leaves(group) ^ settings[number]) - _OPTIONAL
            for number, group in enumerate(self.optimizer.param_groups)
            if number in settings
        )

    def is_optional(self, path: Path, *, without_tree: bool) -> bool:
        """Accept settings that only some versions of torch have, or only optimizers with a scheduler.

        A checkpoint without a tree has no settings: they are the program's.
        """
        return path[:1] == ("param_groups",) and (without_tree or (len(path) > 2 and path[2] in _OPTIONAL))

    def differences(self, key: Path, stored: Mapping[Path, Any]) -> list[str]:
        groups = _params_of_groups(key, stored)
        if not groups:
            return []
        if len(groups) != len(self.optimizer.param_groups):
            count = len(self.optimizer.param_groups)
            return [f"the optimizer has {count} parameter groups, and in the checkpoint it has {len(groups)}"]
        return [
            f"parameter group {number} of the optimizer has {name}, and in the checkpoint it has not"
            for number, (names, _) in enumerate(self._groups())
            for name in names
            if name not in groups.get(number, ())
        ]

    def apply(self, state: Any, filled: Collection[Path], emptied: AbstractSet[Path]) -> torch.optim.Optimizer:
        params = {name: param for names, group in self._groups() for name, param in zip(names, group, strict=True)}
        given = {path[:depth] for path in filled for depth in (2, 3)}
        for name, param in params.items():
            if ("state", name) in emptied or (self.fresh and ("state", name) not in given):
                self.optimizer.state.pop(param, None)
            elif name in state["state"]:
                self.optimizer.state[param].update(_values(state["state"][name]))
        for number, group in enumerate(self.optimizer.param_groups):
            values = {k: v for k, v in state["param_groups"][number].items() if ("param_groups", number, k) in given}
            group.update(_values(values) | {key: value for key, value in values.items() if key not in group})
        return self.optimizer

    def _groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """The pairs (names, parameters) of the groups."""
        for group, names in zip(self.optimizer.param_groups, self.state["param_groups"], strict=True):
            yield names["params"], group["params"]


def _of_dtype(dtype: torch.dtype, state: Any) -> Any:
    """The state with blank floating point tensors in a parameter's dtype, as its optimizer would create them."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state, dtype=dtype) if state.is_floating_point() else state
    if isinstance(state, dict):
        return {key: _of_dtype(dtype, value) for key, value in state.items()}
    return type(state)(_of_dtype(dtype, value) for value in state) if isinstance(state, (list, tuple)) else state


def _params_of_groups(key: Path, stored: Mapping[Path, Any]) -> dict[Any, set[Any]]:
    """Names of the parameters in each group of the optimizer at `key` in a checkpoint."""
    groups: dict[Any, set[Any]] = {}
    for path, value in stored.items():
        if path[: len(key) + 1] == (*key, "param_groups") and path[len(key) + 2 : -1] == ("params",):
            groups.setdefault(path[len(key) + 1], set()).add(value)
    return groups


def _settings_with_leaves(group: Mapping[str, Any]) -> set[str]:
    """Names of a group's settings, without empty lists and dicts: those have no leaf in a checkpoint."""
    return {name for name, value in group.items() if value or not isinstance(value, (list, tuple, dict))}


def _settings_of_groups(key: Path, stored: Mapping[Path, Any]) -> dict[Any, set[Any]]:
    """Names of the settings in each group of the optimizer at `key` in a checkpoint."""
    at, groups = len(key), defaultdict[Any, set[Any]](set)
    for path in stored:
        if path[: at + 1] == (*key, "param_groups") and len(path) > at + 2:
            groups[path[at + 1]].add(path[at + 2])
    return groups


def _added_by_schedulers(blank: Blank) -> list[dict[str, Any]]:
    """Settings that schedulers added, for each of the checkpoint's groups."""
    groups = blank(("param_groups",), torch.device("cpu"))
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return [{key: group[key] for key in _OF_SCHEDULERS if key in group} for group in groups]


def _values(items: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in items.items() if not isinstance(value, torch.Tensor)}


def _make_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Create the state by torch's step with gradients and learning rates of zero, and undo its other effects.

    The step may change parameters (infinite ones, the sign of a zero, or any where an optimizer has no "lr"), and
    groups, where some optimizers keep counters.
    """
    kept = [dict(group) for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    values = [local_part(param).to("cpu", copy=True) for param in params if not param.is_meta]
    for param in params:  # torch creates the state only if there are none
        param.grad = None
    try:
        get_optimizer_state_dict(module, optimizer)
    except KeyError:
        require_parameters_alone(optimizer)
        raise
    finally:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            group.clear()
            group.update(settings)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for param, value in zip((param for param in params if not param.is_meta), values, strict=True):
            local_part(param).copy_(value)


def require_parameters_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for state of an optimizer that belongs to no parameter."""
    keys = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if keys:
        raise ConfigError(
            f"the state of {type(optimizer).__qualname__} has {', '.join(map(repr, keys[:_MOST_SHOWN]))} beside its "
            "parameters. This cannot be stored with it: keep it in a parameter group or elsewhere."
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step needs a closure, as that of LBFGS, which evaluates the loss repeatedly."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of the tensor."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


@contextmanager
def _unable_to_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put a gradient on one parameter of an optimizer without state.

    torch steps such an optimizer to describe it, but not while there is a gradient.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or not params or any(param.grad is not None for param in params):
        yield
        return
    least = min(params, key=torch.Tensor.numel)
    least.grad = torch.zeros_like(least)
    try:
        yield
    finally:
        least.grad = None
