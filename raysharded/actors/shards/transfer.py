"""Transfer of bytes between workers to fill the buffers of a new layout: by a plan, or from one worker to all.

The bytes that one worker has for another are a stream, in the order of the plan. Streams go in waves: all workers call
the same collective equally often, each time with the next bytes of each stream. They agree beforehand on the number of
waves and on a stream's bytes in a wave. No worker waits for one that waits for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import MIRROR_BUFFER, Copy, Plan, Target, mirror_of

WAVE_BYTES = 256 << 20
"""Most bytes that a worker sends at once, and that it receives at once. The exchange needs twice this memory, in
addition to the buffers that it reads and fills."""

_PIECE_BYTES = 16 << 20
"""Bytes that one worker passes to the next at once."""
_COPY_BYTES = 16 << 20
"""Bytes that one thread copies at once."""

Span = tuple[NDArray[np.uint8], int, int]
"""(buffer, start, stop)"""


class _Stream:
    """The spans of one pair of workers end to end, read or written in order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.size = 0

    def append(self, buffer: NDArray[np.uint8], start: int, nbytes: int) -> None:
        self.spans.append((buffer, start, start + nbytes))
        self.size += nbytes

    def waves(self, wave_bytes: int) -> Iterator[list[NDArray[np.uint8]]]:
        """Views of the next `wave_bytes` of the stream; after its end empty lists."""
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


def kept_buffers(
    plan: Plan, copies: Sequence[Copy], target: Target, store: ShardStore, step: int, worker: WorkerId
) -> dict[int, ShardBuffer]:
    """This worker's buffers that have the place of one of the new layout's, by the plan's `dst_kind`: all bytes of
    such a buffer are where they shall be.

    Most survivors have them if a replacement takes the place of a lost worker.
    """
    mesh = target.mesh
    rank = mesh.shard_of(target.workers.index(worker))
    found: dict[int, ShardBuffer] = {}
    for kind in np.unique(plan.dst_kind[plan.dst_worker == worker]).tolist():
        content = mirror_of(rank, mesh.shards, mesh.apart) if kind == MIRROR_BUFFER else rank
        is_here = (plan.src_worker[(plan.dst_worker == worker) & (plan.dst_kind == kind)] == worker).all()
        for copy in copies if is_here else ():
            is_alike = copy.medium != "storage" and (copy.world_size, copy.tensor) == (mesh.shards, mesh.tensor)
            if is_alike and copy.holders[content] == worker:
                found[kind] = store.find(step, GenerationId(copy.layout_id), copy.medium, content)
    return found


def exchange(
    plan: Plan,
    copies: Sequence[Copy],
    store: ShardStore,
    step: int,
    targets: dict[int, ShardBuffer],
    members: Sequence[WorkerId],
    worker: WorkerId,
    group: HostGroup,
    probe: Callable[[str], None],
) -> int:
    """Carry out this worker's rows of a plan; returns the bytes received from others.

    `targets` maps a plan's `dst_kind` to the buffer to fill; rows of others, which this worker keeps, are left out.
    Every member must call it with the same plan.
    """
    sources = {
        index: store.find(step, GenerationId(copy.layout_id), copy.medium, copy.holders.index(worker)).data.numpy()
        for index, copy in enumerate(copies)
        if worker in copy.holders
    }
    into = {kind: buffer.data.numpy() for kind, buffer in targets.items()}
    local = plan.local(worker)
    copies_here = []
    for i in np.flatnonzero(np.isin(local.dst_kind, list(into))).tolist():
        source, target = sources[int(local.copy[i])], into[int(local.dst_kind[i])]
        a, b, n = int(local.src_offset[i]), int(local.dst_offset[i]), int(local.nbytes[i])
        copies_here.append((target[b : b + n], source[a : a + n]))
    copy_bytes(copies_here, torch.get_num_threads())
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
    _exchange_streams([outgoing[m] for m in members], [incoming[m] for m in members], group)
    return sum(stream.size for stream in incoming.values())


def copy_bytes(copies: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], num_threads: int) -> None:
    """Copy each second array into the first of its pair, of the same length; large ones by several threads.

    One core copies 2 to 6 GB/s, a fraction of what memory gives. Returns when all is copied.
    """
    pieces = [
        (target[start : start + _COPY_BYTES], source[start : start + _COPY_BYTES])
        for target, source in copies
        for start in range(0, len(target), _COPY_BYTES)
    ]
    if num_threads == 1 or sum(len(target) for target, _ in pieces) < 2 * _COPY_BYTES:
        for target, source in pieces:
            target[:] = source
        return
    with ThreadPoolExecutor(num_threads, "copy") as threads:  # NumPy releases the interpreter's lock as it copies
        for done in [threads.submit(np.copyto, target, source) for target, source in pieces]:
            done.result()


