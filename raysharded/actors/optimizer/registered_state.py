"""State of a user's own loop that goes back with the step: numbers in an optimizer's groups, modes, registered objects.

torch's schedulers do not restore the groups of their optimizer, so these belong to it. It is plain data as JSON, of a
limited size. Every worker keeps it for the newest two steps, a worker that joins gets it, and each checkpoint has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.model.inventory import find_difference
from raysharded.actors.model.modes import Modes
from raysharded.display.quantities import size
from raysharded.errors import InexactError, TaskError
from raysharded.ids import WorkerId

MOST_BYTES = 1 << 16
"""Largest size of the state as JSON, in bytes."""
_OF_GROUPS, _LOGGED, _MODES, _IS_LAST = "optimizer", "log", "modes", "last"
_NO_SETTINGS = ("params", "param_names", "initial_lr")
"""Keys of a group that are left out: its parameters, and the rate as built, which only new schedulers read."""
_NUMPY = (np.bool_, np.integer, np.float16, np.float32, np.float64)
_CONSTANTS = (torch.dtype, torch.device, Enum)
"""Settings of a group that are left out, as functions are: they do not change."""
_NUM_WORDS, _WORD_BYTES = 2, 3
NO_WORDS = (0,) * 2 * _NUM_WORDS
"""As many words as `words_of` has."""


class Stateful(Protocol):
    """An object with state that is plain data: torch's learning rate schedulers are such."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class RegisteredState:
    """The state of one worker's loop. Training thread only."""

    def __init__(self, groups: Sequence[dict[str, Any]], things: Mapping[str, Stateful]) -> None:
        """`groups`: the optimizer's. `things`: registered objects by name. Raises TaskError if one is not plain."""
        taken = sorted(things.keys() & {_OF_GROUPS, _LOGGED, _MODES, _IS_LAST})
        if taken:
            raise TaskError(f"session.shard({taken[0]}=...): the name is taken; register the object by another one.")
        self._groups, self._things = groups, things
        self.logged: dict[str, float] = {}
        """Numbers that the newest step has logged."""
        self.modes: Modes | None = None
        """Modes of the model's modules; None before the first generation."""
        self.is_last = False
        """True if the loop has made the newest step the run's last one."""
        self.first = self.text()
        """The state with which a run begins."""

    def settings(self) -> str:
        """The present numbers of the groups, as `text`."""
        return json.dumps({_OF_GROUPS: self._settings()}, separators=(",", ":"))

    def _settings(self) -> list[dict[str, Any]]:
        return [_settings_of(group, f"{_OF_GROUPS}[{place}]") for place, group in enumerate(self._groups)]

    def text(self) -> str:
        """The present state, the same text for the same values. Raises TaskError if it is not plain, or too large."""
        values: dict[str, Any] = {_OF_GROUPS: self._settings()}
        if changes := self.modes.changes if self.modes else []:
            values[_MODES] = changes
        for name, thing in self._things.items():
            values[name] = _plain(thing.state_dict(), name)
        if self.logged:
            values[_LOGGED] = _plain(self.logged, _LOGGED)
        if self.is_last:
            values[_IS_LAST] = True
        text = json.dumps(values, separators=(",", ":"))
        if len(text) > MOST_BYTES:
            sizes = {name: len(json.dumps(value)) for name, value in values.items()}
            largest = max(sizes, key=lambda name: sizes[name])
            raise TaskError(
                f"the registered state has {size(len(text))}, most of it {largest!r} with {size(sizes[largest])}; the "
                f"limit is {size(MOST_BYTES)}, since every worker keeps it twice. Register numbers and settings; keep "
                "what grows, such as a history, in the journal or a file."
            )
        return text

    def load(self, text: str) -> None:
        """Bring the groups and the registered objects to this state. Raises TaskError if it has other objects."""
        values = json.loads(text)
        self.logged = _restored(values.pop(_LOGGED, {"dict": []}))
        changes = values.pop(_MODES, [])
        if self.modes is not None and (changes or self.modes.changes):
            self.modes.set(changes)
        self.is_last = values.pop(_IS_LAST, False)
        if values.keys() != {_OF_GROUPS, *self._things} or len(values[_OF_GROUPS]) != len(self._groups):
            raise TaskError(
                f"the state that is to be loaded has {len(values[_OF_GROUPS])} parameter groups and registered "
                f"{sorted(values.keys() - {_OF_GROUPS})}; this program has {len(self._groups)} and registers "
                f"{sorted(self._things)}. Register the same objects in session.shard, and build the same groups."
            )
        for group, settings in zip(self._groups, values[_OF_GROUPS], strict=True):
            for key, value in ((key, _restored(value)) for key, value in settings.items()):
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        for name, thing in self._things.items():
            thing.load_state_dict(_restored(values[name]))

    def change_since(self, text: str) -> str | None:
        """The first value that differs from an earlier state, with both values; None if there is none."""
        return first_change(text, self.text())


