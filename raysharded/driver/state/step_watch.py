"""Who is stuck: a deadline that follows the measured step time, and what the members say of themselves. Pure.

A generation whose next step does not come within half of the deadline is asked where its members are. Whoever has not
answered when the deadline is reached is stopped, wedged or cut off: answering takes no more than a thread that can
run. If all answered they are asked again, and whoever is in code of its own while others wait for it in a collective
is stuck there. If all wait, the collective itself is stuck, and nobody is to blame. Nobody waits for a worker that is
alone: it is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raysharded.ids import WorkerId
from raysharded.protocol.messages import ProbeReply

_KEPT = 32
_FACTOR = 5.0
"""A step that takes so many times as long as the longest of the newest ones is not slow, it is stuck."""
_FIRST_FACTOR = 2.0
"""So much longer may the first step of a generation take, where caches are cold."""
LONG_PHASES = frozenset({"evaluate", "save", "commit", "prepare"})
"""Phases whose length says nothing about a step's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWatch:
    """What is known of how long steps take, and of a generation whose step does not come."""

    durations: tuple[float, ...] = ()
    """Seconds between the newest steps, as the driver saw them."""
    asked_at: float | None = None
    """When the members were asked where they are."""
    again: bool = False
    """Whether it was for the second time: the deadline has passed."""
    listened: bool = False
    """Whether the driver has had time to hear answers since: who stands still for a while hears them late."""
    seen: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """What they answered since."""
    excused_at: float = 0.0
    """When they were last found to be busy, and not stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangVerdict:
    """What is wrong with a generation that makes no progress; neither of the two if it is only slow."""

    stuck: tuple[WorkerId, ...] = ()
    all_wait: bool = False


def measured(watch: StepWatch, seconds: float, *, first: bool) -> StepWatch:
    """After a step that took so long; the `first` of its generation says less of those that follow."""
    return StepWatch(durations=(*watch.durations, seconds / (_FIRST_FACTOR if first else 1.0))[-_KEPT:])


def at_rest(watch: StepWatch) -> StepWatch:
    """Nobody is asked, and what was answered is forgotten: another phase has begun."""
    return StepWatch(durations=watch.durations)


def excused(watch: StepWatch, at: float) -> StepWatch:
    """The members are busy: from now on they have another deadline."""
    return replace(at_rest(watch), excused_at=at)


def deadline_s(watch: StepWatch, *, shortest_s: float, longest_s: float, first: bool) -> float:
    """How long a step may take; the `first` in its generation longer."""
    if not watch.durations:
        return longest_s
    expected = _FACTOR * max(watch.durations) * (_FIRST_FACTOR if first else 1.0)
    return min(max(expected, shortest_s), longest_s)


def answer_s(deadline: float) -> float:
    """How long a member may take to say where it is, when it matters."""
    return max(1.0, deadline / 8)


def silent(members: frozenset[WorkerId], watch: StepWatch) -> tuple[WorkerId, ...]:
    """Who was asked and has not answered."""
    return tuple(sorted(members - watch.seen.keys()))


def judge(watch: StepWatch) -> HangVerdict:
    """Of members that have all answered."""
    seen = watch.seen
    busy = tuple(sorted(worker for worker, one in seen.items() if not one.waits))
    if not busy:
        return HangVerdict(all_wait=True)
    if any(one.phase in LONG_PHASES for one in seen.values()) or len(busy) == len(seen):
        return HangVerdict()
    return HangVerdict(stuck=busy)
