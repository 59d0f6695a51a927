"""Blocks computed piece by piece from other workers' blocks, so that only a few pieces are in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.shards.erasure import Bytes

PIECE_BYTES = 4 << 20
"""Bytes of each block that are sent, received and computed at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A block's bytes on their way from one worker to another; they may be fewer than the block's length."""

    peer: int
    """Rank at the other end."""
    tag: int
    """Number that distinguishes streams between two workers, at both ends; `num_pieces` of its block limits it."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """A block to compute from others, all of one length; bytes that a source lacks count as zeros."""

    length: int
    sources: Sequence[Stream | Bytes]
    """Blocks of other workers, or this worker's own."""
    compute: Callable[[list[Bytes], int], None]
    """Called with a piece of each source, in order, and the piece's offset in the block."""


def num_pieces(length: int) -> int:
    """Number of pieces in which a block of this length is sent."""
    return -(-length // PIECE_BYTES)


def send(group: HostGroup, stream: Stream, data: torch.Tensor, length: int) -> list[Any]:
    """Start to send a block of this length, as far as it is in `data`, to a peer that gathers it.

    Wait for the returned works, and leave `data` unchanged until then. Nothing is copied: the bytes are sent when the
    peer wants them.
    """
    count = num_pieces(length)
    pieces = data.split(PIECE_BYTES) if data.numel() else ()
    return [group.send(piece, stream.peer, stream.tag * count + number) for number, piece in enumerate(pieces)]


class GatherBuffers:
    """Reused memory for arriving pieces: at most two pieces for each source of a block."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, turn: int, source: int, size_bytes: int) -> torch.Tensor:
        """Memory for a piece of a source, free again in the turn after the next."""
        key = (turn % 2, source)
        if key not in self._buffers or len(self._buffers[key]) < size_bytes:
            self._buffers[key] = torch.empty(size_bytes, dtype=torch.uint8)
        return self._buffers[key][:size_bytes]


def gather(group: HostGroup, needed: Iterable[Needed], room: GatherBuffers) -> int:
    """Compute blocks from pieces of others; the bytes received. During each computation the next piece arrives."""
    jobs = ((block, start) for block in needed for start in range(0, block.length, PIECE_BYTES))
    received = 0
    coming: _Piece | None = None
    for turn, (block, start) in enumerate(jobs):
        piece, coming = coming, _Piece(group, block, start, turn, room)
        received += coming.size_bytes
        if piece is not None:
            piece.finish()
    if coming is not None:
        coming.finish()
    return received


class _Piece:
    """One piece of every source of a block, in transfer."""

    def __init__(self, group: HostGroup, block: Needed, start: int, turn: int, room: GatherBuffers) -> None:
        self._group, self._block, self._start = group, block, start
        self._works: list[Any] = []
        self._parts: list[Bytes] = []
        self.size_bytes = 0
        stop = min(start + PIECE_BYTES, block.length)
        for i, source in enumerate(block.sources):
            size = len(source) if isinstance(source, np.ndarray) else source.size_bytes
            there = max(0, min(stop, size) - start)
            if isinstance(source, np.ndarray) and there == stop - start:
                self._parts.append(source[start:stop])
                continue
            part = room.take(turn, i, stop - start)
            part[there:].zero_()
            if isinstance(source, np.ndarray):
                part[:there] = torch.from_numpy(source[start : start + there])
            elif there:
                tag = source.tag * num_pieces(block.length) + start // PIECE_BYTES
                self._works.append(group.recv(part[:there], source.peer, tag))
                self.size_bytes += there
            self._parts.append(part.numpy())

    def finish(self) -> None:
        for work in self._works:
            self._group.deliver(work)
        self._block.compute(self._parts, self._start)
