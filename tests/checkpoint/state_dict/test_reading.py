"""Every rank reads the bytes of its boxes and few others, once; bytes that several want are read by one of them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.read_plan.dedup import Share, assign
from raysharded.checkpoint.read_plan.groups import unions_of
from raysharded.checkpoint.read_plan.plan import Phase, phases_of
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.fill import fill
from raysharded.checkpoint.sharded_io.load import Options, load_into
from raysharded.checkpoint.state_dict.matching import Chosen
from raysharded.checkpoint.state_dict.shard_boxes import Part, held_of, parts_of
from raysharded.checkpoint.state_dict.staging import STAGE_BYTES
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.writer import ShardTensor, commit, write_shard
from raysharded.testing.storages import CountingStorage
from tests.cases import tried_each_time
from tests.checkpoint.state_dict.ranks import run_ranks

Layout = tuple[tuple[int, ...], dict[str, tuple[Placement, ...]]]
"""A mesh, and the placements of tensors that are cut by rows first, by columns first, and of all others."""


def flat(ranks: int) -> Layout:
    return (ranks,), dict.fromkeys(("rows", "columns", "other"), (Shard(0),))


def hybrid(replicas: int, shards: int) -> Layout:
    return (replicas, shards), dict.fromkeys(("rows", "columns", "other"), (Replicate(), Shard(0)))


def over_tensor_parallel(data: int, tensor: int) -> Layout:
    return (data, tensor), {
        "rows": (_StridedShard(0, split_factor=tensor), Shard(0)),
        "columns": (Shard(0), Shard(1)),
        "other": (Shard(0), Replicate()),
    }


def gpt(width: int, layers: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, how it is cut), parameters and AdamW's state."""
    params: dict[str, tuple[tuple[int, ...], str]] = {
        "embed.weight": ((8192, width), "other"),
        "positions.weight": ((1024, width), "other"),
        "norm.weight": ((width,), "other"),
        "norm.bias": ((width,), "other"),
    }
    for n in range(layers):
        params |= {
            f"layers.{n}.attention.in.weight": ((3 * width, width), "rows"),
            f"layers.{n}.attention.in.bias": ((3 * width,), "rows"),
            f"layers.{n}.attention.out.weight": ((width, width), "columns"),
            f"layers.{n}.attention.out.bias": ((width,), "other"),
            f"layers.{n}.up.weight": ((4 * width, width), "rows"),
            f"layers.{n}.up.bias": ((4 * width,), "rows"),
            f"layers.{n}.down.weight": ((width, 4 * width), "columns"),
            f"layers.{n}.down.bias": ((width,), "other"),
            f"layers.{n}.norm.weight": ((width,), "other"),
        }
    return {f"{kind}.{name}": info for name, info in params.items() for kind in ("model", "exp_avg", "exp_avg_sq")}


def boxes_of(layout: Layout, rank: int, tensors: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    mesh, placements = layout
    coordinate = list(product(*map(range, mesh)))[rank]
    for name, (shape, cut) in tensors.items():
        yield from ((name, part) for part in parts_of(shape, mesh, coordinate, placements[cut]))


def save(storage: Any, layout: Layout, tensors: dict[str, Any]) -> None:
    """A checkpoint of zeros, the first replica writing."""
    zeros = np.zeros(max(math.prod(shape) for shape, _ in tensors.values()) * 4, np.uint8)
    files: list[FileRecord] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank in range(math.prod(layout[0])):
        pieces = []
        for name, part in boxes_of(layout, rank, tensors):
            if (name, part.offsets) in seen:
                continue
            seen.add((name, part.offsets))
            data = zeros[: math.prod(part.sizes) * 4]
            pieces.append(
                ShardTensor(
                    name=name,
                    dtype="float32",
                    shape=tensors[name][0],
                    offsets=part.offsets,
                    sizes=part.sizes,
                    data=data,
                )
            )
        files += write_shard(storage, "c", writer=f"w{rank}", tensors=pieces)
    infos = {name: TensorInfo(dtype="float32", shape=shape) for name, (shape, _) in tensors.items()}
    commit(
        storage,
        "c",
        Manifest(
            run="", step=0, generation=0, save_id="x", writer="w", created_at=0.0, tensors=infos, files=tuple(files)
        ),
    )


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A folder for a large checkpoint, which is deleted after the test: it may be in memory."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(flat(4), flat(3), id="4 to 3"),
        pytest.param(flat(4), flat(8), id="4 to 8", marks=pytest.mark.long),
        pytest.param(flat(8), flat(1), id="8 to 1", marks=pytest.mark.long),
        pytest.param(flat(4), hybrid(2, 2), id="flat to hybrid", marks=pytest.mark.long),
        pytest.param(hybrid(2, 2), flat(3), id="hybrid to flat"),
        pytest.param(flat(4), over_tensor_parallel(2, 2), id="flat to tensor parallel"),
        pytest.param(over_tensor_parallel(2, 2), flat(4), id="tensor parallel to flat", marks=pytest.mark.long),
    ],
)
def test_little_more_is_read_than_is_wanted(large: Path, saved: Layout, loaded: Layout) -> None:
    tensors = gpt(width=1024, layers=1)
    storage = CountingStorage(LocalStorage(str(large)))
    save(storage, saved, tensors)
    checkpoint = open_checkpoint(storage, "c")
    whole = sum(math.prod(shape) for shape, _ in tensors.values()) * 4
    out = np.empty(whole, np.uint8)
    ranks = range(math.prod(loaded[0]))
    shares = [shares_of(loaded, rank, tensors) for rank in ranks]
    plans = phases_of(shares, assign(shares, unions_of(shares, checkpoint.manifest)), STAGE_BYTES)
    storage.reads.clear()
    for own, phases in zip(shares, plans, strict=True):
        for phase in phases:
            checkpoint.read_many(requests_of(own, phase, out))
    read = sum(size for _, _, size in storage.reads)
    assert whole <= read <= 1.1 * whole, f"{read / whole:.3f} times the checkpoint was read"


