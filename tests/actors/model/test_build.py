"""From a task to a sharded model: what is wrapped, what stays tied, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import raysharded as rs
from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.guards.forwards import BufferWatch
from raysharded.actors.model.build import build_sharded
from raysharded.actors.model.construction import parameters_on_meta
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.errors import ConfigError, InexactError, TaskError
from raysharded.task import Strategy
from tests.actors.fake_group import alone, build, fake_mesh
from tests.training.harness import TwoBlocksTask


class Of(rs.Task):
    """A task of any model, wrapped in any way."""

    def __init__(
        self, model: Callable[[], nn.Module], wrap: Callable[[nn.Module], list[nn.Module] | None] = lambda _: None
    ) -> None:
        self._model, self._wrap = model, wrap

    def build_model(self) -> nn.Module:
        return self._model()

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        return self._wrap(model)


class Stack(nn.Module):
    """Layers in a list, called one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def units(sharded: ShardedModel) -> list[str]:
    return [name for name, _ in sharded.units]


def test_the_blocks_of_a_module_list_are_units_and_the_root_is_the_last() -> None:
    assert units(build(TwoBlocksTask())) == ["blocks.0", "blocks.1", ""]


def test_names_are_those_of_the_unwrapped_model_for_every_wrapping_of_the_blocks() -> None:
    expected = dict(TwoBlocksTask().build_model().named_parameters()).keys()
    assert build(TwoBlocksTask()).parameters.keys() == expected
    assert build(TwoBlocksTask(), activation_checkpointing=True, compile=True).parameters.keys() == expected
    assert units(build(TwoBlocksTask(), activation_checkpointing=True)) == ["blocks.0", "blocks.1", ""]


def test_the_task_chooses_its_own_units() -> None:
    def inner_and_outer(model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("layers.1"), model.get_submodule("layers.1.0"), model.get_submodule("first")]

    task = Of(lambda: Stack(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), inner_and_outer)
    assert sorted(units(build(task))) == ["", "first", "layers.1", "layers.1.0"]


def test_a_lists_blocks_without_parameters_are_left_alone() -> None:
    assert units(build(Of(lambda: Stack(nn.Linear(4, 4), nn.GELU())))) == ["layers.0", ""]


def test_a_block_that_occurs_twice_is_left_to_its_parent() -> None:
    def twice() -> nn.Module:
        shared = nn.Linear(4, 4)
        return Stack(shared, nn.Linear(4, 4), shared)

    assert units(build(Of(twice))) == ["layers.1", ""]


def test_a_unit_that_the_task_names_twice_is_wrapped_once() -> None:
    task = Of(lambda: Stack(nn.Linear(4, 4)), lambda model: [model.get_submodule("first")] * 2)
    assert units(build(task)) == ["first", ""]


def test_the_task_declares_the_units_that_stay_gathered_until_backward() -> None:
    class Mixed(TwoBlocksTask):
        def strategy(self, name: str, module: nn.Module) -> Strategy | None:
            return {"blocks.0": "gradients", "blocks.1": "full"}.get(name)  # type: ignore[return-value]  # one of them

    def frees(**engine: Any) -> dict[str, bool]:
        sharded = build(Mixed(), **engine)
        groups = {name: unit._get_fsdp_state()._fsdp_param_group for name, unit in sharded.units}
        return {name: group.post_forward_mesh_info is not None for name, group in groups.items() if group is not None}

    assert (frees()["blocks.0"], frees()["blocks.1"]) == (False, True)
    kept = frees(reshard_after_forward=False, activation_checkpointing=True)
    assert (kept["blocks.0"], kept["blocks.1"]) == (False, True)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_a_task_that_inspects_a_units_class_finds_the_original(activation_checkpointing: bool) -> None:
    class Norms(TwoBlocksTask):
        def wrap(self, model: nn.Module) -> list[nn.Module]:
            return [model.get_submodule(name) for name in ("blocks.0", "norm")]

        def strategy(self, name: str, module: nn.Module) -> Strategy | None:
            return "replicate" if isinstance(module, nn.LayerNorm) else None

    assert build(Norms(), activation_checkpointing=activation_checkpointing).cuts.replicated == {
        "norm.weight",
        "norm.bias",
    }


