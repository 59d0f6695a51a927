"""The report of one process on a model that it built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import TaskError
from raysharded.preflight.builds import build_of, difference
from tests.forked import in_a_fork
from tests.training.harness import GptTask
from tests.training.llama import LlamaTask

pytestmark = pytest.mark.procs


class Draws(GptTask):
    """Keeps a table that torch's generator draws, and one that a generator without a seed does."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        vars(model)["table"] = torch.randn(3)
        generator = torch.Generator()
        generator.seed()
        vars(model)["unseeded"] = torch.rand(3, generator=generator)
        return model


class Exits(GptTask):
    """Its constructor ends the process."""

    def build_model(self) -> nn.Module:
        raise SystemExit(3)


def test_what_a_constructor_draws_is_named_and_no_difference() -> None:
    builds = [in_a_fork(build_of, Draws(), rs.EngineConfig(), 1, 5) for _ in range(2)]
    assert builds[0].drawn == ("table", "unseeded")
    assert builds[0].summary.endswith("; the constructor draws 'table' and 1 more, which travels with the state")
    assert difference("Draws", builds) == ""


def test_another_constant_that_nobody_draws_is_a_difference() -> None:
    builds = [in_a_fork(build_of, Of(value), rs.EngineConfig(), 1, 5) for value in (1.0, 2.0)]
    found = difference("Of", builds)
    assert "one process has constant 'own' (float32 [1], values " in found
    assert found.endswith(
        "Look for what differs between processes: a generator without a seed, a clock, a file, the environment."
    )


class Of(GptTask):
    """Keeps a constant."""

    def __init__(self, value: float) -> None:
        self.value = value

    def build_model(self) -> nn.Module:
        model = super().build_model()
        vars(model)["own"] = torch.tensor([self.value])
        return model


def test_a_task_with_tensor_parallelism_is_built_whole() -> None:
    assert in_a_fork(build_of, LlamaTask(), rs.EngineConfig(), 1, 5).kinds.count("parameter") == 21


def test_a_constructor_that_ends_the_process_is_named() -> None:
    with pytest.raises(TaskError, match=r"^Exits\.build_model raised SystemExit: 3$"):
        in_a_fork(build_of, Exits(), rs.EngineConfig(), 1, 5)
