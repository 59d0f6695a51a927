"""Attributes of a loop's model that steps change: a remark if the loss depends on one, which is in no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from tests.cases import tried_each_time
from tests.session.loops import Average, Loop, run
from tests.training.harness import Gpt, Outcome

pytestmark = pytest.mark.procs
STEPS = 3


class Tempered(Gpt):
    """Its logits have a temperature; it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.length, self.calls, self.seen = 1.0, 0, 0, 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + 0.5
        return super().forward(tokens) * self.tau


class Sets(Loop):
    """Changes the model at one of the loop's places."""

    def __init__(self, place: str) -> None:
        super().__init__(Tempered)
        self._place, self._model = place, nn.Module()

    def built(self, model: nn.Module) -> None:
        self._model = model

    def entered(self, session: Session, step: UserStep) -> None:
        model: Any = self._model
        if self._place == "ahead":
            model.tau = 0.97**step.number
        if self._place == "length":
            model.length = step.number // 2

    def tokens_of(self, step: UserStep, batch: Any) -> torch.Tensor:
        model: Any = self._model
        if self._place == "body":
            model.tau = 0.97**step.number
        if self._place == "length" and model.length != step.number // 2:
            raise ValueError("another length")
        return batch  # type: ignore[no-any-return]

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        model: Any = self._model
        if self._place == "decays":
            model.tau *= 0.97
        if self._place == "dropout":
            next(one for one in model.modules() if isinstance(one, nn.Dropout)).p *= 0.9


def remarks(outcome: Outcome) -> list[str]:
    said = [text for fields in outcome.of("step") for text in fields.get("remarks", ())]
    return [text for text in said if "changed since the model was built" in text]


@pytest.mark.parametrize(
    ("place", "name", "workers"),
    tried_each_time([("dropout", ".p", 2)], [("decays", r"model.tau", 1), ("dropout", ".p", 2)]),
)
def test_a_loss_that_depends_on_a_changed_attribute_is_remarked_once(place: str, name: str, workers: int) -> None:
    (sentence,) = remarks(run(workers, Sets(place), steps=STEPS))
    assert f"{name}, changed since" in sentence
    assert "sets it from step.number in each step" in sentence


@pytest.mark.parametrize("place", tried_each_time(["length"], ["body", "length", "nowhere"]))
def test_what_does_not_depend_on_earlier_steps_gets_no_remark(place: str) -> None:
    """A length is not tried as it was built, since the loop would fail. Counts of forwards make no difference."""
    assert remarks(run(1, Sets(place), steps=STEPS)) == []


def test_an_attribute_that_is_set_from_the_steps_number_has_the_same_bits_after_a_loss_and_without_the_proof() -> None:
    alone = run(1, Sets("ahead"), steps=STEPS)
    assert len(remarks(alone)) == 1
    assert run(2, Sets("ahead"), steps=STEPS, kills=[(1, 2, "forward")]).bits == alone.bits
    unproven = run(1, Sets("ahead"), steps=STEPS, engine=rs.EngineConfig(prove_first_step=False))
    assert unproven.bits == alone.bits
    assert remarks(unproven) == []
