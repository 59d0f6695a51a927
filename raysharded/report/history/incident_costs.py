"""A journal's information about time and incidents, folded alongside the summary. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from raysharded.journal.entries import whole_or_none
from raysharded.journal.log import DAMAGE
from raysharded.journal.records import Recovery
from raysharded.report.history import incidents, wall_time
from raysharded.report.history.incidents import FAILURES, Change, FailedInARow, Incident
from raysharded.report.history.step_table import Int64s, StepLog

Entry = Mapping[str, Any]

_BREAKS = ("worker_lost", "stuck", "corruption", "proof_failed", "rewind")
"""Kinds of entries that may interrupt a step."""


@dataclass
class Chronicle:
    """The state while entries are read, in order."""

    log: StepLog = field(default_factory=StepLog)
    """The steps. The chronicle is notified of steps after they are in the log."""
    first_at: float | None = None
    now: wall_time.Moment = 0
    """Microseconds since the first entry; never decreases."""
    sessions: list[wall_time.Session] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    _told_s: list[float] = field(default_factory=list)
    """The time when each incident was added, which is no earlier than its own."""
    members: frozenset[int] | None = None
    """Members of this driver's newest generation, formed or not."""
    step: int = 0
    trained: wall_time.Moment = 0
    """The time when the newest step was done, or when the newest generation formed before its first step."""
    change: Change | None = None
    """The change in progress since the newest step."""
    closed: Change | None = None
    """The newest change that led to a step."""
    lost_s: float = 0.0
    """Seconds of steps that the change in progress has to compute again."""
    closed_lost_s: float = 0.0
    paused: bool = False
    """True while the workers of this driver are paused."""
    because: str = ""
    """The reason why this driver follows another."""
    failed: FailedInARow = field(default_factory=FailedInARow)
    failure: Incident | None = None
    """The newest incident of checkpoints that failed."""
    died: dict[int, int] = field(default_factory=dict)
    """Worker -> the step of its death, as far as known."""
    recovered: tuple[Incident, Recovery, Callable[..., Incident]] | None = None
    """The newest recovery: its incident, and the same with another `step`, once it is known what a worker died of."""
    undone: list[int] = field(default_factory=list)
    """Indices of the log's steps that were undone on request."""

    def add(self, entry: Entry) -> None:
        """Add any entry but a step."""
        kind = entry["kind"]
        self._tell_the_time(float(entry["at"]), kind)
        match kind:
            case "started":
                self._started(entry)
            case "generation":
                self._generation(entry)
            case "formed":
                self._formed(entry)
            case "finished":
                self.sessions[-1].note(kind, self.now)
            case "waiting" if self.members is not None or incidents.is_incident(entry):  # else they are starting
                self.sessions[-1].note(kind, self.now)
            case "rewind" if entry.get("who") == "asked":  # between two steps: its generation is being formed
                self._because(f"to go back to step {entry['to_step']}, as was asked for")
            case "learning_rate":
                self._because("for another learning rate")
            case "mixture_weights":
                self._because("for other weights of the mixture")
            case "paused":
                self.paused = True
                self.sessions[-1].note(kind, self.now)
            case "resume" if self.paused:
                self._resumed()
            case _ if kind in _BREAKS and self._concerns_members(entry):
                self._open()
                self.sessions[-1].note("found", self.now)
        if kind == "worker_died":
            self._died(entry)
        incident = incidents.of_entry(
            entry, self.now / wall_time.MICRO, self.step, self.sessions[-1].max_steps if self.sessions else None
        )
        row = self.failed.add(entry)
        if incident is not None and row:
            incident = replace(incident, text=row)
            if self.incidents and self.incidents[-1] is self.failure:
                self.incidents.pop()
                self._told_s.pop()
        if incident is not None and not self._is_told(incident):
            self._tell(incident)
            self.failure = incident if kind in FAILURES else self.failure

    def add_step(self, index: int) -> None:
        """Add the log's next step, which the chronicle has not seen yet."""
        number = self.log.number(index)
        self._tell_the_time(self.log.at(index), "step")
        self.sessions[-1].step(number, self.log.generation(index), self.now)
        self.step, self.trained = number, self.now
        change, self.change = self.change, None
        if change is None or change.seconds is None:  # a usual step, or one from before the change
            self.change = change
            if change is not None:
                change.since_s, change.step = self.now / wall_time.MICRO, number
            return
        self.closed, self.closed_lost_s, self.lost_s = change, self.lost_s, 0.0
        if change.before is not None and change.after:
            if not _only_resumes(change):
                self._tell(incidents.of_reshard(change))
        elif len(self.sessions) > 1:
            ended, started = self.sessions[-2].end, self.sessions[-1].begin
            self._tell(
                incidents.of_resumption(
                    change,
                    ended_s=ended / wall_time.MICRO,
                    started_s=started / wall_time.MICRO,
                    lost_s=self.closed_lost_s,
                    because=self.because,
                )
            )

    def add_more_steps(self, indices: range) -> None:
        """Add the steps that follow in the log, of the previous step's generation: as `add_step` of each."""
        assert self.first_at is not None, "the one before told the time"
        moments = np.rint((self.log.moments(indices) - self.first_at) * wall_time.MICRO).astype(np.int64)
        moments = np.maximum.accumulate(np.maximum(moments, self.now))
        self.now = self.trained = self.sessions[-1].end = int(moments[-1])
        self.step = self.log.number(indices[-1])
        self.sessions[-1].more_steps(self.step, moments)
        if self.change is not None:  # they are from before it, like the previous step
            self.change.since_s, self.change.step = self.now / wall_time.MICRO, self.step

    def add_recovery(self, recovery: Recovery) -> int:
        """Add a recovery, directly after its first step. Returns the step in which its workers were lost."""
        self._tell_the_time(recovery.at, "recovery")
        found = max(self.sessions[-1].begin, self.now - round(recovery.total_s * wall_time.MICRO))
        self.sessions[-1].found(found)
        found_s = found / wall_time.MICRO
        unknown = Change(since_s=found_s, opened_s=found_s, step=recovery.resumed_after_step, before=None)
        change = self.closed or unknown
        self._drop_parts(recovery, change)
        ended_s = self.now / wall_time.MICRO
        lost_s = 0.0 if change.before is None else self.closed_lost_s
        told = partial(incidents.of_recovery, recovery, change, ended_s=ended_s, lost_s=lost_s)
        incident = told(step=incidents.lost_in(recovery, self.died, change.step, self.sessions[-1].max_steps))
        self._tell(incident)
        self.recovered = incident, recovery, told
        return incident.step

    def _died(self, entry: Entry) -> None:
        """Add the step of a worker's death, also to the newest recovery, which may be over."""
        with suppress(*DAMAGE):  # an entry without the needed fields
            worker, step = int(entry["worker"]), int(entry["step"])
            self.died[worker] = step
            if self.recovered is None or worker not in self.recovered[1].lost:
                return
            before, recovery, told = self.recovered
            incident = told(step=min(self.died[one] for one in recovery.lost if one in self.died))
            self.incidents = [incident if one is before else one for one in self.incidents]
            self.recovered = incident, recovery, told

    def lost(self, seconds: float) -> None:
        """Add seconds of steps to compute again; a negative number for steps that count after all."""
        self.lost_s += seconds

    def undo(self, steps: Iterable[int]) -> None:
        """Mark steps of the log as undone on request: they are not lost, and will not be computed again."""
        self.undone.extend(steps)
        self.lost_s = 0.0

    def told(self, counted: Int64s) -> tuple[wall_time.Times, wall_time.Track, tuple[Incident, ...]]:
        """(times, track, incidents), given the log's steps that count."""
        when = sorted(self.incidents, key=lambda incident: incident.at_s)
        return *wall_time.partition(self.sessions, self.log, counted, self.undone), tuple(when)

    def _tell(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self._told_s.append(self.now / wall_time.MICRO)

    def _drop_parts(self, recovery: Recovery, change: Change) -> None:
        """Drop the incidents that the recovery contains. None of them was added before the change began."""
        first = bisect_left(self._told_s, min(change.since_s, change.opened_s))
        newest = list(zip(self.incidents[first:], self._told_s[first:], strict=True))
        kept = [pair for pair in newest if not _is_part_of(pair[0], recovery, change)]
        self.incidents[first:] = [incident for incident, _ in kept]
        self._told_s[first:] = [told_s for _, told_s in kept]

    def _tell_the_time(self, at: float, kind: str) -> None:
        if self.first_at is None:
            self.first_at = at
        self.now = max(self.now, round((at - self.first_at) * wall_time.MICRO))
        if not self.sessions or kind == "started":
            self.sessions.append(wall_time.Session(begin=self.now, end=self.now, first=self._told_of()))
        if kind != "checkpoint_skipped":  # recorded by the next driver, before its entry `started`
            self.sessions[-1].end = self.now

    def _told_of(self) -> int:
        """The number of the log's steps seen so far."""
        return sum(len(session.moments) for session in self.sessions)

    def _started(self, entry: Entry) -> None:
        self.sessions[-1].max_steps = whole_or_none(entry.get("max_steps"))
        self.members, self.change, self.paused, self.step = None, None, False, int(entry["resumed_after_step"])
        self.trained, self.because = self.now, str(entry.get("because", ""))

    def _open(self) -> Change:
        if self.change is None:
            now_s, trained_s = self.now / wall_time.MICRO, self.trained / wall_time.MICRO
            self.change = Change(since_s=trained_s, opened_s=now_s, step=self.step, before=self.members)
        return self.change

    def _resumed(self) -> None:
        """End a pause: the following time is the return to training, which excludes the pause."""
        self.sessions[-1].note("resume", self.now)
        self.paused, change = False, self._open()
        change.since_s = change.opened_s = self.now / wall_time.MICRO
        change.resumes = True

    def _generation(self, entry: Entry) -> None:
        self.sessions[-1].note("generation", self.now)
        change = self._open()
        change.decided_s = self.now / wall_time.MICRO
        if change.before is None and not change.after:  # no step was trained yet
            change.since_s = change.decided_s
        change.after, change.why = frozenset(map(int, entry["members"])), str(entry.get("why", ""))
        change.source = str(entry["source"])
        self.members, self.step = change.after, int(entry["step"])

    def _because(self, why: str) -> None:
        """Set the reason of the change in progress."""
        if self.change is not None:
            self.change.why = why

    def _formed(self, entry: Entry) -> None:
        self.sessions[-1].note("formed", self.now)
        change = self._open()
        change.formed_s, self.trained = self.now / wall_time.MICRO, self.now
        change.seconds = {name: float(value) for name, value in dict(entry.get("seconds") or {}).items()}
        change.bytes_received += int(entry.get("bytes_received", 0))
        change.bytes_read += int(entry.get("bytes_read", 0))

    def _is_told(self, incident: Incident) -> bool:
        """True if the newest incident is the same: a run that waits for workers reports it again and again."""
        same = self.incidents[-1:]
        return incident.kind == "waiting" and [(one.text, one.step) for one in same] == [(incident.text, incident.step)]

    def _concerns_members(self, entry: Entry) -> bool:
        worker = entry.get("worker")
        return worker is None or self.members is None or worker in self.members


def _only_resumes(change: Change) -> bool:
    """True if the same workers continued after a pause."""
    return change.resumes and not change.why and change.before == change.after


def _is_part_of(incident: Incident, recovery: Recovery, change: Change) -> bool:
    """True if the recovery contains the incident's information."""
    if incident.kind == "reshard":
        return incident.at_s >= change.since_s
    is_lost = incident.kind == "worker" and incident.worker in recovery.lost
    return is_lost and incident.at_s >= min(change.since_s, change.opened_s)
