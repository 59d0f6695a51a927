"""Retries of storage operations."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raysharded.checkpoint.storage.retry import GIVE_UP_AFTER_S, MAX_ATTEMPTS, MAX_WAIT_S, retries_of, with_retries


def test_lost_connections_are_retried_a_bounded_number_of_times() -> None:
    waits: list[float] = []
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        with_retries(fails, url="memory://", sleep=waits.append)
    assert len(calls) == MAX_ATTEMPTS
    assert len(waits) == MAX_ATTEMPTS - 1
    assert all(0 <= wait <= min(MAX_WAIT_S, 0.2 * 2**n) for n, wait in enumerate(waits))
    assert len(set(waits)) == len(waits)  # each is drawn


def test_what_cannot_pass_by_itself_is_not_retried() -> None:
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        with_retries(fails, url="memory://", sleep=lambda _: None)
    assert len(calls) == 1


def test_every_retry_is_counted_for_its_storage_alone() -> None:
    left = [1, 2, 3]

    def fails() -> str:
        if left:
            raise TimeoutError(left.pop())
        return "done"

    before = retries_of("memory://other")
    assert with_retries(fails, url="memory://counted", sleep=lambda _: None) == "done"
    assert retries_of("memory://counted") == 3
    assert retries_of("memory://other") == before


def test_a_server_that_is_slow_to_fail_is_abandoned_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    calls: list[float] = []

    def times_out() -> None:
        calls.append(now[0])
        now[0] += 60.0
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError):
        with_retries(times_out, url="memory://", sleep=lambda _: None)
    assert now[0] <= GIVE_UP_AFTER_S + 60.0
    assert len(calls) == 2


def test_a_forked_process_counts_for_itself() -> None:
    script = (
        "import os, threading\n"
        "from raysharded.checkpoint.storage import retry\n"
        "retry._counts['x'] = 5\n"
        "with retry._counts_lock:\n"  # as another thread may hold it at that moment
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os._exit(retry.retries_of('x'))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
