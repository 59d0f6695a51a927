"""Saves that have begun and not ended: waited for before the interpreter ends, given up in a forked child.

Soon after a program's last line Python refuses new threads and new work for thread pools, and a save that still goes on
needs both. So the interpreter waits before that. What fails then nobody can catch any more: the log says it, and the
exit status is 120, which is Python's for an error in its clean-up.

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


class Unfinished(Protocol):
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


_Newest = Callable[[Any], Unfinished | None]
_Renew = Callable[[Any], None]

_savers: WeakKeyDictionary[Any, tuple[_Newest, _Renew]] = WeakKeyDictionary()
_unfinished: set[Unfinished] = set()
"""Kept here while they go on: a program may have let go of the saver. A set's changes are atomic, so forks see no half
of one."""


def add_saver(saver: Any, *, newest: _Newest, renew: _Renew) -> None:
    """From now on `renew(saver)` is called in forked children, and `newest(saver)` looked at when Python ends."""
    _savers[saver] = newest, renew


def begun(save: Unfinished) -> None:
    """The interpreter waits for the save until `ended`."""
    _unfinished.add(save)


def ended(save: Unfinished) -> None:
    """Nothing is written for the save any more."""
    _unfinished.discard(save)


def _wait_for_all() -> None:
    try:
        saves = {*_unfinished, *(newest(saver) for saver, (newest, _) in list(_savers.items()))}
        for save in saves:
            if save is not None:
                save.wait()
        lost = sum(save is not None and save.is_lost for save in saves)
    except BaseException as error:  # noqa: BLE001 - such as an interrupt: what it meant to end is going to end
        _log.error("Python ends before all saves have: %s", type(error).__name__)
        lost = 1
    if lost:
        _log.error("the last save of this program is lost, so its exit status is 120")
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
    for save in list(_unfinished):
        save.give_up()
    _unfinished.clear()
    for saver, (_, renew) in list(_savers.items()):
        renew(saver)


# atexit's functions are called too late: after thread pools have been closed. The one that closes them is registered
# here too, when `concurrent.futures` is imported; the last that was registered is called first.
import concurrent.futures.thread  # noqa: E402, F401

threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
with suppress(AttributeError):  # there is no fork on this platform
    os.register_at_fork(after_in_child=_start_anew)
