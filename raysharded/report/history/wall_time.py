"""A partition of a run's wall time, from the times of its journal's entries. Pure.

Moments are whole microseconds since the run's first entry, so that the parts add up exactly. They never decrease: an
entry from a driver with a slower clock gets the newest moment before it.

Between two `formed` entries with steps after them there is a stretch of training and then a gap. In a stretch every
moment belongs to the step that ended next. In a gap the entries in it determine the part, in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np

from raysharded.report.history.step_table import Floats, Int64s, StepLog, Steps

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
_FATES: tuple[Part, ...] = ("lost", "computing", "undone")
"""The parts to which a step's time may belong."""
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
    """The duration of each part, in microseconds; their sum is the time from the first entry to the newest."""

    parts: dict[Part, int]

    def seconds(self, part: Part) -> float:
        return self.parts[part] / MICRO

    @property
    def total(self) -> int:
        """Microseconds from the first entry to the newest."""
        return sum(self.parts.values())

    @property
    def at_work_s(self) -> float:
        """Seconds in which a driver existed and the run was not paused on request."""
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
    """Every computed step, in order of time, including lost ones; and the intervals between them."""

    records: Steps
    begins: array[Moment]
    """The begin of each step: the end of the previous one, or the moment when its generation held the state."""
    ends: array[Moment]
    counts: bytearray
    """1 for a step that counts, 0 for a lost or undone one."""
    undone: bytearray
    """1 for a step undone on request."""
    pieces: Sequence[Piece]
    """The pieces in order, without gaps; waits of a step for a checkpoint are not separate here."""


@dataclass
class Session:
    """One driver's entries about time. Moments never decrease."""

    begin: Moment
    end: Moment
    max_steps: int | None = None
    notes: list[tuple[Moment, What]] = field(default_factory=list)
    first: int = 0
    """Index of the session's first step in the log; `moments` has one value for each of its steps."""
    newest: int | None = None
    """The number of the session's newest step."""
    generation: int | None = None
    """The generation of the newest step."""
    moments: array[int] = field(default_factory=lambda: array("q"))
    """The moment when each step was recorded."""
    stretches: list[tuple[int, int]] = field(default_factory=list)
    """For each membership that did a step: the numbers of steps and notes before it."""

    def note(self, what: What, at: Moment) -> None:
        self.notes.append((at, what))

    def step(self, number: int, generation: int, at: Moment) -> None:
        """The log's next step was recorded."""
        before = len(self.moments)
        self.moments.append(at)  # first: a moment that no array holds changes nothing
        if self.generation != generation:
            self.stretches.append((before, len(self.notes)))
        self.newest, self.generation = number, generation

    def more_steps(self, newest: int, at: Int64s) -> None:
        """The log's next steps were recorded, all of the previous step's generation."""
        self.newest = newest
        self.moments.frombytes(at.tobytes())

    def found(self, at: Moment) -> None:
        """A loss was detected at `at`, which is known only now: insert it into the notes."""
        place = len(self.notes)
        while place and self.notes[place - 1][0] > at:
            place -= 1
        self.notes.insert(place, (at, "found"))
        for index in reversed(range(len(self.stretches))):
            steps, notes = self.stretches[index]
            if notes <= place:
                break  # so are those before: they have no more notes before them
            self.stretches[index] = steps, notes + 1


def partition(
    sessions: Sequence[Session], log: StepLog, counted: Int64s, undone: Sequence[int] = ()
) -> tuple[Times, Track]:
    """The partition of all the time. `log`: the sessions' steps; `counted`: indices of steps whose results count;
    `undone`: indices of steps undone on request."""
    walk = _Walk(log.all(), counted, undone)
    for session in sessions:
        walk.spend("no driver", session.begin)
        walk.session(session)
    return Times(parts=walk.parts), walk.track()


