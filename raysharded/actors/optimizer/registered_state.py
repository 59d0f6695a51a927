"""State of a user's own loop that goes back with the step: numbers in an optimizer's groups, modes, registered objects.

torch's schedulers do not restore the groups of their optimizer, so these belong to it. It is plain data as JSON, of a
limited size, with the entries of dicts sorted. States of a session's streams are in a second line. The order of dicts
is in a third, which is not compared: objects of a worker that joins may have their attributes in another one. A digest
of the names in each group is there, too. Every worker keeps all of it for the newest two steps, a worker that joins
gets it, and each checkpoint has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from itertools import chain
from typing import Any, Protocol

import torch

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.model.inventory import find_difference
from raysharded.actors.model.modes import Modes
from raysharded.actors.task_calls.remarks import Say
from raysharded.data.plain_data import AS_THEY_ARE, KINDS, plain, restored
from raysharded.data.streams.own_microbatches import OwnMicrobatches
from raysharded.display.quantities import size
from raysharded.errors import InexactError, TaskError
from raysharded.ids import WorkerId

MOST_BYTES = 1 << 16
"""Largest size of the state as JSON, in bytes."""
_OF_GROUPS, _LOGGED, _MODES, _IS_LAST = "optimizer", "log", "modes", "last"
_STREAMS, _NAMES = "session.streams", "optimizer.names"
_NO_SETTINGS = ("params", "param_names", "initial_lr")
"""Keys of a group that are left out: its parameters, and the rate as built, which only new schedulers read."""
_CONSTANTS = (torch.dtype, torch.device, Enum)
"""Settings of a group that are left out, as functions are: they do not change."""
_NUM_WORDS, _WORD_BYTES = 2, 3
_ALIGNED_TO = 8
NO_WORDS = (0,) * 2 * _NUM_WORDS
"""As many words as `words_of` has."""


class Stateful(Protocol):
    """An object with state that is plain data: torch's learning rate schedulers are such."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class RegisteredState:
    """The state of one worker's loop. Training thread only."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        things: Mapping[str, Stateful],
        streams: OwnMicrobatches | None = None,
        names: Sequence[Sequence[str]] = (),
    ) -> None:
        """`groups`: the optimizer's. `things`: registered objects by name. `streams`: the session's, if it has some.

        `names`: those of the parameters of each group. Raises TaskError if one is not plain.
        """
        self._names, self._digests = names, [_digest_of(one) for one in names]
        self.streams = streams
        taken = sorted(things.keys() & {_OF_GROUPS, _LOGGED, _MODES, _IS_LAST})
        if taken:
            raise TaskError(f"session.shard({taken[0]}=...): the name is taken; register the object by another one.")
        self._groups, self._things = groups, things
        self.logged: dict[str, float] = {}
        """Numbers that the newest step has logged."""
        self.calls: list[str] = []
        """Calls of the newest step that all workers make alike, with their values, as `name = value`."""
        self.in_update: list[str] = []
        """`settings` as the newest step's `optimizer.step()` began, and as it ended."""
        self.modes: Modes | None = None
        """Modes of the model's modules; None before the first generation."""
        self.is_last = False
        """True if the loop has made the newest step the run's last one."""
        self.step = 0
        """The step of the state that a generation has loaded."""
        self.first = self.text()
        """The state with which a run begins."""

    def begin_step(self) -> None:
        """Forget what the step before has logged, called and set."""
        self.logged, self.calls, self.in_update = {}, [], []

    def settings(self) -> str:
        """The present numbers of the groups, as `text`, and the calls of this step."""
        return _as_json({_OF_GROUPS: self._settings([]), "calls": self.calls})

    def _settings(self, orders: list[Sequence[int]]) -> list[dict[str, Any]]:
        return [_settings_of(group, f"{_OF_GROUPS}[{place}]", orders) for place, group in enumerate(self._groups)]

    def text(self) -> str:
        """The present state; its first two lines are the same for the same values, in any order of dicts.

        Raises TaskError if it is not plain, or too large.
        """
        orders: dict[str, list[Sequence[int]]] = {name: [] for name in (_OF_GROUPS, *self._things)}
        values: dict[str, Any] = {_OF_GROUPS: self._settings(orders[_OF_GROUPS])}
        if self._modes_are_set:
            values[_MODES] = self._changes
        for name, thing in self._things.items():
            values[name] = _plain(thing.state_dict(), name, orders[name])
        if self.logged:
            values[_LOGGED] = _plain(self.logged, _LOGGED, [])
        if self.is_last:
            values[_IS_LAST] = True
        if self.streams is not None:
            values[_STREAMS] = self.streams.place()
        text = _as_json(values)
        if len(text) > MOST_BYTES:
            sizes = {name: len(json.dumps(value)) for name, value in values.items()}
            largest = max(sizes, key=lambda name: sizes[name])
            raise TaskError(
                f"the registered state has {size(len(text))}, most of it {largest!r} with {size(sizes[largest])}; the "
                f"limit is {size(MOST_BYTES)}, since every worker keeps it twice. Register numbers and settings; keep "
                "what grows, such as a history, in the journal or a file."
            )
        states = "" if self.streams is None else self.streams.states_text()
        moved: dict[str, Any] = {name: found for name, found in orders.items() if any(found)}
        if self._digests:
            moved[_NAMES] = self._digests
        return "\n".join([text, *([states] if states or moved else []), *([_as_json(moved)] if moved else [])])

    def with_modes(self, text: str) -> str:
        """An earlier state with the present modes: a loop may set them between two steps."""
        first, line, rest = text.partition("\n")
        if not self._modes_are_set and f'"{_MODES}":' not in first:
            return text
        values = json.loads(first)
        values.pop(_MODES, None)
        modes = {_MODES: self._changes} if self._modes_are_set else {}
        return _as_json({_OF_GROUPS: values.pop(_OF_GROUPS), **modes, **values}) + line + rest

    @property
    def _changes(self) -> list[str]:
        return self.modes.changes if self.modes else []

    @property
    def _modes_are_set(self) -> bool:
        """True if the modes are others than those with which a run of this model begins: a text has them."""
        return bool(self._changes) or (self.modes is not None and self.modes.trains_kept)

    def load(self, text: str, *, step: int | None = None) -> None:
        """Bring the groups and the registered objects to this state. Raises TaskError if it has other objects.

        `step`: the step that it is of, 0 for a run's beginning; None: the present one, whose modes may stay.
        """
        text, states, moved = _lines(text)
        values, orders = json.loads(text), json.loads(moved or "{}")
        self._go_to(values.pop(_STREAMS, None), states)
        self.logged = restored(values.pop(_LOGGED, {"dict": []}))
        changes = values.pop(_MODES, None)
        self.step = self.step if step is None else step
        if self.modes is not None:
            self.modes.go_to(changes, step)
        self.is_last = values.pop(_IS_LAST, False)
        if values.keys() != {_OF_GROUPS, *self._things} or len(values[_OF_GROUPS]) != len(self._groups):
            raise TaskError(
                f"the state that is to be loaded has {len(values[_OF_GROUPS])} parameter groups and registered "
                f"{sorted(values.keys() - {_OF_GROUPS})}; this program has {len(self._groups)} and registers "
                f"{sorted(self._things)}. Register the same objects in session.shard, and build the same groups."
            )
        self._require_order(orders.get(_NAMES, ()))
        of_groups = iter(orders.get(_OF_GROUPS, ()))
        for group, settings in zip(self._groups, values[_OF_GROUPS], strict=True):
            for key, value in ((key, restored(value, of_groups)) for key, value in settings.items()):
                now = group.get(key)
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype is value.dtype:
                    now.fill_(value)  # a learning rate stays the same object
                else:
                    group[key] = value
        for name, thing in self._things.items():
            thing.load_state_dict(restored(values[name], iter(orders.get(name, ()))))

    def _require_order(self, digests: Sequence[str]) -> None:
        """Raise TaskError if groups have changed places. `digests`: of the state's.

        A group may have other parameters than in the state: some are frozen, or added.
        """
        for place, own in enumerate(self._digests[: len(digests)]):
            if own and own != digests[place] and own in digests:
                raise TaskError(
                    f"the state that is to be loaded has the parameters of this program's group {place} (first "
                    f"{self._names[place][0]!r}) in group {digests.index(own)}: settings of groups, and numbers of "
                    "schedulers, go by place. Build the optimizer's groups in the order in which the run built them."
                )

    def _go_to(self, place: Mapping[str, Any] | None, states: str) -> None:
        if self.streams is not None and place is not None:
            self.streams.go_to(place, states)
        elif self.streams is not None or place is not None:
            have, has = ("no streams", "has some") if place is None else ("states of streams", "has none")
            raise TaskError(
                f"the state that is to be loaded has {have}, and this program {has}: call session.streams as the run "
                "did from its beginning."
            )

    def exchange_streams(self, step: int, group: HostGroup, say: Say) -> None:
        """Bring the streams' states to all workers. All call it together, as they end the same step.

        The step becomes the run's last one if a stream has no microbatch for the next one.
        """
        if self.streams is not None:
            ended = self.streams.add(step, _gathered(self.streams.own_part(step), group))
            if ended:
                self.is_last = True
                say("ended streams", ended)

    def change_since(self, text: str) -> str | None:
        """The first value that differs from an earlier state, with both values; None if there is none."""
        return first_change(text, self.text())


