"""The input of a separate driver: the run's specification."""

from __future__ import annotations

from pathlib import Path

import ray

from raysharded.run.hosted.submission import RunSubmission, absolute, spec_of
from tests.preflight.tasks import trainer_of
from tests.training.harness import GptTask


def test_an_order_gives_the_specification_that_it_was_made_of(tmp_path: Path) -> None:
    trainer = trainer_of(GptTask(), str(tmp_path))
    spec = absolute(trainer.spec())
    order = RunSubmission(
        name="a",
        url=spec.url,
        max_steps=spec.run.max_steps,
        spec=ray.cloudpickle.dumps(spec),
        identity="",
        folder="/",
        environment={},
        key_id="",
        take_over=False,
        since=0.0,
    )
    again = spec_of(order)
    assert (again.settings(), again.url, again.run) == (spec.settings(), spec.url, spec.run)
    assert type(again.task) is GptTask
