"""The writer and the reader of each cell: it gets to where it is wanted, each is handled once, and work is even."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.read_plan import dedup, groups
from raysharded.checkpoint.read_plan.dedup import Box, Share, assign, check_coverage
from raysharded.checkpoint.read_plan.plan import NO_BOX, Phase, phases_of
from raysharded.checkpoint.state_dict.shard_boxes import parts_of
from raysharded.errors import CheckpointError
from tests.cases import examples

meshes = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def placed(shape: tuple[int, ...], mesh: tuple[int, ...]) -> st.SearchStrategy[tuple[Placement, ...]]:
    one = st.builds(Replicate) | st.builds(Shard, st.integers(0, len(shape) - 1))
    return st.tuples(*[one for _ in mesh])


def shares_of(mesh: tuple[int, ...], tensors: dict[str, Any]) -> list[list[Share]]:
    """Shares of every rank of a mesh; `tensors`: name -> (shape, placements)."""
    return [
        [
            Share(
                name,
                "float32",
                shape,
                tuple((part.offsets, part.sizes) for part in parts_of(shape, mesh, coordinate, placements)),
            )
            for name, (shape, placements) in tensors.items()
        ]
        for coordinate in product(*map(range, mesh))
    ]


def manifest_of(shares: list[list[Share]]) -> Manifest:
    """A checkpoint stored as these ranks hold it."""
    boxes = sorted({(share.name, box) for own in shares for share in own for box in share.boxes})
    table = BoxTable.of(FileBox(name=name, offsets=o, sizes=s, start=0) for name, (o, s) in boxes)
    return Manifest(
        run="",
        step=0,
        generation=0,
        save_id="x",
        writer="w",
        created_at=0.0,
        tensors={share.name: TensorInfo(dtype=share.dtype, shape=share.shape) for share in shares[0]},
        files=(FileRecord(path="f", size_bytes=1, chunk_size_bytes=1, boxes=table),),
    )


class Ranks:
    """Carries out phases on arrays in which every cell has a different value."""

    def __init__(self, shares: list[list[Share]]) -> None:
        self.shares = shares
        self.whole = {s.name: np.arange(1, math.prod(s.shape) + 1).reshape(s.shape) for own in shares for s in own}
        self.memory = [[[np.zeros(size, int) for _, size in s.boxes] for s in own] for own in shares]
        self.reads: dict[str, int] = defaultdict(int)

    def carry_out(self, phases: list[Phase]) -> None:
        buffers = [[self._read(rank, region) for region in phase.reads] for rank, phase in enumerate(phases)]
        apart = [
            [b for b, region in zip(own, phase.reads, strict=True) if region.which == NO_BOX]
            for own, phase in zip(buffers, phases, strict=True)
        ]
        queues: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for rank, phase in enumerate(phases):
            for move in (move for move in phase.moves if move.source == rank and move.targets != (rank,)):
                for target in move.targets:
                    queues[rank, target].append(self._source(rank, phase, move, apart[rank]).copy())
        for rank, phase in enumerate(phases):
            for move in phase.moves:
                if rank in move.targets:
                    own = move.source == rank
                    cells = self._source(rank, phase, move, apart[rank]) if own else queues[move.source, rank].pop(0)
                    self._place(rank, move.region)[...] = cells
        assert not any(queues.values())

    def _read(self, rank: int, region: Any) -> Any:
        share = self.shares[rank][region.number]
        cells = self.whole[share.name][slices(region.offsets, region.sizes)]
        self.reads[share.name] += cells.size
        if region.which == NO_BOX:
            return (region, cells)
        self._place(rank, region)[...] = cells
        return None

    def _source(self, rank: int, phase: Phase, move: Any, apart: list[Any]) -> Any:
        if move.buffer == NO_BOX:
            return self._place(rank, move.region)
        region, cells = apart[move.buffer]
        begin = tuple(at - o for at, o in zip(move.region.offsets, region.offsets, strict=True))
        return cells[slices(begin, move.region.sizes)]

    def _place(self, rank: int, region: Any) -> Any:
        offsets, _ = self.shares[rank][region.number].boxes[region.which]
        begin = tuple(at - o for at, o in zip(region.offsets, offsets, strict=True))
        return self.memory[rank][region.number][region.which][slices(begin, region.sizes)]

    def require_filled(self) -> None:
        for own, memory in zip(self.shares, self.memory, strict=True):
            for share, arrays in zip(own, memory, strict=True):
                for (offsets, sizes), array in zip(share.boxes, arrays, strict=True):
                    assert np.array_equal(array, self.whole[share.name][slices(offsets, sizes)])


def slices(offsets: Any, sizes: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


@settings(max_examples=examples(33, of=100))
@given(st.data(), st.integers(1, 200), st.integers(1, 100))
def test_every_rank_gets_its_cells_and_each_is_read_once(data: st.DataObject, slab: int, buffer: int) -> None:
    mesh, stored_mesh = data.draw(meshes), data.draw(meshes)
    names = {f"t{number}": data.draw(shapes) for number in range(data.draw(st.integers(1, 3)))}
    wanted = shares_of(mesh, {name: (shape, data.draw(placed(shape, mesh))) for name, shape in names.items()})
    stored = shares_of(stored_mesh, {n: (shape, data.draw(placed(shape, stored_mesh))) for n, shape in names.items()})
    before = dedup.SLAB_BYTES
    dedup.SLAB_BYTES = slab
    try:
        jobs = assign(wanted, groups.unions_of(wanted, manifest_of(stored)))
        plans = phases_of(wanted, jobs, buffer)
    finally:
        dedup.SLAB_BYTES = before
    ranks = Ranks(wanted)
    assert len({len(plan) for plan in plans}) == 1
    for at in range(len(plans[0])):
        phases = [Phase.from_json(plan[at].to_json()) for plan in plans]
        ranks.carry_out(phases)
    ranks.require_filled()
    assert ranks.reads == {name: math.prod(shape) for name, shape in names.items()}


def columns(rows: int, width: int, ranks: int) -> list[list[Share]]:
    return shares_of((ranks,), {"w": ((rows, width), (Shard(1),))})


def test_columns_of_rows_that_were_stored_whole_are_read_together() -> None:
    wanted = columns(64, 128, 4)
    stored = manifest_of(shares_of((3,), {"w": ((64, 128), (Shard(0),))}))
    assert set(groups.unions_of(wanted, stored).values()) == {((0, 0), (64, 128))}


@pytest.mark.parametrize("stored_ranks", [4, 8])
def test_columns_that_were_stored_as_such_are_read_by_their_own_ranks(stored_ranks: int) -> None:
    assert groups.unions_of(columns(64, 128, 4), manifest_of(columns(64, 128, stored_ranks))) == {}


def test_wide_columns_are_read_by_their_own_ranks() -> None:
    stored = manifest_of(shares_of((3,), {"w": ((64, 1 << 20), (Shard(0),))}))
    assert groups.unions_of(columns(64, 1 << 20, 2), stored) == {}


def test_replicas_share_the_work_evenly() -> None:
    tensors: dict[str, Any] = {f"t{n}": ((1024, 100 * (n + 1)), (Replicate(), Shard(0))) for n in range(20)}
    tensors["large"] = ((50_000, 1024), (Replicate(), Shard(0)))
    shares = shares_of((4, 2), tensors)
    loads = [0] * 8
    done: dict[Box, int] = defaultdict(int)
    for job in assign(shares):
        loads[job.doer] += job.size_bytes
        done[job.box] += 1
    whole = sum(math.prod(shape) for shape, _ in tensors.values()) * 4
    assert sum(loads) == whole
    assert max(loads) < 1.05 * whole / 8
    assert all(count == 1 for box, count in done.items() if box[1][1] == 1024)


def test_a_tensor_that_the_ranks_do_not_make_up_is_refused() -> None:
    shares = shares_of((3,), {"w": ((7, 2), (Shard(0),))})
    check_coverage(shares)
    with pytest.raises(CheckpointError, match=r"tensor 'w' of shape \[7, 2\]: no rank holds \[3, 0\]"):
        check_coverage([shares[0], shares[2]])
    overlapping = [[Share("w", "float32", (4,), (((0,), (3,)),))], [Share("w", "float32", (4,), (((2,), (2,)),))]]
    with pytest.raises(CheckpointError, match=r"ranks hold overlapping boxes at \[2\]"):
        check_coverage(overlapping)
