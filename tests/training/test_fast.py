"""Fast mode: the same samples at every size, nearly the same numbers; faults, joins and resumption as in exact mode."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.errors import InexactError, TaskError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.training.harness import (
    VOCABULARY,
    Collector,
    GptTask,
    Outcome,
    SmallTask,
    grouped,
    make_driver,
    make_job,
    make_limits,
    train,
)
from tests.training.test_first_step_proof import Pacing, until_ready
from tests.training.test_non_finite import Diverging, first_sample_of

pytestmark = pytest.mark.procs


class Newest(Collector):
    """Keeps the newest numbers of a step that is computed again: in fast mode they differ."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            self.numbers.pop(fields["step"], None)
        super().__call__(kind, fields)


def fast(
    workers: int,
    *faults: Fault,
    task: rs.Task | None = None,
    microbatches: int = 4,
    steps: Sequence[int] = (4,),
    paced_until: Fault | None = None,
    on_non_finite: Any = "stop",
    shards: int | None = None,
    hang_timeout_s: float = 60.0,
    save_every: int | None = None,
    **engine: Any,
) -> Outcome:
    """A run that may lose as many workers as there are faults; with several `steps` it is resumed, each time with one
    worker more. The journal is that of the last driver."""
    with tempfile.TemporaryDirectory() as folder:
        plan, listener = FaultPlan(faults=faults, folder=folder), Newest()
        for more, last in enumerate(steps):
            job = make_job(
                f"{folder}/run",
                task=task or (Pacing(f"{folder}/{paced_until.marker}") if paced_until else SmallTask()),
                microbatches=microbatches,
                steps=last,
                engine=rs.EngineConfig(reduction="fast", **engine),
                faults=plan if faults else None,
                on_non_finite=on_non_finite,
                save_every=save_every,
            )
            limits = make_limits(
                job,
                workers + more,
                min_workers=1,
                max_worker_losses=len(faults),
                join_wait_s=60.0,
                hang_timeout_s=hang_timeout_s,
                grouping=grouped(job, shards),
            )
            listener.entries.clear()
            driver = make_driver(job, limits, listener)
            driver.restore()
            fingerprint = driver.run().result_fingerprint
        assert all(plan.fired(fault) for fault in faults)
    numbers = tuple(listener.numbers[step] for step in range(1, steps[-1] + 1))
    return Outcome(numbers=numbers, fingerprint=fingerprint, entries=tuple(listener.entries))


@cache
def exact(microbatches: int = 4, steps: int = 4) -> Outcome:
    """The run that fast mode is near to."""
    engine = rs.EngineConfig(prove_first_step=False)
    return train(1, task=SmallTask(), microbatches=microbatches, steps=steps, engine=engine)


def assert_near(outcome: Outcome, to: Outcome) -> None:
    """Assert that every step read the same samples, and that losses and norms are nearly the same."""
    for name in ("step", "digest", "reads", "lr", "weight"):
        assert [numbers[name] for numbers in outcome.numbers] == [numbers[name] for numbers in to.numbers]
    for name in ("loss", "gradient_norm"):
        found, wanted = ([numbers[name] for numbers in one.numbers] for one in (outcome, to))
        np.testing.assert_allclose(found, wanted, rtol=1e-3)


def kill(worker: int, step: int, phase: str) -> Fault:
    return Fault(worker=WorkerId(worker), step=step, phase=phase)


KILLS = [
    [(1, 2, "data"), (2, 3, "apply")],
    [(1, 2, "data"), (2, 3, "backward"), (3, 4, "apply")],
    [(3, 1, "form"), (1, 2, "forward"), (2, 3, "snapshot")],
    [(1, 2, "agree"), (3, 1, "transfer"), (2, 3, "save")],
]
"""Kills of all workers but one, one after the other; never a worker with the one that keeps its mirror."""


@pytest.mark.parametrize("kills", tried_each_time(KILLS[:1], KILLS))
def test_losses_in_every_phase_leave_the_samples_as_they_are_and_the_state_comes_from_memory(
    kills: list[tuple[int, int, str]],
) -> None:
    outcome = fast(len(kills) + 1, *(kill(*one) for one in kills), save_every=3)
    assert_near(outcome, exact())
    assert {fields["source"] for fields in outcome.of("generation") if fields["step"]} == {"memory"}
    assert sorted(fields["worker"] for fields in outcome.of("worker_lost")) == list(range(1, len(kills) + 1))


