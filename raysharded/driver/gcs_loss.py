"""The loss of the cluster's GCS under a driver that lives: what is reported, what is written, and when the run ends.

Ray's processes end themselves when the GCS has been away for a limit of Ray's own, 60 s unless it is set. Workers and
the driver reach each other without it, so training continues meanwhile; a GCS that is back in time costs nothing. The
driver has a checkpoint written a few seconds after the loss, and shortly before the limit it ends the run with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raysharded.clock import Clock
from raysharded.display.quantities import duration
from raysharded.driver.state.state import Phase, State
from raysharded.errors import ClusterError
from raysharded.journal.entry_text import incident_text
from raysharded.protocol.worker_launcher import GCS_LIMIT_SETTING, GcsHealth

DECIDE_AFTER_S = 5.0
"""Time from the notice to the first checkpoint: a GCS that is restarted at once is back sooner."""
_NOTICE_S = 10.0
"""Longest time until the notice."""
_END_BEFORE_S = 5.0
"""Time before Ray's limit at which the run must be over: processes notice the loss at different moments."""
_LEAST_TO_WRITE_S = 10.0
_SLOWER = 2.0
"""A checkpoint may take this many times as long as the slowest so far."""

Say = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsTimes:
    """The moments of one loss, in seconds since the GCS last answered."""

    limit_s: float
    """Time after which Ray ends its processes."""
    write_s: float
    """Longest time that a checkpoint has taken."""
    lease_s: float
    """The lease of workers that outlive the driver, with which their own checkpoint begins; 0: they do not."""

    @property
    def end_s(self) -> float:
        """Time at which the run stops with its last checkpoint; not before the first was requested."""
        to_write_s = max(_LEAST_TO_WRITE_S, _SLOWER * self.write_s)
        return max(_NOTICE_S + DECIDE_AFTER_S, self.limit_s - _END_BEFORE_S - to_write_s)

    @property
    def left_s(self) -> float:
        """Time that the last checkpoint has."""
        return max(1.0, self.limit_s - _END_BEFORE_S - self.end_s)

    @property
    def needed_s(self) -> float:
        """The shortest limit in which a checkpoint is written: by the driver, and by its workers if it is lost too.

        Workers wait for the lease, and then watch for as long whether another process leads the run.
        """
        return max(_NOTICE_S + DECIDE_AFTER_S, 2 * self.lease_s) + self.write_s + _END_BEFORE_S


class Saves(Protocol):
    """The requests to the driver that a loss needs."""

    def checkpoint(self) -> object:
        """Request a checkpoint of the next step."""
        ...

    def stop(self, *, checkpoint_within_s: float | None) -> None:
        """Request the end of the run after one more checkpoint."""
        ...


class GcsLoss:
    """Watches, in each round of the driver's loop, whether the GCS answers, and acts if it does not."""

    def __init__(
        self,
        health: Callable[[], GcsHealth | None],
        clock: Clock,
        record: Say,
        run: Saves,
        *,
        lease_s: float,
    ) -> None:
        """`health`: of the GCS now; `record` writes a journal entry; `lease_s`: the run's."""
        self._health, self._clock, self._record, self._run, self._lease_s = health, clock, record, run, lease_s
        self._write_s, self._ended_after_s = 0.0, 0.0
        self._noticed_at: float | None = None
        self._lost_at = 0.0
        self._saved = self._warned = False

    def error(self, state: State) -> ClusterError | None:
        """The error of a run that ended because of the loss; None if that was not the cause, or if it has finished."""
        if not self._ended_after_s or state.result_fingerprint is not None:
            return None
        health = self._health()
        limit = duration(health.limit_s) if health is not None else "a while"
        return ClusterError(
            f"the GCS of the Ray cluster has not answered for {duration(self._ended_after_s)}, and Ray ends every "
            f"process of the cluster {limit} after its loss: the run ended before. Start it again on another cluster, "
            f"or on this one when it is back: it resumes from its newest checkpoint. {GCS_LIMIT_SETTING}, set for all "
            "of Ray's processes, gives more time, in which a GCS with its tables in Redis can be restarted."
        )

    def warning(self, state: State) -> str:
        """A sentence about a GCS that does not answer now; empty if it does. Any thread."""
        return "" if self._noticed_at is None else incident_text("gcs_lost", self._lost(state, self._health())) or ""

    def begin(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Learn from the entries of earlier drivers, and report at the start if a loss leaves too little time."""
        for entry in entries:
            if entry["kind"] == "checkpoint":
                self._write_s = max(self._write_s, float(entry.get("seconds", 0.0)))
        self._warn(0)

    def on_entry(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Learn from an entry how long checkpoints take, and report once if that is longer than a loss leaves."""
        if kind == "checkpoint":
            self._write_s = max(self._write_s, float(fields.get("seconds", 0.0)))
            self._warn(int(fields["step"]))

    def _warn(self, step: int) -> None:
        health = self._health()
        if health is None or self._warned:
            return
        times = self._times(health)
        if times.needed_s > times.limit_s:
            self._warned = True
            about = {"limit_s": times.limit_s, "needed_s": times.needed_s, "write_s": times.write_s}
            self._record("gcs_limit", {"step": step, **about, "setting": GCS_LIMIT_SETTING})

    def _times(self, health: GcsHealth) -> GcsTimes:
        lease_s = self._lease_s if health.leased else 0.0
        return GcsTimes(limit_s=health.limit_s, write_s=self._write_s, lease_s=lease_s)

    def _lost(self, state: State, health: GcsHealth | None) -> dict[str, Any]:
        """Fields of the entry `gcs_lost`."""
        silent_s, limit_s = (health.silent_s, health.limit_s) if health is not None else (0.0, 0.0)
        return {"step": state.step, "for_s": silent_s, "left_s": max(0.0, limit_s - silent_s)}

    def look(self, state: State) -> None:
        """Act on what is known now."""
        health = self._health()
        if health is None or self._ended_after_s or state.phase is Phase.OVER:
            return
        now = self._clock.monotonic()
        if health.silent_s == 0.0:
            if self._noticed_at is not None:
                self._record("gcs_back", {"step": state.step, "after_s": now - self._lost_at})
            self._noticed_at, self._saved = None, False
            return
        times = self._times(health)
        if self._noticed_at is None:
            self._noticed_at, self._lost_at = now, now - health.silent_s
            self._record("gcs_lost", self._lost(state, health))
        if not self._saved and now - self._noticed_at >= DECIDE_AFTER_S:
            self._saved = True
            if state.step > (state.checkpoint.step if state.checkpoint else 0):
                self._run.checkpoint()
        own_s = times.left_s if state.stop_requested else 0.0
        if health.silent_s >= times.end_s + own_s:
            self._ended_after_s = health.silent_s
            self._run.stop(checkpoint_within_s=times.left_s)
