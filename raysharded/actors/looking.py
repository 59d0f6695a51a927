"""Where the thread that computes is right now, seen from another one."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from threading import get_ident
from traceback import FrameSummary
from types import FrameType

import torch

import raysharded

_PACKAGE = os.path.dirname(raysharded.__file__)
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (_PACKAGE, _TORCH, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
_WAITING = (
    os.path.join(_TORCH, "distributed"),
    *(
        os.path.join(_PACKAGE, "actors", f"{name}.py")
        for name in (
            "letting_go",
            "collectives",
            "process_group",
            "host_group",
            "replica_group",
            "mirror",
            "parity",
            "gathering",
            "rebuilding",
            "transfer",
            "reduction",
        )
    ),
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_FRAMES_KEPT = 40


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Of a thread."""

    waits: bool
    """It is in a collective, or waits for one."""
    stack: str
    """The innermost call last."""
    where: str
    """The innermost line that is neither ours nor a library's: `file:line in function`; empty if there is none."""


def look_at(thread_id: int | None) -> Whereabouts:
    """Any thread may look at any other; it goes on meanwhile.

    If the user's code runs in a thread that it waits for (samples are read ahead), that one's stack is given too.
    """
    running = sys._current_frames()
    frames = _frames_of(running.get(thread_id or 0))
    waits, where, stack = is_waiting(thread_id), _users_line(frames), "".join(traceback.format_list(frames))
    if not waits and not where:
        others = (_frames_of(frame) for other, frame in running.items() if other not in (thread_id, get_ident()))
        for helping in others:
            where = _users_line(helping)
            if where:
                stack += "It waits for:\n" + "".join(traceback.format_list(helping))
                break
    return Whereabouts(waits=waits, stack=stack, where=where)


def _frames_of(frame: FrameType | None) -> list[FrameSummary]:
    return [] if frame is None else list(traceback.extract_stack(frame)[-_FRAMES_KEPT:])


def is_waiting(thread_id: int | None) -> bool:
    """Whether the thread's innermost call, apart from those of locks and threads, is one that waits for others."""
    frame = sys._current_frames().get(thread_id or 0)
    while frame is not None and _is_of_a_lock(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def _is_of_a_lock(file: str) -> bool:
    return file.startswith(_STDLIB) and not file.startswith(_TORCH)


def _users_line(frames: list[FrameSummary]) -> str:
    for frame in reversed(frames):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""
