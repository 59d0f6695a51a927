"""Workers that another version of raysharded left: a driver waits until they have written what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from raysharded.clock import Clock
from raysharded.errors import ClusterError, RunOwnedElsewhere
from raysharded.protocol.worker_launcher import WorkersOfAnotherVersion

WAIT_S = 300.0
"""Time that workers which cannot be queried wait for a new driver, unless their own driver set another time."""
_WRITE_S = 900.0
"""Time that their checkpoint, and their end, may take after the time that they reported."""
_LOOK_UP_S = 1.0
_LOOKS_SHARE = 10.0
"""Smallest ratio of a pause to the query before it: there may be thousands of workers."""
_SAY_AGAIN_S = 60.0


def wait_for_their_checkpoint(
    run: str,
    look: Callable[[], WorkersOfAnotherVersion | None],
    require_free: Callable[[], None],
    pause: Callable[[float], None],
    clock: Clock,
    say: Callable[[Mapping[str, object]], None],
    *,
    take_over: bool,
) -> None:
    """Return when the run has no workers of another protocol; touches nothing of the run before.

    Workers without a driver write a checkpoint of what they hold after a while, and end. During that time `say` is
    called every minute with a report of the wait. Workers that cannot be queried may have a long wait; it has no limit.

    Raises RunOwnedElsewhere if they have a live driver, or if this one is to take over: workers of another protocol
    cannot be taken over. Raises ClusterError if they do not end long after the time that they reported. `require_free`
    and `pause` are those of `RunLeadership`, and raise as they do.
    """
    orphaned_at = said_at = bound = math.inf
    while True:
        began = clock.monotonic()
        found = look()
        if found is None:
            return
        if take_over:
            raise RunOwnedElsewhere(
                f"run {run!r} has {found.workers} workers of {found.version}, which cannot be taken over by another "
                "protocol. Stop the run with that version, or start it without take_over: it then waits for their "
                "checkpoint."
            )
        if found.have_driver:
            require_free()
            orphaned_at = said_at = bound = math.inf
        elif orphaned_at == math.inf:
            orphaned_at, said_at = began, -math.inf
            bound = math.inf if found.wait_s is None else began + found.wait_s + _WRITE_S
        if began >= bound:
            raise ClusterError(
                f"{found.workers} workers of {found.version} hold run {run!r} without a driver, and do not end. End "
                "their processes (Ray calls them ray::Tenant), and start the run again: it goes on from its newest "
                "checkpoint."
            )
        if not found.have_driver and began >= said_at + _SAY_AGAIN_S:
            said_at = began
            wait_s = max(0.0, orphaned_at + WAIT_S - began) if found.wait_s is None else found.wait_s
            say(
                {
                    "version": str(found.version),
                    "workers": found.workers,
                    "wait_s": round(wait_s, 3),
                    "until": round(clock.wall() + wait_s, 3),
                    "sure": found.wait_s is not None,
                }
            )
        pause(max(_LOOK_UP_S, _LOOKS_SHARE * (clock.monotonic() - began)))
