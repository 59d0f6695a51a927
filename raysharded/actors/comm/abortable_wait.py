"""How a thread that waits for peers gets away when its generation is aborted; and marks of the functions that wait for
peers: a hang is theirs who do not wait.

gloo wakes whoever waits when a connection ends, with two gaps in its tcp transport (`pair.cc`): it tells neither whom
a message is for that is half read, nor whom one is from that met a connection just closed. They wait until gloo's own
time-out, and a group cannot be freed before: its destructor joins its threads. So nobody whom training needs waits in
gloo for good: a collective is waited for in slices, anything else in a thread that is left behind.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from types import CodeType, FrameType
from typing import Any, TypeVar

from raysharded.errors import CollectiveAborted

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


T = TypeVar("T")

_SLICE = datetime.timedelta(milliseconds=50)
_NOT_YET = "Operation timed out"
_POLL_S = 0.02
_LOOK_S = 1.0
GRACE_S = 0.2
"""For gloo to say by itself that a transfer failed."""


@waits_for_peers
def has_ended(work: Any) -> bool:
    """Wait a while for a collective of gloo; raises its error. False: it is not done, and may be waited for again.

    Not for gloo's own reduce-scatter, whose work knows no time-out: it waits for another one inside.
    """
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        if work.is_completed():
            work.wait()
        elif _NOT_YET in str(error):
            return False
        else:
            raise
    return True


@waits_for_peers
def run_or_leave(do: Callable[[], T], is_aborted: Callable[[], bool], name: str) -> T:
    """The result of `do`, or its error; on abort `do` is left behind, in a thread of its own: CollectiveAborted."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    while not wait([outcome], _POLL_S).done:
        if is_aborted():
            raise CollectiveAborted(f"aborted: {name}")
    return outcome.result()


@waits_for_peers
def join_or_leave(thread: threading.Thread, is_aborted: Callable[[], bool]) -> None:
    """Return when the thread has ended; raises CollectiveAborted on abort."""
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive() and is_aborted():
            raise CollectiveAborted(f"aborted: {thread.name}")


def keep_until_ended(groups: Iterable[Any], works: Iterable[Any]) -> None:
    """Free process groups only when their works have ended, however late. At the process's end they are not freed."""
    held = list(groups), list(works)

    def keep() -> None:
        while not all(work.is_completed() for work in held[1]):
            time.sleep(_LOOK_S)

    threading.Thread(target=keep, daemon=True, name="left in gloo").start()
