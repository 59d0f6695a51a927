"""Filling of tensors from a checkpoint on all ranks at once. A byte that several ranks need is read by one of them.

In every phase (`read_plan`) each rank reads its part, straight into its tensors where possible. When all ranks have
succeeded, they send each other the shared bytes. A damaged file is therefore an error on every rank, and no rank waits
for bytes that never arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from raysharded.checkpoint.read_plan.dedup import Share, assign
from raysharded.checkpoint.read_plan.groups import unions_of
from raysharded.checkpoint.read_plan.plan import NO_BOX, Move, Phase, Region, phases_of
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.p2p import Transfer, exchange
from raysharded.checkpoint.state_dict.shard_boxes import Held
from raysharded.checkpoint.state_dict.staging import (
    STAGE_BYTES,
    Piece,
    bytes_of,
    carve,
    cut,
    host_buffer,
    in_batches,
    is_in_place,
    space_for,
    synchronize,
    torch_dtype,
)


def fill(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Held],
    coordinator: Coordinator,
    group: dist.ProcessGroup | None = None,
    *,
    stage_bytes: int = STAGE_BYTES,
) -> None:
    """Fill the tensors, by the checkpoint's names, converting dtypes.

    All ranks must call it, in `guarded`.
    """
    # From here on a tensor's name and dtype are the checkpoint's; those of its memory are the tensor's own.
    held = [replace(one, name=n, dtype=checkpoint.manifest.tensors[n].dtype) for n, one in wanted.items()]
    everyone = coordinator.gather([_share(one).to_json() for one in held])
    plans = None if everyone is None else _plans(checkpoint, everyone, stage_bytes)
    for value in coordinator.scatter(plans):
        _carry_out(checkpoint, held, Phase.from_json(value), coordinator, group, stage_bytes)


def require_all_well(coordinator: Coordinator) -> None:
    """Return when every rank has come here. Raises PeerFailed if one has failed."""
    coordinator.scatter(None if coordinator.gather(None) is None else [None] * coordinator.world_size)


def _share(held: Held) -> Share:
    boxes = tuple((part.offsets, part.sizes) for part in held.parts)
    return Share(held.name, held.dtype, held.shape, boxes, kind=str(held.local.dtype))


def _plans(checkpoint: Checkpoint, everyone: Sequence[list[list[object]]], stage_bytes: int) -> list[list[object]]:
    shares = [[Share.from_json(share) for share in own] for own in everyone]
    jobs = assign(shares, unions_of(shares, checkpoint.manifest))
    return [[phase.to_json() for phase in phases] for phases in phases_of(shares, jobs, stage_bytes)]


def _carry_out(
    checkpoint: Checkpoint,
    held: Sequence[Held],
    phase: Phase,
    coordinator: Coordinator,
    group: dist.ProcessGroup | None,
    stage_bytes: int,
) -> None:
    _read(checkpoint, [_piece(held, region) for region in phase.reads if region.which != NO_BOX], stage_bytes)
    apart = [region for region in phase.reads if region.which == NO_BOX]
    buffers = _read_apart(checkpoint, [(held[region.number], region) for region in apart])
    require_all_well(coordinator)

    def memory(move: Move) -> torch.Tensor:
        if move.buffer == NO_BOX:
            return _piece(held, move.region).tensor
        begin = apart[move.buffer].offsets
        cells = zip(begin, move.region.offsets, move.region.sizes, strict=True)
        return buffers[move.buffer][tuple(slice(at - b, at - b + n) for b, at, n in cells)]

    rank = coordinator.rank
    own = [move for move in phase.moves if move.targets == (rank,) and move.source == rank]
    others = [move for move in phase.moves if move.targets != (rank,) or move.source != rank]
    transfers = [Transfer(move.round, move.source, move.targets, memory(move)) for move in others]
    exchange(transfers, group, rank, coordinator.world_size)
    for move in own:
        _piece(held, move.region).tensor.copy_(memory(move))


def _piece(held: Sequence[Held], region: Region) -> Piece:
    own = held[region.number]
    return Piece(own, own.parts[region.which].within(region.offsets, region.sizes))


def _read(checkpoint: Checkpoint, pieces: Sequence[Piece], stage_bytes: int) -> None:
    """Read this rank's part: in place in one go, the rest through a buffer of at most `stage_bytes`."""
    direct = [piece for piece in pieces if _takes_bytes(piece)]
    _read_into(checkpoint, direct, [piece.tensor for piece in direct])
    staged = [part for piece in pieces if not _takes_bytes(piece) for part in cut(piece, stage_bytes)]
    batches = list(in_batches(staged, stage_bytes))
    if not batches:
        return
    buffer = host_buffer(
        max(space_for(batch) for batch in batches), pinned=any(piece.tensor.device.type != "cpu" for piece in staged)
    )
    for batch in batches:
        views = carve(buffer, [(piece.held.dtype, piece.part.sizes) for piece in batch])
        _read_into(checkpoint, batch, views)
        for piece, view in zip(batch, views, strict=True):
            piece.tensor.copy_(view, non_blocking=True)
        synchronize(piece.tensor.device for piece in batch)


def _takes_bytes(piece: Piece) -> bool:
    """Whether the stored bytes can go straight to their place."""
    return is_in_place(piece.tensor) and piece.tensor.dtype == torch_dtype(piece.held.dtype)


def _read_into(checkpoint: Checkpoint, pieces: Sequence[Piece], outs: Sequence[torch.Tensor]) -> None:
    if pieces:
        checkpoint.read_many(
            [(p.held.name, p.part.offsets, p.part.sizes, bytes_of(out)) for p, out in zip(pieces, outs, strict=True)]
        )


def _read_apart(checkpoint: Checkpoint, boxes: Sequence[tuple[Held, Region]]) -> list[torch.Tensor]:
    """Boxes read into buffers, in the dtypes of the tensors that they are for."""
    outs = [torch.empty(region.sizes, dtype=torch_dtype(one.dtype)) for one, region in boxes]
    requests = [
        (one.name, region.offsets, region.sizes, bytes_of(out)) for (one, region), out in zip(boxes, outs, strict=True)
    ]
    if requests:
        checkpoint.read_many(requests)
    return [out.to(one.local.dtype) for (one, _), out in zip(boxes, outs, strict=True)]
