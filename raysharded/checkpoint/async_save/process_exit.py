"""Saves beside the program when that ends, or forks: waited for in the end, given up in a forked child.

Soon after a program's last line Python starts no more threads for pools, and a save that still goes on needs them. So
the interpreter waits before that. If the last save of a program failed, and no exception has told it so, the log says
it, and the exit status is 120, which is Python's for an error in its clean-up.

A fork copies the caller's thread alone: no thread writes the parent's saves in the child, and a lock that another
thread held stays locked there for ever. So the child's savers are made anew.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_log = logging.getLogger("raysharded.checkpoint")


class BegunSave(Protocol):
    """A save beside the program."""

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and no exception has told the program so."""
        ...

    def wait(self) -> None:
        """Until nothing is written any more, whatever came of it."""
        ...

    def give_up(self) -> None:
        """From now on it has failed, in this process, which has no thread that writes it."""
        ...


class _Saves:
    """What this process has begun. Changes of sets and attributes are atomic, so a fork sees no half of one."""

    def __init__(self) -> None:
        self.going_on: set[BegunSave] = set()
        """Kept here: a program may have let go of the saver."""
        self.failed: BegunSave | None = None
        """The last that ended, if it failed."""
        self.python_ends = False
        """Whether the interpreter has waited for them."""


_saves = _Saves()
_savers: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def add_saver(saver: Any, renew: Callable[[Any], None]) -> None:
    """From now on `renew(saver)` is called in forked children."""
    _savers[saver] = renew


def begun(save: BegunSave) -> None:
    """The interpreter waits for the save until `ended`."""
    _saves.going_on.add(save)


def ended(save: BegunSave) -> None:
    """Nothing is written for the save any more."""
    _saves.failed = save if save.is_lost else None
    _saves.going_on.discard(save)
    if _saves.python_ends:  # begun by a thread, or a function of atexit, that goes on after the program's last line
        _tell()


def _wait_for_all() -> None:
    try:
        while _saves.going_on:
            next(iter(list(_saves.going_on))).wait()
    except BaseException as error:  # noqa: BLE001 - such as an interrupt: what it meant to end is going to end
        _log.error("Python ends before all saves have: %s", type(error).__name__)
        _fail_exit()
    _saves.python_ends = True
    _tell()


def _tell() -> None:
    if _saves.failed is not None and _saves.failed.is_lost:
        _log.error("the last save of this program is lost, so its exit status is 120")
        _fail_exit()


def _fail_exit() -> None:
    if not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """The stream, but that the interpreter's own flush of it fails, at its very end: that makes the exit status 120.

    `sys.exit` documents it. All that comes before, atexit's functions for one, runs as ever, which no call that ends
    the process could give.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        try:
            sys._getframe(1)
        except ValueError:  # no Python function calls: the interpreter itself
            raise OSError("a save was lost") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _start_anew() -> None:
    global _saves
    for save in list(_saves.going_on):
        save.give_up()
    _saves = _Saves()
    for saver, renew in list(_savers.items()):
        renew(saver)


# atexit's functions are called too late: after thread pools have been closed. The one that closes them is registered
# here too, when `concurrent.futures` is imported; the last that was registered is called first.
import concurrent.futures.thread  # noqa: E402, F401

threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
with suppress(AttributeError):  # there is no fork on this platform
    os.register_at_fork(after_in_child=_start_anew)
