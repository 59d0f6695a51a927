"""Every difference between a checkpoint and the state to be loaded is an error, or listed: none is silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.checkpoint import api, open_storage
from raysharded.errors import CheckpointError
from raysharded.testing.storages import save_rows
from tests.checkpoint.state_dict.ranks import run_ranks
from tests.checkpoint.state_dict.training import adamw, make, step_once

W = torch.ones(2)


def w() -> torch.Tensor:
    return torch.zeros(2)


def refused(uri: Path, into: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        api.load(uri, into, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("saved", "into", "missing", "unexpected"),
    [
        ({"train": {"w": W, "epoch": 5}}, {"train": {"w": w()}}, (), ("train.epoch",)),
        ({"train": {"w": W, "cfg": {"a": 1, "b": [2]}}}, {"train": {"w": w()}}, (), ("train.cfg.a", "train.cfg.b.0")),
        ({"l": [W, 1, 2]}, {"l": [w(), 0]}, (), ("l.2",)),
        ({"l": [W, 1]}, {"l": [w(), 0, 0]}, ("l.2",), ()),
        ({"a": {"x": 5, "w": W}}, {"a": {"x": w(), "w": w()}}, ("a.x",), ("a.x",)),
        ({"model": {"w": W}}, {"model": {"w": w(), "n": 1}, "epoch": 0}, ("model.n", "epoch"), ()),
    ],
)
def test_values_without_a_place_are_unexpected_and_those_without_a_value_missing(
    tmp_path: Path, saved: Any, into: Any, missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    api.save(tmp_path / "c", saved)
    said = refused(tmp_path / "c", into)
    for names, what in ((missing, "are not in the checkpoint"), (unexpected, "have no place to go")):
        assert (f"{len(names)} {what}: {', '.join(names)}" in said) == bool(names)
    loaded = api.load(tmp_path / "c", into, strict=False)
    assert (loaded.missing, loaded.unexpected) == (missing, unexpected)


def test_settings_and_other_parts_are_no_differences(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"train": {"w": W, "cfg": {"a": 1}, "none": {}}, "epoch": 3, "more": {"w": W, "n": 1}})
    loaded = api.load(tmp_path / "c", {"train": {"w": w(), "cfg": {}}})
    assert (loaded.state["train"]["cfg"], loaded.missing, loaded.unexpected) == ({"a": 1}, (), ())
    api.load(tmp_path / "c", {"train": {"cfg": {}}, "epoch": 0}, names=["train.cfg", "epoch"])


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_that_the_module_lacks_is_unexpected(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": nn.Sequential(Extra())})
    said = refused(tmp_path / "c", {"model": nn.Sequential(nn.Linear(2, 2))})
    assert "1 have no place to go: model.0._extra_state.a" in said


# Optimizers


def trained(kind: Any, *, steps: int = 1, **settings: Any) -> tuple[nn.Module, Any]:
    model = make()
    optimizer = kind(model.parameters(), lr=0.5, **settings)
    for _ in range(steps):
        step_once(model, optimizer)
    return model, optimizer


def saved_by(uri: Path, kind: Any, **settings: Any) -> Path:
    model, optimizer = trained(kind, **settings)
    api.save(uri, {"model": model, "optimizer": optimizer})
    return uri


@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_by_the_settings(tmp_path: Path, steps: int) -> None:
    uri = saved_by(tmp_path / "c", torch.optim.SGD)
    model, optimizer = trained(torch.optim.AdamW, steps=steps, weight_decay=0.25)
    kept = str(optimizer.state_dict())
    said = refused(uri, {"model": model, "optimizer": optimizer}, names=["model.*", "optimizer.param_groups.*"])
    assert "optimizer.param_groups.0.betas.0" in said
    assert "optimizer.param_groups.0.momentum" in said
    assert "optimizer.param_groups.0.foreach" not in said
    assert "up.bias.exp_avg" in refused(uri, {"model": model, "optimizer": optimizer})
    assert str(optimizer.state_dict()) == kept


def test_without_strict_another_kind_of_optimizer_keeps_its_state_and_its_own_settings(tmp_path: Path) -> None:
    uri = saved_by(tmp_path / "c", torch.optim.SGD)
    model, optimizer = trained(torch.optim.AdamW, steps=2)
    loaded = api.load(uri, {"model": model, "optimizer": optimizer}, strict=False)
    assert {f"optimizer.state.up.bias.{key}" for key in ("step", "exp_avg", "exp_avg_sq")} < set(loaded.missing)
    assert {f"optimizer.param_groups.0.{key}" for key in ("eps", "amsgrad")} < set(loaded.missing)
    assert set(loaded.unexpected) == {
        f"optimizer.param_groups.0.{key}" for key in ("dampening", "momentum", "nesterov")
    }
    assert len(optimizer.state) == len(list(model.parameters()))
    assert "momentum" not in optimizer.param_groups[0]
    step_once(model, optimizer)


def test_settings_that_another_version_of_torch_has_are_no_difference(tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    model, optimizer = trained(torch.optim.AdamW)
    del optimizer.param_groups[0]["decoupled_weight_decay"], optimizer.param_groups[0]["foreach"]
    api.save(older, {"model": model, "optimizer": optimizer})
    saved_by(newer, torch.optim.AdamW)
    for steps in (0, 2):
        other, its_optimizer = trained(torch.optim.AdamW, steps=steps)
        loaded = api.load(older, {"model": other, "optimizer": its_optimizer})
        assert (loaded.missing, loaded.unexpected) == ((), ())
        assert its_optimizer.param_groups[0]["decoupled_weight_decay"] is True
    loaded = api.load(newer, {"model": model, "optimizer": optimizer})
    assert (loaded.missing, loaded.unexpected) == ((), ())


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("steps", [0, 1])
def test_what_a_scheduler_added_to_an_optimizers_settings_is_restored(tmp_path: Path, lr: Any, steps: int) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(steps):
        step_once(model, optimizer)
        scheduler.step()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = make(seed=9)
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.0 * lr + 3)
    loaded = api.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer})
    assert (loaded.missing, loaded.unexpected) == ((), ())
    group = its_optimizer.param_groups[0]
    assert (float(group["lr"]), float(group["initial_lr"])) == (0.25 * 0.5**steps, 0.25)
    torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5, last_epoch=steps)
    untouched = torch.optim.AdamW(other.parameters(), lr=lr)
    api.load(tmp_path / "c", {"model": other, "optimizer": untouched}, names=["model.*"])
    assert "initial_lr" not in untouched.param_groups[0]


def test_settings_can_be_chosen_one_by_one(tmp_path: Path) -> None:
    uri = saved_by(tmp_path / "c", torch.optim.SGD, momentum=0.9)
    model, optimizer = trained(torch.optim.SGD, momentum=0.8, steps=0)
    optimizer.param_groups[0]["lr"] = 3.0
    api.load(uri, {"model": model, "optimizer": optimizer}, names=["optimizer.param_groups.*.momentum"])
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (3.0, 0.9)


# Checkpoints without a tree


def without_tree(folder: Path, *, generation: int = 0, **more: Any) -> Path:
    """A checkpoint as an import, or with a generation as raysharded's trainer, writes it."""
    arrays = {f"model.{name}": param.detach().numpy() for name, param in make().named_parameters()}
    arrays["buffer.scale"] = make().get_buffer("scale").numpy()
    save_rows(open_storage(str(folder)), arrays | more, step=7, save_id="g1", num_writers=2, generation=generation)
    return folder / "checkpoints/step-0000000007-g1"


