"""A torch optimizer and the optimizers inside it: their groups and their per-parameter state.

An optimizer that steps several others (AdamW for some parameters, SGD for the rest) holds them as attributes, in lists,
or in closures. Its hooks may hold some, too. The state of inner optimizers belongs to the run's state. `stand_ins`
temporarily replaces the parameters for a trial; `remembered` is what an optimizer keeps elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raysharded.actors.task_calls.object_contents import SavedContents, reachable
from raysharded.data.plain_data import plain
from raysharded.errors import TaskError

REGISTERED = "registered"
"""Path of the state that a user's loop has registered beside the optimizers' own: its names are `registered:<name>`."""
_OF_TORCH = frozenset(
    ("state", "param_groups", "defaults", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")
)
"""Attributes of torch's optimizers that hold no hidden state."""


class OptimizerParts:
    """An optimizer and all optimizers inside it, the outermost first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.outermost = optimizer
        found = [
            (path.lstrip(".").replace(".", "/"), one)
            for path, one in reachable(optimizer)
            if isinstance(one, torch.optim.Optimizer)
        ]
        self.all: tuple[torch.optim.Optimizer, ...] = tuple(one for _, one in found)
        groups = {id(group): group for one in self.all for group in one.param_groups}
        self.groups: tuple[dict[str, Any], ...] = tuple(groups.values())
        """Parameter groups of all optimizers, each once: optimizers may share groups or have copies."""
        states = {id(one.state): (path, one.state) for path, one in reversed(found)}
        self._states: dict[str, MutableMapping[torch.Tensor, dict[str, Any]]] = dict(reversed(states.values()))
        """Path of an optimizer -> its state. A state that several optimizers share is listed once."""
        self._registered = frozenset[str]()

    def hold_registered(self, names: Collection[str]) -> None:
        """Keep state of these names, which the loop has registered. Raises TaskError if an inner optimizer has its
        path."""
        if REGISTERED in self._states:
            raise TaskError(f"the optimizer holds another one as {REGISTERED!r}: give that attribute another name.")
        self._states[REGISTERED], self._registered = {}, frozenset(names)

    @property
    def is_replaced(self) -> bool:
        """True if groups or a state were exchanged for other objects, or added, since this object was made."""
        states, groups = {id(state) for state in self._states.values()}, {id(group) for group in self.groups}
        return any(
            id(one.state) not in states or any(id(group) not in groups for group in one.param_groups)
            for one in self.all
        )

    def identities(self) -> int:
        """A number that changes if an entry of the state is added, dropped or replaced by another object."""
        kept = (one for state in self._states.values() for one in state.values())
        return hash(
            tuple(id(value) for each in kept for value in (each.values() if isinstance(each, dict) else (each,)))
        )

    def lengths(self) -> tuple[int, ...]:
        """Number of entries of the state of each parameter that has any."""
        kept = [one for state in self._states.values() for one in state.values()]
        return tuple([len(one) for one in kept if isinstance(one, dict) and one])

    def added(self, before: Sequence[int]) -> list[str]:
        """Keys of a parameter whose state has grown since `lengths` was `before`; empty if there is none."""
        kept = [one for state in self._states.values() for one in state.values() if isinstance(one, dict) and one]
        for place, one in enumerate(kept):
            if (known := before[place] if place < len(before) else 0) < len(one):
                return [str(key) for key in list(one)[known:]]
        return []

    @property
    def lists(self) -> list[list[Any]]:
        """The groups' lists of parameters, each once."""
        return list({id(group["params"]): group["params"] for group in self.groups}.values())

    def kept_of(self, param: torch.Tensor) -> dict[str, Any]:
        """State of a parameter in all optimizers, by name. Names of inner optimizers begin with their path."""
        return {
            f"{path}:{key}" if path else key: value
            for path, state in self._states.items()
            for key, value in state.get(param, {}).items()
        }

    def unnamed(self, param: torch.Tensor) -> object:
        """A key of a parameter's state that can be no part of a name in the run's state; None if there is none."""
        keys = (key for path, state in self._states.items() if path != REGISTERED for key in state.get(param, ()))
        return next((key for key in keys if not isinstance(key, str) or not {".", ":"}.isdisjoint(key)), None)

    def keep(self, param: torch.Tensor, name: str, value: Any) -> None:
        """Store a value in a parameter's state, under its name in `kept_of`.

        Raises KeyError if no such optimizer exists, or no state of that name is registered.
        """
        path, _, key = name.rpartition(":")
        if path == REGISTERED and key not in self._registered:
            raise KeyError(name)
        self._states[path].setdefault(param, {})[key] = value

    def drop(self, param: torch.Tensor, name: str) -> None:
        """Remove a value from a parameter's state, by its name in `kept_of`."""
        path, _, key = name.rpartition(":")
        del self._states[path][param][key]
        if not self._states[path][param]:
            del self._states[path][param]

    def forget(self) -> None:
        """Clear the state of all optimizers."""
        for state in self._states.values():
            state.clear()

    def counts(self, param: torch.Tensor) -> Iterator[tuple[dict[str, Any], str]]:
        """Places that count a parameter's steps: (dict, key)."""
        for path, state in self._states.items():
            kept = {} if path == REGISTERED else state.get(param, {})
            if "step" in kept and (isinstance(kept["step"], (int, float)) or kept["step"].numel() == 1):
                yield kept, "step"


