"""The engine checks that the optimizer writes to the memory that is gathered; the runs of other tests pass it, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import raysharded as rs
from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.guards.shard_memory import check_memory
from raysharded.actors.model.build import build_sharded
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.errors import InexactError
from raysharded.task import Strategy
from tests.actors.fake_group import alone, fake_axes, fake_mesh
from tests.cases import tried_each_time
from tests.training.harness import SEQUENCE, GptTask, TwoBlocksTask, train
from tests.training.llama import LlamaTask
from tests.training.older_torch import PadsAgain

CPU = torch.device("cpu")


@pytest.mark.procs
@pytest.mark.parametrize("reduction", tried_each_time(["exact"], ["exact", "fast"]))
def test_a_torch_that_gathers_other_memory_is_an_error_before_a_weight_is_wrong(reduction: Any) -> None:
    with pytest.raises(InexactError) as raised:
        train(2, task=PadsAgain(), steps=1, microbatches=2, engine=rs.EngineConfig(reduction=reduction))
    told = str(raised.value)
    assert f"torch {torch.__version__} gathers other memory than the optimizer writes to, of " in told
    assert "first 'embedding.weight'" in told  # 67 rows
    assert "raysharded was tested with torch 2.13 to 2.15: install one of these" in told
    assert "`raysharded doctor --self-test`" in told


class Mixed(TwoBlocksTask):
    """A unit that every worker has whole, and cut ones; tied weights, parameters of fewer rows than workers, and a
    frozen one."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_submodule("norm").requires_grad_(False)
        return model

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return "replicate" if name == "blocks.1" else None


@contextmanager
def axes_of(shards: int, degree: int, rank: int) -> Iterator[DeviceMeshes]:
    if degree > 1:
        with fake_axes(shards, degree, rank) as both:
            yield both
    else:
        with fake_mesh(shards, rank) as mesh:
            yield DeviceMeshes(data=mesh, alone=alone)


@contextmanager
def after_a_forward(
    task: rs.Task, shards: int, degree: int, rank: int, **engine: Any
) -> Iterator[tuple[ShardedModel, ShardOptimizer]]:
    """One rank of many, on fake groups: FSDP2's layout and buffers are real, numbers are not exchanged."""
    config = rs.EngineConfig(**engine)
    with axes_of(shards, degree, rank) as axes:
        sharded = build_sharded(task, config, axes, CPU)
        optimizer = ShardOptimizer(task, sharded.model, sharded.parameters, exact=True, cuts=sharded.cuts)
        for param in sharded.parameters.values():
            local_of(param).zero_()
        task.loss(sharded.model, torch.zeros(1, SEQUENCE + 1, dtype=torch.int64))
        yield sharded, optimizer


@pytest.mark.parametrize(
    ("task", "shards", "degree", "rank", "engine"),
    [
        (Mixed(), 1, 1, 0, {}),
        (Mixed(), 2, 1, 1, {"param_dtype": "bfloat16"}),
        (Mixed(), 5, 1, 4, {"activation_checkpointing": True, "reshard_after_forward": False}),
        (LlamaTask(), 2, 2, 3, {}),
        (LlamaTask(), 1, 3, 1, {}),
    ],
    ids=["alone", "of two", "without rows of some", "two by two", "tensor parallel alone"],
)
def test_every_parameter_is_inspected_however_it_lies(
    task: rs.Task, shards: int, degree: int, rank: int, engine: dict[str, Any]
) -> None:
    with after_a_forward(task, shards, degree, rank, **engine) as (sharded, optimizer):
        check_memory(sharded, optimizer.written)
        here = {name: param for name, param in sharded.parameters.items() if local_of(param).numel()}
        assert len(here) > len(sharded.parameters) // 2
        for name, param in here.items():
            with pytest.raises(InexactError, match=rf"of 1 of {len(sharded.parameters)} parameters, first '{name}'"):
                check_memory(sharded, {**optimizer.written, name: local_of(param).clone()})


def test_a_torch_that_keeps_shards_under_other_names_is_reported_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with after_a_forward(GptTask(), 2, 1, 0) as (sharded, optimizer):
        monkeypatch.setattr(FSDPModule, "_get_fsdp_state", lambda _: object())
        with caplog.at_level(logging.WARNING, "raysharded.worker"):
            check_memory(sharded, optimizer.written)
    assert "run `raysharded doctor --self-test`" in caplog.text
