"""Modules and their optimizers: saved sharded, loaded plain, and the other way round, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raysharded.checkpoint import api, open_storage
from raysharded.checkpoint.interop import RayshardedReader, RayshardedWriter
from raysharded.errors import CheckpointError, ConfigError
from raysharded.testing.storages import save_rows
from tests.checkpoint.state_dict.ranks import run_ranks
from tests.checkpoint.state_dict.training import adamw, make, step_once, whole_state

Mesh = tuple[tuple[int, ...], tuple[str, ...]]
FLAT: Mesh = ((3,), ("data",))
HYBRID: Mesh = ((2, 2), ("replica", "data"))
TWO_D: Mesh = ((2, 2), ("data", "tensor"))


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def trained(mesh: Any = None, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(seed=seed, mesh=mesh)
    optimizer = adamw(model)
    step_once(model, optimizer)
    step_once(model, optimizer)
    return model, optimizer


def save_sharded(rank: int, uri: str, mesh: Mesh) -> dict[str, torch.Tensor]:
    model, optimizer = trained(init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]))
    optimizer.param_groups[1]["lr"] = 0.125
    api.save(uri, {"model": model, "optimizer": optimizer, "epoch": 3})
    return whole_state(model, optimizer)


def load_sharded(rank: int, uri: str, mesh: Mesh) -> tuple[dict[str, torch.Tensor], Any]:
    model = make(seed=9, mesh=init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]))
    optimizer = adamw(model, lr=0.5)
    loaded = api.load(uri, {"model": model, "optimizer": optimizer, "epoch": 0})
    assert loaded.state["model"] is model
    assert loaded.state["optimizer"] is optimizer
    lrs = [group["lr"] for group in optimizer.param_groups]
    return whole_state(model, optimizer), (loaded.state["epoch"], lrs, optimizer.param_groups[0]["betas"])


@pytest.mark.procs
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(FLAT, id="flat", marks=pytest.mark.long),
        pytest.param(HYBRID, id="hybrid", marks=pytest.mark.long),
        pytest.param(TWO_D, id="over tensor parallel"),
    ],
)
def test_fsdp2_to_one_process_and_back(tmp_path: Path, mesh: Mesh) -> None:
    world_size = int(torch.tensor(mesh[0]).prod())
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_ranks(world_size, save_sharded, first, mesh)[0]

    model = make(seed=9)
    optimizer = adamw(model, lr=0.5)
    loaded = api.load(first, {"model": model, "optimizer": optimizer, "epoch": 0})
    assert_equal(whole_state(model, optimizer), expected)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.125]

    api.save(second, {"model": model, "optimizer": optimizer, "epoch": 3})
    for found, others in run_ranks(world_size, load_sharded, second, mesh):
        assert_equal(found, expected)
        assert others == (3, [0.01, 0.125], (0.9, 0.999))


def test_training_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, optimizer = trained()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    step_once(model, optimizer)
    other = make(seed=9)
    its_optimizer = adamw(other, lr=0.5)
    api.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer})
    step_once(other, its_optimizer)
    assert_equal(whole_state(other, its_optimizer), whole_state(model, optimizer))


def test_gradients_survive_a_load_into_a_new_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = make(seed=9)
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    its_optimizer = adamw(other)
    api.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer})
    assert_equal(whole_state(other, its_optimizer), whole_state(model, optimizer))
    assert all(param.grad is not None and bool((param.grad == 1).all()) for param in other.parameters())


def test_a_module_alone(tmp_path: Path) -> None:
    api.save(tmp_path / "c", make())
    other = make(seed=9)
    assert api.load(tmp_path / "c", other).state is other
    assert_equal(dict(other.state_dict()), dict(make().state_dict()))


def test_the_model_of_a_checkpoint_with_an_optimizer_can_be_loaded_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for into in (make(seed=9), {"model": make(seed=9)}):
        loaded = api.load(tmp_path / "c", into)
        assert (loaded.missing, loaded.unexpected) == ((), ())
        other = into["model"] if isinstance(into, dict) else into
        assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_compiled_and_wrapped_modules_have_the_names_of_what_they_wrap(tmp_path: Path) -> None:
    model = make()
    api.save(tmp_path / "c", torch.compile(model))
    assert set(api.open(tmp_path / "c").tensors) == set(model.state_dict())


def trainer_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A checkpoint as raysharded's trainer writes it."""
    arrays = {f"model.{name}": param.detach().numpy() for name, param in model.named_parameters()}
    arrays["buffer.scale"] = model.get_buffer("scale").numpy()
    for name, param in model.named_parameters():
        arrays |= {f"optim.{name}.{key}": value.numpy() for key, value in optimizer.state[param].items()}
    save_rows(open_storage(str(folder)), arrays, step=7, save_id="g1", num_writers=3)
    return str(folder)


