"""Replay of a recorded run: its events go through the state machine again.

The resulting journal entries are compared with the recorded ones. Pure, except for `load`, which reads a run's storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from raysharded.checkpoint import open_storage
from raysharded.display.plain_text import brief
from raysharded.display.quantities import count, moment as moment_text
from raysharded.driver import machine
from raysharded.driver.replay import event_text
from raysharded.driver.replay.encoding import Decoder
from raysharded.driver.replay.names import FORMATS
from raysharded.driver.replay.recorder import BEGINNING, EVENT
from raysharded.driver.state.commands import Command, Record
from raysharded.driver.state.events import Event
from raysharded.driver.state.state import State
from raysharded.errors import StorageError
from raysharded.journal import log
from raysharded.journal.entry_text import incident_text
from raysharded.journal.log import Placed

_NOT_DECIDED = frozenset({"data", "waiting", "below_maximum", "storage_back", "gcs_lost", "gcs_back", "gcs_limit"})
"""Entries that the driver makes without the machine, after it has begun."""
_DROPPED = "entries_dropped"
"""Entry in place of those that storage did not take in time: events are among them."""
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)
"""Errors raised by JSON that no encoder wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One event, and its result."""

    number: int
    """Number of the event, from 1; 0 is the beginning."""
    place: str
    """Place of the entry: file and line, below the run's folder."""
    after_s: float = 0.0
    """Seconds since the driver's beginning."""
    event: Event | None = None
    """The event; None for the beginning, or if it cannot be read."""
    commands: tuple[Command, ...] = ()
    state: State | None = None
    """State after the event; None if it cannot be known."""
    raised: str = ""
    """Error that the machine raised instead of deciding."""
    differences: tuple[str, ...] = ()
    """Differences between the machine's decisions now and the journal."""

    def as_dict(self) -> dict[str, Any]:
        """The moment for JSON."""
        return {
            "number": self.number,
            "place": self.place,
            "after_s": self.after_s,
            "event": event_text.of_event(self.event) if self.event is not None else None,
            "decided": self.decided(),
            "state": event_text.of_state(self.state) if self.state is not None else None,
            "differences": list(self.differences),
        }

    def decided(self) -> str:
        """The machine's decision, for people."""
        return f"raises {brief(self.raised)}" if self.raised else event_text.of_commands(self.commands)

    def line(self) -> str:
        """One line for people: time, event, decision."""
        if self.state is None:
            return f"{'?':>10}  event {self.number} cannot be read"
        told = event_text.of_event(self.event) if self.event is not None else "the driver begins"
        return f"{self.after_s:10.3f}  {told}  ->  {self.decided()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The events and decisions of one driver of a run, from its beginning to its end."""

    driver: str
    began_at: float
    """Wall clock at the beginning."""
    version: str
    """Version of raysharded that made the recording; another one may decide otherwise."""
    moments: tuple[Moment, ...]
    dropped: str = ""
    """A sentence about entries that were dropped: there the replay ends early. Empty: none were."""

    @property
    def differences(self) -> tuple[str, ...]:
        """All differences, each with its place; none if the machine decides as it did."""
        return tuple(difference for moment in self.moments for difference in moment.differences)

    def as_dict(self) -> dict[str, Any]:
        """The replay for JSON."""
        return {
            "driver": self.driver,
            "began_at": self.began_at,
            "version": self.version,
            "differences": list(self.differences),
            "dropped": self.dropped,
            "moments": [moment.as_dict() for moment in self.moments],
        }

    def lines(self) -> Iterator[str]:
        """Lines for people: one for every event, one for every difference, and the verdict."""
        yield f"driver {self.driver}, {moment_text(self.began_at)}, raysharded {self.version}"
        for moment in self.moments:
            yield moment.line()
            yield from (f"{'DIFFERS':>10}  {difference}" for difference in moment.differences)
        if self.dropped:
            yield f"{'ENDS':>10}  {self.dropped}"
        events = count(len(self.moments) - 1, "event")
        found = count(len(self.differences), "difference") if self.differences else "decided as it was then"
        yield f"driver {self.driver}: {events}, {found}"


def load(run_url: str) -> list[Replay]:
    """Replay the recorded drivers of the run in a folder or under a URL, in the order in which they began.

    Works on a run that is still training. Raises StorageError if there is no run, if its journal is damaged or cannot
    be read, or if none of its drivers was recorded.
    """
    storage = open_storage(run_url)
    try:
        entries = list(log.read_placed(storage))
        replays = replay(entries)
    except _UNREADABLE as error:
        raise StorageError(
            f"the journal of the run at {storage.url} is damaged: {type(error).__name__}: {error}. Restore its files."
        ) from error
    if not entries:
        raise StorageError(
            f"there is no run at {storage.url}: nothing of a journal under {log.FOLDER}/. Give the folder of one "
            "run, <RunConfig.storage_path>/<RunConfig.name>."
        )
    if not replays:
        raise StorageError(
            f"the run at {storage.url} was not recorded: its journal says what was decided, and not what led to it. "
            "Run it with RunConfig(record_events=True) to replay what happens from then on; what has happened is in "
            f"`raysharded report {storage.url}`."
        )
    return replays


def replay(entries: Iterable[Placed]) -> list[Replay]:
    """Replays of all recorded drivers. Raises StorageError for a recording of another format."""
    recorded: dict[str, list[Placed]] = {}
    dropped: dict[str, Placed] = {}
    for placed in entries:
        kind, driver = placed.entry["kind"], placed.writer
        if kind == _DROPPED:
            dropped.setdefault(driver, placed)
        elif kind == BEGINNING or (driver in recorded and driver not in dropped and kind not in _NOT_DECIDED):
            recorded.setdefault(driver, []).append(placed)
    return [_of_driver(driver, its_entries, dropped.get(driver)) for driver, its_entries in recorded.items()]


