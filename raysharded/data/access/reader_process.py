"""One worker's data, read in a separate process: started, called, observed, and restarted when it has died.

Only the dataset runs in that process and draws from its generators.
"""

from __future__ import annotations

import copy
import logging
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raysharded.data.access.collation import Wish
from raysharded.data.access.read_errors import innermost_line
from raysharded.data.access.reader import Reads
from raysharded.data.access.reader_main import Payload
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.access.started_process import CannotLeave, StartedProcess
from raysharded.data.access.transport import dump, offsets_of, shared_file
from raysharded.data.order import Int64s
from raysharded.errors import TaskError, text_of, user_traceback
from raysharded.overrides import WeightChanges

_log = logging.getLogger("raysharded.data")
_ATTEMPTS = 2
_ENDS_WITHIN_S = 2.0
_LIMITED = ("read_samples", "collate")
_LONGEST_FACTOR = 5.0
"""A call that takes this many times the longest one so far hangs, and is not slow. Calls do not count that passed over
items on the way to a sample."""


@dataclass(slots=True)
class _Longest:
    """The longest call so far of the processes that read the same datasets. One of them may not have had any."""

    seconds: float = 0.0


class DataProcess:
    """The process that reads some datasets, which may share objects. Thread-safe; calls run one at a time."""

    def __init__(
        self,
        datasets: Sequence[Any],
        *,
        refuses: bool,
        settings: Callable[[], object],
        collate: bytes = b"",
        patience_s: float | None = None,
    ) -> None:
        """Start the process without waiting for it.

        `refuses`: as in `Draws`. `settings`: called in the process once torch is loaded. `collate`: the pickled
        function for batches. `patience_s`: a call may take as long, or 5 times as long as the longest so far, or as
        long as the start of the process; None: for ever. Raises TaskError for datasets that cannot be pickled.
        """
        self._names = [type(one).__name__ for one in datasets]
        self._patience_s, self._longest = patience_s, _Longest()
        try:
            data, buffers = dump(list(datasets))
        except Exception as error:  # the boundary to the user's classes
            raise TaskError(
                f"the data could not be pickled for the process that reads it: {type(error).__name__}: "
                f"{text_of(error)}. Give a dataset that pickles, or read it in the training thread with "
                "EngineConfig(prefetch=False).",
                user_traceback(error),
            ) from error
        sizes = tuple(buffer.nbytes for buffer in buffers)
        offsets, _ = offsets_of([len(data), *sizes])
        self._payload = Payload(len(data), tuple(offsets[1:]), sizes, refuses, pickle.dumps(settings), collate)
        self._handle = shared_file("raysharded-data")
        _write(self._handle, self._payload, data, buffers)
        self.lock = threading.Lock()
        """Held by the thread that calls the process."""
        self._changing = threading.Lock()
        self._closed = False
        self._asked: tuple[str, Sequence[Any]] | None = None
        """The newest call."""
        self._started: StartedProcess | None = StartedProcess(self._payload, self._handle)

    @property
    def pid(self) -> int | None:
        """Current id of the process. It changes when the process has died and was restarted."""
        started = self._started
        return None if started is None else started.child.pid

    def another(self) -> DataProcess:
        """A further process that reads the same datasets, which exist once in shared memory."""
        found = copy.copy(self)
        found._handle = os.dup(self._handle)
        found.lock, found._changing = threading.Lock(), threading.Lock()
        found._started = StartedProcess(self._payload, found._handle)
        return found

    def collate_by(self, collate: bytes) -> None:
        """Make batches by this pickled function from now on, also after a restart."""
        self._payload = replace(self._payload, collate=collate)
        self.ask("collate_by", collate)

    def ask(self, method: str, *args: Any) -> Any:
        """The process's answer. If the process has died, or hangs, it is restarted and the call is repeated once.

        The repeated call may take as long as it takes. Raises what the process raises; TaskError if it dies at that
        call again, RuntimeError after `close`.
        """
        with self.lock:
            ends, killed, self._asked = list[str](), "", (method, args)
            for attempt in range(_ATTEMPTS):
                started, began = self._running(), time.monotonic()
                try:
                    started.wait_until_ready()
                    began, passed = time.monotonic(), started.passed()
                    answer = started.ask(method, args, None if attempt else self._limit_s(started, method))
                except TimeoutError:
                    ends.append(self._end_hanging(started, method, args, time.monotonic() - began))
                    continue
                except (EOFError, OSError):
                    if self._closed:
                        raise RuntimeError("this loader is closed") from None
                except Exception:
                    _report(killed)
                    raise
                else:
                    _report(killed)
                    if method in _LIMITED and (passed == started.passed() or not self._longest.seconds):
                        self._longest.seconds = max(self._longest.seconds, time.monotonic() - began)
                    return answer
                ends.append(started.end(within_s=_ENDS_WITHIN_S))
                killed = (
                    f"process {started.child.pid}, which read the data, {ends[-1]}{self._at(started, method, args)}"
                )
                self._started = None
            raise TaskError(
                f"the process that reads the data {ends[0]}; it was started again, and {ends[1]}, both times at "
                f"{_shown(method, args)}{self._at(started, method, args)}. Look for os._exit, a crash of an extension, "
                "or too little memory for a second process (EngineConfig(prefetch=False) reads in the training thread)."
            )

    def _limit_s(self, started: StartedProcess, method: str) -> float | None:
        longest_s = self._longest.seconds
        if self._patience_s is None or method not in _LIMITED or not longest_s:
            return None
        return max(self._patience_s, _LONGEST_FACTOR * longest_s, started.start_s or 0.0)

    def _end_hanging(self, started: StartedProcess, method: str, args: Sequence[Any], seconds: float) -> str:
        """Kill a process that hangs, and report where it hung; returns a text on that."""
        line = innermost_line(started.stacks())
        pid, at = started.child.pid, self._at(started, method, args)
        started.end()
        self._started = None
        if self._closed:
            raise RuntimeError("this loader is closed")
        text = f"did not answer for {seconds:.1f} s{at}{f', in {line}' if line else ''}, and was killed"
        _log.warning("process %d, which read the data, %s; another one reads that again", pid, text)
        return text

    def _at(self, started: StartedProcess, method: str, args: Sequence[Any]) -> str:
        """The sample that is being read, as the end of a sentence."""
        return f" at {self._names[args[0]]}[{started.sample()}]" if method == "read_samples" else ""

    def _running(self) -> StartedProcess:
        with self._changing:
            if self._closed:
                raise RuntimeError("this loader is closed")
            if self._started is None:
                self._started = StartedProcess(self._payload, self._handle)
            return self._started

    def stacks(self) -> str:
        """Stacks of the process during a call, as `faulthandler` writes them, after a line that names the sample.

        Waits half a second. Empty if there is no call.
        """
        with self._changing:
            started = self._started
        asked = self._asked
        if started is None or not self.lock.locked() or asked is None:
            return ""
        return f"{self._at(started, *asked)}\n{started.stacks()}"

    def close(self) -> None:
        """Kill the process, and wake threads that wait for an answer."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
            started = self._started
            os.close(self._handle)
        if started is not None:
            started.kill()
            with self.lock:  # the calling thread has noticed that
                started.end()


class DataProcesses:
    """Several processes that read the same datasets. A call goes to one with the fewest calls. Thread-safe."""

    def __init__(self, first: DataProcess, number: int) -> None:
        """Start `number - 1` processes beside the first one."""
        self._processes = [first, *(first.another() for _ in range(number - 1))]
        self._calls = [0] * number
        self._choosing = threading.Lock()

    @property
    def pids(self) -> list[int | None]:
        """Current ids of the processes."""
        return [process.pid for process in self._processes]

    def collate_by(self, collate: bytes) -> None:
        """As `DataProcess.collate_by`."""
        for process in self._processes:
            process.collate_by(collate)

    def ask(self, method: str, *args: Any) -> Any:
        """As `DataProcess.ask`."""
        with self._choosing:
            chosen = self._calls.index(min(self._calls))
            self._calls[chosen] += 1
        try:
            return self._processes[chosen].ask(method, *args)
        finally:
            with self._choosing:
                self._calls[chosen] -= 1

    def stacks(self) -> str:
        """As `DataProcess.stacks`, of the first process that has a call."""
        return next((text for text in (process.stacks() for process in self._processes) if text), "")

    def close(self) -> None:
        """As `DataProcess.close`."""
        for process in self._processes:
            process.close()


class Asked(Protocol):
    """One or several processes that read the same datasets."""

    def ask(self, method: str, *args: Any) -> Any: ...
    def close(self) -> None: ...


class ProcessReader:
    """A `Reader` that uses one of a process's datasets."""

    def __init__(self, process: Asked, which: int, name: str) -> None:
        self.name = name
        self._process, self._which = process, which

    def num_samples(self) -> int:
        return int(self._process.ask("num_samples", self._which))

    def samples_per_block(self) -> int:
        return int(self._process.ask("samples_per_block", self._which))

    def order_text(self) -> str:
        return str(self._process.ask("order_text", self._which))

    def contents(self) -> str:
        return str(self._process.ask("contents", self._which))

    def require_position(self, position: int, weights: WeightChanges) -> None:
        self._process.ask("require_position", self._which, position, weights)

    def read_samples(
        self, ids: Sequence[int], where: str, number: int, weights: WeightChanges = (), wish: Wish | None = None
    ) -> Reads:
        more = () if not weights and wish is None else (weights,) if wish is None else (weights, wish)
        reads: Reads = self._process.ask("read_samples", self._which, ids, where, number, *more)
        return reads

    def check(self, ids: Sequence[int], below: int = 0) -> None:
        self._process.ask("check", self._which, ids, below)

    def validate(self) -> None:
        self._process.ask("validate", self._which)

    def num_read_ahead(self) -> int:
        return 0

    def read_ahead(self, ids: Int64s, *, anew: bool, weights: WeightChanges) -> None:
        """Nothing: the process reads one sample after the other."""

    def close(self) -> None:
        self._process.close()


