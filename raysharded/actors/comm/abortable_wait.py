"""Abortable waits for peers.

gloo wakes waiting threads when a connection ends, with two gaps in its tcp transport (`pair.cc`). It notifies neither
the receiver of a half-read message, nor the sender of a message to a connection that has just closed. Both wait until
gloo's time-out, and their group cannot be freed earlier: its destructor joins its threads. Therefore no thread that
training needs waits in gloo indefinitely. Collectives are waited for in slices, anything else in an abandoned thread.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from raysharded.actors.comm.lasting_threads import Transfer, begin
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.errors import ClusterError, CollectiveAborted
from raysharded.protocol import descriptors

T = TypeVar("T")

_SLICE = datetime.timedelta(milliseconds=50)
_NOT_YET = "Operation timed out"
_POLL_S = 0.02
_LOOK_S = 1.0
FREEING = "frees gloo's groups"
"""Name of the thread."""
GRACE_S = 0.2
"""Seconds after an abort in which gloo may itself report a failed transfer."""


@waits_for_peers
def has_ended(work: Any) -> bool:
    """True if a gloo collective ends within one slice; False: call again. Raises the collective's error.

    Not for gloo's own reduce-scatter: its work ignores the time-out, as it waits for another work inside.
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
    """Run `do` in another thread; return its result or raise its error.

    On abort it raises CollectiveAborted and abandons the thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            outcome.set_exception(error)

    begin(run, name)
    while not wait([outcome], _POLL_S).done:
        if is_aborted():
            raise CollectiveAborted(f"aborted: {name}")
    return outcome.result()


@waits_for_peers
def join_or_leave(transfer: Transfer, is_aborted: Callable[[], bool]) -> None:
    """Return when the transfer has ended; raises CollectiveAborted on abort."""
    while not transfer.ended.wait(_POLL_S):
        if is_aborted():
            raise CollectiveAborted(f"aborted: {transfer.name}")


def keep_until_ended(groups: list[Any], works: Iterable[Any] = ()) -> None:
    """Empty the list of process groups in a thread, once their works have ended; never if the process ends first."""
    waited = list(works)
    if not groups:
        return

    def keep() -> None:
        while not all(work.is_completed() for work in waited):
            time.sleep(_LOOK_S)
        groups.clear()

    threading.Thread(target=keep, daemon=True, name=FREEING).start()


def require_descriptors(world_size: int) -> None:
    """Raise ClusterError if this process may not open what the groups of so many workers need.

    Groups that are being freed get some time for it: they still have theirs.
    """
    needed = descriptors.of_groups(world_size)
    if descriptors.lacking(needed):
        until = time.monotonic() + GRACE_S
        for thread in [each for each in threading.enumerate() if each.name == FREEING]:
            thread.join(max(0.0, until - time.monotonic()))
    if lacking := descriptors.lacking(needed):
        raise ClusterError(lacking)
