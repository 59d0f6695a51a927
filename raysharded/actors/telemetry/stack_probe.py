"""Where the thread that computes is right now, seen from another one."""

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
    """Of a thread."""

    waits: bool
    """It is in a collective, or waits for one."""
    stack: str
    """The innermost call last."""
    where: str
    """The innermost line that is neither ours nor a library's: `file:line in function`; empty if there is none."""


def look_at(thread_id: int | None, elsewhere: Callable[[], str] = lambda: "") -> Whereabouts:
    """Any thread may look at any other; it goes on meanwhile.

    If the user's code runs in a thread that it waits for (samples are read ahead), that one's stack is given too; or,
    while it waits for samples, that of the process that reads them: `elsewhere` gives it as `faulthandler` writes it.
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
    """Of what `faulthandler` wrote: the thread that reads samples, the innermost call last; empty if none does."""
    for thread in _THREAD.split(text)[1:]:
        calls = _CALL.findall(thread)
        if any(file.startswith(_DATA) for file, _, _ in calls):
            return [FrameSummary(file, int(line), name) for file, line, name in reversed(calls[:_FRAMES_KEPT])]
    return []


def _frames_of(frame: FrameType | None) -> list[FrameSummary]:
    return [] if frame is None else list(traceback.extract_stack(frame)[-_FRAMES_KEPT:])


def is_waiting(thread_id: int | None) -> bool:
    """True if the thread's innermost call, apart from those of locks and threads, is one that waits for others: a
    collective of torch's, or a function with the mark of `abortable_wait.waits_for_peers`."""
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
