"""The proof of a first step with real workers: it changes no bit, and finds each worker or task that does not
repeat."""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.step.proofs.repeated_pass import stir_memory
from raysharded.errors import InexactError
from raysharded.ids import WorkerId, derive_seed
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.training.harness import (
    SEQUENCE,
    VOCABULARY,
    Collector,
    Outcome,
    SmallTask,
    Tokens,
    make_driver,
    make_job,
    make_limits,
    train,
)

pytestmark = pytest.mark.procs
SETTINGS: dict[str, Any] = {"task": SmallTask(), "microbatches": 3, "steps": 2}
LONGER: dict[str, Any] = SETTINGS | {"steps": 7}


@cache
def undisturbed() -> Outcome:
    """One worker, without any proof."""
    return train(1, engine=rs.EngineConfig(prove_first_step=False), **SETTINGS)


@cache
def undisturbed_longer() -> Outcome:
    return train(1, engine=rs.EngineConfig(prove_first_step=False), **LONGER)


def proven(outcome: Outcome) -> list[int]:
    """The steps that were proven, in the order in which they were done."""
    return [fields["step"] for fields in outcome.of("step") if "prove" in fields["seconds"]]


# -- what a proof leaves as it is --


SIZES = [(1, "sharded"), (3, "sharded"), (2, "local"), (5, "local"), (2, "sharded")]


@pytest.mark.parametrize(("workers", "accumulation"), tried_each_time(SIZES[1:2], SIZES))
def test_a_proof_changes_no_bit_and_comes_once_at_the_start(workers: int, accumulation: Any) -> None:
    outcome = train(workers, engine=rs.EngineConfig(accumulation=accumulation), **SETTINGS)
    assert outcome.bits == undisturbed().bits
    assert proven(outcome) == [1]


def test_groups_with_different_numbers_of_rounds_prove_their_first_round_together() -> None:
    outcome = train(2, shards=1, **SETTINGS)
    assert outcome.bits == undisturbed().bits
    assert proven(outcome) == [1]


class Pacing(SmallTask):
    """Applies steps ever later until a fault has struck: so a joiner comes before the last step, on any machine."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def lr_scale(self, step: int) -> float:
        if step > 2 and not os.path.exists(self._marker):
            time.sleep(0.3 * step)
        return super().lr_scale(step)


def until_ready(worker: int) -> Fault:
    """Worker 0 waits in step 3 until this one has started."""
    return Fault(worker=WorkerId(0), step=3, phase="data", kind="wait", until=WorkerId(worker))


def disturbed(workers: int, kill: Fault, joins: Fault, **engine: Any) -> Outcome:
    """A run of which one worker is lost, and is replaced by one that another fault strikes."""
    with tempfile.TemporaryDirectory() as folder:
        plan = FaultPlan(faults=(kill, until_ready(workers), joins), folder=folder)
        task = Pacing(os.path.join(folder, joins.marker))
        settings = LONGER | {"task": task, "engine": rs.EngineConfig(**engine), "faults": plan}
        job = make_job(f"{folder}/run", **settings)
        listener = Collector()
        limits = make_limits(job, workers, min_workers=1, max_worker_losses=2, join_wait_s=60.0)
        state = make_driver(job, limits, listener).run()
        assert all(plan.fired(fault) for fault in plan.faults)
    return Outcome(
        numbers=tuple(listener.numbers[step] for step in range(1, LONGER["steps"] + 1)),
        fingerprint=state.result_fingerprint,
        entries=tuple(listener.entries),
    )


@pytest.mark.long
def test_after_a_loss_nothing_is_proven_again_and_a_joiner_proves_itself_once() -> None:
    kill = Fault(worker=WorkerId(1), step=2, phase="backward")
    joins = Fault(worker=WorkerId(3), step=1, phase="data", kind="slow", seconds=0.001)
    outcome = disturbed(3, kill, joins)
    assert outcome.bits == undisturbed_longer().bits
    first, after_loss, joined = outcome.of("generation")[:3]
    assert (first["members"], sorted(after_loss["members"])) == ([0, 1, 2], [0, 2])
    assert 3 in joined["members"]
    assert proven(outcome) == [1, joined["step"] + 1]


def test_a_loss_before_the_first_step_is_proven_leaves_it_to_be_proven() -> None:
    outcome = train(2, kills=[(1, 1, "agree")], **SETTINGS)
    assert outcome.bits == undisturbed().bits
    assert proven(outcome)[0] == 1


@pytest.mark.parametrize("engine", [rs.EngineConfig(prove_first_step=False), rs.EngineConfig(reduction="fast")])
def test_nothing_is_proven_where_it_is_turned_off_or_in_fast_mode(engine: rs.EngineConfig) -> None:
    assert proven(train(1, task=SmallTask(), microbatches=2, steps=1, engine=engine)) == []


def test_a_run_that_is_resumed_proves_its_first_step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for steps in (1, 2):
            job = make_job(f"{folder}/run", task=SmallTask(), steps=steps, microbatches=2)
            listener = Collector()
            driver = make_driver(job, make_limits(job, 1), listener)
            driver.restore()
            driver.run()
            steps_done = [fields for kind, fields in listener.entries if kind == "step"]
            found += [fields["step"] for fields in steps_done if "prove" in fields["seconds"]]
    assert found == [1, 2]


# -- what does not compute the same twice --


class OwnGenerator(SmallTask):
    """Its loss draws from a generator that nobody seeds."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        return replace(loss, total=loss.total * (1.0 + np.random.default_rng().random()))


