"""Frozen histories: the drawn values of thousands, and digests of the driver's answers to each.

`tests/golden/histories` has both, a JSON line for each history, in shards that sample all kinds of histories alike.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from raysharded.driver.state.commands import Command
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import Event
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase, State
from raysharded.protocol.session import AdoptedWorker
from tests.driver.canonical import ENUMS, NAMES, Flat, Memo, StateView, View, by_today, command_view, event_view
from tests.driver.schedules import Schedule
from tests.driver.simulated import Cluster
from tests.driver.simulated_driver import SimulatedDriver
from tests.driver.simulated_workers import Worker
from tests.driver.strikes import Fault, Strike
from tests.paths import GOLDEN

FOLDER = GOLDEN / "histories"
SHARD = 2000
"""Histories of a shard; the first one is in every test run."""
WINDOW = 50
"""Events that share a digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The drawn values."""

    number: int
    kind: str
    """The strategy that drew it."""
    schedule: Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """Digests of the driver's answers."""

    history: int
    events: int
    digest: str
    """Digest of the views of all events."""
    windows: tuple[str, ...]
    """Digests of 50 events each, and of the remaining ones."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The view of one event of one driver."""

    driver: str
    at: float
    """Simulated seconds."""
    event: View
    commands: tuple[View, ...]
    changes: Flat
    """Changes of the driver's state."""

    def text(self) -> str:
        return repr((self.driver, self.at, self.event, self.commands, tuple(self.changes.items())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first events of a history that are not as recorded."""

    history: History
    first: int
    """The number of the first of these, from 1."""
    moments: tuple[Moment, ...]
    """The events as they are today; none: the history ends earlier than recorded."""
    recorded: Digests


# -- the results of a history --


class _Lawless:
    """A simulation without laws: they are not checked here."""

    def __call__(self, cluster: Cluster, before: State, event: Event | None, commands: list[Command]) -> None:
        pass

    def take_over(self, driver: SimulatedDriver, there: Sequence[Worker], taken: Sequence[AdoptedWorker]) -> None:
        pass

    def last_words(self, leader: Worker, there: Sequence[Worker]) -> None:
        pass


class Reel:
    """The moments of a history, window by window."""

    def __init__(self, known: Digests | None = None, *, keep: bool = False) -> None:
        """`known`: end at a difference to these. `keep` all moments."""
        self._known, self._keep = known, keep
        self._all = blake2b(digest_size=16)
        self._memo = Memo()
        self._states: dict[str, StateView] = {}
        self.windows: list[str] = []
        self.window: list[Moment] = []
        """The newest moments, that have no digest yet."""
        self.events = 0
        self.differs = False
        """The `window` differs from the record."""
        self.raised = ""
        """The simulation's error."""
        self.kept: list[Moment] = []

    def play(self, schedule: Schedule) -> None:
        """Simulate until the end, or the first difference."""
        cluster = schedule.cluster()
        try:
            cluster.run(_Lawless(), self._observe)
        except Exception as error:  # noqa: BLE001 - what a changed driver makes of the simulation is a difference, too
            self.raised = f"{type(error).__name__}: {error}"
            self._add(Moment("", cluster.now, ("raised", self.raised), (), {}), cluster)
        if not self.differs:
            for driver in cluster.drivers:
                ended = ("ended", type(driver.error).__name__, str(driver.error or ""))
                self._add(Moment(driver.name, 0.0, ended, (), {}), cluster)
        if self.window and not self.differs:
            self._close(cluster)

    def _observe(self, driver: SimulatedDriver, event: Event | None, commands: Sequence[Command], state: State) -> None:
        view, memo = self._states.get(driver.name), self._memo
        if view is None:
            view = self._states[driver.name] = StateView(memo)
        seen, ordered = event_view(event, memo), tuple(command_view(command, memo) for command in commands)
        self._add(Moment(driver.name, driver.cluster.now, seen, ordered, view.changes(state)), driver.cluster)

    def _add(self, moment: Moment, cluster: Cluster) -> None:
        if self.differs:
            return
        if self._keep:
            self.kept.append(moment)
        self.window.append(moment)
        self.events += 1
        if len(self.window) == WINDOW:
            self._close(cluster)

    def _close(self, cluster: Cluster) -> None:
        text = "\n".join(moment.text() for moment in self.window).encode()
        digest = blake2b(text, digest_size=8).hexdigest()
        number, known = len(self.windows), self._known
        if known is not None and (number >= len(known.windows) or known.windows[number] != digest):
            self.differs = cluster.ended = True
            return
        self._all.update(text)
        self.windows.append(digest)
        self.window = []

    def digests(self, history: int) -> Digests:
        return Digests(history=history, events=self.events, digest=self._all.hexdigest(), windows=tuple(self.windows))


def digests_of(history: History) -> Digests:
    """Today's digests. Raises RuntimeError if the simulation fails."""
    reel = Reel()
    reel.play(history.schedule)
    if reel.raised:
        raise RuntimeError(f"history {history.number} ({history.kind}): {reel.raised}: {history.schedule}")
    return reel.digests(history.number)


def moments_of(history: History) -> list[Moment]:
    """Today's moments, all of them."""
    reel = Reel(keep=True)
    reel.play(history.schedule)
    return reel.kept


def difference(history: History, recorded: Digests) -> Difference | None:
    """The first window of events that differs from the record; None: all are equal."""
    reel = Reel(recorded)
    reel.play(history.schedule)
    if not reel.differs and reel.digests(history.number) == recorded:
        return None
    first = len(reel.windows) * WINDOW + 1
    return Difference(history=history, first=first, moments=tuple(reel.window), recorded=recorded)


# -- as JSON lines: drawn values have canonical names, too --


def to_json(history: History) -> dict[str, Any]:
    """Every field by its name."""
    drawn = history.schedule
    faults = [
        {"strike": f.strike.name, "whom": f.whom, "nth": f.nth, "phase": f.phase and _PHASES[f.phase.name]}
        for f in drawn.faults
    ]
    return {
        "history": history.number,
        "kind": history.kind,
        "later_workers": drawn.later_workers,
        "save_every": drawn.save_every,
        "resumed": drawn.resumed,
        "tick_s": drawn.tick_s,
        "seed": drawn.seed,
        "faults": faults,
        "limits": {**_named(drawn.limits), "grouping": drawn.limits.grouping and _named(drawn.limits.grouping)},
    }


def from_json(drawn: dict[str, Any]) -> History:
    """The history that `to_json` gave."""
    grouping = drawn["limits"]["grouping"]
    limits = _unnamed(DriverConfig, {**drawn["limits"], "grouping": None})
    if grouping is not None:
        tables = {name: tuple(map(tuple, grouping[name])) for name in ("step_s", "fits")}
        limits = replace(limits, grouping=_unnamed(Grouping, {**grouping, **tables}))
    members = {canonical: Phase[today] for today, canonical in _PHASES.items()}
    faults = [
        Fault(strike=Strike[f["strike"]], whom=f["whom"], nth=f["nth"], phase=f["phase"] and members[f["phase"]])
        for f in drawn["faults"]
    ]
    schedule = Schedule(
        limits=limits,
        later_workers=drawn["later_workers"],
        save_every=drawn["save_every"],
        resumed=drawn["resumed"],
        tick_s=drawn["tick_s"],
        seed=drawn["seed"],
        faults=tuple(faults),
    )
    return History(number=drawn["history"], kind=drawn["kind"], schedule=schedule)


_PHASES = by_today(ENUMS[Phase])


def _named(value: DriverConfig | Grouping) -> dict[str, Any]:
    return {name: getattr(value, today) for today, name in NAMES[type(value)].by_field().items()}


def _unnamed(cls: Any, fields: dict[str, Any]) -> Any:
    """A field that came later has the value with which nothing differs."""
    names = NAMES[cls]
    known = {**names.later, **fields}
    return cls(**{today: known[name] for today, name in names.by_field().items()})


# -- on disk --


def num_shards() -> int:
    return len(list(FOLDER.glob("drawn-*.jsonl.xz")))


def read_drawn(shard: int) -> list[History]:
    """The histories of a shard, in order."""
    return [from_json(line) for line in _read(_path("drawn", shard))]


def read_digests(shard: int) -> list[Digests]:
    """The recorded digests of a shard."""
    return [
        Digests(history=one["history"], events=one["events"], digest=one["digest"], windows=tuple(one["windows"]))
        for one in _read(_path("digests", shard))
    ]


def read_history(number: int) -> History:
    """Raises IndexError if there is none of this number."""
    return read_drawn(number // SHARD)[number % SHARD]


def write_drawn(shard: int, histories: Iterable[History]) -> None:
    _write(_path("drawn", shard), (to_json(history) for history in histories))


def write_digests(shard: int, digests: Iterable[Digests]) -> None:
    _write(_path("digests", shard), (asdict(one) for one in digests))


def _path(what: str, shard: int) -> Path:
    return FOLDER / f"{what}-{shard:02d}.jsonl.xz"


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
