"""Main program of the process that reads one worker's data. It always ends when the worker ends."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from raysharded.data.access.collation import Wish, collate_here
from raysharded.data.access.read_errors import task_error
from raysharded.data.access.reader import Draws, Reads
from raysharded.data.access.sample_changes import copies_before, require_passing_changes
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.access.transport import Sender, load, receive_request
from raysharded.errors import RayshardedError
from raysharded.overrides import WeightChanges

PLACE = struct.Struct("<qq")
"""The id of the sample that is read, and the number of items that were passed over on the way to samples."""
SHOW_STACKS = signal.SIGRTMAX - 4
"""Signal that makes the process write its threads' stacks: from C, also while an extension holds the GIL."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Start-up data of the process: one file of shared memory, of which each process of a worker has its own view."""

    data_bytes: int
    """Size of the datasets' pickle, at the beginning of the file."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Sizes of the arrays in the datasets."""
    refuses: bool
    """Value for `Draws.refuses`."""
    settings: bytes
    """A pickled function without arguments, called once torch is loaded."""
    collate: bytes = b""
    """The pickled function that makes a batch of samples; empty: none."""

    @property
    def length(self) -> int:
        return max([self.data_bytes, *(at + size for at, size in zip(self.offsets, self.sizes, strict=True))])


@dataclass(frozen=True, slots=True)
class _Answers:
    """Forms of an answer: the first that can be pickled is sent."""

    forms: tuple[Any, ...]


class _Place:
    """The place in the data, where the worker sees it."""

    def __init__(self, connection: Connection) -> None:
        """Receive the memory from the worker."""
        handle = recv_handle(connection)
        self._memory = mmap.mmap(handle, PLACE.size)
        os.close(handle)
        self._sample = self._passed = 0

    def note(self, sample: int) -> None:
        """Note the id of the sample that is read next."""
        self._sample = sample
        PLACE.pack_into(self._memory, 0, sample, self._passed)

    def note_passed(self) -> None:
        """Note that an item was passed over."""
        self._passed += 1
        PLACE.pack_into(self._memory, 0, self._sample, self._passed)


