"""Assignment of boxes that several ranks hold (or want): one rank processes each box, and loads are balanced. Pure.

Many ranks hold the replicas of hybrid sharding and plain tensors. At a save one of them writes a box. At a load one of
them reads it and sends it to the others. Large boxes are cut into slabs, so that replicas share those too.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.format.tiling import TooIrregular, first_fault
from raysharded.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The pair (offsets, sizes)."""
Place = tuple[int, int, int]
"""The triple (rank, number of one of its shares, number of a box of that share)."""
SLAB_BYTES = 8 << 20
"""Approximate slab size of boxes that several ranks share."""


@dataclass(frozen=True, slots=True)
class Share:
    """Boxes of one tensor that one rank holds or wants."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    kind: str = ""
    """Target dtype of the bytes. Boxes of several ranks are merged only if it is equal."""

    @property
    def item_bytes(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype][1]

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, self.shape, self.boxes, self.kind]

    @staticmethod
    def from_json(value: list[Any]) -> Share:
        name, dtype, shape, boxes, kind = value
        return Share(name, dtype, tuple(shape), tuple((tuple(o), tuple(s)) for o, s in boxes), kind)


@dataclass(frozen=True, slots=True)
class Job:
    """Cells of a tensor, the rank that processes them, and the ranks that need them."""

    doer: int
    places: tuple[Place, ...]
    """Places of every rank that has some of the cells, in order of ranks.

    Unless `joint`, each of these boxes contains all the cells.
    """
    box: Box
    size_bytes: int
    joint: bool
    """Whether the places have different boxes, and this box is a part of their union."""

    @property
    def place(self) -> Place:
        """The doer's first place."""
        return next(place for place in self.places if place[0] == self.doer)


def assign(shares: Sequence[Sequence[Share]], unions: Mapping[tuple[str, Box], Box] | None = None) -> list[Job]:
    """Jobs for every box of all ranks. `shares[rank]` holds that rank's boxes.

    Boxes with a union are processed together, in slabs of it. A box that only one rank has goes to that rank. The
    others go, the largest first, to the rank with the least work so far. Laws: the boxes of the jobs for a box, or for
    a union, tile it; a job's doer is among its places.
    """
    unions = unions or {}
    found: dict[tuple[str, Box, str, bool], list[Place]] = defaultdict(list)
    for rank, own in enumerate(shares):
        for number, share in enumerate(own):
            for which, box in enumerate(share.boxes):
                union = unions.get((share.name, box))
                found[share.name, union or box, share.kind, union is not None].append((rank, number, which))
    loads = [0] * len(shares)
    jobs: list[Job] = []
    shared: dict[tuple[int, ...], list[Job]] = defaultdict(list)
    for (_, box, _, joint), places in found.items():
        rank, number, _ = places[0]
        item_bytes = shares[rank][number].item_bytes
        ranks = tuple(sorted({place[0] for place in places}))
        if len(places) == 1 and not joint:
            jobs.append(Job(rank, tuple(places), box, math.prod(box[1]) * item_bytes, joint))
            loads[rank] += jobs[-1].size_bytes
            continue
        for slab in _slabs(box, item_bytes, None if joint else len(ranks)):
            size = math.prod(slab[1]) * item_bytes
            shared[ranks].append(Job(rank, tuple(places), slab, size, joint))
    for ranks, some in shared.items():
        jobs += _shared_out(ranks, some, loads)
    return jobs


def meet(a: Box, b: Box) -> Box | None:
    """The cells in both boxes; None if there are none."""
    first = tuple(map(max, a[0], b[0]))
    sizes = tuple(min(o + n, p + m) - at for o, n, p, m, at in zip(*a, *b, first, strict=True))
    return (first, sizes) if all(size > 0 for size in sizes) else None


def global_tensors(shares: Sequence[Sequence[Share]]) -> dict[str, Share]:
    """Map from name to a share of the tensor, in the order of the ranks. Raises CheckpointError if ranks disagree."""
    known: dict[str, tuple[int, Share]] = {}
    for rank, own in enumerate(shares):
        for share in own:
            first, other = known.setdefault(share.name, (rank, share))
            if (share.dtype, share.shape) != (other.dtype, other.shape):
                raise CheckpointError(
                    f"tensor {share.name!r} is {other.dtype} {list(other.shape)} on rank {first} and {share.dtype} "
                    f"{list(share.shape)} on rank {rank}. One name must mean the same tensor on every rank."
                )
    return {name: share for name, (_, share) in known.items()}


def check_coverage(shares: Sequence[Sequence[Share]]) -> None:
    """Raise CheckpointError unless the ranks' boxes, equal ones counted once, make up every tensor."""
    tensors = global_tensors(shares)
    boxes = {(share.name, box) for own in shares for share in own for box in share.boxes}
    table = BoxTable.of(FileBox(name=name, offsets=o, sizes=s, start=0) for name, (o, s) in sorted(boxes))
    table = table.in_terms_of(tuple(tensors), {name: at for at, name in enumerate(tensors)}, table.sizes.shape[1])
    try:
        found = first_fault(table, [share.shape for share in tensors.values()])
    except TooIrregular as error:
        raise CheckpointError(f"a tensor is cut too irregularly over the ranks: {error}.") from None
    if found is None:
        return
    number, (kind, cell) = found
    name, share = list(tensors.items())[number]
    said = "no rank holds" if kind == "missing" else "ranks hold overlapping boxes at"
    raise CheckpointError(
        f"tensor {name!r} of shape {list(share.shape)}: {said} {list(cell)}. All ranks that hold a part of the state "
        "must take part, and cut a tensor in the same way."
    )


def _slabs(box: Box, item_bytes: int, at_most: int | None) -> list[Box]:
    """The box in slabs that are not much smaller than SLAB_BYTES."""
    offsets, sizes = box
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        return [box]
    count = min(math.prod(sizes) * item_bytes // SLAB_BYTES, sizes[dim], *([] if at_most is None else [at_most]))
    cuts = [sizes[dim] * at // max(count, 1) for at in range(max(count, 1) + 1)]
    return [
        ((*offsets[:dim], offsets[dim] + a, *offsets[dim + 1 :]), (*sizes[:dim], b - a, *sizes[dim + 1 :]))
        for a, b in pairwise(cuts)
    ]


def _shared_out(ranks: tuple[int, ...], some: list[Job], loads: list[int]) -> list[Job]:
    """The jobs of boxes that the same ranks share, each assigned to one of them. Updates `loads`."""
    least = [(loads[rank], rank) for rank in ranks]
    heapq.heapify(least)
    given: list[Job] = []
    for job in sorted(some, key=lambda job: -job.size_bytes):
        load, rank = least[0]
        heapq.heapreplace(least, (load + job.size_bytes, rank))
        loads[rank] += job.size_bytes
        given.append(Job(rank, job.places, job.box, job.size_bytes, job.joint))
    return given