def test_values_are_missing_in_a_checkpoint_without_a_tree(tmp_path: Path) -> None:
    uri = without_tree(tmp_path)
    model = make(seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    into = {"model": model, "optimizer": optimizer, "epoch": 0, "cfg": {"a": 1}}
    loaded = api.load(uri, into, strict=False)
    assert {"epoch", "cfg.a", "optimizer.param_groups.0.lr"} < set(loaded.missing)
    assert "epoch" in refused(uri, into)
    assert "1 are not in the checkpoint: epoch" in refused(uri, {"model": model, "epoch": 0})
    assert "epoch" in refused(uri, into, names=["epoch"])


def test_weights_alone_are_loaded_from_a_checkpoint_without_a_tree(tmp_path: Path) -> None:
    uri = without_tree(tmp_path)
    for into in (make(seed=9), {"model": make(seed=9)}):
        loaded = api.load(uri, into)
        assert (loaded.missing, loaded.unexpected) == ((), ())


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_an_optimizers_settings_are_the_programs_in_a_checkpoint_without_a_tree(tmp_path: Path, lr: Any) -> None:
    model = make()
    optimizer = adamw(model)
    step_once(model, optimizer)
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    state = {f"optim.{names[p]}.{key}": v.numpy() for p, kept in optimizer.state.items() for key, v in kept.items()}
    other = make(seed=9)
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=lr)
    loaded = api.load(without_tree(tmp_path, **state), {"model": other, "optimizer": its_optimizer})
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert its_optimizer.param_groups[0]["lr"] is lr


def test_an_optimizer_without_state_is_loaded_from_a_trainers_checkpoint(tmp_path: Path) -> None:
    uri = without_tree(tmp_path, generation=3)
    model = make(seed=9)
    into: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    loaded = api.load(uri, into)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert "1 are not in the checkpoint: epoch" in refused(uri, {**into, "epoch": 0})
    assert "up.bias.exp_avg" in refused(uri, {"model": model, "optimizer": adamw(model)})


# Names


