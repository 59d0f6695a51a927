"""The planner: from the remaining copies of the state to a new layout, as columns of transfers.

Sources are chosen once per segment of a class of equal tensors (see `segments`). A few gathers then expand them to one
row per transfer, without a Python object or loop per transfer. Everything is a function of the arguments alone, in
fixed orders and in integers. So workers that plan from the same inputs agree without communicating, and each expands
its own part only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.reshard.holdings import Holdings, holdings_of
from raysharded.layout.reshard.plan import MIRROR_BUFFER, Copy, Missing, Plan, Target
from raysharded.layout.reshard.segments import Layout, Segments, cut, layout_of
from raysharded.layout.reshard.sources import Pieces, choose_sources, in_memory
from raysharded.layout.sharding import buffer_origins
from raysharded.layout.state import StateSpec

_RANGES_SHOWN = 8


def make_plan(
    spec: StateSpec, copies: Sequence[Copy], target: Target, *, worker: WorkerId | None = None
) -> Plan | Missing:
    """Plan that fills every buffer of `target` from `copies`, or the bytes that are missing for it.

    Each byte comes from the receiving worker's own buffers if they have it (the earliest copy of several). Otherwise it
    comes from a peer (the load is spread over the peers that have it), else from storage (the earliest copy again).
    Neighbouring transfers that are contiguous on both sides are one row. `worker`: only the rows that this worker
    sends, receives, reads or copies, in a fraction of the time.

    Laws: every byte of every piece of every buffer of the target is written once. The rows for `worker` are those of
    the whole plan. The bytes on the wire are those of `count_wire_bytes`, the least possible.
    """
    layouts = list(dict.fromkeys([layout_of(target.mesh), *map(layout_of, copies)]))
    layout_index = [layouts.index(layout_of(copy)) for copy in copies]
    segments = cut(spec, layouts)
    holdings = holdings_of(copies, layouts, layout_index)
    missing = _missing(spec, segments, holdings, copies)
    if missing is not None:
        return missing
    pieces = choose_sources(segments, holdings, copies, layouts, layout_index, target)
    if worker is not None:
        pieces = pieces.take((pieces.sender == worker) | (pieces.receiver == worker))
    return _expand(spec, segments, pieces, target, layouts, np.asarray(layout_index, np.int64))


def _expand(
    spec: StateSpec,
    segments: Segments,
    pieces: Pieces,
    target: Target,
    layouts: Sequence[Layout],
    layout_index: NDArray[np.int64],
) -> Plan:
    """Rows of all pieces, by (buffer, content rank, tensor, position).

    Small tables have an entry per piece; `piece` has one per row, to index them.
    """
    shards = target.mesh.shards
    buffer, slot = np.divmod(pieces.column, max(len(segments.slot), 1))
    content, cls = segments.slot_rank[slot], segments.cls[segments.slot[slot]]
    kind, replica = np.array(target.buffers, np.int64)[buffer].T
    dst_rank = np.where(kind == MIRROR_BUFFER, (content + target.apart) % shards, replica * shards + content)
    of_layout = layout_index[pieces.copy]

    piece, tensor = _rows(segments, pieces, buffer * shards + content, cls)
    src_offset = pieces.start[piece]
    dst_offset = src_offset + _origins(spec, layouts[0], content[piece], tensor)
    for k, layout in enumerate(layouts):
        rows = np.flatnonzero(of_layout[piece] == k)
        src_offset[rows] += _origins(spec, layout, pieces.rank[piece[rows]], tensor[rows])
    nbytes = pieces.nbytes[piece]
    # The first row of a target's buffer has offset 0, so it never continues the previous one.
    source = (pieces.copy * max(layout.world_size for layout in layouts) + pieces.rank)[piece]
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
    """Piece and tensor of each row; `content` numbers the contents of all buffers."""
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


def _origins(spec: StateSpec, layout: Layout, rank: NDArray[np.int64], tensor: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, the offset at which that tensor would begin in that rank's buffer."""
    needed = np.zeros(layout.world_size, np.bool_)
    needed[rank] = True
    table = buffer_origins(spec, layout.world_size, np.flatnonzero(needed), layout.tensor)
    found: NDArray[np.int64] = table[(np.cumsum(needed) - 1)[rank], tensor]
    return found


def _missing(spec: StateSpec, segments: Segments, holdings: Holdings, copies: Sequence[Copy]) -> Missing | None:
    """The missing bytes, or None. Replicated tensors have a segment per rank of the target: each counts once."""
    missing = ~in_memory(segments, holdings)
    if not missing.any() or any(copy.medium == "storage" for copy in copies):
        return None
    counted = missing & ((np.arange(len(missing)) < segments.first_replicated) | (segments.owner[0] == 0))
    ranges: list[tuple[str, int, int]] = []
    gone = np.flatnonzero(np.isin(segments.class_of, segments.cls[counted])).tolist()
    for name, strips in groupby(gone, lambda t: spec.tensors[t].name):
        for first, behind in sorted(rows for t in strips for rows in _rows_of(spec, segments, counted, t)):
            if ranges and ranges[-1][0] == name and ranges[-1][2] >= first:
                ranges[-1] = (name, ranges[-1][1], max(ranges[-1][2], behind))
            elif len(ranges) == _RANGES_SHOWN:
                return Missing(ranges=tuple(ranges), total_bytes=int(segments.weight[counted].sum()))
            else:
                ranges.append((name, first, behind))
    return Missing(ranges=tuple(ranges), total_bytes=int(segments.weight[counted].sum()))


def _rows_of(spec: StateSpec, segments: Segments, counted: NDArray[np.bool_], t: int) -> Iterator[tuple[int, int]]:
    """Rows of a tensor, or a strip, that these segments are in: start, stop."""
    of_tensor = counted & (segments.cls == segments.class_of[t])
    row_bytes = spec.tensors[t].row_bytes
    for start, nbytes in zip(segments.start[of_tensor].tolist(), segments.nbytes[of_tensor].tolist(), strict=True):
        yield start // row_bytes, -(-(start + nbytes) // row_bytes)
