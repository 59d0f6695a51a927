"""Transfers share threads, for as long as none is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from raysharded.actors.comm import lasting_threads
from raysharded.actors.comm.lasting_threads import begin

_DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_threads, "_idle", [])


def test_transfers_one_after_the_other_run_in_one_thread_with_their_names() -> None:
    ran: list[tuple[threading.Thread, str]] = []
    for number in range(50):
        transfer = begin(lambda: ran.append((thread := threading.current_thread(), thread.name)), f"transfer {number}")
        assert transfer.ended.wait(_DEADLINE_S)
    assert len({thread for thread, _ in ran}) == 1
    assert [name for _, name in ran] == [f"transfer {number}" for number in range(50)]
    assert ran[0][0] is not threading.current_thread()


def test_a_blocked_transfer_holds_up_no_other_and_its_thread_is_used_again() -> None:
    blocked, both, ran = threading.Event(), threading.Barrier(2), set[threading.Thread]()

    def waits_for(wait: Callable[[float], object]) -> None:
        ran.add(threading.current_thread())
        wait(_DEADLINE_S)

    first = begin(lambda: waits_for(blocked.wait), "blocked")
    second = begin(lambda: waits_for(id), "free")
    assert second.ended.wait(_DEADLINE_S)
    assert not first.ended.is_set()
    blocked.set()
    assert first.ended.wait(_DEADLINE_S)
    for each in [begin(lambda: waits_for(both.wait), name) for name in ("third", "fourth")]:
        assert each.ended.wait(_DEADLINE_S)
    assert len(ran) == 2


def test_nothing_of_a_transfer_is_kept_once_it_has_ended() -> None:
    class Held:
        gone = threading.Event()

        def __del__(self) -> None:
            self.gone.set()

    held = Held()
    transfer = begin(partial(id, held), "holds")  # type: ignore[arg-type]  # what it returns is not used
    del held
    assert transfer.ended.wait(_DEADLINE_S)
    assert Held.gone.wait(_DEADLINE_S)


def test_a_transfer_that_fails_ends_its_thread_and_no_other_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, errors = threading.Event(), list[BaseException | None]()

    def report(error: threading.ExceptHookArgs) -> None:
        errors.append(error.exc_value)
        reported.set()

    def fails() -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(threading, "excepthook", report)
    assert begin(fails, "fails").ended.wait(_DEADLINE_S)
    assert begin(lambda: None, "works").ended.wait(_DEADLINE_S)
    assert reported.wait(_DEADLINE_S)
    assert list(map(str, errors)) == ["on purpose"]
