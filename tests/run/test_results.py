"""The result of a run, finished or stopped: what it reached, and its best checkpoint."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import raysharded as rs
from raysharded.checkpoint import open_checkpoint, open_storage
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.run import ScoredCheckpoint
from raysharded.run.offline import StoredRun
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.faults import READY
from raysharded.testing.processes import ProcessLauncher, fit
from tests.cli.test_commands import succeed
from tests.training.harness import SmallTask, samples

WAIT_S = 120.0


def trainer(
    folder: Path, name: str, *, workers: int = 1, max_steps: int = 6, keep_best: bool = True
) -> rs.ElasticTrainer:
    """Evaluates and saves every two steps; the checkpoint with the largest loss of an evaluation, stays."""
    best = rs.CheckpointConfig(
        every_steps=2, keep_last=1, keep_best=("evaluation.loss", "max", 1) if keep_best else None
    )
    return rs.ElasticTrainer(
        task=SmallTask(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(name=name, storage_path=str(folder), max_steps=max_steps, checkpoint=best),
        evaluation=rs.EvalConfig(data=samples(), every_steps=2, num_samples=8),
    )


def evaluations(url: str) -> dict[int, float]:
    """Step -> the loss of its evaluation, for the steps with a checkpoint."""
    entries = list(read(open_storage(url)))
    saved = {entry["step"] for entry in entries if entry["kind"] == "checkpoint"}
    evaluated = {entry["step"]: entry["evaluation"] for entry in entries if entry.get("evaluation")}
    return {step: found["loss"] for step, found in evaluated.items() if step in saved}


@pytest.mark.procs
def test_a_result_names_the_best_checkpoint_which_is_still_there(tmp_path: Path) -> None:
    result = fit(trainer(tmp_path, "best"))
    expected = max(evaluations(result.url).items(), key=lambda one: one[1])
    best = result.best_checkpoint
    assert isinstance(best, ScoredCheckpoint)
    assert (best.step, best.metric, best.value) == (expected[0], "evaluation.loss", expected[1])
    assert best.step < result.steps == 6
    found = open_checkpoint(open_storage(best.url), "")
    assert (found.step, found.manifest.metadata["metrics"]["evaluation.loss"]) == (best.step, best.value)
    assert fit(trainer(tmp_path, "best")).best_checkpoint == best  # finished before
    assert StoredRun("best", result.url).wait(WAIT_S) == result
    status = json.loads(succeed("status", result.url, "--json"))["best_checkpoint"]
    assert status == {"step": best.step, "url": best.url, "metric": "evaluation.loss", "value": best.value}
    assert f"step {best.step}: evaluation.loss {best.value:.6g}" in succeed("status", result.url)


@pytest.mark.long
@pytest.mark.procs
def test_without_keep_best_no_checkpoint_is_the_best(tmp_path: Path) -> None:
    result = fit(trainer(tmp_path, "plain", max_steps=2, keep_best=False))
    assert result.best_checkpoint is None
    assert json.loads(succeed("status", result.url, "--json"))["best_checkpoint"] is None


@pytest.mark.procs
def test_a_stopped_run_has_the_result_of_its_newest_checkpoint(tmp_path: Path) -> None:
    whole = fit(trainer(tmp_path, "whole", max_steps=4))
    stopped = trainer(tmp_path, "stopped", max_steps=40)
    saved = Fault(worker=WorkerId(0), step=4, phase="data", kind="wait", until=WorkerId(98))  # or 4's is left out
    held = Fault(worker=WorkerId(0), step=6, phase="data", kind="wait", until=WorkerId(99))
    stopped.faults = FaultPlan(faults=(saved, held), folder=str(tmp_path))
    run = stopped.start_with(ProcessLauncher)
    for batch in run.follow():
        steps = [fields["step"] for _, kind, fields in batch if kind == "checkpoint"]
        if 2 in steps:
            (tmp_path / f"{READY}-worker98").touch()
        if 4 in steps:
            break
    run.stop()
    with pytest.raises(rs.RunStopped, match=r"Stopped\. Run 'stopped' was at step 5 of 40; the next fit") as caught:
        run.wait(WAIT_S)
    result = caught.value.result
    assert (result.steps, result.fingerprint) == (4, whole.fingerprint)
    assert (result.evaluation, result.loss, result.metrics) == (whole.evaluation, whole.loss, whole.metrics)
    assert open_checkpoint(open_storage(result.checkpoint), "").step == 4
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.step == whole.best_checkpoint.step  # type: ignore[union-attr]
    with pytest.raises(rs.RunStopped) as stored:
        StoredRun("stopped", run.url).wait(WAIT_S)
    assert stored.value.result == result
    again = pickle.loads(pickle.dumps(caught.value))  # as a driver actor sends it
    assert (str(again), again.result) == (str(caught.value), result)


@pytest.mark.procs
def test_a_run_that_is_stopped_before_its_first_checkpoint_has_an_empty_result(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, "early")
    held = Fault(worker=WorkerId(0), step=2, phase="data", kind="wait", until=WorkerId(99))
    stopped.faults = FaultPlan(faults=(held,), folder=str(tmp_path))
    run = stopped.start_with(ProcessLauncher)
    next(batch for batch in run.follow() if any(kind == "step" for _, kind, _ in batch))
    run.stop()
    for handle in (run, StoredRun("early", run.url)):
        with pytest.raises(rs.RunStopped) as caught:
            handle.wait(WAIT_S)
        found = caught.value.result
        assert (found.steps, found.fingerprint, found.checkpoint, found.best_checkpoint) == (0, "", "", None)
