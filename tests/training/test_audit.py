"""Audits with real workers: they change no bit, and a worker that computes wrong numbers is found and removed."""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.actors.shards.store import ShardBuffer
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.training.harness import Collector, Outcome, SmallTask, make_driver, make_job, make_limits, train

pytestmark = pytest.mark.procs
STEPS = 4


@cache
def undisturbed() -> Outcome:
    return train(1, task=SmallTask(), steps=STEPS, microbatches=4)


def audited(every_steps: int = 2, **engine: Any) -> rs.EngineConfig:
    return rs.EngineConfig(audit_every_steps=every_steps, **engine)


def audited_alone() -> rs.EngineConfig:
    """Audit every step, without a proof of the first one."""
    return audited(1, prove_first_step=False)


SIZES = list(product(("sharded", "local"), (1, 2, 3, 5)))


@pytest.mark.long
@pytest.mark.parametrize(("accumulation", "workers"), SIZES)
def test_an_audit_that_finds_nothing_changes_no_bit(workers: int, accumulation: Any) -> None:
    outcome = train(workers, task=SmallTask(), steps=STEPS, microbatches=4, engine=audited(accumulation=accumulation))
    assert outcome.bits == undisturbed().bits
    assert [(fields["step"], fields["ok"]) for fields in outcome.of("audit")] == [(2, True), (4, True)]
    assert not outcome.of("corruption")


@pytest.mark.long  # each of them is tried alone, and `test_sizes.py` audits groups of which a worker is lost
def test_audits_and_losses_together_change_no_bit() -> None:
    kills = [(1, 2, "backward"), (2, 3, "agree")]
    outcome = train(3, task=SmallTask(), steps=STEPS, microbatches=4, engine=audited(1), kills=kills)
    assert outcome.bits == undisturbed().bits
    assert {(fields["step"], fields["ok"]) for fields in outcome.of("audit")} == {(n + 1, True) for n in range(STEPS)}
    assert not outcome.of("corruption")


def with_corruption(
    workers: int,
    fault: Fault,
    *,
    save_every: int | None = None,
    plans: Callable[..., FaultPlan] = FaultPlan,
    **engine: Any,
) -> Outcome:
    """A run in which one worker computes wrong numbers; it may lose as many workers as it has."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plans(faults=(fault,), folder=folder)
        job = make_job(
            f"{folder}/run",
            task=SmallTask(),
            microbatches=4,
            steps=STEPS,
            save_every=save_every,
            engine=audited(**engine),
            faults=plan,
        )
        listener = Collector()
        limits = make_limits(job, workers, min_workers=1, max_worker_losses=workers)
        state = make_driver(job, limits, listener).run()
        assert plan.fired(fault)
    return Outcome(
        numbers=tuple(listener.numbers[step] for step in range(1, STEPS + 1)),
        fingerprint=state.result_fingerprint,
        entries=tuple(listener.entries),
    )


def corrupt(worker: int, step: int, *, every: bool = False) -> Fault:
    return Fault(worker=WorkerId(worker), step=step, phase="backward", kind="corrupt", every=every)


@pytest.mark.parametrize(("accumulation", "workers"), tried_each_time([("local", 2)], SIZES))
def test_a_worker_that_computes_wrong_numbers_once_is_found_removed_and_changes_no_bit(
    workers: int, accumulation: Any
) -> None:
    culprit = workers - 1 if workers < 5 else 3  # the last of five workers computes no microbatch
    outcome = with_corruption(workers, corrupt(culprit, 4), accumulation=accumulation)
    (corruption,) = outcome.of("corruption")
    assert (corruption["step"], corruption["what"], corruption["culprits"]) == (4, "gradient", [culprit])
    assert corruption["verified_step"] == 2
    assert culprit in [fields["worker"] for fields in outcome.of("worker_lost")]
    assert outcome.bits == undisturbed().bits


@pytest.mark.parametrize("workers", tried_each_time([3], [3, 4]))
def test_a_worker_that_computes_wrong_numbers_always_is_outvoted_and_what_it_spoiled_is_computed_again(
    workers: int,
) -> None:
    outcome = with_corruption(workers, corrupt(1, 3, every=True), save_every=1)
    (corruption,) = outcome.of("corruption")
    assert corruption["culprits"] == [1]
    assert corruption["verified_step"] == 2
    after = outcome.of("generation")[1]
    assert after["source"] in ("checkpoint", "start")  # these were written in time
    assert after["step"] <= 2
    assert outcome.bits == undisturbed().bits


def test_of_two_workers_that_each_stand_by_their_numbers_both_are_removed() -> None:
    outcome = with_corruption(2, corrupt(1, 3, every=True))
    (corruption,) = outcome.of("corruption")
    assert sorted(corruption["culprits"]) == [0, 1]
    assert outcome.bits == undisturbed().bits


class FlipsMemory(FaultPlan):
    """Flips a bit of a copy of the state in a worker's host memory: of the fault's `message`, snapshot or mirror."""

    def strike(self, worker: WorkerId, step: int, phase: str) -> None:
        for fault in self.faults:
            if (worker, step, phase) == (fault.worker, fault.step, fault.phase) and not self.fired(fault):
                self._flip(fault.message, step - 1)
                self._mark(fault, step)

    def _flip(self, medium: str, step: int) -> None:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for found in gc.get_objects():
                if isinstance(found, ShardBuffer) and (found.medium, found.step, found.complete) == (
                    medium,
                    step,
                    True,
                ):
                    found.data[17] ^= 4
                    return
            time.sleep(0.01)  # the mirror has not arrived yet
        raise AssertionError(f"no {medium} of step {step} in this process")


@pytest.mark.parametrize("medium", ["snapshot", "mirror"])
def test_a_copy_of_the_state_that_is_not_what_is_on_the_device_is_found_and_its_holder_removed(medium: str) -> None:
    fault = Fault(worker=WorkerId(1), step=4, phase="backward", message=medium)
    outcome = with_corruption(2, fault, plans=FlipsMemory)
    (corruption,) = outcome.of("corruption")
    assert (corruption["step"], corruption["what"], corruption["culprits"]) == (4, "state", [1])
    assert outcome.bits == undisturbed().bits


class Undetermined(SmallTask):
    """Its loss depends on something that torch's seed does not set."""

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        factor = 1.0 + random.SystemRandom().random()
        return rs.Loss(loss.total * factor, loss.weight, loss.metrics)


def test_a_task_that_is_not_reproducible_is_refused_and_no_worker_is_blamed() -> None:
    told = r"the same gradient twice \(microbatches 0, 1, 2, 3\): the task's computation is not reproducible"
    with pytest.raises(InexactError, match=told):
        train(2, task=Undetermined(), microbatches=4, engine=audited_alone())


def test_one_worker_alone_with_such_a_task_is_replaced_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(f"{folder}/run", task=Undetermined(), steps=2, microbatches=4, engine=audited_alone())
        listener = Collector()
        with pytest.raises(InexactError, match=r"computation is not reproducible"):
            make_driver(job, make_limits(job, 1, max_worker_losses=None), listener).run()
    assert [kind for kind, _ in listener.entries].count("corruption") == 2
    assert [kind for kind, _ in listener.entries].count("worker_lost") == 1
