"""One process that reads a worker's data, from its start to its end.

It is a fresh interpreter, or a fork of the server that this process itself was forked from: never of a process that has
threads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Protocol

from raysharded.data.access.reader_main import PLACE, SHOW_STACKS, Payload, serve
from raysharded.data.access.transport import Receiver, dump, send_request, shared_file
from raysharded.errors import text_of

_FRESH = (
    "import json, sys; handles, sys.path[:] = json.loads(sys.argv.pop()); "
    "from raysharded.data.access.reader_main import serve_here; serve_here(handles)"
)
_STACKS_WITHIN_S, _NO_MORE_AFTER_S = 0.5, 0.05
_CHUNK = 1 << 16
_POLL_S = 0.005


class CannotLeave(Exception):
    """Arguments of a call that cannot be pickled, and so cannot leave this process. Nothing was sent."""


class _Child(Protocol):
    """A started process: `subprocess`'s, or `multiprocessing`'s."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...


class StartedProcess:
    """One process, from its start to its end."""

    def __init__(self, payload: Payload, handle: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        alive, self._alive = multiprocessing.Pipe(duplex=False)
        self._stacks, stacks = multiprocessing.Pipe(duplex=False)
        self.receiver = Receiver(self.connection)
        self.start_s: float | None = None
        """Seconds that it took to load the datasets and the function that collates; None until it is ready."""
        self.child = _start((theirs, alive, stacks))
        for end in (theirs, alive, stacks):
            end.close()
        place = shared_file("raysharded-sample")
        os.ftruncate(place, PLACE.size)
        self._place = mmap.mmap(place, PLACE.size)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: the first call will notice
            self.connection.send(payload)
            send_handle(self.connection, handle, self.child.pid)
            send_handle(self.connection, place, self.child.pid)
        os.close(place)

    def wait_until_ready(self) -> None:
        """Wait until it has the datasets. Raises as `ask`."""
        if self.start_s is None:
            self.start_s = float(self._answer())

    def ask(self, method: str, args: Sequence[Any], limit_s: float | None = None) -> Any:
        """The process's answer. Raises what it raised; EOFError or OSError if it has died, CannotLeave for
        arguments that cannot be pickled, TimeoutError after the limit, which begins anew while items are passed over.
        """
        try:
            data, buffers = dump((method, tuple(args)), keeps_strides=True)
        except Exception as error:  # the boundary to the user's classes
            raise CannotLeave(f"{type(error).__name__}: {text_of(error)}") from error
        send_request(self.connection, data, buffers, (self.receiver.freed(), _default_dtype()))
        passed = self.passed()
        while limit_s is not None and not self.connection.poll(limit_s):
            before, passed = passed, self.passed()
            if passed == before:
                raise TimeoutError(method)
        return self._answer()

    def sample(self) -> int:
        """Id of the sample that it reads, or has read last."""
        return int(PLACE.unpack_from(self._place)[0])

    def passed(self) -> int:
        """Number of items that it has passed over on the way to samples."""
        return int(PLACE.unpack_from(self._place)[1])

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


def _default_dtype() -> str:
    """torch's default dtype here, which `build_model` may have set; empty where torch is not loaded."""
    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")


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