class CollatingReader:
    """A `Reader` in this process, whose samples are collated in others."""

    def __init__(self, reader: DatasetReader, processes: DataProcesses) -> None:
        self.name, self._reader, self._processes = reader.name, reader, processes
        self.lock = reader.lock

    def num_samples(self) -> int:
        return self._reader.num_samples()

    def is_read_anywhere(self) -> bool:
        """As `DatasetReader.is_read_anywhere`."""
        return self._reader.is_read_anywhere()

    def samples_per_block(self) -> int:
        return self._reader.samples_per_block()

    def order_text(self) -> str:
        return self._reader.order_text()

    def contents(self) -> str:
        return self._reader.contents()

    def require_position(self, position: int, weights: WeightChanges) -> None:
        self._reader.require_position(position, weights)

    def read_samples(
        self, ids: Sequence[int], where: str, number: int, weights: WeightChanges = (), wish: Wish | None = None
    ) -> Reads:
        reads = self._reader.read_samples(ids, where, number, weights)
        if wish is None:
            return reads
        try:
            collated: Reads = self._processes.ask("collate", reads.samples, reads.ids, wish)
        except CannotLeave:  # the training thread makes the batches of such samples
            return reads
        stay = wish.keeps_samples or collated.batch is None
        return replace(collated, samples=reads.samples if stay else [])

    def check(self, ids: Sequence[int], below: int = 0) -> None:
        self._reader.check(ids, below)

    def validate(self) -> None:
        self._reader.validate()

    def num_read_ahead(self) -> int:
        return self._reader.num_read_ahead()

    def read_ahead(self, ids: Int64s, *, anew: bool, weights: WeightChanges) -> None:
        self._reader.read_ahead(ids, anew=anew, weights=weights)

    def close(self) -> None:
        self._reader.close()
        self._processes.close()


def _shown(method: str, args: Sequence[Any]) -> str:
    return f"{method}{args}" if method != "collate" else f"collate of samples {args[1]}"


def _write(handle: int, payload: Payload, data: bytes, buffers: Sequence[memoryview]) -> None:
    os.ftruncate(handle, max(1, payload.length))
    with mmap.mmap(handle, payload.length) as file:
        file[: len(data)] = data
        for at, buffer in zip(payload.offsets, buffers, strict=True):
            file[at : at + buffer.nbytes] = buffer


def _report(killed: str) -> None:
    """Report that a process was replaced, once the next one answers: what ends the worker often ends its process first.

    `killed`: a sentence about it; empty if none was.
    """
    if killed:
        _log.warning("%s", killed)
