"""Current stack of the training thread, observed from another thread."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from traceback import FrameSummary
from types import FrameType

import torch

from raysharded.actors.comm.abortable_wait import is_marked
from raysharded.locations import PACKAGE_FOLDER

_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (PACKAGE_FOLDER, _TORCH, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
_COLLECTIVES = os.path.join(_TORCH, "distributed", "")
_STDLIB = sysconfig.get_paths()["stdlib"]
_INSTALLED = (f"site-packages{os.sep}", f"dist-packages{os.sep}")
_FRAMES_KEPT = 40
_DATA = os.path.join(PACKAGE_FOLDER, "data", "")
_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """State of a thread."""

    waits: bool
    """True if the thread is in a collective, or waits for one."""
    stack: str
    """The stack, with the innermost call last."""
    where: str
    """Innermost line outside raysharded and libraries: `file:line in function`; empty if none exists."""


def look_at(thread_id: int | None, elsewhere: Callable[[], str] = lambda: "") -> Whereabouts:
    """State of a thread, which continues meanwhile. Any thread may call this.

    If the thread waits for another one that runs the user's code (samples are read ahead), that one's stack is added.
    If it waits for samples, the stack of the process that reads them is added, which `elsewhere` returns as
    `faulthandler` writes it.
    """
    running = sys._current_frames()
    frames = _frames_of(running.get(thread_id or 0))
    waits, where, stack = is_waiting(thread_id), _users_line(frames), "".join(traceback.format_list(frames))
    if not waits and not where:
        others = (_frames_of(frame) for other, frame in running.items() if other not in (thread_id, get_ident()))
        helping = next((found for found in others if _users_line(found)), [])
        if not helping and any(frame.filename.startswith(_DATA) for frame in frames):
            helping = frames_of_dump(elsewhere())
        if helping:
            where = _users_line(helping)
            stack += "It waits for:\n" + "".join(traceback.format_list(helping))
    return Whereabouts(waits=waits, stack=stack, where=where)


def frames_of_dump(text: str) -> list[FrameSummary]:
    """Stack of the thread that reads samples, from a `faulthandler` dump; innermost call last, empty if none reads."""
    for thread in _THREAD.split(text)[1:]:
        calls = _CALL.findall(thread)
        if any(file.startswith(_DATA) for file, _, _ in calls):
            return [FrameSummary(file, int(line), name) for file, line, name in reversed(calls[:_FRAMES_KEPT])]
    return []


def _frames_of(frame: FrameType | None) -> list[FrameSummary]:
    return [] if frame is None else list(traceback.extract_stack(frame)[-_FRAMES_KEPT:])


def is_waiting(thread_id: int | None) -> bool:
    """True if the thread's innermost call, apart from locks and threads, waits for others.

    Such a call is a collective of torch's, or a function with the mark of `abortable_wait.waits_for_peers`.
    """
    frame = sys._current_frames().get(thread_id or 0)
    while frame is not None and is_of_standard_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and (is_marked(frame) or frame.f_code.co_filename.startswith(_COLLECTIVES))


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