def test_an_unknown_strategy_is_refused_with_the_units_name() -> None:
    class Odd(TwoBlocksTask):
        def strategy(self, name: str, module: nn.Module) -> Any:
            return "half"

    with pytest.raises(
        ConfigError, match=r"Odd.strategy returned 'half' for 'blocks.*'full', 'gradients', 'replicate' or None"
    ):
        build(Odd())


def test_a_foreign_module_and_the_model_itself_are_refused_as_units() -> None:
    choices: list[Callable[[nn.Module], list[nn.Module]]] = [lambda _: [nn.Linear(2, 2)], lambda model: [model]]
    for wrap in choices:
        with pytest.raises(ConfigError, match=r"Of\.wrap returned .*return submodules of it"):
            build(Of(lambda: Stack(nn.Linear(4, 4)), wrap))


def tied() -> nn.Module:
    model = Stack(nn.Linear(4, 4), nn.Linear(4, 4))
    model.first.weight = model.layers[1].weight  # type: ignore[assignment]
    return model


def test_a_block_tied_to_the_outside_is_left_to_its_parent_and_stays_tied() -> None:
    sharded = build(Of(tied))
    assert units(sharded) == ["layers.0", ""]
    assert sharded.model.get_parameter("first.weight") is sharded.model.get_parameter("layers.1.weight")


def test_a_tied_unit_that_the_task_chose_is_refused_with_the_parameters_name() -> None:
    with pytest.raises(ConfigError, match=r"whose parameter 'first\.weight' is shared with a module outside it"):
        build(Of(tied, lambda model: [model.get_submodule("layers.1")]))


def test_one_parameter_given_to_two_modules_stays_tied() -> None:
    def model() -> nn.Module:
        weight = nn.Parameter(torch.ones(4, 4))
        stack = Stack(nn.Linear(4, 4))
        stack.first.weight = weight
        stack.extra = nn.Linear(4, 4)
        stack.extra.weight = weight
        return stack

    with parameters_on_meta():
        built = model()
    assert built.get_parameter("first.weight") is built.get_parameter("extra.weight")
    assert build(Of(model)).parameters.keys() == dict(model().named_parameters()).keys()


