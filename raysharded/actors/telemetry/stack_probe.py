"""Current stack of the training thread, observed from another thread.

CPython 3.11 may crash when frames of a running thread are followed from another one (python/cpython#111363). So whole
stacks are read as text of `faulthandler`, and the innermost calls in one C call, which no other thread interrupts.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from threading import get_ident
from traceback import FrameSummary
from types import CodeType, FrameType

import torch

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import is_marked
from raysharded.data.store.shard_reader import oldest_read
from raysharded.locations import PACKAGE_FOLDER

_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (PACKAGE_FOLDER, _TORCH, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
_COLLECTIVES = os.path.join(_TORCH, "distributed", "")
_STDLIB = sysconfig.get_paths()["stdlib"]
_INSTALLED = (f"site-packages{os.sep}", f"dist-packages{os.sep}")
_FRAMES_KEPT = 40
_CALLS_SEEN = 10
"""Number of calls among which one that is not of the standard library is looked for."""
_DATA = os.path.join(PACKAGE_FOLDER, "data", "")
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*\(most recent call first\):$", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_CODES: tuple[Callable[[FrameType], tuple[CodeType, ...]], ...] = tuple(
    attrgetter("f_code", *(f"{'f_back.' * calls}f_code" for calls in range(1, number)))
    for number in range(_CALLS_SEEN, 1, -1)
)
"""For each number of calls, from many to few: the code of a frame and of the frames that called it."""
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
"""A character that is not ASCII, as `faulthandler` writes it."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """State of a thread."""

    waits: bool
    """True if the thread is in a collective, or waits for one."""
    stack: str
    """The stack, with the innermost call last."""
    where: str
    """Innermost line outside raysharded and libraries: `file:line in function`; or a read of data; empty if none
    exists."""
    in_collective: bool | None
    """As `Accelerator.is_in_collective`, if the thread waits."""


def look_at(thread_id: int | None, elsewhere: Callable[[], str] = lambda: "") -> Whereabouts:
    """State of a thread, which continues meanwhile. Any thread may call this.

    If the thread waits for another one that runs the user's code (samples are read ahead), that one's stack is added.
    If it waits for samples, the stack of the process that reads them is added, which `elsewhere` returns as
    `faulthandler` writes it, after a line that names the sample. A read of a token store is named with its shard and
    place.
    """
    running = _stacks()
    frames = running.get(thread_id or 0, [])
    waits, where, stack = is_waiting(thread_id), _users_line(frames), "".join(traceback.format_list(frames))
    if not waits and not where:
        others = (found for other, found in running.items() if other not in (thread_id, get_ident()))
        helping = next((found for found in others if _users_line(found)), [])
        at = ""
        if not helping and any(frame.filename.startswith(_DATA) for frame in frames):
            at, _, dump = elsewhere().partition("\n")
            helping = frames_of_dump(dump)
        if helping:
            where = _users_line(helping) + at
            stack += "It waits for:\n" + "".join(traceback.format_list(helping))
        if any(frame.filename.startswith(_DATA) for frame in frames) and (read := oldest_read()):
            where = f"the read of {read}"
    in_collective = accelerator().is_in_collective() if waits else None
    return Whereabouts(waits=waits, stack=stack, where=where, in_collective=in_collective)


def frames_of_dump(text: str) -> list[FrameSummary]:
    """Stack of the thread that reads samples, from a `faulthandler` dump; innermost call last, empty if none reads."""
    found = parsed(text).values()
    return next((frames for frames in found if any(frame.filename.startswith(_DATA) for frame in frames)), [])


def parsed(text: str) -> dict[int, list[FrameSummary]]:
    """Thread id -> its innermost calls, innermost last, of a `faulthandler` dump."""
    _, *parts = _THREAD.split(text)
    return {int(thread, 16): _frames_of(calls) for thread, calls in zip(parts[::2], parts[1::2], strict=True)}


def _frames_of(calls: str) -> list[FrameSummary]:
    found = _CALL.findall(calls)[:_FRAMES_KEPT]
    return [FrameSummary(_unescaped(file), int(line), _unescaped(name)) for file, line, name in reversed(found)]


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)


def _stacks() -> dict[int, list[FrameSummary]]:
    """Thread id -> its innermost calls, of every thread of this process."""
    handle = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(handle, all_threads=True)
        return parsed(os.pread(handle, os.fstat(handle).st_size, 0).decode("ascii", "replace"))
    finally:
        os.close(handle)


def is_waiting(thread_id: int | None) -> bool:
    """True if the thread's innermost call, apart from locks and threads, waits for others.

    Such a call is a collective of torch's, or a function with the mark of `device_waits.waits_for_peers`.
    """
    own = next((code for code in _innermost(thread_id or 0) if not is_of_standard_library(code.co_filename)), None)
    return own is not None and (is_marked(own) or own.co_filename.startswith(_COLLECTIVES))


def _innermost(thread_id: int) -> tuple[CodeType, ...]:
    """The code of a thread's innermost calls, innermost first; empty if there is no such thread."""
    for codes_of in _CODES:
        try:
            return next(map(codes_of, map(itemgetter(thread_id), iter(sys._current_frames, None))))
        except KeyError:
            return ()
        except AttributeError:  # there are fewer calls
            continue
    return ()


def is_of_standard_library(file: str, folder: str = _STDLIB) -> bool:
    """True if the file is Python's own. Without a virtual environment installed packages lie below the same folder."""
    if not file.startswith(f"{folder}{os.sep}"):
        return False
    return not file.startswith(_INSTALLED, len(folder) + 1)


def _users_line(frames: list[FrameSummary]) -> str:
    for frame in reversed(frames):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""
