"""Saving changes nothing, and loading only what the checkpoint has: optimizers that have not stepped, parts by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.checkpoint import api
from raysharded.errors import CheckpointError
from tests.checkpoint.state_dict.test_modules import Counting, assert_equal
from tests.checkpoint.state_dict.training import adamw, make, step_once, whole_state


def save_it(uri: Path, state: Any) -> None:
    api.save(uri, state)


def save_beside(uri: Path, state: Any) -> None:
    with api.AsyncSaver() as saver:
        saver.prepare(state)
        saver.save(uri, state).result(60)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    return [
        adamw(model),
        torch.optim.SGD(params, lr=0.1),
        torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        Counting(params, lr=0.1),
        Counting(params, lr=0.1, momentum=0.9),
    ]


@pytest.mark.parametrize("save", [save_it, save_beside])
@pytest.mark.parametrize("which", range(5))
def test_training_after_a_save_at_step_zero_gives_the_bits_of_training_without(
    tmp_path: Path, save: Any, which: int
) -> None:
    def run(saves: bool) -> tuple[dict[str, torch.Tensor], Any]:
        model = make()
        optimizer = optimizers(model)[which]
        if saves:
            save(tmp_path / "c", {"model": model, "optimizer": optimizer})
            assert not optimizer.state
            assert all(param.grad is None for param in model.parameters())
        for _ in range(3):
            step_once(model, optimizer)
        return dict(model.state_dict()), optimizer.state_dict()

    (model, optimizer), (expected_model, expected) = run(saves=True), run(saves=False)
    assert_equal(model, expected_model)
    assert str(optimizer) == str(expected)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("which", range(5))
def test_an_optimizer_saved_before_its_first_step_is_one_after_the_load(
    tmp_path: Path, which: int, stepped: bool
) -> None:
    model = make()
    optimizer = optimizers(model)[which]
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = make(seed=9)
    its_optimizer = optimizers(other)[which]
    if stepped:
        step_once(other, its_optimizer)
    loaded = api.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer})
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert not its_optimizer.state
    for _ in range(2):
        step_once(model, optimizer)
        step_once(other, its_optimizer)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_the_state_of_a_parameter_that_never_had_a_gradient_is_none_after_the_load_too(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    for param in list(model.parameters())[1:]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = make(seed=9)
    its_optimizer = adamw(other)
    assert api.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer}).missing == ()
    assert next(other.parameters()) not in its_optimizer.state
    assert_equal(whole_state(other, its_optimizer), whole_state(model, optimizer))


def test_an_optimizer_that_a_load_does_not_fill_is_left_as_it_was(tmp_path: Path) -> None:
    model = make()
    api.save(tmp_path / "c", model)
    api.save(tmp_path / "d", {"model": model})
    optimizer = adamw(model)
    into = {"model": model, "optimizer": optimizer}
    api.load(tmp_path / "d", into, names=["model.*"])
    assert not optimizer.state
    assert api.load(tmp_path / "d", into, strict=False).missing
    assert not optimizer.state
    with pytest.raises(CheckpointError, match="are not in the checkpoint"):
        api.load(tmp_path / "d", into)
    assert not optimizer.state
    step_once(model, optimizer)
    kept = whole_state(model, optimizer)
    api.load(tmp_path / "d", into, names=["model.*"])
    assert whole_state(model, optimizer).keys() == kept.keys()


def test_gradients_and_settings_survive_a_save_before_the_first_step(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    save_beside(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not optimizer.state
    assert model.up.weight.grad is not None
    assert bool((model.up.weight.grad == 1).all())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]


def test_a_module_under_another_key_is_not_filled_with_the_model(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": make()})
    for into in ({"model": make(seed=9), "ema": make(seed=8)}, {"modle": make(seed=8)}):
        kept = {name: tensor.clone() for name, tensor in list(into.values())[-1].state_dict().items()}
        with pytest.raises(CheckpointError, match="are not in the checkpoint"):
            api.load(tmp_path / "c", into)
        api.load(tmp_path / "c", into, strict=False)
        assert_equal(dict(list(into.values())[-1].state_dict()), kept)


def test_an_optimizer_under_another_key_is_not_filled_with_the_trainers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_once(model, optimizer)
    moments = {f"optim.{n}.momentum_buffer": torch.ones_like(p) for n, p in model.named_parameters()}
    api.save(tmp_path / "c", {**{f"model.{n}": p for n, p in model.named_parameters()}, **moments})
    with pytest.raises(CheckpointError, match="are not in the checkpoint"):
        api.load(tmp_path / "c", {"model": model, "other": optimizer})


def test_values_may_be_loaded_beside_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    model = make()
    api.save(tmp_path / "c", {"model": model, "optimizer": adamw(model), "ema": {"w": torch.ones(1)}, "epoch": 3})
    loaded = api.load(tmp_path / "c", {"model": make(seed=9), "epoch": 0})
    assert (loaded.state["epoch"], loaded.unexpected) == (3, ())
    w = torch.zeros(13, 10)
    api.load(tmp_path / "c", {"model.embed.weight": w})
    assert torch.equal(w, model.embed.weight)


def test_preparing_changes_no_bit_of_a_parameter(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[-0.0, 0.0], [torch.inf, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with api.AsyncSaver() as saver:
        assert saver.prepare({"model": model, "optimizer": optimizer}) == 2 * 64  # the weight and its momentum
    assert model.weight.tolist() == [[0.0, 0.0], [torch.inf, 1.0]]
    assert torch.signbit(model.weight).tolist() == [[True, False], [False, False]]