def shares_of(layout: Layout, rank: int, tensors: dict[str, Any]) -> list[Share]:
    boxes: dict[str, list[Any]] = {name: [] for name in tensors}
    for name, part in boxes_of(layout, rank, tensors):
        boxes[name].append((part.offsets, part.sizes))
    return [Share(name, "float32", tensors[name][0], tuple(own), "float32") for name, own in boxes.items()]


def requests_of(own: list[Share], phase: Phase, out: Any) -> list[Any]:
    requests = []
    at = 0
    for region in phase.reads:
        size = math.prod(region.sizes) * 4
        requests.append((own[region.number].name, region.offsets, region.sizes, out[at : at + size]))
        at += size
    return requests


def state_of(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.full((1024, 1024), value)
    return {
        "hybrid": [distribute_tensor(whole * n, mesh, [Replicate(), Shard(0)]) for n in range(4)],
        "replicated": distribute_tensor(whole.repeat(8, 1), mesh, [Replicate(), Replicate()]),
        "plain": [torch.full((5,), value) for _ in range(3)],
    }


def save_and_load_counting(rank: int, folder: str) -> int:
    """Bytes of data files that this rank read."""
    from tests.checkpoint.state_dict.test_failures import save_through

    save_through(LocalStorage(folder), state_of(3.0))
    storage = CountingStorage(LocalStorage(folder))
    state = state_of(0.0)
    checkpoint = open_checkpoint(storage, "c")
    coordinator = Coordinator.of(None, 60.0)
    with coordinator.guarded():
        load_into(checkpoint, state, Options(chosen=Chosen.of(None), strict=True, cast=False), coordinator, None)
    expected = state_of(3.0)
    for mine, its in zip(state["hybrid"], expected["hybrid"], strict=True):
        assert torch.equal(mine.to_local(), its.to_local())
    assert torch.equal(state["replicated"].to_local(), expected["replicated"].to_local())
    assert all(bool((one == 3.0).all()) for one in state["plain"])
    return sum(size for key, _, size in storage.reads if key.endswith(".safetensors"))


@pytest.mark.procs
def test_what_several_ranks_hold_is_read_by_one_of_them_and_all_read_as_much(tmp_path: Path) -> None:
    read = run_ranks(4, save_and_load_counting, str(tmp_path))
    whole = (4 + 8) * 1024 * 1024 * 4 + 3 * 5 * 4
    assert whole <= sum(read) < 1.1 * whole
    assert max(read) < 1.2 * whole / 4
    files = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    assert sum(files) < 1.01 * whole
    assert max(files) < 1.2 * whole / 4


WIDE = (2048, 1536)


def load_columns(rank: int, folder: str, dtype: torch.dtype) -> int:
    """Each rank wants some columns of rows that were stored whole; the buffers hold a part of them only."""
    from tests.checkpoint.state_dict.test_failures import save_through

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(math.prod(WIDE), dtype=torch.float32).reshape(WIDE)
    save_through(LocalStorage(folder), {"w": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])})
    storage = CountingStorage(LocalStorage(folder))
    checkpoint = open_checkpoint(storage, "c")
    target = distribute_tensor(torch.zeros(WIDE, dtype=dtype), mesh, [Shard(0), Shard(1)])
    coordinator = Coordinator.of(None, 60.0)
    with coordinator.guarded():
        fill(checkpoint, {"w": held_of("w", target)}, coordinator, stage_bytes=1 << 20)
    expected = distribute_tensor(whole.to(dtype), mesh, [Shard(0), Shard(1)])
    assert torch.equal(target.to_local(), expected.to_local())
    return sum(size for key, _, size in storage.reads if key.endswith(".safetensors"))


@pytest.mark.procs
@pytest.mark.parametrize("dtype", tried_each_time([torch.float32], of=[torch.float32, torch.float64]))
def test_columns_of_rows_that_were_stored_whole_are_read_once(tmp_path: Path, dtype: torch.dtype) -> None:
    read = run_ranks(4, load_columns, str(tmp_path), dtype)
    whole = math.prod(WIDE) * 4
    assert whole <= sum(read) < 1.1 * whole
    assert max(read) < 0.6 * whole