class _Walk:
    """One pass through time that assigns every moment to a part."""

    def __init__(self, steps: Steps, counted: Int64s, undone: Sequence[int]) -> None:
        self.now: Moment = 0
        self.parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self.pieces: list[Piece] = []
        self._all = steps
        self._took = _in_micros(steps.total_s())
        self._waited = _in_micros(steps.named("seconds", "save"))
        self._begins, self._ends = array("q"), array("q")
        self._fates = np.full(len(steps), _FATES.index("lost"), dtype=np.uint8)
        fated: tuple[tuple[Part, Sequence[int] | Int64s], ...] = (("undone", undone), ("computing", counted))
        for part, which in fated:
            self._fates[np.asarray(which, dtype=np.int64)] = _FATES.index(part)

    def track(self) -> Track:
        counts, undone = (bytearray((self._fates == _FATES.index(part)).tobytes()) for part in ("computing", "undone"))
        return Track(
            records=self._all, begins=self._begins, ends=self._ends, counts=counts, undone=undone, pieces=self.pieces
        )

    def spend(self, part: Part, until: Moment) -> None:
        """Assign the time from now until `until`."""
        if until <= self.now:
            return
        self.parts[part] += until - self.now
        if self.pieces and self.pieces[-1].part == part and self.pieces[-1].end == self.now:
            self.pieces[-1] = Piece(part, self.pieces[-1].begin, until)
        else:
            self.pieces.append(Piece(part, self.now, until))
        self.now = until

    def session(self, session: Session) -> None:
        stretches = [*session.stretches, (len(session.moments), len(session.notes))]
        notes_before = 0
        for number, ((first, notes), (last, _)) in enumerate(pairwise(stretches)):
            between = session.notes[notes_before:notes]
            formed = next((at for at, what in reversed(between) if what == "formed"), session.moments[first])
            self.gap(between, until=formed, kind="inner" if number else "first")
            self.steps(session, first, last)
            notes_before = notes
        after = session.notes[notes_before:]
        done = any(what == "finished" for _, what in after) or _is_done(session)
        self.gap(after, until=session.end, kind="done" if done else "inner" if session.moments else "first")

    def steps(self, session: Session, first: int, last: int) -> None:
        """The steps of a stretch. If several are recorded at once, each ended no later than its successor began."""
        if first == last:
            return
        rows = slice(session.first + first, session.first + last)
        took, waited, fates = np.cumsum(self._took[rows]), self._waited[rows], self._fates[rows]
        recorded = np.array(session.moments[first:last], dtype=np.int64)
        # each end is the minimum of its recording time and its successor's end minus the successor's duration
        ends = np.minimum.accumulate((recorded - took)[::-1])[::-1] + took
        untils = np.maximum.accumulate(np.maximum(ends, self.now))
        begins = np.concatenate(([self.now], untils[:-1]))
        edges = [0, *(np.flatnonzero(np.diff(fates)) + 1).tolist(), len(fates)]
        for begin, end in pairwise(edges):
            self.spend(_FATES[fates[begin]], int(untils[end - 1]))
        saving = int(np.minimum(waited, untils - begins)[fates == _FATES.index("computing")].sum())
        self.parts["computing"] -= saving
        self.parts["checkpointing"] += saving
        self._begins.frombytes(begins.tobytes())
        self._ends.frombytes(untils.tobytes())

    def gap(
        self, notes: Sequence[tuple[Moment, What]], *, until: Moment, kind: Literal["first", "inner", "done"]
    ) -> None:
        """The time between two stretches, before the first one, or after the last step of all."""
        forming: Part = "starting" if kind == "first" else "resharding"
        training: Part = "checkpointing" if kind == "done" else "lost"  # a step that is interrupted, or not done yet
        sign = next((what for _, what in notes if what in ("found", "paused", "generation")), None)
        before: dict[What | None, Part] = {"generation": "resharding", "paused": "paused"}
        part = "starting" if kind == "first" else before.get(sign, training)
        for at, what in notes:
            self.spend(part, min(at, until))
            if what == "found":
                forming = "recovering"
            if part == "paused" and what != "resume":
                continue  # events in a pause cost no time
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
    """True if the session's last step is the run's last step."""
    return session.newest is not None and session.newest == session.max_steps


def _in_micros(seconds: Floats) -> Int64s:
    """Whole microseconds; 0 for non-finite values."""
    micros = np.nan_to_num(seconds, nan=0.0, posinf=0.0, neginf=0.0)
    micros *= MICRO
    return np.rint(micros, out=micros).astype(np.int64)
