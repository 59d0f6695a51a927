"""Transfer of values between two processes of a machine: pickled, with their arrays and tensors in shared memory.

The receiver's arrays lie in the sender's segment. A segment is reused when nothing refers to its contents any more.
Segments have no names (memfd), so they vanish when both processes have exited.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from raysharded.data.access.collation import Batch

_ALIGNED_TO = 64
_INLINE_BYTES = 64 << 10
"""Arrays of fewer bytes go through the pipe."""
_MOST_GAPS = 4
"""A tensor whose elements lie further apart than this times their number is pickled with all of its memory."""
_SPARE = 4
"""Number of unused segments that are kept."""


class _Reducer:
    """The forms in which a value's parts are pickled. Parts of a batch keep their strides, as kernels depend on them.

    A batch is the last part of a value that has one.
    """

    def __init__(self, *, keeps_strides: bool = False) -> None:
        self._keeps_strides = keeps_strides

    def __call__(self, value: Any) -> Any:
        if type(value) is Batch:
            self._keeps_strides = True
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
            return NotImplemented
        if value.is_neg() or value.is_conj() or value.is_quantized:
            return NotImplemented
        value = value.detach()
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        strides: tuple[int, ...] | None = None
        if self._keeps_strides and value.numel() and value.stride() != _strides_of(shape):
            extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, value.stride(), strict=True))
            if extent > _MOST_GAPS * value.numel():
                return NotImplemented
            value, strides = value.as_strided((extent,), (1,)), tuple(value.stride())
        return tensor_of, (array_of(value), dtype, shape, strides)


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, keeps_strides: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduced = _Reducer(keeps_strides=keeps_strides)

    def reducer_override(self, value: Any) -> Any:
        return self._reduced(value)


def _strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape, row by row. Another one may be contiguous, too, if a size is 1."""
    found, step = list[int](), 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def _by_value(*, keeps_strides: bool = False) -> Any:
    """Ray's pickler, where it is loaded: it handles classes that came by value, as those of a notebook's cells."""
    cloudpickle = sys.modules.get("ray.cloudpickle")
    if cloudpickle is None:
        return None
    found = _Reducer(keeps_strides=keeps_strides)

    class ByValue(cloudpickle.CloudPickler):  # type: ignore[misc, name-defined] # of a type that Ray chooses
        def reducer_override(self, value: Any) -> Any:
            reduced = found(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValue


def array_of(tensor: Any) -> Any:
    """The bytes of a host tensor as a flat array of numpy."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(flat: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    """The tensor of a dtype and shape whose bytes are in a flat array of numpy."""
    import torch

    kind = getattr(torch, dtype)
    if not flat.size:
        return torch.empty(shape, dtype=kind)
    if not flat.flags.writeable:
        flat = flat.copy()
    found = torch.from_numpy(flat).view(kind)
    return found.reshape(shape) if strides is None else found.as_strided(shape, strides)


def dump(value: object, *, keeps_strides: bool = False) -> tuple[bytes, list[memoryview]]:
    """The value's pickle, and the bytes of its arrays. `keeps_strides`: as of a batch, also of other tensors."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append, keeps_strides=keeps_strides).dump(value)
    except Exception:
        pickler = _by_value(keeps_strides=keeps_strides)
        if pickler is None:
            raise
        buffers.clear()
        file = io.BytesIO()
        pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def packed(value: object) -> bytes:
    """The value's pickle, with its arrays inside. Raises what pickling raises."""
    file = io.BytesIO()
    try:
        pickle.Pickler(file, protocol=5).dump(value)
    except Exception:
        pickler = _by_value()
        if pickler is None:
            raise
        file = io.BytesIO()
        pickler(file, protocol=5).dump(value)
    return file.getvalue()


def load(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The value that `dump` was given. Its arrays lie in the buffers."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - from this worker's other process


def send_request(connection: Connection, data: bytes, buffers: Sequence[memoryview], more: object) -> None:
    """Send what `dump` returned, and a value that always pickles, through the pipe."""
    sizes = [buffer.nbytes for buffer in buffers]
    offsets, length = offsets_of(sizes)
    connection.send((data, sizes, more))
    if length:
        whole = bytearray(length)
        for offset, size, buffer in zip(offsets, sizes, buffers, strict=True):
            whole[offset : offset + size] = buffer
        connection.send_bytes(whole)


def receive_request(connection: Connection) -> tuple[Callable[[], Any], Any]:
    """A function that loads the value of the next request, which may fail, and the value that was sent with it."""
    data, sizes, more = connection.recv()
    offsets, length = offsets_of(sizes)
    whole = memoryview(bytearray(length))
    if length:
        connection.recv_bytes_into(whole)
    return lambda: load(data, [whole[at : at + size] for at, size in zip(offsets, sizes, strict=True)]), more


def shared_file(name: str) -> int:
    """A file in memory, without a name in a file system."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of buffers of these sizes in one segment, and its length."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNED_TO) * _ALIGNED_TO
    return offsets, end


@dataclass(frozen=True, slots=True)
class _Message:
    data: bytes
    sizes: list[int]
    inline: list[bytes] | None
    slot: int = -1
    capacity: int = 0
    """Capacity of a slot that is new to the receiver: a handle follows."""
    dropped: tuple[int, ...] = ()
    """Slots that no longer exist."""


@dataclass(slots=True)
class Sender:
    """Sender of values to one receiver. Each of the receiver's calls reports the segments that are free again."""

    connection: Connection
    _slots: dict[int, mmap.mmap] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _made: int = 0

    def freed(self, slots: Sequence[int]) -> None:
        """Record segments to which the receiver has no references left."""
        self._free += slots

    def send(self, value: object) -> None:
        """Send a value. Raises what pickling raises, before anything is sent."""
        data, buffers = dump(value)
        sizes = [buffer.nbytes for buffer in buffers]
        offsets, length = offsets_of(sizes)
        if length <= _INLINE_BYTES:
            self.connection.send(_Message(data, sizes, [bytes(buffer) for buffer in buffers]))
            return
        slot, handle, dropped = self._slot(length)
        segment = self._slots[slot]
        target = np.frombuffer(segment, np.uint8)
        for offset, buffer in zip(offsets, buffers, strict=True):
            target[offset : offset + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        capacity = len(segment) if handle is not None else 0
        self.connection.send(_Message(data, sizes, None, slot, capacity, dropped))
        if handle is not None:
            send_handle(self.connection, handle, os.getppid())
            os.close(handle)

    def _slot(self, length: int) -> tuple[int, int | None, tuple[int, ...]]:
        """A free slot that is long enough, its handle if it is new, and the slots that were dropped."""
        fitting = [slot for slot in self._free if len(self._slots[slot]) >= length]
        if fitting:
            slot = min(fitting, key=lambda slot: len(self._slots[slot]))
            self._free.remove(slot)
            return slot, None, self._drop(_SPARE)
        dropped = self._drop(_SPARE - 1)
        handle, self._made = shared_file("raysharded-samples"), self._made + 1
        capacity = -(-length * 9 // 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(handle, capacity)
        self._slots[self._made] = mmap.mmap(handle, capacity)
        return self._made, handle, dropped

    def _drop(self, spare: int) -> tuple[int, ...]:
        """Drop the shortest free segments, except for `spare` of them."""
        excess = sorted(self._free, key=lambda slot: len(self._slots[slot]))[: max(0, len(self._free) - spare)]
        for slot in excess:
            self._free.remove(slot)
            del self._slots[slot]
        return tuple(excess)


class Receiver:
    """Receiver of the values that a `Sender` sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._segments: dict[int, mmap.mmap] = {}
        self._freed: deque[int] = deque()

    def freed(self) -> list[int]:
        """Segments without any references left, since the last call."""
        return [self._freed.popleft() for _ in range(len(self._freed))]

    def receive(self) -> Any:
        """The next value. Raises EOFError when there will be none."""
        message: _Message = self._connection.recv()
        for slot in message.dropped:
            del self._segments[slot]
        if message.inline is not None:
            return load(message.data, [bytearray(part) for part in message.inline])
        if message.capacity:
            handle = recv_handle(self._connection)
            self._segments[message.slot] = mmap.mmap(handle, message.capacity)
            os.close(handle)
        whole = np.frombuffer(self._segments[message.slot], np.uint8)
        weakref.finalize(whole, self._freed.append, message.slot).atexit = False
        view = whole.data
        offsets, _ = offsets_of(message.sizes)
        parts = [view[at : at + size] for at, size in zip(offsets, message.sizes, strict=True)]
        del whole, view
        return load(message.data, parts)