def first_change(text: str, now: str) -> str | None:
    """The first value that differs between two states, with both values; None if there is none."""
    if now == text:
        return None
    was, has = (dict(leaf.split(" = ", 1) for leaf in _leaves(json.loads(one))) for one in (text, now))
    for path, value in has.items():
        if path not in was:
            return f"{path} = {value} has appeared"
        if was[path] != value:
            return f"{path} = {value} (it was {was[path]})"
    return next((f"{path} was removed (it was {value})" for path, value in was.items() if path not in has), "its form")


def words_of(text: str) -> tuple[int, ...]:
    """Numbers to add up over the workers; from the sums `are_different` finds whether all texts are equal."""
    digest = blake2b(text.encode(), digest_size=_NUM_WORDS * _WORD_BYTES).digest()
    parts = (digest[place : place + _WORD_BYTES] for place in range(0, len(digest), _WORD_BYTES))
    words = [int.from_bytes(part, "little") for part in parts]
    return tuple(number for word in words for number in (word, word * word))


def are_different(sums: Sequence[int], world_size: int) -> bool:
    """True if the workers' texts differ: by Cauchy and Schwarz (sum w)^2 = n * sum w^2 only if all `w` are equal."""
    return any(total * total != world_size * squares for total, squares in zip(sums[::2], sums[1::2], strict=True))


def differing(text: str, step: int, members: Sequence[WorkerId], group: HostGroup) -> InexactError:
    """The error for texts that differ between workers. Every member must call it."""
    found = find_difference(list(_leaves(json.loads(text))), len(members), group)
    here, there = (found.first, found.other) if found else ("", "")
    rank = found.rank if found else 0
    return InexactError(
        f"step {step}: the optimizer's settings, modes or registered state differ between workers: worker {members[0]} "
        f"has {here}, worker {members[rank]} {there}. Let nothing in the loop depend on the rank, a clock or a file; "
        "register each scheduler in session.shard, and step it once in each step."
    )


def _settings_of(group: Mapping[str, Any], path: str) -> dict[str, Any]:
    found = {}
    for key, value in sorted(group.items()):
        if key not in _NO_SETTINGS and not isinstance(value, _CONSTANTS) and not callable(value):
            found[key] = _plain(value, f"{path}.{key}")
    return found


def _plain(value: Any, path: str) -> Any:
    """A value as JSON that `_restored` brings back with its types. Raises TaskError for what is not plain data."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, _NUMPY):  # its type decides how later products are rounded
        return {"numpy": [value.dtype.name, value.item()]}
    if isinstance(value, torch.Tensor) and not value.dim():
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, (list, tuple)):
        items = [_plain(one, f"{path}[{place}]") for place, one in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [[_plain(key, path), _plain(one, f"{path}.{key}")] for key, one in value.items()]
        return {
            "Counter" if isinstance(value, Counter) else "dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))
        }
    kind = type(value).__name__
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise TaskError(
        f"the registered state has a {kind}{shape} at {path}: it must be plain data (numbers, text, None, and lists, "
        "tuples and dicts of them), as state_dict() returns it. Give what is registered a state_dict() without it. For "
        "an average of the weights register a raysharded.ParameterTensors, and keep tensors of an optimizer in its "
        "state, not in its groups."
    )


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(_restored(one) for one in items),
    "dict": lambda pairs: {_restored(key): _restored(one) for key, one in pairs},
    "Counter": lambda pairs: Counter({_restored(key): one for key, one in pairs}),
    "numpy": lambda pair: np.dtype(pair[0]).type(pair[1]),
    "tensor": lambda pair: torch.tensor(pair[1], dtype=getattr(torch, pair[0])),
}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(one) for one in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return _MAKERS[kind](inner)
    return value


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Every number and text of a state as `path = value`, in order."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("dict", "Counter"):
        for key, one in next(iter(value.values())):
            yield from _leaves(one, f"{path}.{key}")
    elif isinstance(value, dict) and len(value) == 1 and next(iter(value)) in _MAKERS:
        yield from _leaves(next(iter(value.values())), path)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{path}[{place}]")
    else:
        yield f"{path} = {value!r}"