def test_a_trainers_checkpoint_loads_into_a_plain_model(tmp_path: Path) -> None:
    trained_model, optimizer = trained()
    run = trainer_checkpoint(tmp_path, trained_model, optimizer)
    model = make(seed=9)
    loaded = api.load(f"{run}/checkpoints/step-0000000007-g1", model)
    assert (loaded.step, loaded.missing, loaded.unexpected) == (7, (), ())
    assert_equal(dict(model.state_dict()), dict(trained_model.state_dict()))


def test_a_trainers_checkpoint_loads_into_a_tied_model(tmp_path: Path) -> None:
    tied = make(tied=True)
    arrays = {f"model.{name}": param.detach().numpy() for name, param in tied.named_parameters()}
    arrays["buffer.scale"] = tied.get_buffer("scale").numpy()
    assert "model.head.weight" not in arrays
    save_rows(open_storage(str(tmp_path)), arrays, step=7, save_id="g1", num_writers=2)
    model = make(seed=9, tied=True)
    assert api.load(tmp_path / "checkpoints/step-0000000007-g1", model).missing == ()
    assert_equal(dict(model.state_dict()), dict(tied.state_dict()))


def test_a_trainers_checkpoint_loads_into_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    run = trainer_checkpoint(tmp_path, model, optimizer)
    other = make(seed=9)
    its_optimizer = adamw(other, lr=0.5)
    api.load(f"{run}/checkpoints/step-0000000007-g1", {"model": other, "optimizer": its_optimizer})
    assert_equal(whole_state(other, its_optimizer), whole_state(model, optimizer))
    assert its_optimizer.param_groups[0]["lr"] == 0.5  # the trainer stores no settings: they are the program's


