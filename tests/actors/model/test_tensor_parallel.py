"""Tensor parallelism inside FSDP2: what the task's plan cuts, and plans that do not fit the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import raysharded as rs
from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.model.build import build_sharded
from raysharded.actors.model.param_layout import ParamLayout, Replication
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.actors.shards.device_state import state_spec
from raysharded.errors import ConfigError
from raysharded.layout import shard_map
from tests.actors.fake_group import alone, fake_axes, fake_mesh
from tests.training.harness import GptTask
from tests.training.llama import LlamaTask


def build(task: rs.Task, shards: int, degree: int, rank: int = 0, **engine: Any) -> ShardedModel:
    with fake_axes(shards, degree, rank) as axes:
        return build_sharded(task, rs.EngineConfig(**engine), axes, torch.device("cpu"))


class Planned(GptTask):
    """The GPT of the harness with a given plan."""

    def __init__(self, plan: Mapping[str, ParallelStyle]) -> None:
        self._plan = plan

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        return self._plan


@pytest.mark.parametrize(("shards", "degree"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize("engine", [{}, {"activation_checkpointing": True}])
def test_every_worker_has_the_parts_of_the_weights_that_its_pieces_name(
    shards: int, degree: int, engine: dict[str, Any]
) -> None:
    for rank in range(shards * degree):
        sharded = build(LlamaTask(), shards, degree, rank, **engine)
        assert sharded.cuts.degree == degree
        tensors = {f"model.{name}": ("float32", tuple(param.shape)) for name, param in sharded.parameters.items()}
        spec = state_spec(tensors, sharded.cuts)
        held: dict[str, int] = dict.fromkeys(tensors, 0)
        for piece in shard_map(spec, shards * degree, rank, degree).pieces(spec):
            strips = piece.tensor.strips // degree or 1
            local = local_of(sharded.parameters[piece.tensor.name.removeprefix("model.")])
            expected = list(piece.sizes)
            if strips > 1:
                assert piece.tensor.tensor_dim is not None
                expected[piece.tensor.tensor_dim] *= strips
            assert list(local.shape) == expected
            held[piece.tensor.name] += int(torch.Size(piece.sizes).numel())
        assert held == {f"model.{name}": local_of(param).numel() for name, param in sharded.parameters.items()}


def test_what_would_be_cut_is_known_without_tensor_parallelism_too() -> None:
    with fake_mesh(2) as mesh:
        axes = DeviceMeshes(data=mesh, alone=alone)
        whole = build_sharded(LlamaTask(), rs.EngineConfig(), axes, torch.device("cpu"))
    assert (whole.cuts.degree, whole.cuts.tensor_dims) == (1, build(LlamaTask(), 1, 2).cuts.tensor_dims)
    assert whole.cuts.tensor_dims["blocks.0.o.weight"] == 1
    assert whole.cuts.tensor_dims["blocks.0.q.weight"] == 0
    assert "blocks.0.mlp_norm.weight" not in whole.cuts.tensor_dims


def test_who_has_the_same_part_of_a_parameter() -> None:
    cuts = ParamLayout(degree=2, tensor_dims={"up": 0}, replicated=frozenset({"gate"}))
    assert [cuts.holders(name) for name in ("up", "norm", "gate")] == [
        Replication.ONE,
        Replication.TENSOR_GROUP,
        Replication.EVERYONE,
    ]
    assert ParamLayout(tensor_dims={"up": 0}).holders("norm") is Replication.ONE


def test_a_task_may_apply_the_styles_itself() -> None:
    class Applies(LlamaTask):
        def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle] | None:  # type: ignore[override]  # wider than the example's
            parallelize_module(model, mesh, dict(LlamaTask.parallelize(self, model, mesh)))
            return None

    assert build(Applies(), 2, 2).cuts == build(LlamaTask(), 2, 2).cuts


# -- plans that do not fit --


def test_a_plan_that_names_a_missing_module_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Planned.parallelize names the module 'gone', which the model does not have"
    ):
        build(Planned({"blocks.*.up": ColwiseParallel(), "blocks.*.gone": ColwiseParallel()}), 1, 2)


def test_a_task_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree is 2, but GptTask has no parallelize"):
        build(GptTask(), 1, 2)


def test_a_plan_that_cuts_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut none of the model's parameters"):
        build(Planned({}), 1, 2)


def test_a_plan_that_unties_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unties embedding.weight and head.weight"):
        build(Planned({"head": ColwiseParallel()}), 1, 2)


def test_columns_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cuts dimension 1 of 'blocks.0.down.weight', of length 64, over 3 workers"):
        build(Planned({"blocks.*.down": RowwiseParallel()}), 1, 3)


def test_a_unit_that_is_cut_and_replicated_is_refused() -> None:
    class Both(Planned):
        def strategy(self, name: str, module: nn.Module) -> Any:
            return "replicate" if name == "blocks.0" else None

    with pytest.raises(ConfigError, match=r"strategy replicates 'blocks.0.up.bias', which Both.parallelize cuts"):
        build(Both({"blocks.*.up": ColwiseParallel()}), 1, 2)


def test_a_placement_that_is_no_cut_is_refused() -> None:
    class Sums(GptTask):
        def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
            def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
                weight = distribute_tensor(torch.zeros(64, 16), mesh, [Partial()])
                module.register_parameter("weight", nn.Parameter(weight))

            distribute_module(model.get_submodule("blocks.0.up"), mesh, place)

    with pytest.raises(ConfigError, match=r"places 'blocks.0.up.weight' as P"):
        build(Sums(), 1, 2)