def _of_driver(driver: str, entries: Sequence[Placed], dropped: Placed | None) -> Replay:
    first = entries[0].entry
    if first.get("format") not in FORMATS:
        raise StorageError(
            f"{_place(entries[0])} begins a recording of format {first.get('format')!r}; this version of raysharded "
            f"({', '.join(map(str, FORMATS))}) cannot replay it. Use the one that wrote it: {first.get('version')}."
        )
    return Replay(
        driver=driver,
        began_at=float(first["at"]),
        version=str(first.get("version", "")),
        moments=tuple(_Stage(first["format"]).moments(_told(entries))),
        dropped=f"{_place(dropped)}: {incident_text(_DROPPED, dropped.entry)}" if dropped is not None else "",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """An event's entry, and the entries written because of it."""

    entry: Placed
    written: list[Placed]
    last: bool
    """Whether nothing follows: its results may not have reached storage."""


def _told(entries: Sequence[Placed]) -> list[_Told]:
    starts = [number for number, placed in enumerate(entries) if number == 0 or placed.entry["kind"] == EVENT]
    told = []
    for start, end in zip_longest(starts, starts[1:]):
        written = list(entries[start + 1 : end])
        told.append(_Told(entry=entries[start], written=written, last=end is None))
    return told


class _Stage:
    """One driver's machine, which gets one event after the other."""

    def __init__(self, format: object) -> None:  # noqa: A002 - the recording's format
        self._decoder = Decoder(format)
        self._state: State | None = None
        """State of the machine; None before the beginning."""
        self._began = 0.0
        self._next = 0
        """Number of the next event."""

    def moments(self, told: Iterable[_Told]) -> Iterator[Moment]:
        """The moments until one cannot be read, or the machine raises."""
        for each in told:
            moment = self._play(each)
            yield moment
            if moment.state is None or moment.raised:
                return

    def _play(self, told: _Told) -> Moment:
        place = _place(told.entry)
        try:
            at, number, before, event = self._read(told.entry.entry)
        except _UNREADABLE as error:
            what = f"{place}: cannot be read, nor what follows be replayed: {type(error).__name__}: {error}"
            return Moment(number=self._next, place=place, differences=(what,))
        missing = number - self._next
        differences = [f"{place}: it is event {number}, and {self._next} was to follow"] if missing else []
        self._next = number + 1
        raised, self._state, commands = _decide(before, event, at)
        return Moment(
            number=number,
            place=place,
            after_s=at - self._began,
            event=event,
            commands=tuple(commands),
            state=self._state,
            raised=raised,
            differences=(*differences, *_compare(told, raised, commands)),
        )

    def _read(self, fields: Mapping[str, Any]) -> tuple[float, int, State, Event | None]:
        at = float(fields["time"])
        if self._state is None:
            self._began = at
            return at, 0, self._decoder.state(fields), None
        if "unwritten" in fields:
            raise ValueError(f"it could not be recorded: {fields['unwritten']}")
        return at, int(fields["number"]), self._state, self._decoder.event(fields)


def _decide(state: State, event: Event | None, at: float) -> tuple[str, State, Sequence[Command]]:
    """The machine's error, the next state and the commands."""
    try:
        after, commands = machine.begin(state, at) if event is None else machine.step(state, event, at)
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {error}", state, ()
    return "", after, commands


def _compare(told: _Told, raised: str, commands: Iterable[Command]) -> list[str]:
    """Differences between the journal and the machine, in both directions."""
    before = str(told.entry.entry.get("raised", ""))
    if before != raised:
        return [
            f"{_place(told.entry)}: the machine raises {raised or 'nothing'}, and raised {before or 'nothing'} then"
        ]
    records = [command for command in commands if isinstance(command, Record)]
    written = _without_last_words(told.written, len(records)) if told.last else told.written
    kinds = [placed.entry["kind"] for placed in written], [record.kind for record in records]
    differences: list[str] = []
    for same, a, behind_a, b, behind_b in SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
        if same == "equal":
            for placed, record in zip(written[a:behind_a], records[b:behind_b], strict=True):
                differences += _differing_fields(placed, record)
            continue
        for placed in written[a:behind_a]:
            differences.append(f"{_place(placed)}: {placed.entry['kind']}, which the machine does not write")
        if b < behind_b and not (told.last and a == len(written)):
            missing = ", ".join(kinds[1][b:behind_b])
            differences.append(f"{_place(told.entry)}: the machine writes {missing}, which does not follow")
    return differences


def _without_last_words(written: Sequence[Placed], expected: int) -> Sequence[Placed]:
    """The entries without those that workers wrote for a dead driver: `orphans.orphan_checkpoint`."""
    words = next((number for number, placed in enumerate(written) if placed.entry["kind"] == "orphaned"), None)
    if words is None:
        return written
    while words > expected and written[words - 1].entry["kind"] == "step":
        words -= 1
    return written[:words]


def _differing_fields(placed: Placed, record: Record) -> list[str]:
    was = {name: value for name, value in placed.entry.items() if name not in ("kind", "at")}
    now = json.loads(json.dumps(log.plain(record.fields)))
    return [
        f"{_place(placed)}: {record.kind}: {name} is {_text(was, name)}; the machine writes {_text(now, name)}"
        for name in sorted(was.keys() | now.keys())
        if name not in was or name not in now or was[name] != now[name]
    ]


def _text(fields: Mapping[str, Any], name: str) -> str:
    return brief(json.dumps(fields[name])) if name in fields else "missing"


def _place(placed: Placed) -> str:
    return f"{placed.key}:{placed.line}"
