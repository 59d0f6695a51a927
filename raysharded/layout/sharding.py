"""How one rank of W holds the state in one flat buffer of bytes.

Dimension 0 of a tensor is cut as FSDP2 cuts it (`torch.chunk`): chunks of `ceil(rows / W)` rows, so that the last
ranks may get less or nothing. A rank's buffer is its piece of every tensor in the spec's order, each starting at a
multiple of `ALIGNMENT` bytes; replicated tensors are in every rank's buffer whole; empty pieces take no room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout.state import StateSpec, TensorSpec

ALIGNMENT = 64
"""Every piece starts at a multiple of so many bytes (a cache line; enough for any dtype's view)."""


def row_range(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows `start <= row < stop` of a tensor that rank `rank` of `world_size` holds.

    Laws: the ranges of all ranks in order tile 0..rows; all that are not empty but the last have one length.
    Source: torch.distributed.fsdp `fully_shard`, which chunks dimension 0 with `torch.chunk`.
    """
    require_rank(world_size, rank)
    chunk = -(-rows // world_size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One of so many parts of a rank's pieces, for those that hold the same."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        require_rank(self.of, self.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One rank's part of one tensor: the box at `offsets` of `sizes`, in the bytes `place` of the rank's buffer."""

    tensor: TensorSpec
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: slice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardMap:
    """What lies where in one rank's flat buffer: one entry per piece, in the order of the spec.

    Piece `i` is the bytes `line_start[i] <= position < line_stop[i]` of the state's line, rows
    `row_start[i] <= row < row_stop[i]` of tensor number `tensor[i]`, and begins at byte `offset[i]` of the buffer.
    """

    world_size: int
    rank: int
    tensor: NDArray[np.int64]
    row_start: NDArray[np.int64]
    row_stop: NDArray[np.int64]
    line_start: NDArray[np.int64]
    line_stop: NDArray[np.int64]
    offset: NDArray[np.int64]
    size_bytes: int
    """Bytes of the whole buffer, a multiple of `ALIGNMENT`."""

    def __len__(self) -> int:
        return len(self.tensor)

    def pieces(self, spec: StateSpec) -> Iterator[Piece]:
        """Every piece as a box of its tensor, in order; `spec` is the one that the map was made for."""
        for i in range(len(self)):
            index, start, stop = self.rows(i)
            tensor, offset = spec.tensors[index], int(self.offset[i])
            yield Piece(
                tensor=tensor,
                offsets=(start, *[0] * (len(tensor.shape) - 1)) if tensor.shape else (),
                sizes=(stop - start, *tensor.shape[1:]) if tensor.shape else (),
                place=slice(offset, offset + int(self.line_stop[i] - self.line_start[i])),
            )

    def part(self, share: Share) -> ShardMap:
        """The same map with a share of its pieces: those that are next to each other, about as many bytes for each.

        Law: the shares together have every piece once.
        """
        if share.of == 1:
            return self
        end = np.cumsum(self.line_stop - self.line_start)
        middle = end - (self.line_stop - self.line_start) / 2
        mine = np.flatnonzero(np.floor(middle * share.of / max(1, end[-1] if len(end) else 1)) == share.index)
        return replace(
            self,
            tensor=self.tensor[mine],
            row_start=self.row_start[mine],
            row_stop=self.row_stop[mine],
            line_start=self.line_start[mine],
            line_stop=self.line_stop[mine],
            offset=self.offset[mine],
        )

    def rows(self, i: int) -> tuple[int, int, int]:
        """Piece `i` as (tensor index, first row, row behind the last)."""
        return int(self.tensor[i]), int(self.row_start[i]), int(self.row_stop[i])


def shard_map(spec: StateSpec, world_size: int, rank: int) -> ShardMap:
    """The buffer of rank `rank` when the state is laid out flat over `world_size` ranks.

    Law: over all ranks, the pieces of sharded tensors cover each of their bytes once.
    """
    require_rank(world_size, rank)
    start, stop = _rows_held(spec, world_size, np.array([rank], np.int64))
    size, offset, total = _packed(spec, start, stop)
    tensor = np.flatnonzero(size[0])
    first, last = start[0, tensor], stop[0, tensor]
    base, row_bytes = spec.base[tensor], spec.row_bytes[tensor]
    return ShardMap(
        world_size=world_size,
        rank=rank,
        tensor=tensor.astype(np.int64),
        row_start=first,
        row_stop=last,
        line_start=base + first * row_bytes,
        line_stop=base + last * row_bytes,
        offset=offset[0, tensor],
        size_bytes=int(total[0]),
    )


def buffer_offsets(spec: StateSpec, world_size: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """(ranks, number of tensors): the byte in each of these ranks' buffers at which its piece of each tensor begins.

    Law: the row of rank `r` at `shard_map(spec, world_size, r).tensor` is that map's `offset`. Empty pieces have no
    meaningful one.
    """
    require_rank(world_size, 0)
    start, stop = _rows_held(spec, world_size, ranks)
    return _packed(spec, start, stop)[1]


def require_rank(world_size: int, rank: int) -> None:
    """Raise ConfigError unless `rank` is one of `world_size` ranks."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}, world_size={world_size}: need 0 <= rank < world_size.")


def _rows_held(
    spec: StateSpec, world_size: int, ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ranks, tensors) first rows and rows behind the last."""
    chunk = -(-spec.rows // world_size)
    column = ranks[:, None]
    start = np.where(spec.replicated, 0, np.minimum(column * chunk, spec.rows))
    stop = np.where(spec.replicated, spec.rows, np.minimum((column + 1) * chunk, spec.rows))
    return start, stop


def _packed(
    spec: StateSpec, start: NDArray[np.int64], stop: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(ranks, tensors) sizes and offsets of the pieces, and (ranks,) sizes of the buffers."""
    size = (stop - start) * spec.row_bytes
    room = -(-size // ALIGNMENT) * ALIGNMENT
    end = np.cumsum(room, axis=1)
    return size, end - room, room.sum(axis=1)
