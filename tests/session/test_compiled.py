"""Compiled blocks, recomputation, fast mode and forwards of the user's own, in a session that loses a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from tests.session.loops import MICROBATCHES, Loop, by_task, run
from tests.session.test_objects import Counting
from tests.training.harness import SEQUENCE, train

pytestmark = pytest.mark.procs
STEPS = 4


@pytest.mark.long  # both are tried with tasks, and a loop's objects without them, each time
@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"reshard_after_forward": False}], ids=str)
def test_settings_of_the_engine_change_no_bit_and_a_loss_none_of_the_objects(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    engine = rs.EngineConfig(**settings)  # type: ignore[arg-type]
    counting = Counting(tmp_path, calls=2 if engine.activation_checkpointing else 1)
    assert run(2, counting, engine=engine, kills=[(1, 2, "backward")], steps=STEPS).bits == by_task(STEPS).bits
    assert set((tmp_path / "older").read_text().split()) == {"0"}
    assert set((tmp_path / "calls").read_text().split()) == {"0"}


@pytest.mark.long  # compiles
def test_compiled_blocks_stay_the_same_after_a_loss_and_compute_the_bits_of_a_task(tmp_path: Path) -> None:
    engine = rs.EngineConfig(compile=True)
    of_task = train(1, microbatches=MICROBATCHES, steps=STEPS, engine=engine)
    outcome = run(2, Counting(tmp_path), engine=engine, kills=[(1, 2, "backward")], steps=STEPS)
    assert outcome.bits == of_task.bits
    assert set((tmp_path / "older").read_text().split()) == {"0"}


class Sampling(Loop):
    """Computes with the model in eval mode, behind the optimizer's step."""

    def built(self, model: nn.Module) -> None:
        self._model = model

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
        self._model.eval()
        with torch.no_grad():
            for _number in range(3):
                found = self._model(tokens)[:, -1:].argmax(-1)
                tokens = torch.cat([tokens[:, 1:], found], 1)
        self._model.train()
        session.log(token=int(tokens[0, -1]))


@pytest.mark.long  # `test_lost_changes.py` has one there
def test_a_forward_of_ones_own_behind_the_optimizers_step_changes_no_bit() -> None:
    outcome = run(2, Sampling(), kills=[(1, 3, "forward")], steps=STEPS)
    assert outcome.fingerprint == by_task(STEPS).fingerprint
    assert all("token" in numbers["metrics"] for numbers in outcome.numbers)