_as_json = json.JSONEncoder(separators=(",", ":")).encode


def _digest_of(names: Sequence[str]) -> str:
    """A digest of these names, in any order; empty for none."""
    return blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest() if names else ""


def _lines(text: str) -> tuple[str, str, str]:
    """(values, streams' states, order of dicts) of a state, the latter two empty if it has none."""
    values, _, others = text.partition("\n")
    states, _, orders = others.partition("\n")
    return values, states, orders


def settings_of(text: str) -> str:
    """A state without the streams' own states, and without the order of its dicts."""
    return text.partition("\n")[0]


def values_of(text: str) -> str:
    """A state without the order of its dicts."""
    return "\n".join(_lines(text)[:2])


def first_change(text: str, now: str) -> str | None:
    """The first value that differs between two states, with both values; None if there is none.

    The order of dicts is none: a worker that joins has its objects' attributes in the order in which it made them.
    """
    if now == text or values_of(now) == values_of(text):
        return None
    was, has = (dict(leaf.split(" = ", 1) for leaf in _leaves(json.loads(settings_of(one)))) for one in (text, now))
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


def differing(
    texts: Sequence[str], calls: Sequence[str], step: int, members: Sequence[WorkerId], group: HostGroup
) -> InexactError:
    """The error for texts, or calls, that differ between workers. Every member must call it."""
    now, *in_update = ([*_leaves(json.loads(settings_of(text)))] for text in texts)
    found = find_difference([*now, *calls, *chain(*in_update)], len(members), group)
    here, there = (found.first, found.other) if found else ("", "")
    rank = found.rank if found else 0
    return InexactError(
        f"step {step}: the optimizer's settings, modes, registered state or calls differ between workers: worker "
        f"{members[0]} has {here}, worker {members[rank]} {there}. Let nothing in the loop depend on the rank, a "
        "clock, a file, or a worker's part of a parameter. Register each scheduler in session.shard, and step it once "
        "in each step."
    )


