"""What a journal's entries say about time, and about incidents: folded beside the summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysharded.journal.records import Recovery
from raysharded.report.history import incidents, wall_time
from raysharded.report.history.incidents import Change, Incident
from raysharded.report.history.step_table import StepLog

Entry = Mapping[str, Any]

_BREAKS = ("worker_lost", "stuck", "corruption", "proof_failed", "rewind")
"""Kinds of entries with which a step may be broken off."""


@dataclass
class Chronicle:
    """The state while entries are read, in their order."""

    log: StepLog = field(default_factory=StepLog)
    """The steps, of which the chronicle is told when they are in it."""
    first_at: float | None = None
    now: wall_time.Moment = 0
    """Microseconds since the first entry; never goes back."""
    sessions: list[wall_time.Session] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    members: frozenset[int] | None = None
    """Of the newest generation of this driver, formed or not."""
    step: int = 0
    trained: wall_time.Moment = 0
    """When the newest step was done, or the newest generation formed before its first."""
    change: Change | None = None
    """Under way, since the newest step."""
    closed: Change | None = None
    """The newest that led to a step."""
    lost_s: float = 0.0
    """Of steps that the change under way has to compute again."""
    closed_lost_s: float = 0.0
    paused: bool = False
    """The workers of this driver stand still."""
    because: str = ""
    """Why this driver follows another."""
    undone: list[int] = field(default_factory=list)
    """Which of the log's steps somebody took back."""

    def add(self, entry: Entry) -> None:
        """Any entry but a step."""
        kind = entry["kind"]
        self._tell_the_time(float(entry["at"]), kind)
        match kind:
            case "started":
                self._started(entry)
            case "generation":
                self._generation(entry)
            case "formed":
                self._formed(entry)
            case "waiting" | "finished":
                self.sessions[-1].note(kind, self.now)
            case "rewind" if entry.get("who") == "asked":  # between two steps: its generation is being formed
                self._because(f"to go back to step {entry['to_step']}, as was asked for")
            case "learning_rate":
                self._because("for another learning rate")
            case "paused":
                self.paused = True
                self.sessions[-1].note(kind, self.now)
            case "resume" if self.paused:
                self._resumed()
            case _ if kind in _BREAKS and self._concerns_members(entry):
                self._open()
                self.sessions[-1].note("found", self.now)
        incident = incidents.of_entry(entry, self.now / wall_time.MICRO, self.step)
        if incident is not None:
            self.incidents.append(incident)

    def add_step(self, index: int) -> None:
        """One of the log: the next of which the chronicle was not told yet."""
        number = self.log.number(index)
        self._tell_the_time(self.log.at(index), "step")
        self.sessions[-1].step(number, self.log.generation(index), self.now)
        self.step, self.trained = number, self.now
        change, self.change = self.change, None
        if change is None or change.seconds is None:  # as ever, or a step from before the change
            self.change = change
            if change is not None:
                change.since_s, change.step = self.now / wall_time.MICRO, number
            return
        self.closed, self.closed_lost_s, self.lost_s = change, self.lost_s, 0.0
        if change.before is not None and change.after:
            self.incidents.append(incidents.of_reshard(change))
        elif len(self.sessions) > 1:
            ended, started = self.sessions[-2].end, self.sessions[-1].begin
            self.incidents.append(
                incidents.of_resumption(
                    change,
                    ended_s=ended / wall_time.MICRO,
                    started_s=started / wall_time.MICRO,
                    lost_s=self.closed_lost_s,
                    because=self.because,
                )
            )

    def add_more_steps(self, indices: range) -> None:
        """Those that follow in the log, of the generation of the one before: as `add_step` of each."""
        assert self.first_at is not None, "the one before told the time"
        moments = np.rint((self.log.moments(indices) - self.first_at) * wall_time.MICRO).astype(np.int64)
        moments = np.maximum.accumulate(np.maximum(moments, self.now))
        self.now = self.trained = self.sessions[-1].end = int(moments[-1])
        self.step = self.log.number(indices[-1])
        self.sessions[-1].more_steps(self.step, moments.tolist())
        if self.change is not None:  # they are from before it, as the one before was
            self.change.since_s, self.change.step = self.now / wall_time.MICRO, self.step

    def add_recovery(self, recovery: Recovery) -> None:
        """It comes right after its first step."""
        self._tell_the_time(recovery.at, "recovery")
        found = max(self.sessions[-1].begin, self.now - round(recovery.total_s * wall_time.MICRO))
        self.sessions[-1].found(found)
        change = self.closed or Change(since_s=found / wall_time.MICRO, step=recovery.resumed_after_step, before=None)
        self.incidents = [incident for incident in self.incidents if not _is_part_of(incident, recovery, change)]
        ended_s = self.now / wall_time.MICRO
        lost_s = 0.0 if change.before is None else self.closed_lost_s
        self.incidents.append(incidents.of_recovery(recovery, change, ended_s=ended_s, lost_s=lost_s))

    def lost(self, seconds: float) -> None:
        """Steps that took so long are to be computed again; less than nothing: they count after all."""
        self.lost_s += seconds

    def undo(self, steps: Iterable[int]) -> None:
        """Somebody took these of the log's steps back: they are not lost, and will not be computed again."""
        self.undone.extend(steps)
        self.lost_s = 0.0

    def told(self, counted: Iterable[int]) -> tuple[wall_time.Times, wall_time.Track, tuple[Incident, ...]]:
        """All of it, given which of the log's steps count."""
        when = sorted(self.incidents, key=lambda incident: incident.at_s)
        return *wall_time.partition(self.sessions, self.log, counted, self.undone), tuple(when)

    def _tell_the_time(self, at: float, kind: str) -> None:
        if self.first_at is None:
            self.first_at = at
        self.now = max(self.now, round((at - self.first_at) * wall_time.MICRO))
        if not self.sessions or kind == "started":
            self.sessions.append(wall_time.Session(begin=self.now, end=self.now, first=self._told_of()))
        if kind != "checkpoint_skipped":  # found by the next driver, before it says that it has started
            self.sessions[-1].end = self.now

    def _told_of(self) -> int:
        """How many of the log's steps."""
        return sum(len(session.moments) for session in self.sessions)

    def _started(self, entry: Entry) -> None:
        self.sessions[-1].max_steps = entry.get("max_steps")
        self.members, self.change, self.paused, self.step = None, None, False, int(entry["resumed_after_step"])
        self.trained, self.because = self.now, str(entry.get("because", ""))

    def _open(self) -> Change:
        if self.change is None:
            self.change = Change(since_s=self.trained / wall_time.MICRO, step=self.step, before=self.members)
        return self.change

    def _resumed(self) -> None:
        """What comes is the way back; the pause before it is no part of it."""
        self.sessions[-1].note("resume", self.now)
        self.paused, change = False, self._open()
        change.since_s = self.now / wall_time.MICRO

    def _generation(self, entry: Entry) -> None:
        self.sessions[-1].note("generation", self.now)
        change = self._open()
        change.decided_s = self.now / wall_time.MICRO
        if change.before is None and not change.after:  # nobody has trained yet
            change.since_s = change.decided_s
        change.after, change.why = frozenset(entry["members"]), str(entry.get("why", ""))
        change.source = str(entry["source"])
        self.members, self.step = change.after, int(entry["step"])

    def _because(self, why: str) -> None:
        """Why the change under way is made."""
        if self.change is not None:
            self.change.why = why

    def _formed(self, entry: Entry) -> None:
        self.sessions[-1].note("formed", self.now)
        change = self._open()
        change.formed_s, self.trained = self.now / wall_time.MICRO, self.now
        change.seconds = {name: float(value) for name, value in dict(entry.get("seconds") or {}).items()}
        change.bytes_received += int(entry.get("bytes_received", 0))
        change.bytes_read += int(entry.get("bytes_read", 0))

    def _concerns_members(self, entry: Entry) -> bool:
        worker = entry.get("worker")
        return worker is None or self.members is None or worker in self.members


def _is_part_of(incident: Incident, recovery: Recovery, change: Change) -> bool:
    """Whether the recovery says the same, and more."""
    if incident.at_s < change.since_s:
        return False
    return incident.kind == "reshard" or (incident.kind == "worker" and incident.worker in recovery.lost)
