"""Promises of the driver's calls that wait for saves: they never fill a worker, and each is made once."""

from __future__ import annotations

from raysharded.driver.checkpoints.requests import CALLS_AT_ONCE, SaveCallThrottle
from raysharded.ids import GenerationId, WorkerId

GENERATION, OTHERS = GenerationId(1), WorkerId(7)


def collecting() -> tuple[SaveCallThrottle, list[tuple[WorkerId, int]]]:
    calls: list[tuple[WorkerId, int]] = []
    return SaveCallThrottle(lambda worker, _, step: calls.append((worker, step))), calls


def test_few_calls_wait_at_one_worker_at_a_time_and_all_are_made_in_order() -> None:
    asked, calls = collecting()
    for step in range(10):
        asked.ask(WorkerId(0), GENERATION, step)
    asked.ask(OTHERS, GENERATION, 0)
    assert len(calls) == CALLS_AT_ONCE + 1
    for _ in range(10):
        asked.answered(WorkerId(0))
    assert [step for worker, step in calls if worker == 0] == list(range(10))


def test_a_worker_that_is_lost_is_not_called_any_more() -> None:
    asked, calls = collecting()
    for step in range(10):
        asked.ask(WorkerId(0), GENERATION, step)
    asked.forget(WorkerId(0))
    asked.answered(WorkerId(0))  # it was on its way
    assert len(calls) == CALLS_AT_ONCE
