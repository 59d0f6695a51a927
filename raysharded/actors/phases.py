"""What a worker is doing in its generation, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId


class Phases:
    """The phase that one generation's training thread is in. Any thread may read `name` and `since`."""

    def __init__(self, generation: GenerationId, is_aborted: Callable[[], bool]) -> None:
        self._generation, self._is_aborted = generation, is_aborted
        self.name = "build"
        """The newest phase; it stays until the next one begins."""
        self.since = time.monotonic()
        """When it began."""
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds since the newest `restart`."""
        return dict(self._seconds)

    def restart(self) -> None:
        """Count the seconds anew."""
        self._seconds = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Within it, the worker is in the phase `name`. Raises CollectiveAborted if the generation was aborted."""
        if self._is_aborted():
            raise CollectiveAborted(f"generation {self._generation} was aborted before {name}")
        self.name, self.since = name, time.monotonic()
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
