"""The planner: from the copies of the state that are left to a new layout, as columns of transfers.

Sources are chosen once per segment of a class of equal tensors (see `segments`), then expanded to one row per
transfer with a few gathers; no Python object or loop per transfer. Everything is a function of the arguments alone,
in fixed orders: workers that plan from the same inputs agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.plan import MIRROR_BUFFER, Copy, Missing, Plan, Target
from raysharded.layout.segments import Segments, cut
from raysharded.layout.sharding import ALIGNMENT, buffer_offsets
from raysharded.layout.sources import Candidates, choose_copies, find_candidates, wire_bytes_of
from raysharded.layout.state import StateSpec

_BUNDLES = 16
_PIECES_PER_SENDER = 32
_MIN_PIECE_BYTES = 64 * 1024
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
    of the whole plan.
    """
    world_sizes, size_index = _world_sizes(copies, target)
    segments = _cut_for_balance(spec, copies, world_sizes)
    candidates = find_candidates(segments, copies, size_index, target)
    choice = choose_copies(candidates)
    total = len(segments.cls)
    if (choice[:total] < 0).any():
        return _missing(spec, segments, choice[:total] < 0)
    keep = None
    if worker is not None:
        sender = candidates.holder[choice, np.arange(len(choice))]
        keep = (sender == worker) | (candidates.receiver == worker)
    return _expand(spec, segments, candidates, choice, target, world_sizes, size_index, keep)


def count_wire_bytes(spec: StateSpec, copies: Sequence[Copy], target: Target) -> int:
    """What `make_plan(...).wire_bytes` would be, in about a hundredth of the time; missing bytes count as none.

    Law: equal to the plan's number whenever there is a plan.
    """
    world_sizes, size_index = _world_sizes(copies, target)
    return wire_bytes_of(find_candidates(cut(spec, world_sizes), copies, size_index, target))


def _expand(
    spec: StateSpec,
    segments: Segments,
    candidates: Candidates,
    choice: NDArray[np.int64],
    target: Target,
    world_sizes: Sequence[int],
    size_index: Sequence[int],
    keep: NDArray[np.bool_] | None,
) -> Plan:
    """The rows of all buffers, by (buffer, content rank, tensor, position).

    Small tables have an entry per column (buffer, segment); `column` has one per row and looks up in them.
    """
    buffers, n_tensors = len(target.buffers), len(spec.tensors)
    tables = [buffer_offsets(spec, world_size) for world_size in world_sizes]
    lengths = np.array([table.size for table in tables])
    offsets, first_offset = np.concatenate([table.ravel() for table in tables]), np.cumsum(lengths) - lengths

    start, content, cls = (np.tile(a, buffers) for a in (segments.start, segments.owner[0], segments.cls))
    kind, replica = np.repeat(np.asarray(target.buffers, np.int32), len(segments.cls), axis=0).T
    rank = candidates.rank[choice, np.arange(len(choice))]
    sender = candidates.holder[choice, np.arange(len(choice))]
    size = np.asarray(size_index, np.int64)[choice]
    src_buffer = first_offset[size] + rank * n_tensors
    src_within = start - rank * segments.chunk[size, cls]
    dst_within = start - content * segments.chunk[0, cls]
    shards = target.mesh.shards
    dst_rank = np.where(kind == MIRROR_BUFFER, (content + 1) % shards, replica * shards + content)

    column, tensor, piece = _rows(segments, tables[0], buffers, keep)
    src_offset = offsets[src_buffer[column] + tensor] + src_within[column]
    dst_offset = piece + dst_within[column]
    nbytes = np.tile(segments.nbytes, buffers)[column]
    # The first row of a target's buffer has offset 0, so it never continues the one before it.
    source = (choice * max(world_sizes) + rank)[column]
    joined = (np.diff(src_offset) == nbytes[:-1]) & (np.diff(dst_offset) == nbytes[:-1]) & (np.diff(source) == 0)
    if joined.any():
        first = np.flatnonzero(np.append(True, ~joined))
        nbytes = np.add.reduceat(nbytes, first)
        column, tensor, src_offset, dst_offset = column[first], tensor[first], src_offset[first], dst_offset[first]
    return Plan(
        src_worker=sender[column],
        copy=choice.astype(np.int32)[column],
        src_rank=rank.astype(np.int32)[column],
        src_offset=src_offset,
        dst_worker=candidates.receiver[column],
        dst_rank=dst_rank.astype(np.int32)[column],
        dst_kind=kind[column],
        dst_offset=dst_offset,
        line_start=spec.base[tensor] + start[column],
        nbytes=nbytes,
    )


def _rows(
    segments: Segments, target_offsets: NDArray[np.int64], buffers: int, keep: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per row its column (buffer, segment), its tensor, and where its piece begins in the target's buffer."""
    world_size = len(target_offsets)
    filled = np.flatnonzero(segments.class_of >= 0)
    one_buffer = segments.bounds(world_size)[segments.class_of[filled]].T  # (world size + 1, tensors)
    bounds = one_buffer + len(segments.cls) * np.arange(buffers)[:, None, None]
    if keep is not None:
        bounds = np.append(0, np.cumsum(keep))[bounds]
    first, count = bounds[:, :-1].ravel(), np.diff(bounds, axis=1).ravel()
    behind = np.cumsum(count)
    column = np.repeat(first - (behind - count), count)
    column += np.arange(len(column))
    if keep is not None:
        column = np.flatnonzero(keep)[column]
    tensor = np.repeat(np.tile(filled, buffers * world_size), count)
    return column, tensor, np.repeat(np.tile(target_offsets[:, filled].ravel(), buffers), count)


def _world_sizes(copies: Sequence[Copy], target: Target) -> tuple[list[int], list[int]]:
    """The distinct numbers of shards, the target's first, and the place of each copy's among them."""
    sizes = list(dict.fromkeys([target.mesh.shards, *(copy.world_size for copy in copies)]))
    return sizes, [sizes.index(copy.world_size) for copy in copies]


def _cut_for_balance(spec: StateSpec, copies: Sequence[Copy], world_sizes: Sequence[int]) -> Segments:
    """Finer than the layouts ask for where there is a choice between senders, so that it can be used."""
    memory = [copy.world_size for copy in copies if copy.medium != "storage"]
    if len(memory) < 2:
        return cut(spec, world_sizes)
    step = max(spec.total_bytes // (max(memory) * _PIECES_PER_SENDER), _MIN_PIECE_BYTES)
    return cut(spec, world_sizes, bundles=_BUNDLES, max_bytes=step // ALIGNMENT * ALIGNMENT)


def _missing(spec: StateSpec, segments: Segments, missing: NDArray[np.bool_]) -> Missing:
    """Replicated tensors have a segment per rank of the target: each counts once."""
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
