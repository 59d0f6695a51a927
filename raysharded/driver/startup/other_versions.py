"""Workers of the run that another version of raysharded left: a driver waits until they have written what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raysharded.clock import Clock
from raysharded.errors import RunOwnedElsewhere
from raysharded.protocol.worker_launcher import WorkersOfAnotherVersion

WAIT_S = 300.0
"""How long workers that cannot be asked wait for a driver of theirs, unless theirs said otherwise."""
_LOOK_UP_S = 1.0


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
    """Return when the run has no workers of another protocol; nothing of the run is touched before.

    Workers without a driver write a checkpoint of what they hold after a while, and end. `say` hears once, when they
    are without one, what is waited for. Raises RunOwnedElsewhere if they have a driver that lives, or if this one is to
    take over: workers of another protocol cannot be. `require_free` and `pause` are those of `RunLeadership`, and raise
    as they do.
    """
    said = False
    while (found := look()) is not None:
        if take_over:
            raise RunOwnedElsewhere(
                f"run {run!r} has {found.workers} workers of {found.version}, which cannot be taken over by another "
                "protocol. Stop the run with that version, or start it without take_over: it then waits for their "
                "checkpoint."
            )
        require_free()
        if not found.have_driver and not said:
            said = True
            wait_s = WAIT_S if found.wait_s is None else found.wait_s
            say(
                {
                    "version": str(found.version),
                    "workers": found.workers,
                    "wait_s": round(wait_s, 3),
                    "until": round(clock.wall() + wait_s, 3),
                    "sure": found.wait_s is not None,
                }
            )
        pause(_LOOK_UP_S)
