"""Values of buffers and of other tensors that a loop writes between `session.build` and `session.shard`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysharded.actors.model.construction import construct
from raysharded.actors.session.built_model import BuiltModel
from raysharded.actors.session.session_task import SessionTask
from raysharded.errors import TaskError


class Net(nn.Module):
    """A model with all kinds of tensors that are no parameters."""

    mean: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.full((2,), torch.nan), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
        self.scale, self.noise = torch.ones(2), torch.rand(4)
        self.held = {"low": [torch.zeros(2)], "array": np.zeros(2)}
        self.tau = 1.0


def built() -> BuiltModel:
    task = SessionTask(lambda _: None, 3)
    task.make = Net
    return BuiltModel(construct(task, 0))


CHANGES: list[tuple[str, Callable[[Any], object]]] = [
    ("mean", lambda model: model.mean.copy_(torch.tensor([3.0, 4.0]))),
    ("mean", lambda model: setattr(model, "mean", torch.ones(2))),
    ("mean", lambda model: model.mean.data.add_(1)),
    ("mean", lambda model: model.load_state_dict({"mean": torch.ones(2)}, strict=False)),
    ("table", lambda model: model.table.fill_(7.0)),
    ("mask", lambda model: model.mask.logical_not_()),
    ("spectrum", lambda model: model.spectrum.add_(1j)),
    ("scale", lambda model: model.scale.mul_(5)),
    ("scale", lambda model: setattr(model, "scale", model.scale.double())),
    ("held['low'][0]", lambda model: model.held["low"][0].add_(1)),
    ("held['array']", lambda model: model.held["array"].fill(1)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_values_that_would_be_lost_are_refused(name: str, change: Callable[[Any], object]) -> None:
    model = built()
    change(model.model)
    sentence = (
        rf"test_values_before_shard\.py:\d+: values of {re.escape(repr(name))}, a buffer or a tensor of the model, "
    )
    with pytest.raises(TaskError, match=sentence + r".*Do it in the function that session\.build calls"):
        model.end()


def sets_a_number(model: Any) -> None:
    model.tau = 0.5


def writes_the_same(model: Any) -> None:
    model.mean.zero_()
    model.scale = torch.ones(2)


def adds(model: Any) -> None:
    """A worker that joins calls the function, too."""
    model.register_buffer("other", torch.ones(2))
    model.extra = torch.ones(3)
    model.register_forward_pre_hook(lambda *_: None)


def changes_settings(model: Any) -> None:
    model.eval()
    model.linear.requires_grad_(False)


@pytest.mark.parametrize("change", [lambda _: None, sets_a_number, writes_the_same, adds, changes_settings])
def test_what_is_not_lost_is_not_refused(change: Callable[[Any], None]) -> None:
    model = built()
    change(model.model)
    model.end()
