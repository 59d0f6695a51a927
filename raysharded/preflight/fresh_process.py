"""Newly started interpreters, each with a different hash seed: as separate as workers on different machines.

Processes forked from one server share its random draws, including the order of their sets.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from raysharded.errors import ConfigError, RayshardedError, TaskError, text_of, user_traceback

_PROGRAM = (
    "import json, sys; handle, sys.path[:] = json.loads(sys.argv.pop()); "
    "from raysharded.preflight.fresh_process import serve; serve(handle)"
)
_STDERR = 2
_WAY_OUT = (
    "A check gives them to plain processes, which import what they are made of: put that into a module, give no "
    'lambdas or open files, and let a script begin what it does under `if __name__ == "__main__":`.'
)


class Started(Protocol):
    """A started process: `subprocess`'s."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


class NotImportable(ConfigError):
    """The trainer's task or data cannot be sent to another process."""


class FreshProcess:
    """One such interpreter, which executes calls in sequence. It is killed when its `with` block ends."""

    def __init__(self, hash_seed: int) -> None:
        """Start the interpreter without waiting for it."""
        self._connection, theirs = multiprocessing.Pipe()
        self._process = start(theirs, hash_seed)
        theirs.close()
        preparation = spawn.get_preparation_data("fresh")
        del preparation["authkey"]  # cannot be pickled, and is not needed
        self._send(preparation)

    def ask(self, act: Callable[..., Any], *args: Any) -> int:
        """Begin `act(*args)` there; returns the bytes sent. Raises NotImportable if the call cannot be pickled."""
        try:
            data = pickle.dumps((act, args))
        except Exception as error:
            text = f"the task or its data cannot be pickled: {type(error).__name__}: {text_of(error)}"
            raise NotImportable(f"{text.rstrip('.')}. {_WAY_OUT}") from error
        self._send_bytes(data)
        return len(data)

    def answer(self, deadline: float) -> Any:
        """The value of the oldest call. Raises its error, or TimeoutError at `deadline`, which is a time of
        `time.monotonic`."""
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            ok, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise TaskError(
                f"a process that built the model {why}{' (out of memory?)' if code == -9 else ''}"
            ) from None
        if not ok:
            raise value
        return value

    def _send(self, value: Any) -> None:
        self._send_bytes(pickle.dumps(value))

    def _send_bytes(self, data: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: `answer` reports how
            self._connection.send_bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the interpreter now."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def start(connection: Connection, hash_seed: int) -> Started:
    """Start an interpreter that serves calls at this end of a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps([connection.fileno(), sys.path])],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,  # the task's prints
        pass_fds=[connection.fileno()],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        start_new_session=True,  # Ctrl-C is handled by this process
    )


def serve(handle: int) -> None:
    """Main program of the interpreter: execute calls until the process that started it has exited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        problem = _import_main(connection.recv_bytes())
        while True:
            data = connection.recv_bytes()
            connection.send(_answer(data) if problem is None else (False, problem))
    os._exit(0)


def _import_main(data: bytes) -> NotImportable | None:
    """Import the main script under another name, as `multiprocessing` does; that must not start anything. Returns the
    error if one occurs."""
    me: Any = multiprocessing.current_process()
    me._inheriting = True
    try:
        spawn.prepare(pickle.loads(data))  # noqa: S301 - from the process that started it
    except BaseException as error:  # noqa: BLE001 - the boundary to the user's code
        return _not_importable("importing the main script", error)
    finally:
        del me._inheriting
    return None


def _answer(data: bytes) -> tuple[bool, Any]:
    """Result of one call: (True, its value) or (False, its error)."""
    try:
        act, args = pickle.loads(data)  # noqa: S301 - from the process that started it
    except BaseException as error:  # noqa: BLE001 - as above
        return False, _not_importable("unpickling the task and its data", error)
    try:
        return True, act(*args)
    except RayshardedError as error:
        return False, error.with_traceback(None)
    except BaseException as error:  # noqa: BLE001 - as above: also a task's SystemExit
        return False, TaskError(f"the task raised {type(error).__name__}: {text_of(error)}", user_traceback(error))


def _not_importable(what: str, error: BaseException) -> NotImportable:
    line = text_of(error).strip().partition("\n")[0].rstrip(".")
    return NotImportable(f"{what} raised {type(error).__name__}: {line}. {_WAY_OUT}")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)
