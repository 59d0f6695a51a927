"""Hugging Face's `Trainer` in a session: the bits of one worker after losses, and losses of the plain Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.adapters.plain import losses_of, plain_trainer
from tests.adapters.programs import (
    STEPS,
    Script,
    by_one_worker,
    causal_lm,
    classifier,
    run,
    sentences,
    texts,
    with_lora,
)
from tests.cases import tried_each_time

pytestmark = pytest.mark.procs


def accuracy(found: Any) -> dict[str, float]:
    assert len(found.predictions) == len(found.label_ids) == 7
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def with_metrics() -> dict[str, Any]:
    return {"eval_dataset": sentences(7, first=100), "compute_metrics": accuracy}


def held_out() -> dict[str, Any]:
    return {"eval_dataset": texts(5, first=100)}


LOSSES = [
    [(1, 2, "forward"), (2, 3, "agree"), (3, 5, "snapshot")],
    [(1, 2, "backward"), (2, 4, "apply"), (3, STEPS, "snapshot")],
    [(1, 2, "agree"), (2, 1, "transfer")],  # a second loss while the state of the first one's is sent
    [(2, 1, "form")],
    [(1, 3, "data"), (2, 3, "save")],
]


@pytest.mark.long
@pytest.mark.parametrize("kills", LOSSES, ids=lambda kills: "-".join(k[2] for k in kills))
def test_losses_in_every_phase_change_no_bit(kills: list[tuple[int, int, str]]) -> None:
    workers = 1 + max(worker for worker, _, _ in kills)
    assert run(max(2, workers), Script(), kills=kills, save_every=3).bits == by_one_worker().bits


KINDS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "language model": (partial(causal_lm, 0.0), texts(), dict, {"label_smoothing_factor": 0.1}),
    "classifier with metrics": (
        partial(classifier, 0.0),
        sentences(),
        with_metrics,
        {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3},
    ),
    "adapter of low rank": (partial(with_lora, 0.0), texts(), dict, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("kind", tried_each_time(["classifier with metrics", "adapter of low rank"], KINDS))
def test_losses_are_those_of_the_plain_trainer_and_bits_those_of_one_worker(tmp_path: Path, kind: str) -> None:
    make, data, given, changed = KINDS[kind]
    plain = plain_trainer(str(tmp_path), make, data, given(), **changed)
    script = Script(make, data, given=given, **changed)
    last = STEPS if kind == "language model" else 3
    found = run(2, script, data, kills=[(1, last, "apply")])
    assert found.losses == pytest.approx(losses_of(plain), abs=1e-5)
    assert found.bits == run(1, script, data).bits
    evaluations = [line for line in plain.state.log_history if "eval_loss" in line]
    for line in evaluations:
        metrics = found.numbers[line["step"] - 1]["metrics"]
        assert metrics["eval_loss"] == pytest.approx(line["eval_loss"], abs=1e-5)
        assert metrics["eval_accuracy"] == line["eval_accuracy"]
    assert bool(evaluations) == (kind == "classifier with metrics")


def test_an_evaluation_changes_nothing_in_the_steps_behind_it() -> None:
    script = Script(given=held_out, eval_strategy="steps", eval_steps=2)
    found = run(1, script)
    assert found.losses == by_one_worker().losses
    assert found.fingerprint == by_one_worker().fingerprint
