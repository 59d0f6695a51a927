"""Marks of the functions in which a thread waits for peers: a hang is theirs who do not wait."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_marked: dict[int, CodeType] = {}
"""id -> the code of a marked function, which is kept so that its id is nobody else's."""


def waits_for_peers(function: F) -> F:
    """A function that is in a call which returns when other workers have done their part, or fails."""
    _marked[id(function.__code__)] = function.__code__
    return function


def is_marked(frame: FrameType) -> bool:
    """True if the frame is of a function with the mark."""
    return id(frame.f_code) in _marked


def marked_functions() -> frozenset[tuple[str, str]]:
    """The file and the qualified name of each function with the mark."""
    return frozenset((code.co_filename, code.co_qualname) for code in _marked.values())
