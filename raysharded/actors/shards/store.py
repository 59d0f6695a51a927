"""A worker's host memory: its own shard and what it holds for others, of the newest steps, in old and new layouts.

Buffers are allocated once per layout and reused: of each medium one holds the last committed step while another takes
the newer one. A buffer that is being read, usually by a checkpoint, is not overwritten: one more is allocated, and
kept. Buffers of an older layout stay until the new layout is held twice. A buffer whose bytes are the same in the new
layout belongs to both until then, and to the new one later: its memory stays where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import wait_on_host
from raysharded.actors.shards.async_copy import PendingCopy
from raysharded.actors.shards.pinned_arena import PinnedArena, aligned
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, Parity, Piece, ShardMap, StateSpec, shard_map

_UNUSED = -1
"""Step of a buffer that a layout took over and nothing has written to since."""
HostMedium = Literal["snapshot", "mirror", "parity"]


class _Readers:
    """The number of background readers of some memory. Any thread."""

    def __init__(self) -> None:
        self._number, self._lock = 0, threading.Lock()

    def add(self, change: int) -> None:
        with self._lock:
            self._number += change

    def __bool__(self) -> bool:
        return self._number > 0


@dataclass(slots=True, eq=False)
class ShardBuffer:
    """The bytes of one rank's shard at one step, or the parity blocks that it holds."""

    step: int
    layout: GenerationId
    medium: HostMedium
    world_size: int
    rank: int
    """Rank of the shard in its layout; for parity blocks: rank of their holder."""
    spec: StateSpec
    pieces: ShardMap
    degree: int
    """Degree of tensor parallelism in the layout."""
    data: torch.Tensor
    """uint8 on the host, laid out as `pieces`; parity blocks lie one after the other."""
    parity: Parity | None = None
    """Parity of the blocks; None for a shard."""
    registered: str = ""
    """State that a session has registered, as of the same step; empty without a session."""
    complete: bool = False
    _filling: PendingCopy | None = field(default=None, repr=False)
    _tensors: tuple[tuple[torch.Tensor, Piece], ...] | None = field(default=None, repr=False)
    _readers: _Readers = field(default_factory=_Readers, repr=False)
    """Those of its memory, which another layout's buffer may share."""

    @property
    def tensors(self) -> tuple[tuple[torch.Tensor, Piece], ...]:
        """Every piece of a shard as a tensor of its dtype and local shape: views of `data`."""
        if self._tensors is None:  # cached: with many tensors it would take milliseconds in every step
            pieces = self.pieces.pieces(self.spec)
            self._tensors = tuple((_view(self.data, piece), piece) for piece in pieces)
        return self._tensors

    def fill(self, filling: PendingCopy) -> None:
        """Register the copy that fills the buffer. Called by the thread that fills buffers."""
        self._filling = filling

    def wait(self) -> None:
        """Return when the copy is done and the buffer complete; raises the error of a failed copy.

        Called by any thread that holds the buffer, or by the one that fills buffers.
        """
        filling = self._filling
        if filling is not None:
            filling.wait()
            self.complete, self._filling = True, None

    @property
    def is_read(self) -> bool:
        """True if a background reader needs its bytes and its step unchanged."""
        return bool(self._readers)

    def hold(self) -> None:
        """Keep its bytes and its step unchanged until `release`. Called by the thread that fills buffers."""
        self._readers.add(1)

    def release(self) -> None:
        """End one `hold`. Any thread."""
        self._readers.add(-1)


