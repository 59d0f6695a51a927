"""A run continues with the kind that it began with: a loop with a loop, a task with a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import CheckpointError
from raysharded.task import TrainFunction
from tests.session.loops import MICROBATCHES, Loop
from tests.training.harness import Collector, GptTask, make_driver, make_job, make_limits
from tests.training.test_start_from import fitted, trainer

pytestmark = pytest.mark.procs


def begun_and_continued(url: str, *parts: tuple[rs.Task, int]) -> Mapping[int, Mapping[str, Any]]:
    """The numbers by step of a run that is started with each task in turn, up to a step."""
    listener = Collector()
    for task, steps in parts:
        job = make_job(url, task=task, microbatches=MICROBATCHES, steps=steps)
        driver = make_driver(job, make_limits(job, 1), listener)
        driver.restore()
        driver.run()
    return listener.numbers


def test_a_loops_run_is_not_continued_by_a_task(tmp_path: Path) -> None:
    loop = TrainFunction(Loop())
    with pytest.raises(
        CheckpointError, match=r"step 1 was trained by a loop, .* Continue with that loop \(train_fn=\)"
    ):
        begun_and_continued(f"{tmp_path}/run", (loop, 1), (GptTask(), 2))
    assert begun_and_continued(f"{tmp_path}/run", (loop, 2)).keys() == {2}


def test_a_tasks_run_is_not_continued_by_a_loop(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 1 has no state of a session: it was trained with a Task"):
        begun_and_continued(f"{tmp_path}/run", (GptTask(), 1), (TrainFunction(Loop()), 2))


def test_a_task_begins_with_the_weights_of_a_loops_run(tmp_path: Path) -> None:
    begun_and_continued(f"{tmp_path}/loop", (TrainFunction(Loop()), 2))
    assert fitted(trainer(tmp_path, "task", 1, tmp_path / "loop")).steps > 0
