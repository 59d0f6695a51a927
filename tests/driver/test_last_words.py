"""The last checkpoint of workers without a driver, when one comes in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raysharded.actors.last_words import write_last_words
from raysharded.checkpoint import Claims
from raysharded.checkpoint.claims import find_newest
from raysharded.driver.journal import Journal, read
from raysharded.driver.messages import Saved
from raysharded.driver.tenancy import LastWords, PartOf
from raysharded.ids import GenerationId, WorkerId
from tests.driver.memory_storage import MemoryStorage
from tests.driver.simulated_workers import SAVED_SPEC
from tests.driver.test_journal import SetClock
from tests.driver.test_takeover import TERMS, adopted


class Answering:
    """Two workers that hold step 7, and what happens when they are asked."""

    def __init__(self, happens: Mapping[str, Callable[[], object]] | None = None) -> None:
        """`happens`: method -> what happens before its answers come."""
        self._happens = dict(happens or {})
        self.asked: list[str] = []
        self.ended: list[tuple[int, set[WorkerId]]] = []

    def before(self, me: WorkerId) -> int:
        return me

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        self.asked.append(method)
        self._happens.get(method, lambda: None)()
        if method == "last_words":
            return {WorkerId(rank): self._words(rank) for rank in range(2)}
        if method == "write_part":
            assert calls is not None
            return {worker: self._saved(*more) for worker, more in calls.items()}
        return {}

    def end_others(self, epoch: int, but: Collection[WorkerId]) -> None:
        self.ended.append((epoch, set(but)))

    @staticmethod
    def _words(rank: int) -> LastWords:
        one = adopted(rank, rank, 2, 7)
        return LastWords(facts=one.facts, stopped=one.stopped, reports=(), fence=one.fence, skips=())

    @staticmethod
    def _saved(part: PartOf, generation: GenerationId) -> Saved:
        return Saved(
            generation=generation, step=part.step, spec=SAVED_SPEC, fingerprint=np.zeros((1, 2), dtype=np.uint64)
        )


def a_run() -> tuple[MemoryStorage, Claims]:
    storage = MemoryStorage()
    claims = Claims(storage, "a")
    claims.own(3)
    return storage, claims


def kinds(storage: MemoryStorage) -> list[str]:
    return [entry["kind"] for entry in read(storage)]


def test_what_the_workers_hold_is_committed_and_all_of_them_end() -> None:
    storage, claims = a_run()
    peers = Answering()
    assert write_last_words(WorkerId(0), replace(TERMS, claimer=claims.id), storage, peers)
    newest = find_newest(storage)[1]
    assert newest is not None
    assert (newest.kind, newest.step) == ("commit", 7)
    assert kinds(storage) == ["orphaned", "checkpoint"]
    assert peers.ended == [(TERMS.epoch, {0, 1})]  # nobody that a newer driver has started


@pytest.mark.parametrize("when", ["last_words", "write_part", "leave"])
def test_a_driver_that_comes_meanwhile_keeps_its_workers_and_its_journal(when: str) -> None:
    storage, claims = a_run()

    def come() -> None:
        newer = Journal(storage, SetClock(), "b", still_owns=lambda: True)
        Claims(storage, "b").own(5)
        newer.fence()
        newer.append("started", {"resumed_after_step": 0}, durable=True)

    peers = Answering({when: come})
    write_last_words(WorkerId(0), replace(TERMS, claimer=claims.id), storage, peers)
    assert peers.ended == []
    assert kinds(storage)[-1] == "started"  # nothing was written after it
    assert ("leave" in peers.asked) == (when == "leave")


def test_nothing_is_written_while_one_of_them_has_a_driver() -> None:
    storage, claims = a_run()

    class OneHasADriver(Answering):
        def ask(self, calls: Any, method: str, *args: Any, timeout_s: float) -> dict[WorkerId, Any]:
            return {**super().ask(calls, method, *args, timeout_s=timeout_s), WorkerId(1): None}

    peers = OneHasADriver()
    assert not write_last_words(WorkerId(0), replace(TERMS, claimer=claims.id), storage, peers)
    assert peers.asked == ["last_words"]
    assert (peers.ended, kinds(storage)) == ([], [])
