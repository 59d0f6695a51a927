"""Happens-before for streams: vector clocks, the accesses of each storage, and the caching allocator's reuse rule.

A stream does its work in order. Work of two streams, or of a stream and the host, is ordered only by a wait. Two rules
are checked:

1. Of two accesses of a storage, one of which writes, one must be ordered before the other.
2. A storage's memory may be given to a new tensor of the stream that it was allocated on as soon as the host has freed
   it. So all its uses on other streams must be ordered before the next allocation on that stream, unless it is kept for
   them (`record_stream`).

Each thread of the host is a timeline, too: work is ordered after all that its thread had waited for at the launch. A
thread that learns from another one that a copy is done calls `waited_by_host`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]
HOST = 0
_FOLDER = str(Path(__file__).parent)
"""Id of the host's timeline."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Order a timeline's later work after all that another clock has seen."""
    for line, count in other.items():
        if clock.get(line, 0) < count:
            clock[line] = count


@dataclass(frozen=True, slots=True)
class Access:
    """The newest access of one kind by one timeline."""

    count: int
    what: str


@dataclass(slots=True)
class Block:
    """Memory of one storage."""

    ref: StorageWeakRef
    size_bytes: int
    stream: int
    """Id of the stream that it was allocated on; `HOST` for page-locked memory."""
    where: str
    addresses: range = range(0)
    """Those of page-locked memory that its owner gives to other buffers by itself; else empty."""
    reads: dict[int, Access] = field(default_factory=dict)
    writes: dict[int, Access] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


class Timeline:
    """The streams of one device, its storages, and the problems found so far. Any thread."""

    def __init__(self) -> None:
        self._drained: Clock = {}
        """Work that all threads of the host know to be done."""
        self._num_host_accesses = 0
        self.problems: list[str] = []
        self.num_accesses = self.num_allocations = 0
        self.callers: set[tuple[str, int]] = set()
        """Files and lines of all calls that order streams."""
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, list[tuple[str, dict[int, Access]]]] = {}
        """Stream -> memory freed since its last allocation, with the uses on other streams that nothing covers."""
        self._freed_parts: list[Block] = []
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams: list[SimulatedStream] = []
        self.default = self.new_stream()

    def new_stream(self) -> SimulatedStream:
        with self._lock:
            found = SimulatedStream(self, len(self._streams) + 1)
            self._streams.append(found)
            return found

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def drain(self) -> None:
        """The host waits for all streams."""
        for stream in tuple(self._streams):
            join(self._drained, stream.clock)

    def current(self) -> SimulatedStream:
        """The calling thread's stream."""
        found: SimulatedStream = getattr(self._local, "stream", self.default)
        return found

    @property
    def host(self) -> Clock:
        """The calling thread's clock."""
        found: Clock | None = getattr(self._local, "host", None)
        if found is None:
            found = self._local.host = {}
        join(found, self._drained)
        found[HOST] = self._num_host_accesses
        return found

    @contextmanager
    def _on(self, stream: SimulatedStream | None) -> Any:
        before = self.current()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def on(self, stream: SimulatedStream | None) -> AbstractContextManager[None]:
        """A context in which the calling thread launches work on a stream."""
        found: AbstractContextManager[None] = self._on(stream)
        return found

    def called(self) -> None:
        """Note the place of a call that orders streams."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _FOLDER in frame.f_code.co_filename:
            frame = frame.f_back
        self.callers.add((frame.f_code.co_filename, frame.f_lineno))

    def waited_by_host(self, clock: Mapping[int, int]) -> None:
        """The calling thread has seen that all this is done."""
        self.called()
        with self._lock:
            join(self.host, clock)

    # -- storages --

    def page_locked(self, storage: torch.UntypedStorage) -> None:
        """Register host memory, which the host and the device share."""
        with self._lock:
            self._blocks[storage._cdata] = Block(StorageWeakRef(storage), storage.nbytes(), HOST, "page-locked memory")

    def carved(self, storage: torch.UntypedStorage) -> None:
        """As `page_locked`, for a part of such memory. Nothing but the calling thread orders it after earlier parts."""
        addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        with self._lock:
            self._collect()
            for block in [block for block in self._freed_parts if _overlap(block.addresses, addresses)]:
                self._freed_parts.remove(block)
                self._require_seen_by_host(block)
            self.page_locked(storage)
            self._blocks[storage._cdata].addresses = addresses

    def _require_seen_by_host(self, block: Block) -> None:
        for kind in (block.reads, block.writes):
            for line, access in kind.items():
                if line != HOST and self.host.get(line, 0) < access.count:
                    self.problems.append(
                        f"reused while in use: page-locked memory is given to another buffer while {access.what} on "
                        f"{_name(line)} uses it"
                    )

    def is_page_locked(self, storage: torch.UntypedStorage) -> bool:
        block = self._blocks.get(storage._cdata)
        return block is not None and block.stream == HOST

    def allocated(self, storage: torch.UntypedStorage, where: str) -> None:
        """Register memory that the current stream's allocator has given to a new or larger storage."""
        with self._lock:
            stream = self.current()
            join(stream.clock, self.host)
            self.num_allocations += 1
            self._blocks[storage._cdata] = Block(StorageWeakRef(storage), storage.nbytes(), stream.id, where)
            self._collect()
            self._reuse(stream, where)

    def freed(self, storage: torch.UntypedStorage) -> None:
        """A storage was made empty."""
        with self._lock:
            block = self._blocks.pop(storage._cdata, None)
            if block is not None:
                self._free(block)

    def keep(self, storage: torch.UntypedStorage, stream: SimulatedStream) -> None:
        """As `record_stream`: the memory is not reused before this stream's work so far is done."""
        self.called()
        with self._lock:
            self._block(storage).kept_for.add(stream.id)

    def access(self, storage: torch.UntypedStorage, line: SimulatedStream | None, what: str, *, writes: bool) -> None:
        """An access in the order of a stream; None: by the host, at once."""
        if not storage.nbytes():
            return
        with self._lock:
            self.num_accesses += 1
            own, clock = (HOST, self.host) if line is None else (line.id, line.clock)
            block = self._block(storage)
            self._check(block.writes, clock, own, block, what, "writes" if writes else "reads", "write")
            if writes:
                self._check(block.reads, clock, own, block, what, "writes", "read")
            self._num_host_accesses += line is None
            clock[own] = clock.get(own, 0) + 1
            (block.writes if writes else block.reads)[own] = Access(clock[own], what)

    def _check(
        self, earlier: Mapping[int, Access], clock: Clock, own: int, block: Block, what: str, does: str, kind: str
    ) -> None:
        for line, access in earlier.items():
            if line != own and clock.get(line, 0) < access.count:
                self.problems.append(
                    f"race: {what} on {_name(own)} {does} memory of {block.where}, not ordered after its {kind} by "
                    f"{access.what} on {_name(line)}"
                )

    def _block(self, storage: torch.UntypedStorage) -> Block:
        """A storage of before the simulation counts as one of the default stream, and an array's as the host's."""
        found = self._blocks.get(storage._cdata)
        if found is None:
            is_of_torch = storage.resizable()
            owner, name = (self.default.id, "earlier") if is_of_torch else (HOST, "an array")
            found = Block(StorageWeakRef(storage), storage.nbytes(), owner, name)
            self._blocks[storage._cdata] = found
        return found

    def _collect(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.ref.expired()]:
            self._free(self._blocks.pop(key))

    def _free(self, block: Block) -> None:
        if block.stream == HOST:  # its allocator waits for the streams that used it
            if block.addresses:
                self._freed_parts.append(block)
            return
        uses = {
            line: access
            for kind in (block.reads, block.writes)
            for line, access in kind.items()
            if line not in (block.stream, HOST) and line not in block.kept_for
        }
        if uses:
            self._freed.setdefault(block.stream, []).append((block.where, uses))

    def _reuse(self, stream: SimulatedStream, where: str) -> None:
        for freed, uses in self._freed.pop(stream.id, ()):
            for line, access in uses.items():
                if stream.clock.get(line, 0) < access.count:
                    self.problems.append(
                        f"reused while in use: memory of {freed}, freed on {_name(stream.id)}, may be given to {where} "
                        f"while {access.what} on {_name(line)} uses it"
                    )


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _name(line: int) -> str:
    return "the host" if line == HOST else f"stream {line}"


class SimulatedEvent:
    """A place in a stream's order. One that was never recorded is reached at once."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.clock: Clock = {}

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._timeline.called()
        self.clock = (stream or self._timeline.current()).reached()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        (stream or self._timeline.current()).wait_event(self)

    def query(self) -> bool:
        """True: the host sees that the event is reached."""
        self._timeline.waited_by_host(self.clock)
        return True

    def synchronize(self) -> None:
        self._timeline.waited_by_host(self.clock)


class SimulatedStream:
    """A stream as torch's: all its work is ordered, and after what the host had waited for at the launch."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.id = number
        self.clock: Clock = {number: 0}

    def reached(self) -> Clock:
        """The clock behind all work so far."""
        return dict(self.clock)

    def launch(self) -> SimulatedStream:
        """Begin an operation; returns the stream."""
        join(self.clock, self._timeline.host)
        return self

    def wait_stream(self, stream: SimulatedStream) -> None:
        self._timeline.called()
        join(self.clock, stream.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._timeline.called()
        join(self.clock, event.clock)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent(self._timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._timeline.waited_by_host(self.clock)

    def query(self) -> bool:
        return True