class Rope(nn.Module):
    """A table of angles that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "angles", torch.outer(torch.arange(5.0), 100.0 ** -torch.linspace(0, 1, 3)), persistent=False
        )
        self.weight = nn.Parameter(torch.ones(3))


def test_tables_are_computed_while_parameters_take_no_memory() -> None:
    with parameters_on_meta():
        rope = Rope()
    assert rope.weight.is_meta
    assert torch.equal(rope.get_buffer("angles"), Rope().get_buffer("angles"))
    sharded = build(Of(Rope))
    assert torch.equal(sharded.model.get_buffer("angles"), Rope().get_buffer("angles"))
    assert sharded.persistent_buffers == {}
    assert not local_of(sharded.parameters["weight"]).is_meta


def test_modules_are_as_before_after_building_even_if_it_failed() -> None:
    original = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        raise ZeroDivisionError
    assert nn.Module.register_parameter is original
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_table_that_is_computed_from_parameters_is_refused() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("mask", self.weight > 0, persistent=False)

    with pytest.raises(TaskError, match=r"buffer 'layers\.0\.mask' is computed from parameters"):
        build(Of(lambda: Stack(Masked())))


class Holding(nn.Module):
    """A layer, and a parameter beside it."""

    def __init__(self, value: torch.Tensor, *, trainable: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.own = nn.Parameter(value, requires_grad=trainable)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * self.own


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3, 0), r"'layers\.0\.own' of shape \(3, 0\) has no elements.*freeze it"),
        (
            torch.ones(3, dtype=torch.float64),
            r"'layers\.0\.layer\.weight' is torch\.float32 and 'layers\.0\.own' in the same unit torch\.float64.*wrap",
        ),
    ],
)
def test_a_parameter_that_cannot_be_sharded_is_refused_by_name(
    value: torch.Tensor, message: str, checkpointing: bool
) -> None:
    task = Of(lambda: Stack(Holding(value), Holding(torch.ones(3))))
    with pytest.raises(TaskError, match=message):
        build(task, activation_checkpointing=checkpointing)


@pytest.mark.parametrize("value", [torch.ones(3, 0), torch.ones(3, dtype=torch.float64)])
def test_frozen_parameters_need_neither_elements_nor_the_dtype_of_others(value: torch.Tensor) -> None:
    model = build(Of(lambda: Stack(Holding(value, trainable=False))))
    assert model.parameters["layers.0.own"].dtype is value.dtype


def test_units_may_have_a_dtype_each() -> None:
    values = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    model = build(Of(lambda: Stack(*(Holding(value).to(value.dtype) for value in values))))
    assert model.parameters["layers.1.layer.weight"].dtype is torch.float64


def test_persistent_buffers_are_state_and_others_are_not() -> None:
    assert build(TwoBlocksTask()).persistent_buffers.keys() == {"positions"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_rank_holds_its_rows_and_all_of_them_together_the_whole(world_size: int) -> None:
    whole = {name: tuple(param.shape) for name, param in TwoBlocksTask().build_model().named_parameters()}
    rows = dict.fromkeys(whole, 0)
    for rank in range(world_size):
        for name, param in build(TwoBlocksTask(), world_size, rank).parameters.items():
            local = local_of(param)
            assert tuple(local.shape[1:]) == whole[name][1:]
            assert local.shape[0] <= math.ceil(whole[name][0] / world_size)
            rows[name] += local.shape[0]
    assert rows == {name: shape[0] for name, shape in whole.items()}


def test_batch_norm_is_refused_in_exact_mode_with_what_to_use_instead() -> None:
    def model() -> nn.Module:
        return Stack(nn.Linear(4, 4), nn.BatchNorm1d(4))

    with pytest.raises(InexactError, match=r"layers\.1 is a BatchNorm1d: .*Use LayerNorm.*reduction=\"fast\""):
        build(Of(model))
    build(Of(model), reduction="fast")
    build(Of(lambda: Stack(nn.BatchNorm1d(4, track_running_stats=False))))


def test_a_buffer_that_forward_changes_is_named() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as in the base class
            self.get_buffer("count").add_(1)
            return super().forward(input)

    model = Stack(nn.Linear(4, 4), Counting())
    watch = BufferWatch(model)
    watch.check("training", 1)
    model(torch.ones(2, 4))
    with pytest.raises(InexactError, match=r"buffer 'layers\.1\.count' changed during forward"):
        watch.check("training", 3)


def test_a_change_of_a_buffer_that_torch_does_not_count_is_found_the_first_time_and_then_now_and_then() -> None:
    model = nn.Module()
    model.register_buffer("large", torch.zeros(3, 50_000))
    model.register_buffer("none", torch.zeros(0))
    model.register_buffer("number", torch.tensor(1.0))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("conjugate", torch.ones(3, dtype=torch.complex64).conj())
    model.register_buffer("mask", torch.ones(1, 1).expand(100_000, 100_000))
    watch = BufferWatch(model)
    watch.check("training", 5)
    model.get_buffer("large").data.add_(1)
    watch.check("training", 6)
    with pytest.raises(InexactError, match="buffer 'large' changed"):
        watch.check("evaluation", 6)
    with pytest.raises(InexactError, match="buffer 'large' changed"):
        watch.check("training", 8)


def test_every_unit_is_sharded_by_fsdp() -> None:
    with fake_mesh(3) as mesh:
        sharded = build_sharded(
            TwoBlocksTask(), rs.EngineConfig(), DeviceMeshes(data=mesh, alone=alone), torch.device("cpu")
        )
        assert all(isinstance(module, FSDPModule) for _, module in sharded.units)