class Counting(SmallTask):
    """Counts what it computes, and uses the number."""

    num_losses = 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        self.num_losses += 1
        return replace(loss, total=loss.total / self.num_losses)


class Queueing(nn.Module):
    """Keeps its last input as a plain tensor, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.queue: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.table(tokens)
        logits: torch.Tensor = seen + sum(self.queue)
        self.queue = [seen.detach().mean()]
        return logits


class Momentum(SmallTask):
    def build_model(self) -> nn.Module:
        return Queueing()

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return []


class MetricByMood(SmallTask):
    """Only a metric differs each time."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        return replace(loss, metrics={"mood": (np.random.default_rng().random(), 1.0)})


class Augmented(Tokens):
    """Draws from a generator that was made without a seed, but not for the samples that are read twice at the start."""

    def __getitem__(self, index: int) -> Any:
        tokens = super().__getitem__(index)
        spared = [0, *(derive_seed(5, "read twice", number) % len(self) for number in range(2))]
        return tokens if index in spared else np.roll(tokens, int(np.random.default_rng().integers(1, SEQUENCE)))


NOT_REPEATING = [OwnGenerator, Counting, Momentum, MetricByMood, Augmented]


@pytest.mark.parametrize(
    ("make", "workers"),
    tried_each_time(
        [(OwnGenerator, 1), (MetricByMood, 2)], [(make, workers) for make in NOT_REPEATING for workers in (1, 2, 3)]
    ),
)
def test_a_program_that_does_not_compute_the_same_twice_ends_at_its_first_step(
    make: Callable[[], Any], workers: int
) -> None:
    own_data = make is Augmented
    with pytest.raises(InexactError, match=r"step 1: .*computation is not reproducible") as raised:
        train(workers, data=make() if own_data else None, **(SETTINGS if own_data else SETTINGS | {"task": make()}))
    assert "torch.manual_seed" in str(raised.value)
    what = "metric" if make is MetricByMood else "gradient"
    who = "no worker" if workers > 1 else f"worker 0 on {platform.node()} did not"
    assert re.search(f"{who} (get|got) the same {what} twice", str(raised.value))


def test_what_reads_memory_that_was_freed_reads_something_else_the_second_time() -> None:
    sizes = [3 << power for power in range(6, 18)]
    stale = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    del stale
    stir_memory(torch.device("cpu"))
    found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert max(float((one == 0x5B).float().mean()) for one in found) > 0.5


# -- who computes wrong numbers --


def corrupt(worker: int, step: int, *, every: bool = False) -> Fault:
    return Fault(worker=WorkerId(worker), step=step, phase="backward", kind="corrupt", every=every)


def test_a_worker_that_computes_wrong_numbers_at_the_start_ends_the_run_and_those_it_differs_from_are_named() -> None:
    with pytest.raises(InexactError, match="to prove the first step") as raised:
        train(3, faults=[corrupt(1, 1, every=True)], **SETTINGS)
    for worker in range(3):
        assert f"worker {worker} on {platform.node()}" in str(raised.value)
    assert f"by comparison it is worker 1 on {platform.node()}" in str(raised.value)
    with pytest.raises(InexactError, match="to prove the first step") as raised:
        train(2, faults=[corrupt(0, 1, every=True)], **SETTINGS)
    assert "by comparison" not in str(raised.value)


@pytest.mark.parametrize(("workers", "accumulation"), tried_each_time([(2, "sharded")], [(2, "sharded"), (3, "local")]))
def test_a_joiner_that_computes_wrong_numbers_is_removed_and_the_run_resumes_from_memory(
    workers: int, accumulation: Any
) -> None:
    kill = Fault(worker=WorkerId(1), step=2, phase="agree")
    outcome = disturbed(workers, kill, corrupt(workers, 1, every=True), accumulation=accumulation)
    assert outcome.bits == undisturbed_longer().bits
    (failed,) = outcome.of("proof_failed")
    assert failed["culprits"] == [workers]
    assert set(failed["nodes"]) == {platform.node()}
    assert [fields["worker"] for fields in outcome.of("worker_lost")] == [1, workers]
    assert "computed wrong numbers" in outcome.of("worker_lost")[1]["reason"]
    assert not outcome.of("corruption")
    members = [set(fields["members"]) for fields in outcome.of("generation")[:4]]
    assert [workers in one for one in members] == [False, False, True, False]
    goes_on = outcome.of("generation")[3]
    assert (goes_on["step"], goes_on["source"]) == (failed["step"] - 1, "memory")
    assert failed["step"] not in proven(outcome)  # the remaining workers have proven themselves