def _gathered(own: bytes, group: HostGroup) -> list[bytes]:
    """The bytes of all workers, by rank."""
    if group.size == 1:
        return [own]
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(own)
    lengths = group.sum_int64(sizes).tolist()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _ALIGNED_TO) * _ALIGNED_TO)
    room = torch.zeros(starts[-1], dtype=torch.uint8)
    room[starts[group.rank] : starts[group.rank] + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    data = group.sum_int64(room.view(torch.int64)).view(torch.uint8).numpy().tobytes()
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _settings_of(group: Mapping[str, Any], path: str, orders: list[Sequence[int]]) -> dict[str, Any]:
    found = {}
    for key in sorted(group):
        value = group[key]
        if key in _NO_SETTINGS:
            continue
        if type(value) in AS_THEY_ARE:
            found[key] = value
        elif not isinstance(value, _CONSTANTS) and not callable(value):
            found[key] = _plain(value, f"{path}.{key}", orders)
    return found


def _plain(value: Any, path: str, orders: list[Sequence[int]]) -> Any:
    """A value as JSON. Adds the order of its dicts. Raises TaskError for what is not plain data."""
    try:
        return plain(value, path, _REFUSAL, orders=orders)
    except TaskError as error:
        raise TaskError(f"the registered state has a {error}") from None


_REFUSAL = (
    "it must be plain data (numbers, text, None, and lists, tuples and dicts of them), as state_dict() returns it. "
    "Give what is registered a state_dict() without it. For an average of the weights register a "
    "raysharded.ParameterTensors, and let optimizer.step() keep its tensors in optimizer.state, not in its groups."
)


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Every number and text of a state as `path = value`, in order."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("dict", "Counter"):
        for key, one in next(iter(value.values())):
            yield from _leaves(one, f"{path}.{key}")
    elif isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS:
        yield from _leaves(next(iter(value.values())), path)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{path}[{place}]")
    else:
        yield f"{path} = {value!r}"
