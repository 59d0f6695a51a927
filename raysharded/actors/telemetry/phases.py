"""Phases of a worker in its generation, and their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysharded.actors.telemetry import position_record
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId


class Phases:
    """The current phase of one generation's training thread. Any thread may read `name` and `since`.

    Phases may be nested: the seconds of an inner phase do not count for the outer one.
    """

    def __init__(self, generation: GenerationId, is_aborted: Callable[[], bool]) -> None:
        self._generation, self._is_aborted = generation, is_aborted
        self.name = "build"
        """The newest phase; it stays until the next one begins, or an outer one resumes."""
        self.since = time.monotonic()
        """Start of the phase in monotonic seconds."""
        self._seconds: dict[str, float] = {}
        self._inner_s: list[float] = []
        """For each open phase, the outermost first: seconds that phases within it took."""
        self._is_apart = False
        self.note_place(0)
        position_record.note_phase(self.name)

    def note_place(self, step: int, microbatch: int | None = None) -> None:
        """Record, for the case of the process's death, the step in progress and the microbatch that is computed."""
        position_record.note_place(self._generation, step, -1 if microbatch is None else microbatch)

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds since the newest `restart`, in the order in which they first began."""
        return dict(self._seconds)

    def restart(self) -> None:
        """Count the seconds anew."""
        self._seconds = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context in which the worker is in the phase `name`. Raises CollectiveAborted if the generation was aborted.

        One thread at a time: autograd's may be in it while the training thread waits for backward.
        """
        if self._is_aborted():
            raise CollectiveAborted(f"generation {self._generation} was aborted before {name}")
        if self._is_apart:
            yield
            return
        outer = (self.name, self.since) if self._inner_s else None
        self.name, self.since = name, time.monotonic()
        position_record.note_phase(name)
        self._inner_s.append(0.0)
        self._seconds.setdefault(name, 0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - started
            self._seconds[name] += took_s - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += took_s
        if outer is not None:
            self.name, self.since = outer
            position_record.note_phase(self.name)

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """A context that counts as the phase `name`, including inner phases: it is not part of an ordinary step."""
        with self(name):
            self._is_apart = True
            try:
                yield
            finally:
                self._is_apart = False
