"""One worker's data, read in a separate process: started, called, observed, and restarted when it has died.

Only the dataset runs in that process and draws from its generators. It is a fresh interpreter, or a fork of the server
that this process itself was forked from: never of a process that has threads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Protocol

from raysharded.data.access.reader_main import SHOW_STACKS, Payload, serve
from raysharded.data.access.sample_reader import Reads
from raysharded.data.access.transport import Receiver, dump, offsets_of, shared_file
from raysharded.data.order import Int64s
from raysharded.errors import TaskError, text_of, user_traceback
from raysharded.overrides import WeightChanges

_log = logging.getLogger("raysharded.data")
_FRESH = (
    "import json, sys; handles, sys.path[:] = json.loads(sys.argv.pop()); "
    "from raysharded.data.access.reader_main import serve_here; serve_here(handles)"
)
_ATTEMPTS = 2
_STACKS_WITHIN_S, _NO_MORE_AFTER_S = 0.5, 0.05
_CHUNK = 1 << 16
_ENDS_WITHIN_S, _POLL_S = 2.0, 0.005


class _Child(Protocol):
    """A started process: `subprocess`'s, or `multiprocessing`'s."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...


class _Started:
    """One process, from its start to its end."""

    def __init__(self, payload: Payload, handle: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        alive, self._alive = multiprocessing.Pipe(duplex=False)
        self._stacks, stacks = multiprocessing.Pipe(duplex=False)
        self.receiver = Receiver(self.connection)
        self._answered_first = False
        self.child = _start((theirs, alive, stacks))
        for end in (theirs, alive, stacks):
            end.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: the first call will notice
            self.connection.send(payload)
            send_handle(self.connection, handle, self.child.pid)

    def ask(self, method: str, args: Sequence[Any]) -> Any:
        """The process's answer. Raises what it raised; EOFError or OSError if it has died."""
        if not self._answered_first:
            self._answer()
            self._answered_first = True
        self.connection.send((method, args, self.receiver.freed(), _default_dtype()))
        return self._answer()

    def _answer(self) -> Any:
        ok, value = self.receiver.receive()
        if not ok:
            raise value
        return value

    def stacks(self) -> str:
        """Stacks of its threads as `faulthandler` writes them; empty if it does not write them soon."""
        found = bytearray()
        with contextlib.suppress(OSError, EOFError):
            os.kill(self.child.pid, SHOW_STACKS)
            while self._stacks.poll(_NO_MORE_AFTER_S if found else _STACKS_WITHIN_S):
                read = os.read(self._stacks.fileno(), _CHUNK)
                if not read:
                    break
                found += read
        return found.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process unless it has ended, as its id may then belong to another."""
        with contextlib.suppress(ProcessLookupError):
            if self.child.poll() is None:
                self.child.kill()

    def end(self, *, within_s: float = 0.0) -> str:
        """Text on how it ended. It is killed if it does not end by itself within that time."""
        deadline = time.monotonic() + within_s
        while self.child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.kill()
        code = self.child.wait()
        for end in (self.connection, self._alive, self._stacks):
            end.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
        return f"ended with exit code {code}"


class DataProcess:
    """The process that reads some datasets, which may share objects. Thread-safe; calls run one at a time."""

    def __init__(self, datasets: Sequence[Any], *, refuses: bool, settings: Callable[[], object]) -> None:
        """Start the process without waiting for it.

        `refuses`: as in `Draws`. `settings`: called in the process once torch is loaded. Raises TaskError for datasets
        that cannot be pickled.
        """
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
        self._payload = Payload(len(data), tuple(offsets[1:]), sizes, refuses, pickle.dumps(settings))
        self._handle = shared_file("raysharded-data")
        _write(self._handle, self._payload, data, buffers)
        self.lock = threading.Lock()
        """Held by the thread that calls the process."""
        self._changing = threading.Lock()
        self._closed = False
        self._started: _Started | None = _Started(self._payload, self._handle)

    @property
    def pid(self) -> int | None:
        """Current id of the process. It changes when the process has died and was restarted."""
        started = self._started
        return None if started is None else started.child.pid

    def ask(self, method: str, *args: Any) -> Any:
        """The process's answer. If the process has died, it is restarted and the call is repeated once.

        Raises what the process raises; TaskError if it dies at that call again, RuntimeError after `close`.
        """
        with self.lock:
            ends, killed = list[str](), ""
            for _ in range(_ATTEMPTS):
                started = self._running()
                try:
                    answer = started.ask(method, args)
                except (EOFError, OSError):
                    if self._closed:
                        raise RuntimeError("this loader is closed") from None
                except Exception:
                    _report(killed)
                    raise
                else:
                    _report(killed)
                    return answer
                ends.append(started.end(within_s=_ENDS_WITHIN_S))
                killed = f"process {started.child.pid}, which read the data, {ends[-1]}"
                self._started = None
            raise TaskError(
                f"the process that reads the data {ends[0]}; it was started again, and {ends[1]}, both times at "
                f"{method}{args}. Look for os._exit, a crash of an extension, or too little memory for a second "
                "process (EngineConfig(prefetch=False) reads in the training thread)."
            )

    def _running(self) -> _Started:
        with self._changing:
            if self._closed:
                raise RuntimeError("this loader is closed")
            if self._started is None:
                self._started = _Started(self._payload, self._handle)
            return self._started

    def stacks(self) -> str:
        """Stacks of the process during a call, as `faulthandler` writes them. Waits half a second."""
        with self._changing:
            started = self._started
        return started.stacks() if started is not None and self.lock.locked() else ""

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


class ProcessReader:
    """A `Reader` that uses one of a process's datasets."""

    def __init__(self, process: DataProcess, which: int, name: str) -> None:
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

    def read_samples(self, ids: Sequence[int], where: str, number: int, weights: WeightChanges = ()) -> Reads:
        more = (weights,) if weights else ()
        reads: Reads = self._process.ask("read_samples", self._which, ids, where, number, *more)
        return reads

    def check(self, ids: Sequence[int]) -> None:
        self._process.ask("check", self._which, ids)

    def validate(self) -> None:
        self._process.ask("validate", self._which)

    def num_read_ahead(self) -> int:
        return 0

    def read_ahead(self, ids: Int64s, *, anew: bool, weights: WeightChanges) -> None:
        """Nothing: the process reads one sample after the other."""

    def close(self) -> None:
        self._process.close()


def _default_dtype() -> str:
    """torch's default dtype here, which `build_model` may have set; empty where torch is not loaded."""
    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")


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


def _start(ends: tuple[Connection, Connection, Connection]) -> _Child:
    if forkserver.get_inherited_fds() is not None:
        with contextlib.suppress(OSError, EOFError, ValueError):  # that server has exited
            return _forked(ends)
    handles = [end.fileno() for end in ends]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
    return subprocess.Popen(
        [sys.executable, *flags, "-c", _FRESH, json.dumps([handles, sys.path])],
        pass_fds=handles,
        stdin=subprocess.DEVNULL,
    )


def _forked(ends: tuple[Connection, Connection, Connection]) -> _Child:
    """Fork the process from the server that this process was forked from.

    CPython passes the server's address on, but would still start another server. `Process.start` would reject the call,
    as workers are daemons. This process ends with its worker without that, and may have children.
    """
    from multiprocessing.popen_forkserver import Popen

    process = multiprocessing.get_context("forkserver").Process(target=serve, args=ends, daemon=False)
    with _the_server_is_running():
        started: _Child = Popen(process)
    return started


@contextlib.contextmanager
def _the_server_is_running() -> Any:
    server = vars(forkserver)["_forkserver"]
    with _starting:
        server.ensure_running = functools.partial(lambda: None)
        try:
            yield
        finally:
            del server.ensure_running


_starting = threading.Lock()
