"""Layout of the state over W ranks, each with one flat buffer of bytes.

Dimension 0 of a tensor is cut as FSDP2 cuts it (`torch.chunk`): chunks of `ceil(rows / W)` rows, so that the last ranks
may get less or nothing. A rank's buffer is its piece of every tensor in the spec's order, each starting at a multiple
of `ALIGNMENT` bytes. Replicated tensors are whole in every rank's buffer; empty pieces take no space.

With a tensor parallel degree `T` rank `r` is tensor rank `r % T` of data shard `r // T`, of `W / T`. Tensor parallelism
treats a tensor in one of three ways:

- It cuts dimension 0, too: this is chunked first over the tensor ranks, and then each one's rows over the data shards
  (torch's `_StridedShard`).
- It cuts the tensor into `G` strips: each tensor rank has `G / T` consecutive ones, whose rows are cut over the data
  shards.
- It does not cut the tensor, which is common: it is cut over the data shards, and each of these has a chunk `T` times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout.state import StateSpec, TensorSpec, possible_degree

ALIGNMENT = 64
"""Every piece starts at a multiple of this number of bytes (a cache line; enough for any dtype's view)."""


def row_range(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows `start <= row < stop` of a tensor that rank `rank` of `world_size` holds.

    Laws: the ranges of all ranks in order tile 0..rows; all nonempty ones but the last have one length. Source:
    torch.distributed.fsdp `fully_shard`, which chunks dimension 0 with `torch.chunk`.
    """
    require_rank(world_size, rank)
    chunk = -(-rows // world_size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One of several parts of a rank's pieces, for ranks that hold the same."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        require_rank(self.of, self.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One rank's part of one tensor, or of a strip.

    It is the box at `offsets` of `sizes` of the whole tensor, in row-major order in the bytes `place` of the rank's
    buffer.
    """

    tensor: TensorSpec
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: slice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardMap:
    """Contents of one rank's flat buffer: one entry per piece, in the order of the spec.

    Piece `i` is the bytes `line_start[i] <= position < line_stop[i]` of the state's line, rows `row_start[i] <= row <
    row_stop[i]` of tensor number `tensor[i]`, and begins at byte `offset[i]` of the buffer.
    """

    world_size: int
    rank: int
    degree: int
    """Tensor parallel degree: the rank is tensor rank `rank % degree`, as in `Mesh`."""
    tensor: NDArray[np.int64]
    row_start: NDArray[np.int64]
    row_stop: NDArray[np.int64]
    line_start: NDArray[np.int64]
    line_stop: NDArray[np.int64]
    offset: NDArray[np.int64]
    common: NDArray[np.bool_]
    """True for pieces that the other tensor ranks of the data shard have as well; replicated tensors do not count."""
    size_bytes: int
    """Bytes of the whole buffer, a multiple of `ALIGNMENT`."""

    def __len__(self) -> int:
        return len(self.tensor)

    def pieces(self, spec: StateSpec) -> Iterator[Piece]:
        """Every piece as a box of its tensor, in order. `spec`: the one that the map was made for."""
        for i in range(len(self)):
            index, start, stop = self.rows(i)
            tensor, offset = spec.tensors[index], int(self.offset[i])
            offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
            if tensor.shape:
                offsets[0], sizes[0] = start, stop - start
            if tensor.tensor_dim:
                dim, first, behind = tensor.strip_range
                offsets[dim], sizes[dim] = first, behind - first
            yield Piece(
                tensor=tensor,
                offsets=tuple(offsets),
                sizes=tuple(sizes),
                place=slice(offset, offset + int(self.line_stop[i] - self.line_start[i])),
            )

    def part(self, share: Share) -> ShardMap:
        """The map with only a share of its pieces, for ranks that hold the same.

        These are replicas, which pass their share, and the other tensor ranks, which have the common pieces. A share is
        adjacent pieces, with about as many bytes for each.

        Law: the shares of all replicas and of all tensor ranks together have every piece of a sharded tensor once.
        """
        if share.of == 1 and self.degree == 1:
            return self
        nbytes = self.line_stop - self.line_start
        common = np.flatnonzero(self.common)
        dealt = _shared(nbytes[common], Share(index=self.rank % self.degree, of=self.degree))
        mine = np.sort(np.concatenate([np.flatnonzero(~self.common), common[dealt]]))
        mine = mine[_shared(nbytes[mine], share)]
        return replace(
            self,
            tensor=self.tensor[mine],
            row_start=self.row_start[mine],
            row_stop=self.row_stop[mine],
            line_start=self.line_start[mine],
            line_stop=self.line_stop[mine],
            offset=self.offset[mine],
            common=self.common[mine],
        )

    def rows(self, i: int) -> tuple[int, int, int]:
        """Piece `i` as (tensor index, first row, row behind the last)."""
        return int(self.tensor[i]), int(self.row_start[i]), int(self.row_stop[i])


def shard_map(spec: StateSpec, world_size: int, rank: int, degree: int = 1) -> ShardMap:
    """The buffer of rank `rank` when the state is laid out over `world_size` ranks with this tensor parallel degree.

    Law: over all ranks, the pieces of sharded tensors cover each of their bytes once, those of common ones `degree`
    times. Raises ConfigError for a degree that does not divide the world size, or the strips of a tensor.
    """
    require_rank(world_size, rank)
    require_degree(spec, world_size, degree)
    start, stop = _rows_held(spec, world_size, np.array([rank], np.int64), degree)
    size, offset, total = _packed(spec, start, stop)
    tensor = np.flatnonzero(size[0])
    first, last = start[0, tensor], stop[0, tensor]
    base, row_bytes = spec.base[tensor], spec.row_bytes[tensor]
    return ShardMap(
        world_size=world_size,
        rank=rank,
        degree=degree,
        tensor=tensor.astype(np.int64),
        row_start=first,
        row_stop=last,
        line_start=base + first * row_bytes,
        line_stop=base + last * row_bytes,
        offset=offset[0, tensor],
        common=(degree > 1) & (spec.tensor_dim[tensor] < 0) & ~spec.replicated[tensor],
        size_bytes=int(total[0]),
    )


def buffer_origins(spec: StateSpec, world_size: int, ranks: NDArray[np.int64], degree: int = 1) -> NDArray[np.int64]:
    """(ranks, tensors): offset in each rank's buffer at which row 0 of each tensor or strip would begin.

    It may be below 0, as the piece may begin with a later row. Law: in `shard_map(spec, world_size, r, degree)` the
    piece of tensor `t` has the `offset` `origin[t] + row_start * row_bytes`. Empty pieces have no meaningful one.
    """
    require_rank(world_size, 0)
    require_degree(spec, world_size, degree)
    start, stop = _rows_held(spec, world_size, ranks, degree)
    offset = _packed(spec, start, stop)[1]
    start *= spec.row_bytes
    offset -= start
    return offset


def strip_keepers(spec: StateSpec, degree: int) -> NDArray[np.int64]:
    """Tensor rank that has each tensor or strip; -1 for those that are not listed in strips."""
    keepers: NDArray[np.int64] = np.where(spec.strips > 0, spec.strip * degree // np.maximum(spec.strips, 1), -1)
    return keepers


def require_rank(world_size: int, rank: int) -> None:
    """Raise ConfigError unless `rank` is one of `world_size` ranks."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}, world_size={world_size}: need 0 <= rank < world_size.")


def require_degree(spec: StateSpec, world_size: int, degree: int) -> None:
    """Raise ConfigError unless the state can be laid out over so many ranks with this tensor parallel degree."""
    if degree == 1:
        return
    reason = possible_degree(spec, degree)
    if reason is not None:
        raise ConfigError(reason)
    if world_size % degree:
        raise ConfigError(f"world_size={world_size} is not a multiple of the tensor parallel degree {degree}.")


def _shared(nbytes: NDArray[np.int64], share: Share) -> NDArray[np.intp]:
    """Indices of the pieces in a share, ascending."""
    if share.of == 1:
        return np.arange(len(nbytes))
    end = np.cumsum(nbytes)
    middle = end - nbytes / 2
    return np.flatnonzero(np.floor(middle * share.of / max(1, end[-1] if len(end) else 1)) == share.index)


def _rows_held(
    spec: StateSpec, world_size: int, ranks: NDArray[np.int64], degree: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ranks, tensors): first rows, and rows behind the last."""
    if degree > 1:
        return _rows_held_by_tensor_ranks(spec, world_size // degree, *np.divmod(ranks[:, None], degree), degree)
    chunk = -(-spec.rows // world_size)
    column = ranks[:, None]
    start = np.where(spec.replicated, 0, np.minimum(column * chunk, spec.rows))
    stop = np.where(spec.replicated, spec.rows, np.minimum((column + 1) * chunk, spec.rows))
    return start, stop


def _rows_held_by_tensor_ranks(
    spec: StateSpec, shards: int, shard: NDArray[np.int64], tensor_rank: NDArray[np.int64], degree: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Result of `_rows_held` for these pairs (column vectors) of one of `shards` data shards and a tensor rank."""
    nested = spec.tensor_dim == 0
    chunk = -(-spec.rows // degree)
    first = np.where(nested, np.minimum(tensor_rank * chunk, spec.rows), 0)
    behind = np.where(nested, np.minimum((tensor_rank + 1) * chunk, spec.rows), spec.rows)
    chunk = -(-(behind - first) // shards)
    start, stop = np.minimum(first + shard * chunk, behind), np.minimum(first + (shard + 1) * chunk, behind)
    keeper = strip_keepers(spec, degree)
    other = (keeper >= 0) & (keeper != tensor_rank)
    start, stop = np.where(spec.replicated, 0, start), np.where(spec.replicated, spec.rows, stop)
    return start, np.where(other, start, stop)


def _packed(
    spec: StateSpec, start: NDArray[np.int64], stop: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(ranks, tensors) sizes and offsets of the pieces, and (ranks,) sizes of the buffers."""
    size = (stop - start) * spec.row_bytes
    room = -(-size // ALIGNMENT) * ALIGNMENT
    end = np.cumsum(room, axis=1)
    return size, end - room, room.sum(axis=1)
