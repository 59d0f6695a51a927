"""Segments: the state cut so fine that every segment lies in one piece of each of several layouts.

Tensors of one geometry (rows, bytes per row) are cut alike. So the cuts are made once per class of such tensors and
counted as often as the class has tensors. A large model has thousands of tensors and a handful of geometries. With
tensor parallelism strips are of one class only if they are with the same tensor rank in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.layout.mesh import Mesh
from raysharded.layout.reshard.plan import Copy
from raysharded.layout.sharding import require_degree, strip_keepers
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A number of ranks with a tensor parallel degree, and the parts of the state that they hold.

    Part `r` is what rank `r` alone has. With tensor parallelism part `world_size + s` is what all tensor ranks of data
    shard `s` have in common.
    """

    world_size: int
    tensor: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts: those of one rank, and common ones."""
        return self.world_size + (self.world_size // self.tensor if self.tensor > 1 else 0)

    def rank_of(self, part: NDArray[np.int64], tensor_rank: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Rank that has the part; for a common one, that of the given tensor rank."""
        common = (part - self.world_size) * self.tensor + tensor_rank
        return np.where(part < self.world_size, part, common)


def layout_of(held: Copy | Mesh) -> Layout:
    """Layout of a copy, or of each group of a mesh."""
    return Layout(world_size=held.shards if isinstance(held, Mesh) else held.world_size, tensor=held.tensor)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Intervals of bytes of each class of tensors, by class and then by position.

    Segment `i` is the bytes `start[i] <= byte < start[i] + nbytes[i]` of every tensor of class `cls[i]`. For a cut
    class, `owner[k, i]` is the part that it is in under `layouts[k]`. Replicated classes (the last ones, from
    `first_replicated` on) have one segment per rank of `layouts[0]`, which all stand for the whole tensor. Their
    `owner[0, i]` is that rank, and the other owners mean nothing.
    """

    class_of: NDArray[np.int64]
    """Class of each tensor of the spec; -1 for a tensor without bytes."""
    members: NDArray[np.int64]
    """Number of tensors of each class."""
    first_replicated: int
    """Index of the first segment of the replicated classes, which come last."""
    cls: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    owner: NDArray[np.int64]
    slot: NDArray[np.int64]
    """Segment of each slot, ascending. A slot is a segment in the buffer of one rank of `layouts[0]`; common segments
    have as many slots as there are tensor ranks."""
    slot_rank: NDArray[np.int64]
    """Rank of each slot."""

    @property
    def weight(self) -> NDArray[np.int64]:
        """Bytes of each segment over all tensors of its class."""
        return self.nbytes * self.members[self.cls]

    @property
    def cut_slots(self) -> int:
        """Number of slots of cut classes, which come first."""
        return len(self.slot) - (len(self.cls) - self.first_replicated)


def cut(spec: StateSpec, layouts: Sequence[Layout]) -> Segments:
    """The state cut at the bounds of every layout.

    Laws: the segments of a cut class cover its bytes once; each lies in one part of every layout. Raises ConfigError
    for a layout that the state cannot have.
    """
    for layout in layouts:
        require_degree(spec, layout.world_size, layout.tensor)
    classes = _classes(spec, layouts)
    first = classes.num_cut
    nbytes = classes.rows[:first] * classes.row_bytes[:first]
    base = np.cumsum(nbytes) - nbytes  # a line of the classes, each once
    edges = [base, base + nbytes]
    for layout in layouts:
        edges += [(inner + base[which, None]).ravel() for which, inner in _bounds(classes, layout)]
    line = np.unique(np.concatenate(edges))
    at, length = line[:-1], np.diff(line)
    cls = np.searchsorted(base, at, side="right") - 1
    start = at - base[cls]
    owner = np.stack([_part(classes, k, layout, cls, start) for k, layout in enumerate(layouts)])
    world_size = layouts[0].world_size
    whole = np.arange(first, len(classes.rows))
    copies, ranks = np.repeat(whole, world_size), np.tile(np.arange(world_size), len(whole))
    owner = np.concatenate([owner, np.broadcast_to(ranks, (len(owner), len(ranks)))], axis=1)
    slot, slot_rank = _slots(owner[0], len(cls), layouts[0])
    return Segments(
        class_of=classes.class_of,
        members=classes.members,
        first_replicated=len(cls),
        cls=np.concatenate([cls, copies]),
        start=np.concatenate([start, np.zeros_like(copies)]),
        nbytes=np.concatenate([length, (classes.rows * classes.row_bytes)[copies]]),
        owner=owner,
        slot=slot,
        slot_rank=slot_rank,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Classes:
    """Class of each tensor; rows, bytes per row, members of each class, and the effect of tensor parallelism on it."""

    class_of: NDArray[np.int64]
    members: NDArray[np.int64]
    num_cut: int
    """Number of cut classes, which come first; the others are replicated."""
    rows: NDArray[np.int64]
    row_bytes: NDArray[np.int64]
    nested: NDArray[np.bool_]
    """True for a class whose rows tensor parallelism cuts, before they are cut again."""
    tensor_rank: NDArray[np.int64]
    """(layouts, classes): the tensor rank that has a strip; -1 for tensors that are not listed in strips."""


def _classes(spec: StateSpec, layouts: Sequence[Layout]) -> _Classes:
    columns = [
        spec.replicated,
        np.where(spec.replicated, 1, spec.rows),
        np.where(spec.replicated, spec.nbytes, spec.row_bytes),
    ]
    tensor_rank = np.stack([strip_keepers(spec, layout.tensor) for layout in layouts])
    if any(layout.tensor > 1 for layout in layouts):
        columns += [spec.tensor_dim == 0, *tensor_rank]
    filled = np.flatnonzero(spec.nbytes)
    table, one, number = np.unique(
        np.stack([column[filled] for column in columns], axis=1), axis=0, return_index=True, return_inverse=True
    )
    class_of = np.full(len(spec.tensors), -1, np.int64)
    class_of[filled] = number.ravel()
    example = filled[one]
    return _Classes(
        class_of=class_of,
        members=np.bincount(class_of[filled], minlength=len(table)).astype(np.int64),
        num_cut=int((table[:, 0] == 0).sum()),
        rows=table[:, 1],
        row_bytes=table[:, 2],
        nested=spec.tensor_dim[example] == 0,
        tensor_rank=tensor_rank[:, example],
    )


def _bounds(classes: _Classes, layout: Layout) -> list[tuple[NDArray[np.intp], NDArray[np.int64]]]:
    """Cut classes, and for each the bytes (classes, bounds) at which pieces begin."""
    shards = layout.world_size // layout.tensor
    nested = classes.nested[: classes.num_cut] & (layout.tensor > 1)
    plain, twice = np.flatnonzero(~nested), np.flatnonzero(nested)
    rows, row_bytes = classes.rows[:, None], classes.row_bytes[:, None]
    inner = np.minimum(np.arange(1, shards) * -(-rows[plain] // shards), rows[plain]) * row_bytes[plain]
    bounds = [(plain, inner)]
    if len(twice):
        chunk = -(-rows[twice] // layout.tensor)
        first = np.minimum(np.arange(layout.tensor) * chunk, rows[twice])[:, :, None]  # (classes, tensor ranks, 1)
        own = np.minimum(chunk[:, :, None], rows[twice, :, None] - first)
        inner = first + np.minimum(np.arange(shards) * -(-own // shards), own)
        bounds.append((twice, inner.reshape(len(twice), -1) * row_bytes[twice]))
    return bounds


def _part(
    classes: _Classes, k: int, layout: Layout, cls: NDArray[np.int64], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Parts of layout number `k` that segments of cut classes are in."""
    shards = layout.world_size // layout.tensor
    rows, row_bytes = classes.rows, classes.row_bytes
    shard = start // (-(-rows // shards) * row_bytes)[cls]
    if layout.tensor == 1:
        return shard
    chunk = (-(-rows // layout.tensor) * row_bytes)[cls]
    nested, tensor_rank = classes.nested[cls], classes.tensor_rank[k, cls]
    outer = start // chunk
    own = np.minimum(chunk, (rows * row_bytes)[cls] - outer * chunk) // row_bytes[cls]
    within = (start - outer * chunk) // (-(-own // shards) * row_bytes[cls])
    one = np.where(nested, within * layout.tensor + outer, shard * layout.tensor + tensor_rank)
    return np.where(nested | (tensor_rank >= 0), one, layout.world_size + shard)


def _slots(part: NDArray[np.int64], num_cut: int, layout: Layout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Segments.slot` and `slot_rank`, from the parts that segments are in."""
    every = np.arange(len(part))
    if layout.tensor == 1:
        return every, part
    count = np.where((every < num_cut) & (part >= layout.world_size), layout.tensor, 1)
    slot = np.repeat(every, count)
    nth = np.arange(len(slot)) - np.repeat(np.cumsum(count) - count, count)
    return slot, layout.rank_of(part[slot], nth)
