"""A worker's position in its run, in memory that outlives its process: for the report of its death.

The record is an anonymous file in memory (memfd). A watch of the same machine (`death_watch`) opens it through /proc
while the worker lives, and reads it after its death, however that came. Writing costs less than a microsecond, and
nothing remains when both processes have exited.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

NAME = "raysharded-position"
"""Name of the file, as /proc shows it."""
_PLACE, _STATUS = struct.Struct("<qqq"), struct.Struct("<q")
_PHASE = 32
MOST_SAMPLES = 16
"""Samples of a microbatch whose indices are noted."""
_PHASE_AT = _PLACE.size
_STATUS_AT = _PHASE_AT + _PHASE
_SAMPLES_AT = _STATUS_AT + _STATUS.size
_SIZE = _SAMPLES_AT + 8 * (1 + MOST_SAMPLES)
_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The contents of a record."""

    generation: int = 0
    step: int = 0
    """The step in progress; 0 before the first."""
    phase: str = ""
    microbatch: int | None = None
    """The microbatch that is being read or computed; None between them."""
    samples: tuple[int, ...] = ()
    """Indices of its first samples, once they are read."""
    status: int | None = None
    """Status that `os._exit` was called with."""


class PositionRecord:
    """The record of this process. Writes of different threads may mix: it is a hint."""

    def __init__(self) -> None:
        self._file = os.memfd_create(NAME)
        os.ftruncate(self._file, _SIZE)
        self._memory = mmap.mmap(self._file, _SIZE)
        self._pid = os.getpid()
        self.note_place(0, 0)
        _STATUS.pack_into(self._memory, _STATUS_AT, _NONE)

    def note_phase(self, phase: str) -> None:
        """Note the phase that begins."""
        self._memory[_PHASE_AT:_STATUS_AT] = phase.encode()[:_PHASE].ljust(_PHASE, b"\0")

    def note_place(self, generation: int, step: int, microbatch: int = _NONE) -> None:
        """Note the step in progress, and the microbatch that begins; without one, that none is being computed."""
        self.note_samples(())
        _PLACE.pack_into(self._memory, 0, generation, step, microbatch)

    def note_samples(self, indices: Sequence[int]) -> None:
        """Note the indices of the microbatch's samples."""
        found = indices[:MOST_SAMPLES]
        struct.pack_into(f"<q{len(found)}q", self._memory, _SAMPLES_AT, len(found), *found)

    def note_exits(self) -> None:
        """From now on note the status of `os._exit`, for kernels that do not report it."""
        leave, pid = os._exit, self._pid

        def exit_noted(status: int) -> None:
            if os.getpid() == pid:  # not a child that inherited this
                _STATUS.pack_into(self._memory, _STATUS_AT, int(status) & 0xFF)
            leave(status)

        os._exit = exit_noted  # type: ignore[assignment]  # it never returns


_own: PositionRecord | None = None


def begin() -> None:
    """Begin the record of this process, which is to be a worker: from then on, the functions below write into it."""
    global _own
    if _own is None:
        _own = PositionRecord()
        _own.note_exits()


def note_phase(phase: str) -> None:
    """As `PositionRecord.note_phase`; nothing in a process without a record."""
    if _own is not None:
        _own.note_phase(phase)


def note_place(generation: int, step: int, microbatch: int = _NONE) -> None:
    """As `PositionRecord.note_place`; nothing in a process without a record."""
    if _own is not None:
        _own.note_place(generation, step, microbatch)


def note_samples(indices: Sequence[int]) -> None:
    """As `PositionRecord.note_samples`; nothing in a process without a record."""
    if _own is not None:
        _own.note_samples(indices)


def open_record(pid: int) -> int | None:
    """A descriptor of another process's record; None if it has none, or if this process may not open it."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{NAME}"):
                return os.open(f"{folder}/{name}", os.O_RDONLY)
    except OSError:  # it has ended, or belongs to somebody else
        return None
    return None


def read_record(file: int) -> Position:
    """The contents of a record, from a descriptor of `open_record`."""
    data = os.pread(file, _SIZE, 0)
    if len(data) < _SIZE:
        return Position()
    generation, step, microbatch = _PLACE.unpack_from(data)
    (status,) = _STATUS.unpack_from(data, _STATUS_AT)
    count, *samples = struct.unpack_from(f"<{1 + MOST_SAMPLES}q", data, _SAMPLES_AT)
    return Position(
        generation=generation,
        step=step,
        phase=data[_PHASE_AT:_STATUS_AT].rstrip(b"\0").decode(errors="replace"),
        microbatch=None if microbatch == _NONE else microbatch,
        samples=tuple(samples[: max(0, count)]),
        status=None if status == _NONE else status,
    )
