"""The last checkpoint of workers without a driver, when one comes in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raysharded.checkpoint import Claims
from raysharded.checkpoint.stored_claims import find_newest
from raysharded.clock import SystemClock
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal, read
from raysharded.orphans.orphan_checkpoint import write_orphan_checkpoint
from raysharded.overrides import Decisions
from raysharded.ownership.leadership import LeaseTerms, RunLeadership
from raysharded.protocol.messages import Saved
from raysharded.protocol.session import FreedWorker, PartOf
from tests.driver.memory_storage import MemoryStorage
from tests.driver.simulated_workers import SAVED_SPEC
from tests.driver.test_journal import SetClock
from tests.driver.test_takeover import TERMS, adopted


class Answering:
    """Two workers that hold step 7, and the events at their calls."""

    def __init__(self, happens: Mapping[str, Callable[[], object]] | None = None) -> None:
        """`happens`: method -> the event before its answers come."""
        self._happens = dict(happens or {})
        self.asked: list[str] = []
        self.ended_all = False

    def before(self, worker: WorkerId) -> list[WorkerId]:
        return [WorkerId(number) for number in range(worker)]

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        self.asked.append(method)
        self._happens.get(method, lambda: None)()
        if method == "is_orphan":
            return {WorkerId(rank): True for rank in range(2)}
        if method == "last_words":
            return {WorkerId(rank): self._words(rank) for rank in range(2)}
        if method == "write_part":
            assert calls is not None
            return {worker: self._saved(*more) for worker, more in calls.items()}
        return {}

    def end_all(self) -> None:
        self.ended_all = True

    @staticmethod
    def _words(rank: int) -> FreedWorker:
        one = adopted(rank, rank, 2, 7)
        return FreedWorker(facts=one.facts, stopped=one.stopped, reports=(), fence=one.fence, decisions=Decisions())

    @staticmethod
    def _saved(part: PartOf, generation: GenerationId, _writer: str) -> Saved:
        return Saved(
            generation=generation, step=part.step, spec=SAVED_SPEC, fingerprint=np.zeros((1, 2), dtype=np.uint64)
        )


def a_run() -> MemoryStorage:
    """A run whose driver has released it: there is no lease."""
    storage = MemoryStorage()
    Claims(storage, "a").own(3)
    return storage


def kinds(storage: MemoryStorage) -> list[str]:
    return [entry["kind"] for entry in read(storage)]


def test_what_the_workers_hold_is_committed_and_all_of_them_end() -> None:
    storage = a_run()
    peers = Answering()
    assert write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    newest = find_newest(storage)[1]
    assert newest is not None
    assert (newest.kind, newest.step) == ("commit", 7)
    assert kinds(storage) == ["orphaned", "checkpoint"]
    assert peers.ended_all


@pytest.mark.parametrize("when", ["last_words", "write_part", "leave"])
def test_a_driver_that_comes_meanwhile_keeps_its_workers_and_its_journal(when: str) -> None:
    storage = a_run()

    def come() -> None:
        newer = Journal(storage, SetClock(), "b", still_owns=lambda: True)
        Claims(storage, "b").own(5)  # by force
        newer.fence()
        newer.append("started", {"resumed_after_step": 0}, durable=True)

    peers = Answering({when: come})
    assert not write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    assert not peers.ended_all
    assert kinds(storage)[-1] == "started"  # nothing was written after it
    assert ("leave" in peers.asked) == (when == "leave")


def test_nothing_is_written_while_one_of_them_has_a_driver() -> None:
    storage = a_run()

    class OneHasADriver(Answering):
        def ask(self, calls: Any, method: str, *args: Any, timeout_s: float) -> dict[WorkerId, Any]:
            return {**super().ask(calls, method, *args, timeout_s=timeout_s), WorkerId(1): False}

    peers = OneHasADriver()
    assert not write_orphan_checkpoint(WorkerId(0), replace(TERMS, lease_s=0.1), storage, peers)
    assert set(peers.asked) == {"is_orphan"}
    assert (peers.ended_all, kinds(storage)) == (False, [])


def test_nothing_is_written_while_somebody_holds_the_run() -> None:
    storage = a_run()
    claims = Claims(storage, "b")
    holder = RunLeadership(
        "run",
        storage,
        claims,
        SystemClock(),
        LeaseTerms(lease_s=0.3),
        lambda _: None,
        lambda _: None,
        where=("", ""),
        has_ended=lambda _cluster, _job: False,
    )
    holder.acquire()
    peers = Answering()
    assert not write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    assert (peers.asked, peers.ended_all, kinds(storage)) == (["is_orphan"], False, [])
    holder.end(5.0)
