"""Moves bytes between workers to fill the buffers of a new layout: by a plan, or from one worker to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from raysharded.actors.process_group import Groups
from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, Plan

WAVE_BYTES = 256 << 20
"""A worker sends and receives about so much at once, so that the exchange needs a bounded amount of memory."""

_PIECE_BYTES = 16 << 20
"""What is handed from replica to replica at once."""

Span = tuple[NDArray[np.uint8], int, int]
"""(buffer, start, stop)"""


class _Stream:
    """The spans of one pair of workers, end to end, read or written in order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.size = 0

    def append(self, buffer: NDArray[np.uint8], start: int, nbytes: int) -> None:
        self.spans.append((buffer, start, start + nbytes))
        self.size += nbytes

    def waves(self, wave_bytes: int) -> Iterator[list[NDArray[np.uint8]]]:
        """Views of the next `wave_bytes` of the stream each; empty lists when it has ended."""
        rest = wave_bytes
        wave: list[NDArray[np.uint8]] = []
        for buffer, start, stop in self.spans:
            position = start
            while position < stop:
                end = min(stop, position + rest)
                wave.append(buffer[position:end])
                rest -= end - position
                position = end
                if rest == 0:
                    yield wave
                    wave, rest = [], wave_bytes
        yield wave
        while True:
            yield []


def exchange(
    plan: Plan,
    copies: Sequence[Copy],
    store: ShardStore,
    step: int,
    targets: dict[int, ShardBuffer],
    members: Sequence[WorkerId],
    worker: WorkerId,
    groups: Groups,
    probe: Callable[[str], None],
) -> int:
    """Carry out this worker's rows of a plan; returns the bytes received from others.

    `targets` maps a plan's `dst_kind` to the buffer to fill. Every member must call it with the same plan.
    """
    sources = {
        index: store.find(step, GenerationId(copy.layout_id), copy.medium, copy.holders.index(worker)).data.numpy()
        for index, copy in enumerate(copies)
        if worker in copy.holders
    }
    into = {kind: buffer.data.numpy() for kind, buffer in targets.items()}
    local = plan.local(worker)
    for i in range(len(local)):
        source, target = sources[int(local.copy[i])], into[int(local.dst_kind[i])]
        a, b, n = int(local.src_offset[i]), int(local.dst_offset[i]), int(local.nbytes[i])
        target[b : b + n] = source[a : a + n]
    if len(members) == 1:
        return 0
    sends, receives = plan.sends(worker), plan.receives(worker)
    outgoing = {member: _Stream() for member in members}
    incoming = {member: _Stream() for member in members}
    for i in range(len(sends)):
        outgoing[WorkerId(int(sends.dst_worker[i]))].append(
            sources[int(sends.copy[i])], int(sends.src_offset[i]), int(sends.nbytes[i])
        )
    for i in range(len(receives)):
        incoming[WorkerId(int(receives.src_worker[i]))].append(
            into[int(receives.dst_kind[i])], int(receives.dst_offset[i]), int(receives.nbytes[i])
        )
    probe("transfer")
    _exchange_streams([outgoing[m] for m in members], [incoming[m] for m in members], groups)
    return sum(stream.size for stream in incoming.values())


def broadcast(places: Sequence[NDArray[np.uint8]], groups: Groups) -> int:
    """Give every worker rank 0's bytes of `places`, which are as long everywhere; the bytes received.

    Every member must call it.
    """
    total = sum(map(len, places))
    if total == 0:
        return 0
    is_source = groups.rank == 0
    data = np.concatenate(places) if is_source else np.empty(total, np.uint8)
    groups.broadcast(torch.from_numpy(data))
    if is_source:
        return 0
    position = 0
    for place in places:
        place[:] = data[position : position + len(place)]
        position += len(place)
    return total


def pass_on(data: torch.Tensor, groups: Groups) -> int:
    """Give the holders of each shard the bytes that the first replica's has, from each replica to the next, piece by
    piece; the bytes received. `data` is uint8, as long at every holder. Every member must call it.
    """
    mesh, rank = groups.mesh, groups.rank
    before, after = rank - mesh.shards, rank + mesh.shards
    sending = []
    for tag, piece in enumerate(data.split(_PIECE_BYTES)):
        if before >= 0:
            groups.state.recv([piece], before, tag).wait()
        if after < mesh.world_size:
            sending.append(groups.state.send([piece], after, tag))
    for each in sending:
        each.wait()
    return data.numel() if before >= 0 else 0


def _exchange_streams(outgoing: Sequence[_Stream], incoming: Sequence[_Stream], groups: Groups) -> None:
    wave_bytes = max(1, WAVE_BYTES // len(outgoing))
    own_waves = max(-(-stream.size // wave_bytes) for stream in (*outgoing, *incoming))
    num_waves = groups.max_int(own_waves)
    out_waves = [stream.waves(wave_bytes) for stream in outgoing]
    in_waves = [stream.waves(wave_bytes) for stream in incoming]
    for _ in range(num_waves):
        send_parts = [next(waves) for waves in out_waves]
        receive_parts = [next(waves) for waves in in_waves]
        in_sizes = [sum(map(len, parts)) for parts in send_parts]
        out_sizes = [sum(map(len, parts)) for parts in receive_parts]
        flat = [part for parts in send_parts for part in parts]
        send = np.concatenate(flat) if flat else np.empty(0, np.uint8)
        received = torch.empty(sum(out_sizes), dtype=torch.uint8)
        groups.exchange(received, torch.from_numpy(send), out_sizes, in_sizes)
        position, data = 0, received.numpy()
        for part in (part for parts in receive_parts for part in parts):
            part[:] = data[position : position + len(part)]
            position += len(part)