class _Served:
    """The calls that the process carries out."""

    def __init__(self, datasets: Sequence[Any], payload: Payload, place: _Place) -> None:
        draws, lock = Draws(refuses=payload.refuses, puts_back=False), threading.Lock()
        self._readers = [
            None if data is None else DatasetReader(data, lock=lock, draws=draws, note=place.note) for data in datasets
        ]
        for data in datasets:
            if callable(getattr(type(data), "note_passed", None)):
                data.note_passed(place.note_passed)
        self._settings: bytes | None = payload.settings
        self._refuses = payload.refuses
        self._function: Callable[[list[Any]], Any] | None = None
        self.collate_by(payload.collate)

    def collate_by(self, collate: bytes) -> None:
        if collate:
            with contextlib.suppress(Exception):  # the training thread makes all batches then
                self._function = pickle.loads(collate)  # noqa: S301 - from this process's own worker

    def num_samples(self, which: int) -> int:
        return self._reader(which).num_samples()

    def samples_per_block(self, which: int) -> int:
        return self._reader(which).samples_per_block()

    def order_text(self, which: int) -> str:
        return self._reader(which).order_text()

    def contents(self, which: int) -> str:
        return self._reader(which).contents()

    def require_position(self, which: int, position: int, weights: WeightChanges) -> None:
        self._reader(which).require_position(position, weights)

    def read_samples(
        self,
        which: int,
        ids: Sequence[int],
        where: str,
        number: int,
        weights: WeightChanges = (),
        wish: Wish | None = None,
    ) -> Reads | _Answers:
        reader = self._reader(which)
        reads = reader.read_samples(ids, where, number, weights)
        if wish is None or self._function is None:
            return reads
        if not wish.keeps_samples:
            return self._with_batch(reads, wish.number, reads, [])
        kept = replace(reads, samples=copies_before(reads.samples))  # a batch is made of them elsewhere, too
        answers = self._with_batch(reads, wish.number, kept, kept.samples)
        if self._refuses and isinstance(answers, _Answers) and reader.is_read_anywhere():

            def again() -> list[Any]:
                return reader.read_samples(ids, where, number, weights).samples

            require_passing_changes("Task.collate", self._function, kept.samples, reads.samples, again, wish.number)
        return answers

    def collate(self, samples: list[Any], ids: list[int], wish: Wish) -> Reads | _Answers:
        """The batch of samples that another process has read, and keeps."""
        reads = Reads(samples, ids)
        return self._with_batch(reads, wish.number, replace(reads, samples=[]), [])

    def _with_batch(self, reads: Reads, number: int, otherwise: Reads, kept: list[Any]) -> Reads | _Answers:
        """The answer with the batch, and with `kept`. `otherwise`: the answer without a batch."""
        if self._function is None:
            return otherwise
        try:
            batch = collate_here(self._function, reads.samples, number)
        except BaseException:  # noqa: BLE001 - the training thread calls it, too, and raises what it raises
            return otherwise
        return _Answers((replace(reads, samples=kept, batch=batch), otherwise))

    def check(self, which: int, ids: Sequence[int], below: int) -> None:
        self._reader(which).check(ids, below)

    def validate(self, which: int) -> None:
        self._reader(which).validate()

    def settle(self, default_dtype: str) -> None:
        """Apply the worker's settings to torch once it is loaded; the contents of samples may depend on them."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self._settings is not None:
            settings, self._settings = self._settings, None
            pickle.loads(settings)()  # noqa: S301 - from this process's own worker
        if default_dtype:
            torch.set_default_dtype(getattr(torch, default_dtype))

    def _reader(self, which: int) -> DatasetReader:
        reader = self._readers[which]
        assert reader is not None
        return reader


def serve(connection: Connection, alive: Connection, stacks: Connection) -> None:
    """Carry out the worker's calls until it has ended.

    `alive`: closed at its other end when the worker ends. `stacks`: receives what is written at `SHOW_STACKS`.
    """
    _end_with(alive.fileno())
    faulthandler.register(SHOW_STACKS, file=stacks.fileno(), all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals to a whole group are for the worker
    signal.signal(signal.SIGTERM, lambda *_: None)
    multiprocessing.set_start_method(None, force=True)  # not that of the server it was forked from
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # keeps the dataset's prints when this process is killed
    sender, served, began = Sender(connection), None, time.monotonic()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        payload: Payload = connection.recv()
        handle = recv_handle(connection)
        error = None
        try:
            served = _Served(_unpacked(handle, payload), payload, _Place(connection))
        except BaseException as raised:  # noqa: BLE001 - the boundary to the user's code
            error = _converted(raised, "The dataset's pickle", "in the process that reads it")
        os.close(handle)
        sender.send((error is None, error or time.monotonic() - began))
        while served is not None:
            request, (freed, default_dtype) = receive_request(connection)
            sender.freed(freed)
            served.settle(default_dtype)
            _answer(sender, served, request)
    os._exit(0)


def serve_here(handles: Sequence[int]) -> None:
    """Run `serve` in a fresh interpreter, with the handles that it was given."""
    connection, alive, stacks = (Connection(handle) for handle in handles)
    serve(connection, alive, stacks)


def _unpacked(handle: int, payload: Payload) -> Any:
    private = mmap.MAP_PRIVATE  # writes stay private to this process; the rest exists once for all
    view = memoryview(mmap.mmap(handle, payload.length, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    parts = [view[at : at + size] for at, size in zip(payload.offsets, payload.sizes, strict=True)]
    return load(view[: payload.data_bytes], parts)


def _answer(sender: Sender, served: _Served, request: Callable[[], tuple[str, Sequence[Any]]]) -> None:
    try:
        method, args = request()
        value = getattr(served, method)(*args)
        answers = [(True, form) for form in (value.forms if isinstance(value, _Answers) else (value,))]
    except BaseException as raised:  # noqa: BLE001 - the boundary of the process: everything becomes a message
        answers = [(False, _converted(raised, "The dataset"))]
    for answer in answers:
        try:
            sender.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as raised:  # noqa: BLE001 - the user's classes
            failed = raised
        else:
            return
    what = "A sample, which cannot be pickled and so cannot leave the process that reads it,"
    sender.send((False, _converted(failed, what)))


def _converted(error: BaseException, what: str, where: str = "while it was read") -> BaseException:
    """The error in a form that survives pickling."""
    if isinstance(error, RayshardedError):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))  # noqa: S301 - just pickled here
            return error.with_traceback(None)
    return task_error(what, where, error)


def _end_with(alive: int) -> None:
    """Have the kernel kill this process when the other end of `alive` is closed, also while an extension holds the GIL.

    The kernel sends a chosen signal at an event of the pipe (fcntl(2), F_SETSIG).
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # it was closed before
        os._exit(1)
