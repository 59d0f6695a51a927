"""What a driver of its own is given: the run's specification, also by an order that an older raysharded made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ray

from raysharded.run.hosted.submission import RunSubmission, absolute, spec_of
from tests.engine.harness import GptTask
from tests.preflight.tasks import trainer_of


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
        take_over=False,
        since=0.0,
    )
    again, older = spec_of(order), spec_of(replace(order, spec=ray.cloudpickle.dumps(trainer)))
    assert (again.settings(), again.url, again.run) == (spec.settings(), spec.url, spec.run)
    assert (older.settings(), older.url) == (trainer.spec().settings(), trainer.url)
    assert type(again.task) is type(older.task) is GptTask