def broadcast(places: Sequence[NDArray[np.uint8]], group: HostGroup) -> int:
    """Send rank 0's bytes of `places`, of equal lengths on all workers, to every worker; the bytes received.

    Every member must call it.
    """
    stream = _Stream()
    for place in places:
        stream.append(place, 0, len(place))
    buffer = torch.empty(min(WAVE_BYTES, stream.size), dtype=torch.uint8)
    waves = stream.waves(WAVE_BYTES)
    for _ in range(-(-stream.size // WAVE_BYTES)):
        parts = next(waves)
        data = buffer[: sum(map(len, parts))]
        if group.rank == 0:
            _gather(data, parts)
        group.broadcast(data)
        if group.rank != 0:
            _scatter(data, parts)
    return 0 if group.rank == 0 else stream.size


def pass_on(parts: Sequence[torch.Tensor], place: int, of: int, stride: int, groups: Groups) -> int:
    """Pass the bytes of a chain's first worker on to all others, from each to the next, in pieces; the bytes received.

    The chain has `of` workers, whose ranks are `stride` apart; this one is at `place`. `parts` are uint8, of equal
    lengths on all of them. All of them must call it.
    """
    state = groups.state
    source = groups.rank - stride if place > 0 else None
    to = groups.rank + stride if place < of - 1 else None
    return groups.beside(lambda: _pass_on(parts, source, to, state), "pass on") if of > 1 else 0


def _pass_on(parts: Sequence[torch.Tensor], source: int | None, to: int | None, group: HostGroup) -> int:
    sending = []
    for tag, piece in enumerate(piece for part in parts for piece in part.split(_PIECE_BYTES)):
        if source is not None:
            group.deliver(group.recv(piece, source, tag))
        if to is not None:
            sending.append(group.send(piece, to, tag))
    for each in sending:
        group.deliver(each)
    return 0 if source is None else sum(part.numel() for part in parts)


def _exchange_streams(outgoing: Sequence[_Stream], incoming: Sequence[_Stream], group: HostGroup) -> None:
    num_streams = group.max_int(max(sum(stream.size > 0 for stream in streams) for streams in (outgoing, incoming)))
    wave_bytes = max(1, WAVE_BYTES // max(1, num_streams))
    num_waves = group.max_int(max(-(-stream.size // wave_bytes) for stream in (*outgoing, *incoming)))
    out_waves = [stream.waves(wave_bytes) for stream in outgoing]
    in_waves = [stream.waves(wave_bytes) for stream in incoming]
    # No later wave is larger than the first: a stream that has ended stays empty.
    send, received = (
        group.room(sum(min(stream.size, wave_bytes) for stream in streams)) for streams in (outgoing, incoming)
    )
    for _ in range(num_waves):
        send_parts = [next(waves) for waves in out_waves]
        receive_parts = [next(waves) for waves in in_waves]
        sent_sizes = [sum(map(len, parts)) for parts in send_parts]
        received_sizes = [sum(map(len, parts)) for parts in receive_parts]
        sent_now, received_now = send[: sum(sent_sizes)], received[: sum(received_sizes)]
        _gather(sent_now, [part for parts in send_parts for part in parts])
        group.exchange(received_now, sent_now, received_sizes, sent_sizes)
        _scatter(received_now, [part for parts in receive_parts for part in parts])


def _gather(data: torch.Tensor, places: Sequence[NDArray[np.uint8]]) -> None:
    """Copy the bytes of the places, in order, to `data`."""
    copy_bytes([(there, place) for there, place in _parts(data, places)], torch.get_num_threads())


def _scatter(data: torch.Tensor, places: Sequence[NDArray[np.uint8]]) -> None:
    """Copy the bytes to the places in order."""
    copy_bytes([(place, there) for there, place in _parts(data, places)], torch.get_num_threads())


def _parts(
    data: torch.Tensor, places: Sequence[NDArray[np.uint8]]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Each place with the bytes of `data` that belong to it."""
    position, flat = 0, data.numpy()
    for place in places:
        yield flat[position : position + len(place)], place
        position += len(place)
