"""A run without a driver that takes requests: read from its storage alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.errors import CheckpointError, ClusterError, RunFailed, StorageError
from raysharded.run.handle import Ask, Run
from raysharded.run.outcome import folder_of, newest_of, of_checkpoint, with_best
from raysharded.run.results import Entry, Result, RunStopped, Status, start_in_words

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint
    from raysharded.report.overview import RunOverview
    from raysharded.report.recent import RecentReader

_LOOK_UP_S = 1.0
_LINES = 1 << 20
"""More lines than a segment of the journal has: entries are numbered by (segment, line)."""
_AGAIN = "Start it again with its trainer to resume it."
_AT_ONCE = 2_000
ENDED = ("finished", "stopped", "failed")
"""Last entries of a journal whose driver came to its end."""


class StoredRun(Run):
    """A run as its storage shows it: it is over, or its driver is in a process that takes no requests."""

    def __init__(self, name: str, url: str, why_not_asked: str = "") -> None:
        """`why_not_asked`: reason why its driver takes no requests, if it has one on this cluster."""
        from raysharded.checkpoint import open_storage

        self._storage = open_storage(url)
        self.name, self.url, self._why_not_asked = name, self._storage.url, why_not_asked
        self._recent: RecentReader | None = None
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[type[StoredRun], tuple[str, str, str]]:
        return StoredRun, (self.name, self.url, self._why_not_asked)

    def status(self) -> Status:
        from raysharded.report.recent import RecentReader
        from raysharded.run.status import stored_status

        with self._reading:
            self._recent = self._recent or RecentReader(self._storage)
            return replace(stored_status(self._look(), self._recent.read()), name=self.name)

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._after(after)
            left_s = deadline - time.monotonic()
            if found or left_s <= 0:
                return found
            time.sleep(min(_LOOK_UP_S, left_s))

    def is_over(self) -> bool:
        from raysharded.report.live.follow import OVER

        return self._look().state in OVER

    def wait(self, timeout_s: float | None = None) -> Result:
        return wait_for(self, lambda: self.outcome() if self.is_over() else None, timeout_s)

    def outcome(self) -> Result:
        """The result of a finished run. Raises RunStopped for a stopped one; for any other RunFailed, with the final
        entry's error."""
        found = self._look()
        if found.state == "finished":
            newest = newest_of(self._storage)
            if newest is not None and newest.step >= (found.max_steps or 0):
                return self._with_best(of_checkpoint(newest, self._storage, self.name, self.url))
            return self._with_best(self._without_last_checkpoint(found, newest))
        what = {"failed": "failed", "stopped": "was stopped"}.get(found.state, "ended without a final journal entry")
        what = "failed to start" if found.before_start is not None else what
        why = f": {found.error}" if found.error else ""
        start = start_in_words(found.checkpoint_step)
        message = f"Run {self.name!r} {what} at step {found.step or 0}{why}"
        stop = "" if message.endswith((".", ".)")) else "."
        message = f"{message}{stop} Started again, it resumes {start}."
        if found.state != "stopped":
            raise RunFailed(message)
        reached = Result(name=self.name, url=self.url, steps=0, fingerprint="", checkpoint="")
        with suppress(CheckpointError, StorageError):
            newest = newest_of(self._storage)
            reached = reached if newest is None else of_checkpoint(newest, self._storage, self.name, self.url)
            reached = self._with_best(reached)
        raise RunStopped(message, reached)

    def _with_best(self, result: Result) -> Result:
        from raysharded.checkpoint import signing_key_from_environment

        return with_best(result, self._storage, key=signing_key_from_environment())

    def _without_last_checkpoint(self, found: RunOverview, newest: Checkpoint | None) -> Result:
        steps = found.step or 0
        words = [fields for _, kind, fields in self._newest() if kind == "finished"]
        return Result(
            name=self.name,
            url=self.url,
            steps=steps,
            fingerprint=str(words[-1].get("fingerprint") or "") if words else "",
            checkpoint=folder_of(self._storage, self.url, newest.prefix, newest.storage.url) if newest else "",
        )

    def _ask(self, what: Ask, **arguments: Any) -> Any:
        found = self._look()
        if self._why_not_asked and found.state not in ENDED:
            raise ClusterError(f"Run.{what}: {self._why_not_asked}.")
        from raysharded.report.live.follow import OVER

        if found.state in OVER:
            if what in ("stop", "remark"):
                return None
            raise RunFailed(
                f"Run.{what}: run {self.name!r} is over ({found.state}, step {found.step or 0}). "
                f"{'A larger max_steps continues it.' if found.state == 'finished' else _AGAIN}"
            )
        raise ClusterError(
            f"Run.{what}: run {self.name!r} is {found.state} and has no driver on this cluster that takes requests"
            f"{f' (it is held by {found.driver})' if found.driver else ''}. Use its handle in the process of fit(). "
            "For requests from elsewhere, stop it, and start it on a Ray cluster that outlives its script: `ray start "
            "--head`, then `raysharded run FILE --detach` or ElasticTrainer.start()."
        )

    def _look(self) -> RunOverview:
        from raysharded.report.overview import look
        from raysharded.run.status import with_restart

        (found,) = look([self._storage])
        return with_restart(found)

    def _after(self, number: int) -> list[Entry]:
        found: list[Entry] = []
        for segment in self._segments():
            if segment >= number // _LINES and len(found) < _AT_ONCE:
                found += [entry for entry in self._read(segment) if entry[0] > number]
        return found[:_AT_ONCE]

    def _newest(self) -> list[Entry]:
        segments = self._segments()
        return self._read(segments[-1]) if segments else []

    def _segments(self) -> list[int]:
        from raysharded.journal.log import segment_numbers

        return segment_numbers(self._storage)

    def _read(self, segment: int) -> list[Entry]:
        from raysharded.journal.log import read_segment, segment_key
        from raysharded.report.recent import entries_of

        entries = entries_of(read_segment(self._storage, segment_key(segment)))
        return [
            (segment * _LINES + line, entry["kind"], {name: value for name, value in entry.items() if name != "kind"})
            for line, entry in enumerate(entries, 1)
        ]


def wait_for(run: Run, outcome: Callable[[], Result | None], timeout_s: float | None) -> Result:
    """The first result of `outcome` that is not None; it is called every second. Raises TimeoutError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        result = outcome()
        if result is not None:
            return result
        left_s = _LOOK_UP_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"run {run.name!r} is still {run.status().phase} after {timeout_s} s")
        time.sleep(min(_LOOK_UP_S, left_s))
