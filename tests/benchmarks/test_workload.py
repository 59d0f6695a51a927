"""The peers' plain workload is ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import model
from benchmarks.workload import BATCH, SHAPES, RandomBytes, task, trainer, write_order
from raysharded.actors.model.init_weights import first_build
from raysharded.actors.model.param_layout import MODEL
from raysharded.testing.processes import ProcessLauncher

STEPS = 2


def test_first_weights_samples_and_learning_rates_are_ours(tmp_path: Path) -> None:
    theirs = dict(model.build_model().named_parameters())
    [ours] = first_build(task(), BATCH.seed).tensors()
    assert {MODEL + name for name in theirs} == {name for name in ours if name.startswith(MODEL)}
    assert all(torch.equal(tensor, ours[MODEL + name]) for name, tensor in theirs.items())
    assert np.array_equal(model.sample(1234), RandomBytes()[1234])
    assert all(model.learning_rate(s) == model.LEARNING_RATE * task().lr_scale(s) for s in (1, 9, 10, 500, 2000))
    write_order(tmp_path / "order.npy", STEPS)
    samples = model.Samples(tmp_path / "order.npy")
    read = [one for step in (1, 2) for microbatch in range(8) for one in samples.ids(step, microbatch)]
    assert len(set(read)) == STEPS * BATCH.global_batch_size
    with pytest.raises(IndexError, match="step 3 is beyond"):
        samples.ids(3, 0)


@pytest.mark.procs
def test_its_loss_curve_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", {"layers": 2, "width": 32, "heads": 2})
    ours: dict[int, float] = {}

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            ours[fields["step"]] = fields["loss"]

    trainer("ours", 1, str(tmp_path), steps=STEPS, parameters="tiny").start_with(ProcessLauncher, listen).wait()
    write_order(tmp_path / "order.npy", STEPS)
    plain, samples = model.build_model(**SHAPES["tiny"]), model.Samples(tmp_path / "order.npy")
    optimizer = model.build_optimizer(plain)
    for step in range(1, STEPS + 1):
        done = model.compute(plain, samples, step, list(range(8)), scale=1 / model.NUM_MICROBATCHES)
        model.update(plain, optimizer, step)
        assert math.isclose(done.loss, ours[step], rel_tol=1e-6), f"step {step}"
