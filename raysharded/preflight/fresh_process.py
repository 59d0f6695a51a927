"""Interpreters that are started anew, each with a hash seed of its own: as separate as workers on different machines.

Processes that are forked from one server share what it has drawn, the order of their sets among it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Self

from raysharded.errors import ConfigError, RayshardedError, TaskError, text_of, user_traceback

_PROGRAM = (
    "import json, sys; handle, sys.path[:] = json.loads(sys.argv.pop()); "
    "from raysharded.preflight.fresh_process import serve; serve(handle)"
)
_STDERR = 2


class FreshProcess:
    """One such interpreter, which carries out calls one after another. Ends with its `with`, whatever it does."""

    def __init__(self, hash_seed: int) -> None:
        """Starts it, and does not wait."""
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps([theirs.fileno(), sys.path])],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # what the task prints
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            start_new_session=True,  # Ctrl-C is this process's business
        )
        theirs.close()
        preparation = spawn.get_preparation_data("fresh")
        del preparation["authkey"]  # cannot be pickled, and is not needed
        self._send(preparation)

    def ask(self, act: Callable[..., Any], *args: Any) -> int:
        """Begin `act(*args)` there; how many bytes were sent. Raises ConfigError for what cannot be pickled."""
        try:
            data = ForkingPickler.dumps((act, args))
        except Exception as error:
            raise ConfigError(
                f"the task or its data could not be pickled for another process: {type(error).__name__}: "
                f"{text_of(error)}. Put what they are made of into a module that can be imported, and give no lambdas "
                "or open files."
            ) from error
        self._send_bytes(data)
        return len(data)

    def answer(self, deadline: float) -> Any:
        """The value of the oldest call. Raises what it raised, and TimeoutError at `deadline`, of `time.monotonic`."""
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
        self._send_bytes(ForkingPickler.dumps(value))

    def _send_bytes(self, data: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: `answer` says how
            self._connection.send_bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def serve(handle: int) -> None:
    """Its main program: carries out calls until the process that started it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    is_prepared = False
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        what = "unpickling what the trainer is made of"
        try:
            value = ForkingPickler.loads(data)
            if is_prepared:
                what = "the task"
                act, args = value
                connection.send((True, act(*args)))
            else:
                is_prepared, what = True, "importing the main script"
                spawn.prepare(value)
        except RayshardedError as error:
            connection.send((False, error.with_traceback(None)))
        except BaseException as error:  # noqa: BLE001 - the boundary of the process: also a task's SystemExit
            text = f"{what} raised {type(error).__name__}: {text_of(error)}"
            connection.send((False, TaskError(text, user_traceback(error))))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)
