"""The memory of a run's driver and workers over time, and the peak memory of a program."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from raysharded.run import Status

Samples = list[tuple[float, float]]
"""(seconds, resident megabytes)"""
_PERIOD_S = 2.0
_WARM_AFTER_S = 20.0


class Sampler:
    """Measures this process and a run's workers every few seconds, while its block runs."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="memory")
        self.driver: Samples = []
        self.workers: dict[int, Samples] = {}
        self._open_files: Samples = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def file_growth(self) -> float:
        """Files a minute that this process opens and does not close."""
        return slope(self._open_files)

    def worker_growth(self) -> float:
        """Megabytes a minute of the median worker that has been there for a while; it may be another one at each time.
        A new worker grows for a minute or two; only larger workers at later times would be a leak."""
        at_once: dict[float, list[float]] = {}
        for samples in self.workers.values():
            for at, mb in samples:
                if at - samples[0][0] >= _WARM_AFTER_S:
                    at_once.setdefault(at, []).append(mb)
        return slope([(at, statistics.median(found)) for at, found in sorted(at_once.items())])

    def _look(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            now = time.monotonic()
            self.driver.append((now, resident_mb(os.getpid())))
            self._open_files.append((now, len(os.listdir("/proc/self/fd"))))
            for pid in self._status().pids.values():
                if mb := resident_mb(pid):
                    self.workers.setdefault(pid, []).append((now, mb))


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Megabytes a minute, by least squares over the second half; 0 for too few samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return 0.0
    return statistics.linear_regression([at for at, _ in half], [mb for _, mb in half]).slope * 60


def resident_mb(pid: int) -> float:
    """Resident memory of a process of this machine; 0 if it has exited."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_bytes() -> int:
    """The most that this program had resident since it began, or since `reset_peak`; `getrusage` would include the
    process that started it."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def reset_peak() -> int:
    """Reset the peak; the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()
