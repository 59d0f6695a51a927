"""The planner: from the copies of the state that are left to a new layout, as columns of transfers.

Sources are chosen once per segment of a class of equal tensors (see `segments`), then expanded to one row per
transfer with a few gathers; no Python object or loop per transfer. Everything is a function of the arguments alone,
in fixed orders and in integers: workers that plan from the same inputs agree without talking, and each expands its own
part only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.holdings import Holdings, holdings_of
from raysharded.layout.plan import MIRROR_BUFFER, Copy, Missing, Plan, Target
from raysharded.layout.segments import Segments, cut
from raysharded.layout.sharding import buffer_offsets
from raysharded.layout.sources import Pieces, choose_sources, in_memory
from raysharded.layout.state import StateSpec

_RANGES_SHOWN = 8


def make_plan(
    spec: StateSpec, copies: Sequence[Copy], target: Target, *, worker: WorkerId | None = None
) -> Plan | Missing:
    """How every buffer of `target` is filled from `copies`, or what is missing for it.

    Each byte comes from the receiving worker's own buffers if they have it (the earliest copy of several), else from a
    peer (the load is spread over the peers that have it), else from storage (the earliest copy again). Neighbouring
    transfers that are contiguous on both sides are one row. `worker`: only the rows that this worker sends, receives,
    reads or copies, for a fraction of the time.

    Laws: every byte of every piece of every buffer of the target is written once; the rows for `worker` are those
    of the whole plan; what goes over the wire is what `count_wire_bytes` says, the least there can be.
    """
    world_sizes = list(dict.fromkeys([target.mesh.shards, *(copy.world_size for copy in copies)]))
    size_index = [world_sizes.index(copy.world_size) for copy in copies]
    segments = cut(spec, world_sizes)
    holdings = holdings_of(copies, size_index)
    missing = _missing(spec, segments, holdings, copies)
    if missing is not None:
        return missing
    pieces = choose_sources(segments, holdings, copies, size_index, target)
    if worker is not None:
        pieces = pieces.take((pieces.sender == worker) | (pieces.receiver == worker))
    return _expand(spec, segments, pieces, target, world_sizes, np.asarray(size_index, np.int64))


def _expand(
    spec: StateSpec,
    segments: Segments,
    pieces: Pieces,
    target: Target,
    world_sizes: Sequence[int],
    size_index: NDArray[np.int64],
) -> Plan:
    """The rows of all pieces, by (buffer, content rank, tensor, position).

    Small tables have an entry per piece; `piece` has one per row and looks up in them.
    """
    shards = target.mesh.shards
    buffer, segment = np.divmod(pieces.column, max(len(segments.cls), 1))
    content, cls = segments.owner[0, segment], segments.cls[segment]
    kind, replica = np.array(target.buffers, np.int64)[buffer].T
    dst_rank = np.where(kind == MIRROR_BUFFER, (content + 1) % shards, replica * shards + content)
    size = size_index[pieces.copy]
    src_within = pieces.start - pieces.rank * segments.chunk[size, cls]
    dst_within = pieces.start - content * segments.chunk[0, cls]

    piece, tensor = _rows(segments, pieces, buffer * shards + content, cls)
    src_offset = src_within[piece]
    for k, world_size in enumerate(world_sizes):
        rows = np.flatnonzero(size[piece] == k)
        src_offset[rows] += _offsets(spec, world_size, pieces.rank[piece[rows]], tensor[rows])
    dst_offset = dst_within[piece] + _offsets(spec, shards, content[piece], tensor)
    nbytes = pieces.nbytes[piece]
    # The first row of a target's buffer has offset 0, so it never continues the one before it.
    source = (pieces.copy * max(world_sizes) + pieces.rank)[piece]
    joined = (np.diff(src_offset) == nbytes[:-1]) & (np.diff(dst_offset) == nbytes[:-1]) & (np.diff(source) == 0)
    if joined.any():
        first = np.flatnonzero(np.append(True, ~joined))
        nbytes = np.add.reduceat(nbytes, first)
        piece, tensor, src_offset, dst_offset = piece[first], tensor[first], src_offset[first], dst_offset[first]
    return Plan(
        src_worker=pieces.sender[piece],
        copy=pieces.copy.astype(np.int32)[piece],
        src_rank=pieces.rank.astype(np.int32)[piece],
        src_offset=src_offset,
        dst_worker=pieces.receiver[piece],
        dst_rank=dst_rank.astype(np.int32)[piece],
        dst_kind=kind.astype(np.int32)[piece],
        dst_offset=dst_offset,
        line_start=spec.base[tensor] + pieces.start[piece],
        nbytes=nbytes,
    )


def _rows(
    segments: Segments, pieces: Pieces, content: NDArray[np.int64], cls: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per row its piece and its tensor; `content` numbers the contents of all buffers."""
    tensors = np.argsort(segments.class_of, kind="stable")[np.count_nonzero(segments.class_of < 0) :]
    of_class = np.cumsum(segments.members) - segments.members
    by_place = np.lexsort((pieces.start, content))
    count = (pieces.behind - pieces.first)[by_place]
    behind = np.cumsum(count)
    piece = np.repeat(by_place, count)
    nth = np.arange(len(piece)) - np.repeat(behind - count, count)
    tensor = tensors[(of_class[cls] + pieces.first)[piece] + nth]
    order = np.argsort(content[piece] * len(segments.class_of) + tensor, kind="stable")
    return piece[order], tensor[order]


def _offsets(spec: StateSpec, world_size: int, rank: NDArray[np.int64], tensor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per row where the piece of that tensor begins in that rank's buffer."""
    needed = np.zeros(world_size, np.bool_)
    needed[rank] = True
    table = buffer_offsets(spec, world_size, np.flatnonzero(needed))
    found: NDArray[np.int64] = table[(np.cumsum(needed) - 1)[rank], tensor]
    return found


def _missing(spec: StateSpec, segments: Segments, holdings: Holdings, copies: Sequence[Copy]) -> Missing | None:
    """Replicated tensors have a segment per rank of the target: each counts once."""
    missing = ~in_memory(segments, holdings)
    if not missing.any() or any(copy.medium == "storage" for copy in copies):
        return None
    counted = missing & ((np.arange(len(missing)) < segments.first_replicated) | (segments.owner[0] == 0))
    ranges: list[tuple[str, int, int]] = []
    for t in np.flatnonzero(np.isin(segments.class_of, segments.cls[counted])):
        of_tensor = counted & (segments.cls == segments.class_of[t])
        tensor, name = spec.tensors[t], spec.tensors[t].name
        for start, nbytes in zip(segments.start[of_tensor].tolist(), segments.nbytes[of_tensor].tolist(), strict=True):
            first, behind = start // tensor.row_bytes, -(-(start + nbytes) // tensor.row_bytes)
            if ranges and ranges[-1][0] == name and ranges[-1][2] >= first:
                first = ranges.pop()[1]
            elif len(ranges) == _RANGES_SHOWN:
                return Missing(ranges=tuple(ranges), total_bytes=int(segments.weight[counted].sum()))
            ranges.append((name, first, behind))
    return Missing(ranges=tuple(ranges), total_bytes=int(segments.weight[counted].sum()))
