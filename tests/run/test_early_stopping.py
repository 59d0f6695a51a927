"""Early stopping as running.md shows it: at which step it ends, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher, fit
from tests.docs.blocks import blocks, page
from tests.training.harness import SmallTask, samples


class Overfitting(SmallTask):
    """A task whose evaluation gets worse with every step."""

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        found = self.loss(model, batch)
        assert isinstance(found, rs.Loss)
        return rs.Loss(-found.total, found.weight)


def trainer(folder: Path, name: str, workers: int, max_steps: int) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=Overfitting(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(
            name=name,
            storage_path=str(folder),
            max_steps=max_steps,
            checkpoint=rs.CheckpointConfig(every_steps=2, keep_best=("evaluation.loss", "min", 1)),
        ),
        evaluation=rs.EvalConfig(data=samples(), every_steps=2, num_samples=8),
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """The functions of the guide; runs take plain processes for workers."""
    monkeypatch.setattr(rs.ElasticTrainer, "fit", fit)
    monkeypatch.setattr(rs.ElasticTrainer, "start", lambda trainer: trainer.start_with(ProcessLauncher))
    names: dict[str, Any] = {}
    for block in blocks(page("running.md"), "python"):
        if "patience" in block:
            exec(compile(block, "running.md", "exec"), names)  # noqa: S102 - our own documentation
    return names


@pytest.mark.procs
def test_a_rule_over_evaluations_ends_a_run_of_any_size_at_the_same_step_with_the_same_bits(
    tmp_path: Path, shown: dict[str, Callable[..., Any]]
) -> None:
    one = trainer(tmp_path, "one", workers=1, max_steps=40)
    two = trainer(tmp_path, "two", workers=2, max_steps=40)
    kill = Fault(worker=WorkerId(1), step=3, phase="backward", kind="kill")
    two.faults = FaultPlan(faults=(kill,), folder=str(tmp_path))
    found = [shown["fit_with_patience"](made, 2) for made in (one, two)]
    assert two.faults.fired(kill)
    assert [result.steps for result in found] == [6, 6]  # the evaluations of steps 4 and 6 were worse than that of 2
    assert found[0].fingerprint == found[1].fingerprint
    assert [result.best_checkpoint and result.best_checkpoint.step for result in found] == [2, 2]


@pytest.mark.procs
@pytest.mark.long  # the code of the guide alone, and resumption
def test_a_script_that_is_started_again_ends_at_once_or_continues_with_a_greater_patience(
    tmp_path: Path, shown: dict[str, Callable[..., Any]]
) -> None:
    found = shown["fit_with_patience"](trainer(tmp_path, "again", workers=1, max_steps=40), 2)
    assert found.steps == 6
    assert shown["fit_with_patience"](trainer(tmp_path, "again", workers=1, max_steps=40), 2) == found
    further = shown["fit_with_patience"](trainer(tmp_path, "again", workers=1, max_steps=7), 5)
    assert further.steps == 7  # a greater patience continues, to the last step


@pytest.mark.long
@pytest.mark.procs
def test_a_run_that_is_stopped_has_its_result_and_its_best_checkpoint(
    tmp_path: Path, shown: dict[str, Callable[..., Any]]
) -> None:
    result = shown["start_with_patience"](trainer(tmp_path, "stopped", workers=1, max_steps=100_000), 2)
    assert 6 <= result.steps < 100_000
    newest = [ref for ref in list_checkpoints(open_storage(result.url)) if ref.complete][-1]
    assert (newest.step, result.checkpoint.endswith(newest.prefix)) == (result.steps, True)
    assert len(result.fingerprint) == 32
    assert result.evaluation["loss"] < 0
    assert result.best_checkpoint is not None
