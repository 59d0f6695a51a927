"""An accelerator with simulated streams, in real processes: the engine and FSDP2 run on it, and races show.

FSDP2 requests streams from `torch.cpu` if its mesh is on the CPU. Torch's are stubs, and are replaced.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from raysharded.actors.comm.host_group import HostGroup, Replicas
from raysharded.actors.device import accelerator
from raysharded.actors.shards import transfer
from raysharded.actors.shards.pinned_arena import PinnedArena
from raysharded.actors.shards.store import ShardBuffer
from tests import patches
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.actors.device.simulated.access_watch import AccessWatch, place
from tests.actors.device.simulated.autograd_thread import replace_backward
from tests.actors.device.simulated.removals import Removal, remove
from tests.actors.device.simulated.timeline import SimulatedEvent, SimulatedStream, Timeline


class SimulatedAccelerator(DoubleAccelerator):
    """A device in host memory whose streams and events have vector clocks."""

    def __init__(self, folder: Path) -> None:
        """`folder`: each process writes its findings into a file there."""
        super().__init__()
        self.timeline = Timeline()
        self._file = folder / f"{os.getpid()}.json"
        self._watched = threading.local()

    def enter_thread(self) -> None:
        if not getattr(self._watched, "is_watched", False):
            self._watched.is_watched = True
            AccessWatch(self.timeline).__enter__()  # type: ignore[no-untyped-call]

    def pinned(self, size_bytes: int) -> torch.Tensor:
        found = super().pinned(size_bytes)
        self.timeline.page_locked(found.untyped_storage())
        return found

    def drain(self, device: torch.device) -> None:
        self.timeline.drain()
        self.write()

    def new_stream(self, device: torch.device) -> Any:
        return self.timeline.new_stream()

    def current_stream(self, device: torch.device) -> Any:
        return self.timeline.current()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self.timeline.on(stream)

    def record(self, stream: Any) -> Any:
        self.write()
        return stream.record_event()

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        self.timeline.keep(tensor.untyped_storage(), self.timeline.current())

    def write(self) -> None:
        """Write what was found so far."""
        line = self.timeline
        found = {
            "problems": line.problems[:1000],
            "accesses": line.num_accesses,
            "allocations": line.num_allocations,
            "streams": line.num_streams,
            "callers": sorted(line.callers),
        }
        self._file.write_text(json.dumps(found), encoding="utf-8")


def simulate(folder: str, removal: Removal | None = None) -> None:
    """In a worker's process: compute on simulated streams, without one call that orders them."""
    used = SimulatedAccelerator(Path(folder))
    accelerator.use(used)
    replace_torch_streams(used.timeline)
    replace_backward(used.timeline, used.enter_thread)
    if removal is not None:
        remove(removal)


def replace_torch_streams(timeline: Timeline) -> None:
    """Give FSDP2 simulated streams, and let the timeline see the memory that FSDP2 frees and takes again."""

    def new_stream(*_: Any, **__: Any) -> SimulatedStream:
        return timeline.new_stream()

    def new_event(*_: Any, **__: Any) -> SimulatedEvent:
        return SimulatedEvent(timeline)

    patches.replace(torch.cpu, "Stream", new_stream)
    patches.replace(torch.cpu, "Event", new_event)
    patches.replace(torch.cpu, "current_stream", lambda *_: timeline.current())
    patches.replace(torch.cpu, "stream", timeline.on)
    _see_resizes(timeline)
    _see_host(timeline)
    _see_communicators(timeline)
    _see_filled_buffers(timeline)
    _see_carved_memory(timeline)


def _see_resizes(timeline: Timeline) -> None:
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        if size < before:
            timeline.freed(storage)
        found = resize(storage, size)
        if size > before:
            timeline.allocated(storage, "storage that was resized")
        return found

    setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010 - for the rest of the process


def _see_host(timeline: Timeline) -> None:
    """Let the timeline see accesses of page-locked memory by the host that are no operations.

    An array of a tensor counts as read when it is made.
    """

    def note(tensor: torch.Tensor, *, writes: bool) -> None:
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if timeline.is_page_locked(storage):
                timeline.access(storage, None, f"the host at {place()}", writes=writes)

    _note_arguments(torch.Tensor, "tolist", note, reads=[0])
    _note_arguments(torch.Tensor, "numpy", note, reads=[0])
    _note_arguments(HostGroup, "send", note, reads=[1])
    _note_arguments(HostGroup, "recv", note, writes=[1])
    _note_arguments(HostGroup, "broadcast", note, writes=[1])
    _note_arguments(HostGroup, "exchange", note, writes=[1], reads=[2])
    _note_arguments(transfer, "_gather", note, writes=[0])


def _see_communicators(timeline: Timeline) -> None:
    """Let the timeline see collectives of a device's communicator that are called on it: they are no operations.

    Each is ordered as the calling thread's stream is.
    """

    def note(tensor: torch.Tensor, *, writes: bool) -> None:
        stream = timeline.current().launch()
        timeline.access(tensor.untyped_storage(), stream, f"a collective at {place()}", writes=writes)

    _note_arguments(Replicas, "all_to_all", note, writes=[1], reads=[2])
    _note_arguments(Replicas, "all_gather", note, writes=[1], reads=[2])
    _note_arguments(Replicas, "all_reduce", note, writes=[1])


def _note_arguments(
    owner: Any, name: str, note: Callable[..., None], reads: Sequence[int] = (), writes: Sequence[int] = ()
) -> None:
    """Let a function of a class or module note the tensors that it reads and writes, by their positions."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        for positions, does_write in ((reads, False), (writes, True)):
            for position in positions:
                note(args[position], writes=does_write)
        return function(*args, **kwargs)

    setattr(owner, name, noted)


def _see_carved_memory(timeline: Timeline) -> None:
    """Let the timeline see the parts of page-locked memory that the arena gives to buffers."""
    take = PinnedArena.take

    def taken(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = take(*args, **kwargs)
        timeline.carved(found.untyped_storage())
        return found

    setattr(PinnedArena, "take", taken)  # noqa: B010


def _see_filled_buffers(timeline: Timeline) -> None:
    """Let the timeline see that a buffer's copy is done for each thread that waits for it, also if another one did."""
    fill, wait = ShardBuffer.fill, ShardBuffer.wait
    copies: dict[int, SimulatedEvent] = {}
    """Storage -> the end of the newest copy to it."""

    def filled(buffer: ShardBuffer, copy: Any) -> None:
        copies[buffer.data.untyped_storage()._cdata] = copy._done
        fill(buffer, copy)

    def waited(buffer: ShardBuffer) -> None:
        is_waited_for = buffer._filling is None
        wait(buffer)
        copy = copies.get(buffer.data.untyped_storage()._cdata)
        if is_waited_for and copy is not None:
            timeline.waited_by_host(copy.clock)

    setattr(ShardBuffer, "fill", filled)  # noqa: B010
    setattr(ShardBuffer, "wait", waited)  # noqa: B010