class ShardStore:
    """All shard buffers of one worker. Used by one thread at a time."""

    def __init__(self, *, pin_memory: bool = False) -> None:
        """`pin_memory`: take page-locked memory."""
        self._arena = PinnedArena(_page_locked, wait_on_host) if pin_memory else None
        self._expected: Sequence[int] = ()
        self._buffers: list[ShardBuffer] = []
        self._registered: dict[int, str] = {}
        """Step -> the registered state of a session."""
        self._behind: int | None = None
        """The step behind which a session's lines have run, if its state has what they set."""

    def begin(
        self,
        step: int,
        layout: GenerationId,
        medium: HostMedium,
        world_size: int,
        rank: int,
        spec: StateSpec,
        parity: Parity | None = None,
        size_bytes: int | None = None,
        degree: int = 1,
    ) -> ShardBuffer:
        """A buffer to fill for `step`, as long as the rank's shard or `size_bytes`; set `complete` afterwards.

        Reuses the oldest buffer of the same layout, medium and rank that nobody reads and that is not the newest
        complete one. Allocates a new one if none exists.
        """
        same = [b for b in self._buffers if (b.layout, b.medium, b.rank) == (layout, medium, rank)]
        oldest = _replaceable(same)
        if oldest is not None:
            self._buffers.remove(oldest)
            if oldest.spec is spec:
                oldest.complete, oldest._filling = False, None
                oldest.step, oldest.registered = step, self._registered.get(step, "")
                self._buffers.append(oldest)
                return oldest
        newest = max(same, key=lambda b: b.step, default=None)
        pieces = newest.pieces if newest and newest.spec is spec else shard_map(spec, world_size, rank, degree)
        size = pieces.size_bytes if size_bytes is None else size_bytes
        del same, oldest, newest  # a buffer that was removed is free for this one
        data = self._memory(size, layout, spec)
        buffer = ShardBuffer(step, layout, medium, world_size, rank, spec, pieces, degree, data, parity)
        buffer.registered = self._registered.get(step, "")
        self._buffers.append(buffer)
        return buffer

    def share(self, buffer: ShardBuffer, layout: GenerationId, medium: HostMedium, spec: StateSpec) -> ShardBuffer:
        """A buffer of a newer layout with the memory, step and rank of an older one's; set `complete` afterwards.

        `spec`: equal to the buffer's. Neither may be written before the older layout is dropped.
        """
        shared = replace(buffer, layout=layout, medium=medium, spec=spec, complete=False)
        shared.registered = self._registered.get(buffer.step, "")
        self._buffers.append(shared)
        return shared

    def stop_pinning(self) -> object:
        """Take ordinary memory from now on: the device has failed. Returns what must be kept."""
        arena, self._arena = self._arena, None
        return arena

    def expect(self, sizes: Sequence[int]) -> None:
        """Announce the next layout before its first buffer: bytes of its buffers, once the optimizer has state.

        Twice that of this worker's shard, then twice that of what it holds for others, if it does. If the layout is
        this worker's first, its page-locked memory is allocated in the background from now on.
        """
        self._expected = sizes
        if self._arena is not None and not self._buffers:
            self._arena.begin(sum(map(aligned, sizes)))

    def _memory(self, size_bytes: int, layout: GenerationId, spec: StateSpec) -> torch.Tensor:
        """Memory for one buffer. All of a first layout is there for its first buffer: no step waits for it.

        A later layout begins with one snapshot and one redundant copy. Its others take the place of the older layout.
        Buffers of before the optimizer's state lie at the other end than those that replace them.
        """
        if self._arena is None:
            return torch.empty(size_bytes, dtype=torch.uint8)
        own = [buffer for buffer in self._buffers if buffer.layout == layout]
        sizes = self._expected or (size_bytes, size_bytes)
        if size_bytes > sizes[0]:  # the state has more than was expected
            sizes = [-(-size * size_bytes // sizes[0]) for size in sizes]
        ahead_bytes = 0
        if not self._buffers:
            ahead_bytes = sum(map(aligned, sizes)) - aligned(size_bytes)
        elif not own:
            ahead_bytes = sum(sizes[2:3])
        is_grown = any(buffer.spec is not spec for buffer in own)
        return self._arena.take(size_bytes, at_end=(layout + is_grown) % 2 == 1, ahead_bytes=ahead_bytes)

    def register(self, step: int, state: str) -> None:
        """Keep a session's state as of a step, for as long as there are buffers of the step; call it before `begin`."""
        held = {buffer.step for buffer in self._buffers}
        self._registered = {step: text for step, text in self._registered.items() if step in held} | {step: state}
        self._behind = None if self._behind == step else self._behind

    def amend(self, step: int, state: str, *, is_behind: bool = True) -> None:
        """Replace a session's state as of a step that is complete. `is_behind`: the lines behind it found it done."""
        self._registered[step] = state
        self._behind = step if is_behind else self._behind
        for buffer in self._buffers:
            if buffer.step == step and buffer.registered:
                buffer.registered = state

    def registered(self, step: int) -> str | None:
        """The state of a session as of a step; None if this worker does not have it."""
        return self._registered.get(step)

    def is_behind(self, step: int) -> bool:
        """True if the registered state of a step has what a session's lines behind it have set."""
        return self._behind == step

    def find(self, step: int, layout: GenerationId, medium: str, rank: int | None = None) -> ShardBuffer:
        """The complete buffer of a step, of `rank` if it is given. Raises KeyError if none exists."""
        for buffer in self._buffers:
            found = buffer.complete and (buffer.step, buffer.layout, buffer.medium) == (step, layout, medium)
            if found and rank in (None, buffer.rank):
                return buffer
        raise KeyError(f"no {medium} of step {step} in layout {layout}")

    def find_shard(self, step: int, layout: GenerationId, rank: int) -> ShardBuffer:
        """The complete buffer of a rank's shard, this worker's own or another's. Raises KeyError if none exists."""
        own = next((b for b in self._buffers if (b.layout, b.medium, b.rank) == (layout, "snapshot", rank)), None)
        return self.find(step, layout, "mirror" if own is None else "snapshot", rank)

    def newest_own(self) -> ShardBuffer | None:
        """The newest complete buffer of this worker's own shard, or None."""
        own = [b for b in self._buffers if b.complete and b.medium == "snapshot"]
        return max(own, key=lambda b: (b.layout, b.step), default=None)

    def drop_other_layouts(self, layout: GenerationId) -> None:
        """Free the buffers of all other layouts; beside a shared one, its medium's next buffer is taken from them.

        An incomplete one is not: a transfer that was abandoned may still write to its memory.
        """
        kept = [buffer for buffer in self._buffers if buffer.layout == layout]
        for shared in list(kept):
            others = [b for b in self._buffers if b.layout != layout and _is_alike(b, shared)]
            if any(b.data is shared.data for b in others):
                used = {id(buffer.data) for buffer in kept}
                idle = [b for b in others if (b.complete or b.step == _UNUSED) and not b.is_read]
                spare = next((b for b in idle if id(b.data) not in used), None)
                if spare is not None:
                    spare.layout, spare.spec, spare.complete, spare.step = layout, shared.spec, False, _UNUSED
                    kept.append(spare)
        self._buffers = kept

    def forget(self, step: int) -> list[ShardBuffer]:
        """Forget a step: its buffers, which are returned, and a session's state."""
        forgotten = [buffer for buffer in self._buffers if buffer.step == step]
        self._buffers = [buffer for buffer in self._buffers if buffer.step != step]
        self._registered.pop(step, None)
        return forgotten

    def drop_incomplete(self) -> list[ShardBuffer]:
        """Forget the buffers that were not complete when a generation failed; returns them."""
        dropped = [buffer for buffer in self._buffers if not buffer.complete]
        self._buffers = [buffer for buffer in self._buffers if buffer.complete]
        return dropped

    def held(self, worker: WorkerId) -> tuple[Held, ...]:
        """All complete buffers, for the driver."""
        return tuple(
            Held(
                worker=worker,
                step=b.step,
                medium=b.medium,
                world_size=b.world_size,
                rank=b.rank,
                layout_id=b.layout,
                parity=b.parity,
                tensor=b.degree,
            )
            for b in self._buffers
            if b.complete
        )

    def specs(self) -> dict[int, StateSpec]:
        """Spec of the complete buffers, by step."""
        return {b.step: b.spec for b in self._buffers if b.complete}

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory, also of free pieces."""
        return 0 if self._arena is None else self._arena.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum({id(buffer.data): buffer.data.numel() for buffer in self._buffers}.values())


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _page_locked(size_bytes: int) -> torch.Tensor:
    """Page-locked memory, uint8 [size_bytes]. Any thread."""
    accelerator().enter_thread()
    return accelerator().pinned(size_bytes)


def _view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[piece.place].view(torch_dtype(piece.tensor.dtype)).view(piece.sizes)


def _is_alike(one: ShardBuffer, other: ShardBuffer) -> bool:
    """Whether one buffer could take the other's next step."""
    first, second = ((b.medium, b.world_size, b.rank, b.degree, b.parity, b.data.numel()) for b in (one, other))
    return first == second and one.spec == other.spec


def _replaceable(same: list[ShardBuffer]) -> ShardBuffer | None:
    """The buffer of one layout and medium to overwrite: never the only one, the newest complete one, or one in use."""
    newest = max((b for b in same if b.complete), key=lambda b: b.step, default=None)
    idle = [b for b in same if b is not newest and not b.is_read]
    return min(idle, key=lambda b: (b.complete, b.step)) if len(same) >= 2 and idle else None
