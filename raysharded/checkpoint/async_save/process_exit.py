"""Background saves at process exit and at a fork: the interpreter waits for them, and a forked child fails them.

Soon after a program's last line Python starts no more pool threads, which a running save needs, so the interpreter
waits before that. If the last save of a saver failed and the program has not received its exception, the log reports
it. The exit status is then 120, Python's status for an error in its clean-up. A later save of a saver that was made
after the failure takes its place, too; one of a saver beside it, as for an average of the weights, does not.

A fork copies only the caller's thread. No thread writes the parent's saves in the child, and a lock that another thread
held stays locked there forever. The child's savers are therefore reset.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_log = logging.getLogger("raysharded.checkpoint")


class BegunSave(Protocol):
    """A save that is written in the background."""

    @property
    def is_lost(self) -> bool:
        """Whether the save failed and the program has not received its exception."""
        ...

    def wait(self) -> None:
        """Wait until the save has ended, successfully or not."""
        ...

    def give_up(self) -> None:
        """Fail the save in this process, which has no thread that writes it."""
        ...


class _Saves:
    """Saves that this process has begun.

    Changes of dicts and attributes are atomic, so a fork never sees half a change.
    """

    def __init__(self) -> None:
        self.going_on: dict[BegunSave, int] = {}
        """Running saves with their savers' numbers, kept here because the program may have dropped the saver."""
        self.failed: dict[int, tuple[BegunSave, int]] = {}
        """Saver's number -> its last save, if it failed and none took its place, and the newest saver's number then."""
        self.python_ends = False
        """Whether the interpreter has waited for the saves."""


_saves = _Saves()
_savers: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_numbers = count(1)
_newest = 0
"""Number of the newest saver."""


def add_saver(saver: Any, renew: Callable[[Any], None]) -> int:
    """The new saver's number. `renew(saver)` is called in forked children from now on."""
    global _newest
    _savers[saver] = renew
    _newest = number = next(_numbers)
    return number


def begun(save: BegunSave, saver: int) -> None:
    """Make the interpreter wait for the save until `ended`. `saver`: its saver's number."""
    _saves.going_on[save] = saver


def ended(save: BegunSave) -> None:
    """Record that the save has ended. Only the first call for a save counts."""
    saves, saver = _saves, _saves.going_on.get(save)
    if saver is None:
        return
    for other, (_, newest) in list(saves.failed.items()):
        if other == saver or newest < saver:
            saves.failed.pop(other, None)
    if save.is_lost:
        saves.failed[saver] = save, _newest
    saves.going_on.pop(save, None)
    if _saves.python_ends:  # begun by a thread or an atexit function that runs after the program's last line
        _tell()


def _wait_for_all() -> None:
    try:
        while _saves.going_on:
            next(iter(list(_saves.going_on))).wait()
    except BaseException as error:  # noqa: BLE001 - such as an interrupt: its purpose, the end of the process, is near
        _log.error("Python exits before all saves have ended: %s", type(error).__name__)
        _fail_exit()
    _saves.python_ends = True
    _tell()


def _tell() -> None:
    if any(save.is_lost for save, _ in list(_saves.failed.values())):
        _log.error("the last save of this program, or of one of its savers, is lost, so its exit status is 120")
        _fail_exit()


def _fail_exit() -> None:
    if not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A stream whose last flush, by the interpreter at its very end, fails: that makes the exit status 120.

    This is documented under `sys.exit`. Everything before it runs as usual, for example the atexit functions. No call
    that ends the process could guarantee that.
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


# atexit functions run too late: after thread pools have been closed. The function that closes the pools is registered
# in the same place as this one, when `concurrent.futures` is imported. The last one registered is called first.
import concurrent.futures.thread  # noqa: E402, F401

threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
with suppress(AttributeError):  # this platform has no fork
    os.register_at_fork(after_in_child=_start_anew)
