"""A function in a separate process that has torch and the engine already: forked from the server that workers are
forked from, so that it starts in milliseconds where a fresh interpreter takes seconds."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import pytest

from raysharded.testing import processes

_T = TypeVar("_T")

PRELOADED = ["raysharded.testing.preloaded", "tests.preloaded"]
"""Imports of the one server of a test run, which the first caller starts."""
vars(processes)["_PRELOADED"] = PRELOADED


def server() -> ForkServerContext:
    """The context of processes that are forked from the server. Its first user chose the imports if others did not give
    the same: each later process would import the rest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def readers_as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that read data are forks of the server here too, as those of a worker, and no fresh interpreters."""
    server()
    forkserver.ensure_running()
    monkeypatch.setattr(forkserver, "get_inherited_fds", list)


def in_a_fork(act: Callable[..., _T], *args: Any, timeout_s: float = 120.0) -> _T:
    """The result of `act(*args)` there. Raises its error, EOFError if the process died, and TimeoutError."""
    context = server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, act, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise TimeoutError(f"no result within {timeout_s} s")
        returned: tuple[bool, Any] = ours.recv()
    finally:
        process.kill()
        process.join()
    raised, value = returned
    if raised:
        raise value
    result: _T = value
    return result


def _serve(pipe: Connection, act: Callable[..., Any], args: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send((False, act(*args)))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        pipe.send((True, error))
