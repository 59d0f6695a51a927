"""Values that a module stores in addition to its tensors: extra state, and replacements by `state_dict` hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from raysharded.checkpoint import api
from raysharded.errors import CheckpointError
from tests.checkpoint.state_dict.ranks import run_ranks


class Extra(nn.Module):
    """Keeps a value in addition to its weight, which only `set_extra_state` changes."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.extra = extra
        self.times_set = 0

    def get_extra_state(self) -> Any:
        return self.extra.clone() if isinstance(self.extra, torch.Tensor) else self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra, self.times_set = state, self.times_set + 1


class Buffered(nn.Module):
    """Its extra state is one of its buffers, and `set_extra_state` records its argument."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2,), value), persistent=False)
        self.got: list[float] = []

    def get_extra_state(self) -> torch.Tensor:
        return self.get_buffer("scale")

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.got = state.tolist()


def compiled(module: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "list": nn.Sequential,
    "compiled": compiled,
    "list of compiled": lambda module: nn.Sequential(compiled(module)),
    "compiled list of compiled": lambda module: compiled(nn.Sequential(compiled(module))),
    "the same twice": lambda module: compiled(nn.Sequential(module, module)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize(
    ("saved", "before"),
    [(torch.tensor([7.0, 8.0]), torch.zeros(2)), ({"a": 7, "b": [1, "x"]}, {"a": 1}), ({"t": torch.ones(2)}, {})],
    ids=["tensor", "dict", "dict of tensors"],
)
def test_extra_state_is_set_however_the_module_is_wrapped(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], saved: Any, before: Any
) -> None:
    before = {"t": torch.zeros(2)} if before == {} else before
    api.save(tmp_path / "c", {"model": wrap(Extra(saved))})
    module = Extra(before)
    loaded = api.load(tmp_path / "c", {"model": wrap(module)})
    assert str(module.extra) == str(saved)
    assert (loaded.missing, loaded.unexpected) == ((), ())


def load_into_parallel(rank: int, uri: str) -> list[Any]:
    inner = nn.Sequential(Extra({"a": 1}), Extra(torch.zeros(2)))
    sharded = nn.Sequential(compiled(Extra({"a": 1})), Extra(torch.zeros(2)))
    fully_shard([sharded[0], sharded[1]])
    fully_shard(sharded)
    deeper = nn.ModuleDict({"ddp": nn.parallel.DistributedDataParallel(inner), "fsdp": sharded})
    api.load(uri, {"model": deeper})
    return [str(module.extra) for module in deeper.modules() if isinstance(module, Extra)]


@pytest.mark.procs
def test_extra_state_is_set_in_replicated_and_in_sharded_modules(tmp_path: Path) -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])]
    ddp, fsdp = (nn.Sequential(Extra({"a": n}), Extra(tensor)) for n, tensor in enumerate(tensors, start=7))
    api.save(tmp_path / "c", {"model": nn.ModuleDict({"ddp": ddp, "fsdp": fsdp})})
    expected = [str({"a": 7}), str(tensors[0]), str({"a": 8}), str(tensors[1])]
    assert run_ranks(2, load_into_parallel, str(tmp_path / "c")) == [expected, expected]


@pytest.mark.parametrize("extra", [{"a": 7}, torch.ones(2)], ids=["dict", "tensor"])
def test_extra_state_of_the_model_of_a_checkpoint_is_set_in_a_module_alone(tmp_path: Path, extra: Any) -> None:
    saved = nn.Sequential(Extra(extra))
    api.save(tmp_path / "inside", {"model": saved, "epoch": 3})
    api.save(tmp_path / "alone", saved)
    for uri in (tmp_path / "inside", tmp_path / "alone"):
        module = Extra({"a": 1} if isinstance(extra, dict) else torch.zeros(2))
        loaded = api.load(uri, nn.Sequential(module))
        assert str(module.extra) == str(extra)
        assert (loaded.missing, loaded.unexpected) == ((), ())
    with pytest.raises(CheckpointError, match=r"1 have no place to go: model.0._extra_state"):
        api.load(tmp_path / "inside", nn.ModuleList([nn.ParameterDict({"w": torch.zeros(2)})]))


def test_extra_state_that_is_a_buffer_is_set_too(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": nn.Sequential(Buffered(5.0))})
    module = Buffered(1.0)
    api.load(tmp_path / "c", {"model": nn.Sequential(module)})
    assert module.got == [5.0, 5.0]


def test_extra_state_that_is_not_chosen_is_not_set(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": nn.Sequential(Extra({"a": 7}), Extra(torch.ones(2)))})
    model = nn.Sequential(Extra({"a": 1}), Extra(torch.zeros(2)))
    api.load(tmp_path / "c", {"model": model}, names=["*.w"])
    assert [module.times_set for module in model.modules() if isinstance(module, Extra)] == [0, 0]


class Hooked(nn.Module):
    """Its `state_dict` has `hook`'s result for the weight."""

    def __init__(self, value: float, hook: Callable[[torch.Tensor], Any], name: str = "w") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))

        def replace(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}{name}"] = hook(state.pop(f"{prefix}w"))

        self.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("hook", [torch.Tensor.clone, torch.Tensor.double], ids=["clone", "double"])
def test_tensors_that_a_hook_copied_reach_the_module(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], hook: Any
) -> None:
    api.save(tmp_path / "c", {"model": wrap(Hooked(5.0, hook))})
    module = Hooked(1.0, hook)
    loaded = api.load(tmp_path / "c", {"model": wrap(module)})
    assert (module.w.tolist(), loaded.missing) == ([5.0] * 3, ())


def test_a_copy_that_the_checkpoint_lacks_does_not_change_the_module(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": {"other": torch.ones(1)}})
    module = Hooked(1.3, torch.Tensor.half)
    api.load(tmp_path / "c", {"model": module}, strict=False)
    assert torch.equal(module.w, torch.full((3,), 1.3))


def test_copies_that_the_module_does_not_take_are_refused_by_name(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": Hooked(5.0, torch.Tensor.clone, name="v")})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="load_state_dict does not take 1 values that its state_dict has: v"):
            api.load(tmp_path / "c", {"model": Hooked(1.0, torch.Tensor.clone, name="v")}, strict=strict)


def load_what_one_rank_cannot_take(rank: int, uri: str) -> str:
    module = Hooked(1.0, torch.Tensor.clone, name="v") if rank == 1 else Hooked(1.0, torch.Tensor.detach, name="v")
    try:
        api.load(uri, {"model": module}, timeout_s=60)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.procs
def test_a_copy_that_one_rank_cannot_take_is_an_error_of_all(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": {"v": torch.ones(3)}})
    assert all("does not take" in said for said in run_ranks(2, load_what_one_rank_cannot_take, str(tmp_path / "c")))
