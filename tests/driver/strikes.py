"""The faults of a simulated cluster, and their times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from raysharded.driver.state.state import Phase


class Strike(Enum):
    """The kind of a fault."""

    KILL = "a worker's process dies"
    NODE = "a node dies with all of its workers, and another takes its place"
    SILENCE = "a worker stops answering"
    FREEZE = "a worker stands still for a while, and then goes on"
    BREAK = "a collective breaks, and nobody is gone"
    RAISE = "the task raises in a worker"
    FAIL_START = "the next worker that is asked for does not start"
    NEVER_START = "the next worker that is asked for waits for resources for ever"
    FAIL_SAVE = "the next part of a checkpoint cannot be written"
    FAIL_COMMIT = "the next manifest cannot be written"
    FAIL_PREPARE = "the next worker that is to prepare a generation cannot"
    REPEAT = "a message comes again"
    ASK = "somebody asks for a checkpoint"
    RESHARD = "somebody asks for other shard groups, or another tensor parallel degree"
    RATE = "somebody asks for another learning rate"
    REWIND = "somebody wants to go back to a checkpoint, or to one that there is none of"
    UNREADABLE = "the next checkpoint that somebody wants to go back to is damaged"
    PAUSE = "somebody pauses the run, and lets it go on after a while"
    RESIZE = "somebody asks for another number of workers"
    DRAIN = "somebody drains a node"
    STALL = "the driver stands still for a while, and then hears everything at once"
    LEAVE = "the run is told to end after one more checkpoint"
    NOTICE = "a worker is told to leave, and is gone after a while"
    CORRUPT = "an audit finds that a worker computes wrong numbers"
    NOT_FINITE = "a loss is not finite"
    NOTICE_NODE = "a worker and all others of its node are told to leave, and are gone after a while"
    DRIVER_DIES = "the driver is killed, and another comes: soon, late, or too late for the workers"
    CUT = "the link between two nodes is cut, for a while or for good"
    DRIVER_STOPS = "the driver is stopped, another comes, and the first one wakes up"
    DEVICE = "a worker's GPU fails, and its process stays"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Strikes at the `nth` thing that happens in a phase (None: in any)."""

    strike: Strike
    whom: int
    """Counts through the possible victims."""
    nth: int
    phase: Phase | None = None