class Counting(torch.optim.SGD):
    """Counts its steps as plain numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
        return super().step(closure)


def test_plain_numbers_of_an_optimizer_come_back_from_both_kinds_of_checkpoint(tmp_path: Path) -> None:
    model = make()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        step_once(model, optimizer)
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    arrays = {f"model.{name}": param.detach().numpy() for name, param in model.named_parameters()}
    arrays["buffer.scale"] = model.get_buffer("scale").numpy()
    for name, param in model.named_parameters():
        arrays[f"optim.{name}.momentum_buffer"] = optimizer.state[param]["momentum_buffer"].numpy()
        arrays[f"number.{name}.count"] = torch.tensor(5).numpy()
    save_rows(open_storage(str(tmp_path)), arrays, step=5, save_id="g1", num_writers=2)
    for uri in (tmp_path / "c", tmp_path / "checkpoints/step-0000000005-g1"):
        other = make(seed=9)
        its_optimizer = Counting(other.parameters(), lr=0.1, momentum=0.9)
        loaded = api.load(uri, {"model": other, "optimizer": its_optimizer})
        assert (loaded.missing, loaded.unexpected) == ((), ())
        assert [its_optimizer.state[param]["count"] for param in other.parameters()] == [5] * 8
        assert all(
            torch.equal(its_optimizer.state[a]["momentum_buffer"], optimizer.state[b]["momentum_buffer"])
            for a, b in zip(other.parameters(), model.parameters(), strict=True)
        )


def test_groups_with_other_parameters_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="the optimizer has 1 parameter groups, and in the checkpoint it has 2"):
        api.load(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    swapped = adamw(model)
    swapped.param_groups.reverse()
    with pytest.raises(CheckpointError, match=r"parameter group 0 of the optimizer has up.bias, and in the checkpoint"):
        api.load(tmp_path / "c", {"model": model, "optimizer": swapped})


def test_an_optimizer_needs_the_one_module_that_it_belongs_to(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(ConfigError, match="there are 0 modules"):
        api.save(tmp_path / "c", {"optimizer": optimizer})
    with pytest.raises(ConfigError, match="there are 2 modules"):
        api.save(tmp_path / "c", {"a": model, "b": make(), "optimizer": optimizer})


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(ConfigError, match=r"state\['optimizer'\] is an optimizer, and 8 of its 8 parameters"):
        api.save(tmp_path / "d", {"model": make(), "optimizer": optimizer})
    with pytest.raises(ConfigError, match="8 of its 8 parameters"):
        api.load(tmp_path / "c", {"model": make(), "optimizer": optimizer})
    one_more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="1 of its 9 parameters"):
        api.save(tmp_path / "d", {"model": model, "optimizer": one_more})
    assert not (tmp_path / "d").exists()


def closure_steps(model: nn.Linear, optimizer: torch.optim.LBFGS, steps: int) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.arange(6.0).reshape(3, 2)).sub(1).pow(4).sum()
        value.backward()
        return value  # type: ignore[no-any-return]  # of a call to a module

    for _ in range(steps):
        optimizer.step(loss)


@pytest.mark.parametrize("before", [0, 1])
def test_an_optimizer_that_needs_a_closure_continues_as_if_it_had_not_stopped(tmp_path: Path, before: int) -> None:
    """LBFGS keeps lists of tensors whose number grows as it steps, and steps only with a closure."""
    whole = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(whole.parameters(), max_iter=3, history_size=5)
    closure_steps(whole, optimizer, 2)
    api.save(tmp_path / "c", {"model": whole, "optimizer": optimizer})
    other = nn.Linear(2, 2)
    loaded = torch.optim.LBFGS(other.parameters(), lr=9.0, max_iter=3, history_size=5)
    closure_steps(other, loaded, 2 * before)
    api.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    closure_steps(whole, optimizer, 2)
    closure_steps(other, loaded, 2)
    assert_equal(dict(other.state_dict()), dict(whole.state_dict()))


def test_the_state_of_an_optimizer_that_needs_a_closure_is_known_from_a_checkpoint_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, other = torch.optim.LBFGS(model.parameters(), lr=0.5), torch.optim.LBFGS(model.parameters())
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    api.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert (other.param_groups[0]["lr"], dict(other.state)) == (0.5, {})
    api.save(tmp_path / "d", {"model": model})
    with pytest.raises(ConfigError, match="LBFGS that has not stepped"):
        api.load(tmp_path / "d", {"model": model, "optimizer": optimizer})
    with pytest.raises(ConfigError, match="LBFGS that has not stepped"), api.AsyncSaver() as saver:
        saver.prepare({"model": model, "optimizer": optimizer})
    assert not optimizer.state


def test_the_state_of_an_optimizer_that_needs_a_closure_is_converted_with_the_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    closure_steps(model, optimizer, 2)
    api.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = nn.Linear(2, 2).double()
    into: dict[str, Any] = {"model": other, "optimizer": torch.optim.LBFGS(other.parameters(), max_iter=3)}
    with pytest.raises(CheckpointError, match="cast=True"):
        api.load(tmp_path / "c", into)
    api.load(tmp_path / "c", into, cast=True)
    (state,) = into["optimizer"].state.values()
    assert state["d"].dtype == torch.float64
    assert torch.equal(state["d"], next(iter(optimizer.state.values()))["d"].double())


def test_a_module_without_parameters_is_stored(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "loss": nn.MSELoss()}
    api.save(tmp_path / "c", state)
    api.load(tmp_path / "c", {"model": nn.Linear(2, 2), "loss": nn.MSELoss()})
    assert api.open(tmp_path / "c").state()["loss"] == {}
    api.save(tmp_path / "d", nn.Identity())
    api.load(tmp_path / "d", nn.Identity())
    assert api.open(tmp_path / "d").state() == {}


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    api.save(tmp_path / "c", make())
    with torch.device("meta"):
        model = make()
    with pytest.raises(CheckpointError, match="on the meta device"):
        api.load(tmp_path / "c", model)


def test_a_backward_of_a_forward_before_the_load_is_an_error_as_after_torchs_load(tmp_path: Path) -> None:
    """Its gradients would be of weights that are no longer there."""
    model = nn.Linear(2, 2)
    api.save(tmp_path / "c", model)
    dcp_save({"m": model.state_dict()}, storage_writer=RayshardedWriter(str(tmp_path / "d")), no_dist=True)
    for load in (
        lambda: api.load(tmp_path / "c", model),
        lambda: dcp_load({"m": model.state_dict()}, storage_reader=RayshardedReader(str(tmp_path / "d")), no_dist=True),
    ):
        loss = model.weight.square().sum()
        load()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def backward_of_a_dtensor(_rank: int, uri: str) -> str:
    w = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    api.save(uri, {"w": w})
    loss = (w * w).sum()
    api.load(uri, {"w": w})
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.procs
def test_so_is_that_of_a_dtensor(tmp_path: Path) -> None:
    for error in run_ranks(2, backward_of_a_dtensor, str(tmp_path / "c")):
        assert "modified by an inplace operation" in error