class Inner(nn.Module):
    """Has a parameter named as another one of its model under "model"."""

    def __init__(self, *, model_too: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.model = nn.ParameterDict({"weight": nn.Parameter(torch.rand(2))} if model_too else {})

    def values(self) -> list[list[float]]:
        return [param.tolist() for param in self.parameters()]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("names", [None, ["*weight"]])
def test_a_tensor_is_not_filled_from_that_of_another_name(tmp_path: Path, strict: bool, names: Any) -> None:
    saved = Inner()
    api.save(tmp_path / "inside", {"model": saved})
    api.save(tmp_path / "alone", saved)
    for uri in (tmp_path / "inside", tmp_path / "alone"):
        module = Inner()
        loaded = api.load(uri, module, strict=strict, names=names)
        assert module.values() == saved.values()
        assert (loaded.missing, loaded.unexpected) == ((), ())


def test_the_nesting_decides_if_the_names_do_not(tmp_path: Path) -> None:
    saved, module = Inner(model_too=False), Inner()
    (own, inner) = module.values()
    api.save(tmp_path / "inside", {"model": saved})
    assert api.load(tmp_path / "inside", module, strict=False).missing == ("model.weight",)
    assert module.values() == [saved.weight.tolist(), inner]
    api.save(tmp_path / "alone", nn.ModuleDict({"model": nn.ParameterDict({"weight": saved.weight})}))
    module = Inner()
    own, inner = module.values()
    assert api.load(tmp_path / "alone", module, strict=False).missing == ("weight",)
    assert module.values() == [own, saved.weight.tolist()]


# Ranks


def stage(rank: int, value: float) -> dict[str, Any]:
    own = {f"layer{rank}.w": torch.full((3,), value), f"number{rank}": int(value)}
    return {"model": {**own, "shared": torch.ones(1)}, "settings": {"a": [1]}}


def save_and_load_stages(rank: int, folder: str) -> Any:
    api.save(f"{folder}/c", stage(rank, float(rank + 1)))
    found = []
    for strict in (True, False):
        loaded = api.load(f"{folder}/c", into := stage(rank, 0.0), strict=strict)
        own = loaded.state["model"][f"number{rank}"], into["model"][f"layer{rank}.w"].tolist()
        found.append((*own, loaded.missing, loaded.unexpected))
    return found


@pytest.mark.procs
def test_stages_with_different_names_are_loaded_by_the_same_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, save_and_load_stages, str(tmp_path))
    for rank, of_rank in enumerate(found):
        assert of_rank == [(rank + 1, [rank + 1.0] * 3, (), ())] * 2


def load_two_of_three_stages(rank: int, folder: str) -> Any:
    layers = {f"layer{number}.w": torch.ones(3) for number in range(3)} | {f"number{number}": 1 for number in range(3)}
    api.save(f"{folder}/c", {**stage(0, 1.0), "model": {**layers, "shared": torch.ones(1)}})
    try:
        api.load(f"{folder}/c", stage(rank, 0.0))
    except CheckpointError as error:
        said = str(error)
    loaded = api.load(f"{folder}/c", {**stage(rank, 0.0), **({"more": 1} if rank else {})}, strict=False)
    return said, loaded.missing, loaded.unexpected


@pytest.mark.procs
def test_a_name_for_which_no_rank_has_a_place_is_an_error_of_all(tmp_path: Path) -> None:
    found = run_ranks(2, load_two_of_three_stages, str(tmp_path))
    for rank, (said, missing, unexpected) in enumerate(found):
        assert re.search(r"2 have no place to go: model.layer2.w, model.number2\.", said), said
        assert missing == (("more",) if rank else ())
        assert unexpected == ("model.layer2.w", "model.number2")


# Memory


@pytest.mark.parametrize(
    ("size", "shape", "strides"), [(5, (3, 3), (1, 1)), (7, (3, 3), (2, 1)), (9, (2, 2, 2), (2, 3, 1)), (1, (4,), (0,))]
)
def test_a_tensor_of_which_several_elements_are_one_in_memory_is_refused(
    tmp_path: Path, size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    api.save(tmp_path / "c", {"w": whole})
    into = torch.zeros(size).as_strided(shape, strides)
    assert "w cannot be loaded into: several of its elements are one in memory" in refused(tmp_path / "c", {"w": into})


@pytest.mark.parametrize(
    ("size", "shape", "strides"),
    [(12, (3, 2), (2, 3)), (9, (3, 3), (1, 3)), (50, (2, 3), (7, 11)), (1, (1, 1), (0, 0))],
)
def test_a_tensor_of_unusual_strides_is_filled(
    tmp_path: Path, size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    api.save(tmp_path / "c", {"w": whole})
    into = torch.zeros(size).as_strided(shape, strides)
    api.load(tmp_path / "c", {"w": into})
    assert torch.equal(into, whole)
