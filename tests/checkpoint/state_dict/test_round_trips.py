"""Saved at one layout, loaded at another: equal to the bit, for all meshes and placements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from raysharded.checkpoint import api
from raysharded.errors import CheckpointError
from tests.checkpoint.state_dict.ranks import run_ranks

pytestmark = pytest.mark.procs

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (64, 24),
    "uneven": (7, 5),
    "short": (3, 6),
    "vector": (13,),
    "cube": (6, 4, 10),
    "one": (1,),
    "none": (0, 4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64)

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]
FLAT: dict[int, Layout] = {n: ((n,), (Shard(0),)) for n in (1, 2, 3, 4)}
HYBRID: Layout = ((2, 2), (Replicate(), Shard(0)))
TENSOR_PARALLEL: Layout = ((2, 2), (Shard(0), Shard(1)))
FSDP_OVER_TP: Layout = ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
REPLICATED: Layout = ((3,), (Replicate(),))


def whole_tensors() -> dict[str, torch.Tensor]:
    """The state as one process would have it, the same on every call."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        for dtype in (torch.float32, DTYPES[number % len(DTYPES)]):
            values = torch.randint(0, 200, shape, generator=generator)
            tensors[f"{name}/{str(dtype).removeprefix('torch.')}"] = values.to(dtype)
    return tensors


def laid_out(layout: Layout, *, empty: bool = False) -> dict[str, Any]:
    shape, placements = layout
    mesh = init_device_mesh("cpu", shape)
    state: dict[str, Any] = {"sharded": {}, "plain": {}}
    for name, whole in whole_tensors().items():
        state["sharded"][name] = cut(torch.full_like(whole, 1) if empty else whole, mesh, placements)
    state["plain"]["step"] = torch.tensor(0 if empty else 12)
    state["plain"]["scattered"] = torch.zeros(6, 4).t() if empty else torch.arange(24.0).reshape(6, 4).t()
    state["plain"]["note"] = None if empty else ["text", 1.5, True, float("inf"), (1, 2)]
    return state


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Distributed by these placements; `distribute_tensor` does not support FSDP2's over tensor parallelism."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        known = [p if not isinstance(p, Shard) or p.dim < whole.dim() else Replicate() for p in placements]
        return distribute_tensor(whole, mesh, known)
    data, tensor = mesh.get_coordinate() or ()
    local = chunk(chunk(whole, 2, tensor), 2, data)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def chunk(tensor: torch.Tensor, count: int, which: int) -> torch.Tensor:
    chunks = tensor.chunk(count)
    return chunks[which] if which < len(chunks) else tensor[:0]


CHANGES: dict[str, tuple[Layout, Layout]] = {
    "4 to 3": (FLAT[4], FLAT[3]),
    "1 to 4": (FLAT[1], FLAT[4]),
    "flat to hybrid": (FLAT[4], HYBRID),
    "hybrid to FSDP over tensor parallel": (HYBRID, FSDP_OVER_TP),
    "FSDP over tensor parallel to tensor parallel": (FSDP_OVER_TP, TENSOR_PARALLEL),
    "tensor parallel to flat": (TENSOR_PARALLEL, FLAT[2]),
    "replicated to flat": (REPLICATED, FLAT[2]),
    "flat to replicated": (FLAT[2], REPLICATED),
}
"""The layout that is saved, and the one that is loaded."""


def save_all(rank: int, folder: str, changes: list[str]) -> None:
    for change in changes:
        saved, _ = CHANGES[change]
        with named(change):
            api.save(f"{folder}/{change}", laid_out(saved), step=12, metadata={"seed": 1}, data={"samples": 7})


def load_all(rank: int, folder: str, changes: list[str]) -> dict[str, list[str]]:
    """Change -> the differences on this rank."""
    found = {}
    for change in changes:
        with named(change):
            found[change] = differences(f"{folder}/{change}", CHANGES[change][1])
    return found


@contextmanager
def named(change: str) -> Iterator[None]:
    """Add the name of the change to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the change {change}")
        raise


def differences(uri: str, layout: Layout) -> list[str]:
    state, expected = laid_out(layout, empty=True), laid_out(layout)
    loaded = api.load(uri, state)
    equal = {
        "step": loaded.step == 12,
        "metadata": loaded.metadata == {"seed": 1},
        "data": loaded.data == {"samples": 7},
        "note": loaded.state["plain"]["note"] == ["text", 1.5, True, float("inf"), (1, 2)],
    }
    for name, tensor in state["sharded"].items():
        equal[name] = torch.equal(tensor.to_local(), expected["sharded"][name].to_local())
        equal[f"{name} in place"] = loaded.state["sharded"][name] is tensor
    for name in ("step", "scattered"):
        equal[f"plain {name}"] = torch.equal(state["plain"][name], expected["plain"][name])
    return [what for what, is_equal in equal.items() if not is_equal]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[str]]]]:
    """The folder with a checkpoint for each change, and by change the differences on each rank that has loaded it.
    Ranks save and load all changes that are possible with their number."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[str, list[list[str]]] = {}
    for act, layouts in ((save_all, 0), (load_all, 1)):
        for size in range(1, 5):
            changes = [change for change, pair in CHANGES.items() if _ranks(pair[layouts]) == size]
            results = run_ranks(size, act, str(folder), changes) if changes else []
            if act is load_all:
                found |= {change: [result[change] for result in results] for change in changes}
    return folder, found


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_is_the_same_after_a_change_of_layout(
    changed: tuple[Path, dict[str, list[list[str]]]], change: str
) -> None:
    folder, found = changed
    with api.open(folder / change) as checkpoint:
        for name, tensor in whole_tensors().items():
            assert torch.equal(checkpoint.read(f"sharded.{name}"), tensor), name
    assert found[change] == [[]] * _ranks(CHANGES[change][1])


def _ranks(layout: Layout) -> int:
    return int(torch.tensor(layout[0]).prod())


def in_a_group(rank: int, uri: str) -> str:
    """Ranks 1 and 2 save and load; rank 0 does not take part."""
    group = dist.new_group([1, 2])
    state = {"w": torch.arange(6.0), f"own{rank}": torch.full((2,), float(rank))}
    if rank == 0:
        with pytest.raises(CheckpointError, match="not in the process group"):
            api.save(uri, state, process_group=group)
        return ""
    saved = api.save(uri, state, process_group=group)
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    api.load(uri, empty, process_group=group, strict=False)
    assert all(torch.equal(empty[name], state[name]) for name in state)
    return saved.digest


def test_a_part_of_the_ranks_can_save_and_load_by_themselves(tmp_path: Path) -> None:
    alone, *digests = run_ranks(3, in_a_group, str(tmp_path / "c"))
    assert alone == ""
    assert digests == [api.open(tmp_path / "c").digest] * 2
    assert set(api.open(tmp_path / "c").tensors) == {"w", "own1", "own2"}
