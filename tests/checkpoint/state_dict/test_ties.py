"""Names that share memory in the state to be loaded: equal values fill it, different ones are never called corrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from raysharded.checkpoint import api
from raysharded.errors import CheckpointError, CorruptCheckpoint
from tests.checkpoint.state_dict.ranks import outcomes


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def refusal(uri: Path, into: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        api.load(uri, into, **options)
    assert not isinstance(caught.value, CorruptCheckpoint)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "cast"])
def test_an_untied_model_that_differs_is_refused_by_a_tied_one(tmp_path: Path, dtype: torch.dtype) -> None:
    untied = Model(tied=False)
    api.save(tmp_path / "c", untied)
    tied = Model(tied=True).to(dtype)
    said = refusal(tmp_path / "c", tied, cast=True)
    assert "embed.weight and head.weight are one tensor here and differ in the checkpoint" in said
    api.load(tmp_path / "c", tied, names=["head.*"], cast=True)
    assert torch.equal(tied.embed.weight, untied.head.weight.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "cast"])
def test_an_untied_model_of_equal_values_fills_a_tied_one(tmp_path: Path, dtype: torch.dtype) -> None:
    untied = Model(tied=False)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
        untied.head.weight[3, 5] = untied.embed.weight[3, 5] = torch.nan
    api.save(tmp_path / "c", untied)
    tied = Model(tied=True).to(dtype)
    loaded = api.load(tmp_path / "c", tied, cast=True)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert torch.equal(tied.embed.weight.nan_to_num(9), untied.head.weight.to(dtype).nan_to_num(9))


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "last"])
def test_one_element_that_differs_is_enough(tmp_path: Path, bad: int) -> None:
    stored = torch.zeros(3, 4)
    other = stored.clone()
    other[bad * 2, bad * 3] = -0.0
    api.save(tmp_path / "c", {"a": stored, "b": other})
    scattered = torch.ones(4, 3).t()
    assert "a and b are one tensor here" in refusal(tmp_path / "c", {"a": scattered, "b": scattered})


def load_tied(rank: int, uri: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    api.load(uri, {"a": tensor, "b": tensor})


@pytest.mark.procs
@pytest.mark.parametrize("row", [0, 3])
def test_what_differs_on_one_rank_is_an_error_on_all(tmp_path: Path, row: int) -> None:
    other = torch.ones(4, 3)
    other[row] = 2
    api.save(tmp_path / "c", {"a": torch.ones(4, 3), "b": other})
    for error in outcomes(2, load_tied, str(tmp_path / "c")):
        assert isinstance(error, CheckpointError)
        assert not isinstance(error, CorruptCheckpoint)
        assert "a and b are one tensor here and differ" in str(error)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 4, bias=False)
        self.decode = nn.Parameter(self.encode.weight.t())
        self.register_buffer("first", self.encode.weight.detach()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "cast"])
def test_a_model_of_views_of_one_another_is_filled_from_what_it_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    saved, into = Transposed(), Transposed()
    api.save(tmp_path / "c", saved)
    into.encode.weight.data = into.encode.weight.data.to(dtype)
    into.decode.data = into.encode.weight.data.t()
    into.first = into.encode.weight.detach()[0]
    api.load(tmp_path / "c", into, cast=True)
    assert torch.equal(into.encode.weight, saved.encode.weight.to(dtype))
    assert torch.equal(into.decode, saved.decode.to(dtype))


def test_a_flat_tensor_and_its_parts_are_filled_and_the_part_that_differs_is_named(tmp_path: Path) -> None:
    flat = torch.arange(9.0)
    stored = {"flat": flat, "a": flat[:3], "b": flat[3:6].clone(), "c": flat[6:]}
    memory = torch.zeros(9)
    into = {"flat": memory, "a": memory[:3], "b": memory[3:6], "c": memory[6:]}
    api.save(tmp_path / "equal", stored)
    api.load(tmp_path / "equal", into)
    assert torch.equal(memory, flat)
    stored["b"][1] = -1
    api.save(tmp_path / "different", stored)
    assert "flat and b overlap in memory here, and differ there in the checkpoint" in refusal(
        tmp_path / "different", into
    )


def test_one_of_two_names_of_a_tensor_may_overlap_with_a_third(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"a": torch.arange(6.0), "b": torch.arange(6.0), "c": torch.arange(3.0)})
    memory = torch.zeros(6)
    api.load(tmp_path / "c", {"a": memory, "b": memory, "c": memory[:3]})
    assert memory.tolist() == [0, 1, 2, 3, 4, 5]


def load_transposed(rank: int, uri: str) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    local = tensor.to_local()
    turned = DTensor.from_local(local.t(), mesh, [Shard(1)])
    api.load(uri, {"a": tensor, "b": turned})
    return list(local.tolist())


@pytest.mark.procs
@pytest.mark.parametrize("row", [None, 3], ids=["equal", "different on one rank"])
def test_overlapping_shards_are_filled_or_refused_on_all_ranks(tmp_path: Path, row: int | None) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    turned = whole.t().clone()
    if row is not None:
        turned[0, row] = -1
    api.save(tmp_path / "c", {"a": whole, "b": turned})
    found = outcomes(2, load_transposed, str(tmp_path / "c"))
    if row is None:
        assert found == [whole[:2].tolist(), whole[2:].tolist()]
    else:
        assert all(isinstance(error, CheckpointError) and "a and b overlap in memory" in str(error) for error in found)


def test_views_that_overlap_and_differ_are_refused(tmp_path: Path) -> None:
    memory = torch.zeros(5)
    api.save(tmp_path / "c", {"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    assert "a and b overlap in memory here" in refusal(tmp_path / "c", {"a": memory[:3], "b": memory[2:]})
    assert "overlap in memory here" in refusal(tmp_path / "c", {"a": memory[::2], "b": memory[:3]})
    memory.zero_()
    api.load(tmp_path / "c", {"a": memory[:3], "b": memory[2:]}, names="b")
    assert memory.tolist() == [0, 0, 2, 2, 2]


def test_one_memory_read_in_two_ways_is_filled_if_both_are_right(tmp_path: Path) -> None:
    saved, memory = torch.randn(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64)
    api.save(tmp_path / "c", {"a": saved, "b": saved.conj(), "c": torch.ones(4, dtype=torch.int64)})
    api.load(tmp_path / "c", {"a": memory, "b": memory.conj()}, names=["a", "b"])
    assert torch.equal(memory, saved)
    assert "a and c overlap" in refusal(tmp_path / "c", {"a": memory, "c": memory.view(torch.int64)}, names=["a", "c"])


def test_views_that_only_interleave_are_filled(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    api.save(tmp_path / "c", {"q": whole[:, :2], "k": whole[:, 2:4], "v": whole[:, 4:]})
    fused = torch.zeros(4, 6)
    api.load(tmp_path / "c", {"q": fused[:, :2], "k": fused[:, 2:4], "v": fused[:, 4:]})
    assert torch.equal(fused, whole)


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"w": torch.arange(3.0)})
    assert "w cannot be loaded into" in refusal(tmp_path / "c", {"w": torch.zeros(1).expand(3)})
