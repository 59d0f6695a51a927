"""Where the wall time of a run went: a partition of it, from the moments of its journal's entries. Pure.

Moments are whole microseconds since the run's first entry, so that the parts add up to the whole exactly. They never go
back: an entry that a driver with a slower clock made counts as made at the newest moment before.

Between two `formed` with steps after them lies a stretch of training and then a gap. In a stretch every moment belongs
to the step that ended next; in a gap to what the entries in it say, in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from raysharded.obs.records import StepRecord

Part: TypeAlias = Literal[
    "computing",
    "lost",
    "undone",
    "recovering",
    "resharding",
    "checkpointing",
    "starting",
    "waiting",
    "paused",
    "no driver",
]
PARTS: tuple[Part, ...] = get_args(Part)
MEANING: dict[Part, str] = {
    "computing": "steps that count",
    "lost": "steps that were lost, broken off or not yet done, until that was noticed",
    "undone": "steps that somebody took back",
    "recovering": "from when a loss was noticed until the state was whole again",
    "resharding": "workers that joined or left, or another change, between two steps, and the way back from a pause",
    "checkpointing": "steps that waited for a checkpoint, and the writing of the last one",
    "starting": "from the start of a driver until its workers held the state",
    "waiting": "fewer workers were ready than the run needs",
    "paused": "somebody had asked for a pause, until somebody ended it",
    "no driver": "from the last sign of one driver to the start of the next",
}
MICRO = 1_000_000

Moment: TypeAlias = int
What: TypeAlias = Literal["found", "waiting", "paused", "resume", "generation", "formed", "finished"]


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of time that was spent in one way; never empty."""

    part: Part
    begin: Moment
    end: Moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """How long each part took, in microseconds; their sum is the time from the first entry to the newest."""

    parts: dict[Part, int]

    def seconds(self, part: Part) -> float:
        return self.parts[part] / MICRO

    @property
    def total(self) -> int:
        """Microseconds from the first entry to the newest."""
        return sum(self.parts.values())

    @property
    def at_work_s(self) -> float:
        """Seconds in which a driver was there, and nobody had paused the run."""
        return self._at_work / MICRO

    @property
    def goodput(self) -> float:
        """The share of the time at work that was spent on steps that count; NaN without a time."""
        return self.parts["computing"] / self._at_work if self._at_work else float("nan")

    @property
    def _at_work(self) -> int:
        return self.total - self.parts["no driver"] - self.parts["paused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """Every step that was computed, in order of time, those that were lost too; and what lay between."""

    records: Sequence[StepRecord]
    begins: Sequence[Moment]
    """When each began: the end of the one before, or when its generation held the state."""
    ends: Sequence[Moment]
    counts: Sequence[int]
    """1 if it counts, 0 if it was lost or undone."""
    undone: Sequence[int]
    """1 if somebody took it back."""
    pieces: Sequence[Piece]
    """In order, without gaps; a checkpoint that a step waited for is not told apart here."""


@dataclass
class Session:
    """What one driver's entries say about time. Moments do not go back."""

    begin: Moment
    end: Moment
    max_steps: int | None = None
    notes: list[tuple[Moment, What]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    moments: array[int] = field(default_factory=lambda: array("q"))
    """When each step was recorded."""
    stretches: list[tuple[int, int]] = field(default_factory=list)
    """Of each membership that did a step: how many steps, and how many notes, came before."""

    def note(self, what: What, at: Moment) -> None:
        self.notes.append((at, what))

    def step(self, record: StepRecord, at: Moment) -> None:
        if not self.steps or self.steps[-1].generation != record.generation:
            self.stretches.append((len(self.steps), len(self.notes)))
        self.steps.append(record)
        self.moments.append(at)

    def found(self, at: Moment) -> None:
        """A loss was noticed at `at`, which becomes known only now: put it among the notes."""
        place = len(self.notes)
        while place and self.notes[place - 1][0] > at:
            place -= 1
        self.notes.insert(place, (at, "found"))
        self.stretches = [(steps, notes + (notes > place)) for steps, notes in self.stretches]


def partition(
    sessions: Sequence[Session], counted: Iterable[StepRecord], undone: Iterable[StepRecord] = ()
) -> tuple[Times, Track]:
    """Where all the time went. `counted`: the very records, among those of the sessions, whose results count; `undone`:
    those that somebody took back."""
    walk = _Walk(counted=frozenset(map(id, counted)), undone=frozenset(map(id, undone)))
    for session in sessions:
        walk.spend("no driver", session.begin)
        walk.session(session)
    return Times(parts=walk.parts), walk.track()


@dataclass
class _Walk:
    """Goes through time once, and says of every moment what it was spent on."""

    counted: frozenset[int]
    undone: frozenset[int]
    now: Moment = 0
    parts: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    pieces: list[Piece] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    begins: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    counts: bytearray = field(default_factory=bytearray)
    taken_back: bytearray = field(default_factory=bytearray)

    def track(self) -> Track:
        return Track(
            records=self.records,
            begins=self.begins,
            ends=self.ends,
            counts=self.counts,
            undone=self.taken_back,
            pieces=self.pieces,
        )

    def spend(self, part: Part, until: Moment) -> None:
        """All from now until then."""
        if until <= self.now:
            return
        self.parts[part] += until - self.now
        if self.pieces and self.pieces[-1].part == part and self.pieces[-1].end == self.now:
            self.pieces[-1] = Piece(part, self.pieces[-1].begin, until)
        else:
            self.pieces.append(Piece(part, self.now, until))
        self.now = until

    def session(self, session: Session) -> None:
        stretches = [*session.stretches, (len(session.steps), len(session.notes))]
        notes_before = 0
        for number, ((first, notes), (last, _)) in enumerate(pairwise(stretches)):
            between = session.notes[notes_before:notes]
            formed = next((at for at, what in reversed(between) if what == "formed"), session.moments[first])
            self.gap(between, until=formed, kind="inner" if number else "first")
            self.steps(session, first, last)
            notes_before = notes
        after = session.notes[notes_before:]
        done = any(what == "finished" for _, what in after) or _is_done(session)
        self.gap(after, until=session.end, kind="done" if done else "inner" if session.steps else "first")

    def steps(self, session: Session, first: int, last: int) -> None:
        """The steps of a stretch. Several may be recorded at once: each ended no later than its successor began."""
        ends = session.moments[first:last]
        for index in range(len(ends) - 2, -1, -1):
            took = round(session.steps[first + index + 1].total_s * MICRO)
            ends[index] = min(ends[index], ends[index + 1] - took)
        for record, end in zip(session.steps[first:last], ends, strict=True):
            counts, undone = id(record) in self.counted, id(record) in self.undone
            begin, until = self.now, max(self.now, end)
            self.spend("computing" if counts else "undone" if undone else "lost", until)
            if counts:
                waited = min(round(record.seconds.get("save", 0.0) * MICRO), until - begin)
                self.parts["computing"] -= waited
                self.parts["checkpointing"] += waited
            self.records.append(record)
            self.begins.append(begin)
            self.ends.append(until)
            self.counts.append(counts)
            self.taken_back.append(undone)

    def gap(
        self, notes: Sequence[tuple[Moment, What]], *, until: Moment, kind: Literal["first", "inner", "done"]
    ) -> None:
        """What lies between two stretches, before the first one, or after the last step of all."""
        forming: Part = "starting" if kind == "first" else "resharding"
        training: Part = "checkpointing" if kind == "done" else "lost"  # a step that is broken off, or not done yet
        sign = next((what for _, what in notes if what in ("found", "paused", "generation")), None)
        before: dict[What | None, Part] = {"generation": "resharding", "paused": "paused"}
        part = "starting" if kind == "first" else before.get(sign, training)
        for at, what in notes:
            self.spend(part, min(at, until))
            if what == "found":
                forming = "recovering"
            if part == "paused" and what != "resume":
                continue  # what happens in a pause takes nobody's time
            match what:
                case "found":
                    part = forming
                case "paused":
                    part = "paused"
                case "resume":
                    part = forming
                case "waiting":
                    part = "waiting"
                case "generation":
                    part = forming
                case "formed":
                    part, forming = training, "resharding"
        self.spend(part, until)


def _is_done(session: Session) -> bool:
    """Whether its last step was the run's."""
    return bool(session.steps) and session.steps[-1].step == session.max_steps
