"""Views of parameters that a loop keeps over a change of the workers: they are of memory that nobody trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.actors.optimizer.held_parameters import FormerMemory
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from tests.cases import tried_each_time
from tests.session.loops import Average, Loop, run
from tests.session.test_replaced_objects import Acting, updates
from tests.training.harness import Outcome


class Keeping(Loop):
    """Keeps something of the parameters: from the first step on, or anew in each step."""

    def __init__(self, take: Callable[[nn.Parameter], Any], *, anew: bool = False) -> None:
        super().__init__()
        self._take, self._anew = take, anew
        self._kept: list[Any] = []

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None:
        if self._anew or not self._kept:
            self._kept = [self._take(param) for param in model.parameters()]

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        if torch.is_tensor(self._kept[0]) and not isinstance(self._kept[0], nn.Parameter):
            with torch.no_grad():
                for one in self._kept:
                    one.clamp_(-3, 3)


def local(param: nn.Parameter) -> Any:
    return param.to_local().detach()  # type: ignore[attr-defined]


def detached(param: nn.Parameter) -> Any:
    return param.detach()


def itself(param: nn.Parameter) -> Any:
    return param


def copied(param: nn.Parameter) -> Any:
    return param.detach().clone()


def remarks(outcome: Outcome) -> list[str]:
    said = [text for fields in outcome.of("step") for text in fields.get("remarks", ())]
    return [text for text in said if "the loop keeps a view of" in text]


@pytest.mark.procs
@pytest.mark.parametrize("take", tried_each_time([detached], [local, detached]))
def test_views_that_are_kept_over_a_change_of_the_workers_are_remarked_once(take: Any) -> None:
    (sentence,) = remarks(run(2, Keeping(take), kills=[(1, 2, "forward")], steps=4))
    assert "a view of 'embedding.weight', such as" in sentence
    assert "take it from model.parameters() in each step" in sentence


@pytest.mark.procs
@pytest.mark.parametrize(
    "loop",
    [
        Keeping(detached, anew=True),
        pytest.param(Keeping(itself), marks=pytest.mark.long),
        pytest.param(Keeping(copied), marks=pytest.mark.long),
        pytest.param(Acting(updates), marks=pytest.mark.long),
        pytest.param(Loop(), marks=pytest.mark.long),
    ],
    ids=["anew", "parameters", "copies", "average", "nothing"],
)
@pytest.mark.parametrize(
    ("workers", "kills"),
    tried_each_time(
        [(2, [(1, 2, "backward")])],
        [(2, [(1, 2, "backward")]), *((3, [(1, 2, phase), (2, 4, "snapshot")]) for phase in ("backward", "apply"))],
    ),
)
def test_loops_that_keep_no_view_get_no_remark(loop: Any, workers: int, kills: list[tuple[int, int, str]]) -> None:
    outcome = run(workers, loop, kills=kills, steps=6 if workers == 3 else 4)
    assert remarks(outcome) == []


def test_views_are_found_in_the_second_step_and_once() -> None:
    def memory(parameters: Mapping[str, nn.Parameter]) -> FormerMemory:
        found = FormerMemory()
        found.note(parameters)
        return found

    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    view, found = other.detach(), memory({"one": one, "other": other})
    del one, other
    assert [found.end_step(list) for _ in range(3)] == ["", "other", ""]
    assert [memory({}).end_step(list) for _ in range(2)] == ["", ""]
    found = memory({"other": nn.Parameter(view)})
    found.end_step(list)
    found.note({"next": nn.Parameter(torch.ones(2))})
    assert [found.end_step(list) for _ in range(2)] == ["", "other"], "of a generation of one step, too"
    kept = nn.Parameter(torch.ones(2))
    both, found = kept.detach(), memory({"kept": kept})
    assert [found.end_step(list) for _ in range(2)] == ["", ""], "a parameter that is kept itself is refused at its use"
    found = memory({"kept": kept})
    del kept
    assert [found.end_step(lambda: [both]) for _ in range(2)] == ["", ""], "the memory is used again"
    assert view.sum() == both.sum()
