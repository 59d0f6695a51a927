"""Promises of `torch.distributed.checkpoint.state_dict`: states of FSDP2 models, saved and set into another layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.interop.dcp_promises_storages import Kind
from tests.checkpoint.interop.ranks import assert_same, dcp, model, trained, whole

FULL = StateDictOptions(full_state_dict=True)


def other(*, of_one_rank: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with other weights, over replicas of two ranks each, or whole on each rank."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5))
    if not of_one_rank:
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    return net, torch.optim.AdamW(net.parameters(), lr=1.0)


def full(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """(model, optimizer), every tensor whole. `betas` as lists: torch sets one where a state is full."""
    model_state, optimizer_state = whole(get_state_dict(net, optimizer, options=FULL))
    for group in optimizer_state["param_groups"]:
        group["betas"] = list(group["betas"])
    return [model_state, optimizer_state]


def a_trained_state_is_set_into_another_layout(kind: Kind, folder: Path) -> None:
    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    kind.save({"model": model_state, "optimizer": optimizer_state}, folder)
    for of_one_rank in (False, True):
        to, to_optimizer = other(of_one_rank=of_one_rank)
        model_state, optimizer_state = get_state_dict(to, to_optimizer)
        state = kind.load({"model": model_state, "optimizer": optimizer_state}, folder)
        set_state_dict(to, to_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_same(full(to, to_optimizer), full(net, optimizer))


def full_state_dict_is_whole_and_set_from_what_is_whole(kind: Kind, folder: Path) -> None:
    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer, options=FULL)
    assert not any(isinstance(tensor, DTensor) for tensor in model_state.values())
    kind.save({"model": model_state, "optimizer": optimizer_state}, folder)
    to, to_optimizer = other()
    model_state, optimizer_state = get_state_dict(to, to_optimizer, options=FULL)
    state = kind.load({"model": model_state, "optimizer": optimizer_state}, folder)
    set_state_dict(to, to_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FULL)
    assert_same(full(to, to_optimizer), full(net, optimizer))


def cpu_offload_and_broadcast_from_rank0_take_rank_0_alone(kind: Kind, folder: Path) -> None:
    net, _ = trained()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(net, options=options)
    assert bool(state) == (dist.get_rank() == 0)
    kind.save(state, folder)  # the others bring nothing
    to, _ = other()
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        found = kind.load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder, no_dist=True)
    set_model_state_dict(to, found, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(whole(to.state_dict()), whole(net.state_dict()))


def ignore_frozen_params_leaves_them_out(kind: Kind, folder: Path) -> None:
    net = model()
    net.get_submodule("0").requires_grad_(False)
    state = get_model_state_dict(net, options=StateDictOptions(ignore_frozen_params=True))
    assert {name.split(".")[0] for name in state} == {"2", "3"}
    kind.save({"model": state}, folder)
    assert set(kind.reader(folder).read_metadata().state_dict_metadata) == {f"model.{name}" for name in state}
    to, _ = other()
    before = copy.deepcopy(whole(to.state_dict()))
    to.get_submodule("0").requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    found = kind.load({"model": get_model_state_dict(to, options=options)}, folder)
    set_model_state_dict(to, found["model"], options=options)
    of_net, of_to = whole(net.state_dict()), whole(to.state_dict())
    assert_same(dict(of_to), {name: (of_net if name in state else before)[name] for name in of_to})


def strict_false_sets_a_part(kind: Kind, folder: Path) -> None:
    net, _ = trained()
    part = {name: tensor for name, tensor in get_model_state_dict(net).items() if name.startswith("2.")}
    kind.save({"model": part}, folder)
    to, _ = other()
    before = copy.deepcopy(whole(to.state_dict()))
    state = {name: tensor for name, tensor in get_model_state_dict(to).items() if name in part}
    found = kind.load({"model": state}, folder)["model"]
    answer = set_model_state_dict(to, found, options=StateDictOptions(strict=False))
    assert set(answer.missing_keys) == set(before) - set(part)
    of_net, of_to = whole(net.state_dict()), whole(to.state_dict())
    assert_same(dict(of_to), {name: (of_net if name in part else before)[name] for name in of_to})


def submodules_are_a_part_of_the_state(kind: Kind, folder: Path) -> None:
    net, _ = trained()
    part = get_model_state_dict(net, submodules={net.get_submodule("2")})
    assert set(part) == {"2.weight", "2.bias"}
    kind.save({"model": part}, folder)
    to, _ = other()
    state = get_model_state_dict(to, submodules={to.get_submodule("2")})
    found = kind.load({"model": state}, folder)["model"]
    set_model_state_dict(to, found, options=StateDictOptions(strict=False))
    assert_same(whole(dict(to.get_submodule("2").state_dict())), whole(dict(net.get_submodule("2").state_dict())))


def flatten_optimizer_state_dict_is_set_from_flat_keys(kind: Kind, folder: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    net, optimizer = trained()
    state = get_optimizer_state_dict(net, optimizer, options=options)
    assert "state.0.weight.exp_avg" in state
    kind.save({"optimizer": state}, folder)
    to, to_optimizer = other()
    found = kind.load({"optimizer": get_optimizer_state_dict(to, to_optimizer, options=options)}, folder)
    set_optimizer_state_dict(to, to_optimizer, found["optimizer"], options=options)
    assert_same(full(to, to_optimizer)[1], full(net, optimizer)[1])


class AppState:
    """The wrapper that PyTorch's guides show: a Stateful object around a model and its optimizer."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.net, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def a_stateful_application_saves_and_loads_itself(kind: Kind, folder: Path) -> None:
    net, optimizer = trained()
    dcp.async_save({"app": AppState(net, optimizer)}, storage_writer=kind.writer(folder)).result(60)
    to, to_optimizer = other()
    kind.load({"app": AppState(to, to_optimizer)}, folder)
    assert_same(full(to, to_optimizer), full(net, optimizer))


STATES = (a_trained_state_is_set_into_another_layout,)
LONG_STATES = (
    cpu_offload_and_broadcast_from_rank0_take_rank_0_alone,
    full_state_dict_is_whole_and_set_from_what_is_whole,
    ignore_frozen_params_leaves_them_out,
    strict_false_sets_a_part,
    submodules_are_a_part_of_the_state,
    flatten_optimizer_state_dict_is_set_from_flat_keys,
    a_stateful_application_saves_and_loads_itself,
)
