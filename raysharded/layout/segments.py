"""Where the pieces of several layouts meet: the state cut so fine that every cut lies in one piece of each.

Tensors of one geometry (rows, bytes per row) are cut alike, so the cuts are made once per *class* of such tensors and
counted as often as the class has tensors. A large model has thousands of tensors and a handful of geometries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Intervals of bytes of each class of tensors, by class and then by position.

    Segment `i` is the bytes `start[i] <= byte < start[i] + nbytes[i]` of every tensor of class `cls[i]`. For a
    cut class, `owner[k, i]` is the rank that holds it when the state lies over `world_sizes[k]` ranks.
    Replicated classes (the last ones, from `first_replicated` on) have one segment per rank of `world_sizes[0]`,
    which all stand for the whole tensor: `owner[0, i]` is that rank, and the other owners mean nothing.
    """

    class_of: NDArray[np.int64]
    """Per tensor of the spec its class; -1 for a tensor without bytes."""
    members: NDArray[np.int64]
    """Per class the number of its tensors."""
    first_replicated: int
    """The segments from this one on belong to replicated classes."""
    cls: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    owner: NDArray[np.int64]
    chunk: NDArray[np.int64]
    """(world sizes, classes): bytes of a full piece of a cut class; 0 for a replicated one, whose pieces start at 0."""

    @property
    def weight(self) -> NDArray[np.int64]:
        """Per segment its bytes over all tensors of its class."""
        return self.nbytes * self.members[self.cls]


def cut(spec: StateSpec, world_sizes: Sequence[int]) -> Segments:
    """The state cut at the bounds of every layout in `world_sizes`.

    Laws: the segments of a cut class cover its bytes once; each lies in one rank's piece of every world size.
    """
    sizes = np.asarray(world_sizes, np.int64)
    class_of, rows, row_bytes, members, first = _classes(spec)
    cut_rows, cut_row_bytes = rows[:first], row_bytes[:first]
    chunk = -(-cut_rows // sizes[:, None]) * cut_row_bytes  # (world sizes, cut classes)
    nbytes = cut_rows * cut_row_bytes
    base = np.cumsum(nbytes) - nbytes  # a line of the classes, each once
    edges = [base, base + nbytes]
    for k, world_size in enumerate(world_sizes):
        inner = np.minimum(np.arange(1, world_size) * chunk[k][:, None], nbytes[:, None])
        edges.append((inner + base[:, None]).ravel())
    line = np.unique(np.concatenate(edges))
    at, length = line[:-1], np.diff(line)
    cls = np.searchsorted(base, at, side="right") - 1
    start = at - base[cls]
    owner = start // chunk[:, cls]
    whole = np.arange(first, len(rows))
    copies, ranks = np.repeat(whole, sizes[0]), np.tile(np.arange(sizes[0]), len(whole))
    return Segments(
        class_of=class_of,
        members=members,
        first_replicated=len(cls),
        cls=np.concatenate([cls, copies]),
        start=np.concatenate([start, np.zeros_like(copies)]),
        nbytes=np.concatenate([length, (rows * row_bytes)[copies]]),
        chunk=np.concatenate([chunk, np.zeros((len(sizes), len(whole)), np.int64)], axis=1),
        owner=np.concatenate([owner, np.broadcast_to(ranks, (len(sizes), len(ranks)))], axis=1),
    )


def _classes(
    spec: StateSpec,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Per tensor its class; per class rows, bytes per row and members; and the first replicated class."""
    rows = np.where(spec.replicated, 1, spec.rows)
    row_bytes = np.where(spec.replicated, spec.nbytes, spec.row_bytes)
    filled = np.flatnonzero(spec.nbytes)
    table, number = np.unique(
        np.stack([spec.replicated[filled], rows[filled], row_bytes[filled]], axis=1), axis=0, return_inverse=True
    )
    class_of = np.full(len(spec.tensors), -1, np.int64)
    class_of[filled] = number.ravel()
    members = np.bincount(class_of[filled], minlength=len(table)).astype(np.int64)
    return class_of, table[:, 1], table[:, 2], members, int((table[:, 0] == 0).sum())
