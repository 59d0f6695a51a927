"""A real run with writers of metrics: their values are those of the journal, through a loss, a stop and a resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import ConfigError, RunFailed
from raysharded.ids import WorkerId
from raysharded.metrics import MetricsWriter, TensorBoard
from raysharded.report import load
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.metrics.test_tensorboard import losses, needs_tensorboard
from tests.metrics.writers import Failing, Kept
from tests.ray.leftovers import wait_until
from tests.training.harness import SmallTask, samples

WAIT_S = 240.0


class Waiting(SmallTask):
    """Applies step 7 once a stop was requested."""

    def __init__(self, stopped: Path) -> None:
        self._stopped = stopped

    def lr_scale(self, step: int) -> float:
        wait_until(lambda: step < 7 or self._stopped.exists(), "no stop was requested", WAIT_S)
        return super().lr_scale(step)


def trainer(folder: Path, metrics: Sequence[MetricsWriter]) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=Waiting(folder / "stopped"),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(2, 2)),
        run=rs.RunConfig(
            name="gpt",
            storage_path=str(folder / "runs"),
            max_steps=8,
            checkpoint=rs.CheckpointConfig(every_steps=3),
            metrics=metrics,
        ),
    )


@pytest.mark.slow
@pytest.mark.procs
def test_curves_continue_through_a_loss_and_a_resume_and_a_failing_writer_hurts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs_tensorboard()
    (tmp_path / "faults").mkdir()
    curves, kept, failing = TensorBoard(tmp_path / "curves"), Kept(), Failing()
    first = trainer(tmp_path, [failing, curves, kept])
    first.faults = FaultPlan(
        folder=str(tmp_path / "faults"), faults=(Fault(worker=WorkerId(1), step=2, phase="forward"),)
    )
    runs: list[rs.Run] = []
    made = threading.Event()

    def look(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step" and fields["step"] == 5 and made.wait(WAIT_S):
            runs[0].stop()
            (tmp_path / "stopped").touch()

    with caplog.at_level(logging.WARNING, "raysharded.metrics"):
        run = first.start_with(ProcessLauncher, look)
        runs.append(run)
        made.set()
        with pytest.raises(RunFailed, match="Stopped"):
            run.wait(WAIT_S)
    said = [record.getMessage() for record in caplog.records if record.name == "raysharded.metrics"]
    assert [text.split(" and")[0] for text in said] == ["metrics: Failing failed"]
    done = [step.step for step in kept.steps]
    [recovery] = [event for event in kept.events if event.kind == "recovery"]
    assert sorted(set(done)) == list(range(1, done[-1] + 1))
    assert len(done) - len(set(done)) == recovery.fields["steps_redone"] <= 1
    assert done[-1] >= 5
    assert kept.closed == 1

    result = trainer(tmp_path, [curves, kept]).start_with(ProcessLauncher).wait(WAIT_S)
    assert result.steps == 8
    assert [begun.after_step for begun in kept.beginnings] == [0, kept.beginnings[1].after_step]
    after_step = kept.beginnings[1].after_step
    assert after_step % 3 == 0, "a checkpoint's"
    assert [step.step for step in kept.steps[len(done) :]] == list(range(after_step + 1, 9))
    assert kept.closed == 2
    report = load(result.url)
    assert losses(tmp_path / "curves") == pytest.approx(
        {step.step: step.loss for step in report.summary.steps}, rel=1e-6
    )


@pytest.mark.parametrize("metrics", [Kept(), [Kept], [print], "tensorboard"], ids=["bare", "class", "function", "name"])
def test_what_is_no_writer_is_refused(tmp_path: Path, metrics: Any) -> None:
    with pytest.raises(ConfigError, match="begin, step, event, close"):
        trainer(tmp_path, metrics)