MODES: list[tuple[int, dict[str, Any]]] = [
    (2, {"shards": 1}),
    (3, {"accumulation": "local"}),
    (4, {"shards": 2, "reshard_after_forward": False}),
]


@pytest.mark.parametrize(("workers", "settings"), tried_each_time(MODES[:1], MODES))
def test_a_loss_with_local_accumulation_and_in_groups(workers: int, settings: dict[str, Any]) -> None:
    assert_near(fast(workers, kill(1, 2, "backward"), **settings), exact())


@pytest.mark.parametrize("kind", tried_each_time(["raise"], ["raise", "stuck"]))
def test_other_faults_in_backward_are_met_once(kind: Any) -> None:
    seconds = 60.0 if kind == "stuck" else None
    fault = Fault(worker=WorkerId(1), step=2, phase="backward", kind=kind, seconds=seconds)
    if kind == "raise":
        with pytest.raises(TaskError, match="injected by a fault plan"):
            fast(2, fault)
        return
    outcome = fast(3, fault, hang_timeout_s=3.0)
    assert_near(outcome, exact())
    assert [fields["worker"] for fields in outcome.of("stuck") if "worker" in fields] == [1]


def test_a_step_that_is_not_finite_is_left_out_though_a_worker_is_lost_in_it() -> None:
    task = Diverging([first_sample_of(2)])
    outcome = fast(2, kill(1, 2, "agree"), task=task, on_non_finite="skip", steps=(3,))
    assert [numbers.get("skipped", False) for numbers in outcome.numbers] == [False, True, False]
    assert [numbers["digest"] for numbers in outcome.numbers] == [numbers["digest"] for numbers in exact().numbers[:3]]
    assert np.isfinite(outcome.losses[2])


def test_a_joiner_takes_part_with_the_state_of_the_others() -> None:
    joins = Fault(worker=WorkerId(2), step=1, phase="data", kind="slow", seconds=0.001)
    outcome = fast(2, kill(1, 2, "backward"), until_ready(2), joins, paced_until=joins, microbatches=2, steps=(7,))
    assert_near(outcome, exact(2, 7))
    assert 2 in outcome.of("generation")[-1]["members"]
    assert {fields["source"] for fields in outcome.of("generation")[1:]} == {"memory"}


def test_a_run_resumes_from_its_checkpoint_at_another_size() -> None:
    outcome = fast(1, kill(1, 4, "backward"), steps=(2, 4))
    assert_near(outcome, exact())
    assert [fields["source"] for fields in outcome.of("generation")] == ["checkpoint", "memory"]


# -- optimizers that see whole tensors --


class Matrices(nn.Module):
    """All of its parameters are matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


class WithMuon(SmallTask):
    def build_model(self) -> nn.Module:
        return Matrices()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), lr=1e-2)


class WithAdafactor(GptTask):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("resumed", tried_each_time([False], [False, True]))
def test_muon_steps_on_whole_matrices_at_every_size_after_a_loss_and_when_it_is_resumed(resumed: bool) -> None:
    alone = fast(1, task=WithMuon(), steps=(2,), microbatches=2)
    steps = (1, 2) if resumed else (2,)
    assert_near(fast(2, kill(1, 2, "agree"), task=WithMuon(), steps=steps, microbatches=2), alone)


@pytest.mark.parametrize(
    ("workers", "reduction"), tried_each_time([(1, "fast")], [(1, "fast"), (2, "fast"), (1, "exact")])
)
def test_adafactor_is_refused_in_every_mode_because_of_what_it_keeps(workers: int, reduction: Any) -> None:
    with pytest.raises(InexactError, match=r"Adafactor keeps 'row_var' .* in the shape \(\d+, 1\): .*Muon, too"):
        train(workers, task=WithAdafactor(), engine=rs.EngineConfig(reduction=reduction), steps=1)


class ByColumn(torch.optim.SGD):
    """Squares, in place, a norm that is spread over the workers, for which torch's DTensors have no rule."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.div_(torch.norm(param.grad, dim=0, keepdim=True).square_() + 1.0)
        super().step()


class WithColumns(WithMuon):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ByColumn(model.parameters(), lr=1e-2)


def test_an_optimizer_that_fails_on_spread_parameters_is_distinguished_from_a_fault() -> None:
    with pytest.raises(TaskError, match="failed on parameters that are spread over the workers"):
        fast(2, task=WithColumns(), steps=(1,))
