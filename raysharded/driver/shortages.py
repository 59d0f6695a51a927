"""Reports of shortages for as long as they last: of workers, and of storage that takes the journal's entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from raysharded.clock import Clock
from raysharded.display.plain_text import brief
from raysharded.driver.generation import link_tests
from raysharded.driver.membership import reachable
from raysharded.driver.state.state import Phase, State
from raysharded.ids import GenerationId
from raysharded.journal.entry_text import below_maximum_text, incident_text
from raysharded.journal.writer import Failure, Recorder
from raysharded.protocol.worker_launcher import Launcher

Say = Callable[[str, dict[str, Any]], None]
"""Called with the kind and the fields of an entry."""
_LOOK_FOR_WORKERS_S = 10.0
"""Interval at which a run that waits for workers looks for what is missing, and reports it. For a run that trains with
fewer workers than it may have: also the age of its generation, and of a request for one that lacks something."""
_STORAGE_FAILS_S = 30.0
"""Interval of the reports that storage takes no entries."""


class Shortages:
    """Looks for shortages in each round of the driver's loop."""

    def __init__(
        self, launcher: Launcher, recorder: Recorder, clock: Clock, tell: Say, record: Say, *, storage_patience_s: float
    ) -> None:
        """`tell` reports an entry to those who follow the run; `record` writes it into the journal, too.

        `storage_patience_s`: time for which storage may take no entries before the run ends; a pause does not count.
        """
        self._launcher, self._recorder, self._clock, self._tell, self._record = launcher, recorder, clock, tell, record
        self._patience_s = storage_patience_s
        self._looked_at = 0.0
        self._below: tuple[tuple[GenerationId, int], dict[str, Any]] | None = None
        """The newest generation that could have more workers and lacks what they need, with the number that it could
        have, and the fields of its entry."""
        self._range, self._range_since = (GenerationId(0), 0), 0.0
        """The newest generation, the number of workers that it could have, and the first round with both."""
        self._told_at = -math.inf
        self._failing_since: float | None = None
        """Since when storage has been failing, once that was reported."""
        self._paused_at = -math.inf
        """The last round in which the run was paused."""

    def report(self, state: State) -> None:
        """Report what is missing. Raises StorageError if storage has failed for too long."""
        now = self._clock.monotonic()
        self._report_workers(state, now)
        self._report_below_maximum(state, now)
        self._report_storage(state, now)

    def below_maximum(self, state: State) -> str:
        """A sentence on the workers that would be taken in addition; empty: none, or unknown. Any thread."""
        below = self._below
        if below is None or below[0] != _range(state) or not _num_more(state):
            return ""
        return below_maximum_text(below[1])

    def storage_failing(self, state: State) -> str:
        """A sentence about storage that takes no entries now; empty if it takes them. Any thread."""
        failure, now = self._recorder.failure, self._clock.monotonic()
        return "" if failure is None else incident_text("storage_failing", self._failing(failure, state, now)) or ""

    def _report_workers(self, state: State, now: float) -> None:
        num_usable = len(reachable.usable(state)) if state.phase is Phase.GATHERING else 0
        waiting = state.phase is Phase.GATHERING and num_usable < state.limits.min_workers
        if not waiting or now - max(state.since, self._looked_at) < _LOOK_FOR_WORKERS_S:
            return
        self._looked_at = now
        found = (link_tests.text(state), self._launcher.describe_shortage(), _failed_starts(state))
        missing = " ".join(filter(None, found))
        if missing:  # workers that take long to start lack nothing
            self._record("waiting", {"ready": num_usable, "needed": state.limits.min_workers, "missing": missing})

    def _report_below_maximum(self, state: State, now: float) -> None:
        if self._below is not None and self._below[0] == _range(state):
            return
        if self._range != _range(state):
            self._range, self._range_since = _range(state), now
        requested_at = min(state.starting.values(), default=now)
        since = max(requested_at, self._range_since, self._looked_at)
        if not _num_more(state) or now - since < _LOOK_FOR_WORKERS_S:
            return
        self._looked_at = now
        wanted = state.limits.max_workers
        if missing := self._launcher.describe_shortage(wanted):
            fields = {"step": state.step, "workers": len(state.members), "wanted": wanted, "missing": missing}
            self._below = _range(state), fields
            self._record("below_maximum", fields)

    def _report_storage(self, state: State, now: float) -> None:
        if state.phase is Phase.PAUSED:
            self._paused_at = now
        failure = self._recorder.failure
        if failure is None:
            if self._failing_since is not None:
                self._record("storage_back", {"after_s": now - self._failing_since})
            self._failing_since, self._told_at = None, -math.inf
            return
        if self._counted_s(failure, now) > self._patience_s:
            raise failure.error
        if now - self._told_at >= _STORAGE_FAILS_S:
            self._told_at, self._failing_since = now, failure.since
            self._tell("storage_failing", self._failing(failure, state, now))

    def _counted_s(self, failure: Failure, now: float) -> float:
        return now - max(failure.since, self._paused_at)

    def _failing(self, failure: Failure, state: State, now: float) -> dict[str, Any]:
        """Fields of the entry `storage_failing`."""
        left_s = None if state.phase is Phase.PAUSED else max(0.0, self._patience_s - self._counted_s(failure, now))
        fields = {"step": state.step, "for_s": now - failure.since, "left_s": left_s, "error": str(failure.error)}
        dropped = self._recorder.num_dropped
        return {**fields, "dropped": dropped} if dropped else fields


def _range(state: State) -> tuple[GenerationId, int]:
    """The generation, and the number of workers that it could have."""
    return state.generation, state.limits.max_workers


def _num_more(state: State) -> int:
    """The number of workers that a run would take while it trains."""
    return max(0, state.limits.max_workers - len(state.members)) if state.phase is Phase.TRAINING else 0


def _failed_starts(state: State) -> str:
    """A sentence about workers that did not start, of which the driver starts others; empty without any."""
    failures, first = state.start_failures, brief(state.first_start_failure)
    if failures < 2:
        return f"A worker did not start: {first}." if failures else ""
    return f"{failures} workers in a row did not start; the first: {first}."
