"""Features of torch that a run cannot have are refused by name, in real processes.

Autocast trains with equal bits: `tests/session/test_behind_a_step.py`, and `idiom_autocast` of `tests/corpus`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import raysharded as rs
from raysharded.errors import TaskError
from tests.training.harness import SmallTask, train

pytestmark = pytest.mark.procs


class Scaled(SmallTask):
    """Scales its loss, as a loop with float16 does."""

    def __init__(self, scaler: type[torch.amp.GradScaler], *, enabled: bool = True) -> None:
        super().__init__()
        self._scaler, self._enabled = scaler, enabled

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        found = super().loss(model, batch)
        assert isinstance(found, rs.Loss)
        return replace(found, total=self._scaler("cpu", enabled=self._enabled).scale(found.total))


class Graphed(SmallTask):
    """Records its kernels, as `torch.cuda.make_graphed_callables` and torch.compile's `reduce-overhead` do."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        torch.cuda.CUDAGraph()
        return super().loss(model, batch)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_scaler_in_a_task_is_refused_by_name_with_its_line(scaler: type[torch.amp.GradScaler]) -> None:
    with pytest.raises(TaskError, match=r"test_unsupported_features.py:\d+: a GradScaler .*Leave it out: bfloat16"):
        train(1, task=Scaled(scaler), steps=1, microbatches=1)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    plain = train(1, task=SmallTask(), steps=1, microbatches=1)
    assert train(1, task=Scaled(torch.amp.GradScaler, enabled=False), steps=1, microbatches=1).bits == plain.bits


def test_a_graph_of_kernels_is_refused_by_name_with_its_line() -> None:
    with pytest.raises(TaskError, match=r"test_unsupported_features.py:\d+: CUDA graphs have fixed addresses"):
        train(1, task=Graphed(), steps=1, microbatches=1)
