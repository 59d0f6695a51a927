"""The commands that are calls to workers, and nothing else. Pure."""

from __future__ import annotations

from typing import Any

from raysharded.driver.events import (
    AskFingerprint,
    AskReport,
    Command,
    Form,
    Interrupt,
    Look,
    Poll,
    Prepare,
    RequestBoundary,
    RequestSave,
    SaveHeld,
    Train,
)
from raysharded.ids import WorkerId

_POLL_TIMEOUT_S = 5.0

Call = tuple[WorkerId, str, tuple[Any, ...]]
"""(worker, method of `raysharded.actors.worker.Worker`, arguments)"""


def calls_of(command: Command) -> list[Call]:
    """The calls that carry a command out; none if it is not of that kind."""
    match command:
        case Form(spec=spec):
            return [(member, "form", (spec,)) for member in spec.members]
        case Prepare(spec=spec):
            return [(member, "prepare", (spec,)) for member in spec.members]
        case Train(generation=generation, members=members, rest=rest):
            return [(member, "rest" if rest else "train", (generation,)) for member in members]
        case SaveHeld(generation=generation, members=members):
            return [(member, "save_held", (generation,)) for member in members]
        case AskFingerprint(generation=generation, members=members):
            return [(member, "fingerprint", (generation,)) for member in members]
        case Interrupt(worker=worker, generation=generation):
            return [(worker, "interrupt", (generation,))]
        case AskReport(worker=worker, generation=generation):
            return [(worker, "report", (generation,))]
        case RequestBoundary(worker=worker, generation=generation):
            return [(worker, "request_boundary", (generation,))]
        case RequestSave(worker=worker, generation=generation):
            return [(worker, "request_save", (generation,))]
        case Poll(worker=worker, generation=generation, after_step=after_step):
            return [(worker, "poll", (generation, after_step, _POLL_TIMEOUT_S))]
        case Look(worker=worker, generation=generation):
            return [(worker, "look", (generation,))]
    return []