class StandIns:
    """The task's own optimizer object, with its hooks and patched methods, over other parameters.

    Everything that the optimizer and its hooks hold is restored before each trial and at the end.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, without: Collection[torch.Tensor]) -> None:
        """`without`: tensors whose values may be lost, such as the parameters of a model that is not loaded yet."""
        self.parts = OptimizerParts(optimizer)
        own = [param for held in self.parts.lists for param in held]
        self._saved = SavedContents(optimizer, without=[*without, *own])
        self.own = [list(held) for held in self.parts.lists]
        """The optimizer's own parameters, one list for each of `OptimizerParts.lists`."""

    def give(self, of: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Restore everything, then replace each parameter by those that `of` has for its id."""
        self.put_back()
        for held, own in zip(self.parts.lists, self.own, strict=True):
            held[:] = [one for param in own for one in of.get(id(param), ())]

    def make_anew(self) -> None:
        """Restore everything except the parameters and their state, as in a worker that joins.

        Each has other memory then, so that what was one tensor, or shared its memory, is separate.
        """
        lists = [list(held) for held in self.parts.lists]
        kept = {id(one): (one, self.parts.kept_of(one)) for held in lists for one in held}
        self.put_back()
        for held, given in zip(self.parts.lists, lists, strict=True):
            held[:] = given
        for one, values in kept.values():
            one.data = one.detach().clone()
            for name, value in values.items():
                if value is not None:  # no state has such an entry
                    self.parts.keep(one, name, _copied(value))

    def put_back(self) -> None:
        """Restore the optimizer with its own parameters."""
        self._saved.put_back()


@contextmanager
def stand_ins(optimizer: torch.optim.Optimizer, *, without: Collection[torch.Tensor] = ()) -> Iterator[StandIns]:
    """A context in which an optimizer can be given other parameters; it is restored afterwards."""
    found = StandIns(optimizer, without=without)
    try:
        yield found
    finally:
        found.put_back()


def remembered(optimizer: torch.optim.Optimizer, *, keeps_groups: bool) -> dict[str, object]:
    """Plain values outside the per-parameter state of an optimizer and of those inside it: name -> bits.

    `keeps_groups`: without the groups' numbers, which are kept.
    """
    found: dict[str, object] = {}
    groups = {id(group) for group in OptimizerParts(optimizer).groups}
    for path, one in reachable(optimizer):
        if isinstance(one, torch.optim.Optimizer):
            prefix = f"self{path}."
            own = {key: value for key, value in vars(one).items() if key not in _OF_TORCH and _is_plain(value)}
            found |= {f"{prefix}{key}": bits_of(value) for key, value in own.items()}
            found |= {f"state[{key!r}]": bits_of(v) for key, v in one.state.items() if _is_plain(key) and _is_plain(v)}
        elif isinstance(one, dict) and id(one) in groups:
            found |= {
                f"{key!r} of its groups": bits_of(value)
                for key, value in one.items()
                if key not in ("params", "lr") and _is_plain(value) and not (keeps_groups and _is_kept(value))
            }
    return found


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_kept(value: object) -> bool:
    """True for a setting of a group that a session keeps."""
    try:
        plain(value, "", "")
    except TaskError:
        return False
    return True


def _is_plain(value: object) -> bool:
    """True for numbers, text, tensors, and containers of them; an optimizer does not own parameters."""
    match value:
        case dict():
            return all(_is_plain(one) for one in value.values())
        case list() | tuple():
            return all(_is_plain(one) for one in value)
        case _:
            return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def bits_of(value: object) -> object:
    """A representation that is equal for bit-identical values."""
    match value:
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
        case dict():
            return [(repr(key), bits_of(one)) for key, one in value.items()]
        case list() | tuple():
            return [bits_of(one) for one in value]
        case _:
            return repr(value)
