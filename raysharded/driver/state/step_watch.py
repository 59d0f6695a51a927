"""Detection of stuck workers: a deadline that follows the measured step time, and the members' probe replies. Pure.

Slow steps stretch the deadline, and 8 fast ones bring it back.

If the next step does not come within half of the deadline, the members are probed. A member that has not answered by
the deadline is stopped, wedged or cut off: answering takes no more than a thread that can run. If all answered, they
are probed again. A member that runs its own code at both while others wait for it in a collective is stuck there. If
all wait, the collective itself is stuck, and no worker is to blame. No other worker waits for a single worker: it is
slow, not stuck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from raysharded.driver.state.changed import replace
from raysharded.ids import WorkerId
from raysharded.protocol.messages import ProbeReply

_NEWEST = 8
"""Number of steps after which a longer one before them no longer counts, unless such steps recur."""
_KEPT = 64
"""Number of steps in which long ones recur: two in it, one every 31 steps."""
_FACTOR = 5.0
"""A step that takes this many times the longest of the newest ones is stuck, not slow."""
_FIRST_FACTOR = 2.0
"""Extra factor for the first step of a generation, when caches are cold."""
LONG_PHASES = frozenset({"evaluate", "save", "commit", "prepare"})
"""Phases whose length does not indicate a step's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWatch:
    """Measured step times, and the probes of a generation whose step does not come."""

    durations: tuple[float, ...] = ()
    """Seconds between the newest steps, as the driver saw them."""
    asked_at: float | None = None
    """Time at which the members were probed."""
    again: bool = False
    """Whether it was the second probe: the deadline has passed."""
    listened: bool = False
    """Whether the driver has had time to receive answers since: after standing still it receives them late."""
    seen: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """Answers since the probe."""
    waited: frozenset[WorkerId] = frozenset()
    """Members that waited at the first probe. One that is busy at the second has moved since, and is not stuck."""
    excused_at: float = 0.0
    """Time at which the members were last found busy, not stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangVerdict:
    """Verdict on a generation without progress; with neither of the two, it is only slow."""

    stuck: tuple[WorkerId, ...] = ()
    all_wait: bool = False


def measured(watch: StepWatch, seconds: float, *, first: bool) -> StepWatch:
    """The watch after a step of this duration; a generation's `first` step counts less."""
    return StepWatch(durations=(*watch.durations, seconds / (_FIRST_FACTOR if first else 1.0))[-_KEPT:])


def usual_s(watch: StepWatch) -> float:
    """Median of the newest steps' durations; 0 before the first."""
    return median_low(watch.durations[-_NEWEST:]) if watch.durations else 0.0


def at_rest(watch: StepWatch) -> StepWatch:
    """The watch of a new phase: no probe is pending, and answers are discarded."""
    return StepWatch(durations=watch.durations)


def excused(watch: StepWatch, at: float) -> StepWatch:
    """The watch when the members are busy: a new deadline begins."""
    return replace(at_rest(watch), excused_at=at)


def deadline_s(watch: StepWatch, *, shortest_s: float, longest_s: float, first: bool) -> float:
    """Longest time that a step may take; a generation's `first` step may take longer."""
    if not watch.durations:
        return longest_s
    expected = _FACTOR * _longest(watch.durations) * (_FIRST_FACTOR if first else 1.0)
    return min(max(expected, shortest_s), longest_s)


def _longest(durations: Sequence[float]) -> float:
    """The longest step to be expected: the longest of the newest ones, or one as long as steps that recur.

    Slow steps are one stretch until `_NEWEST` faster ones follow in a row. A stretch that is over counts only if there
    was another: an evaluation every 20 steps recurs, and a network that was slow for a minute does not.
    """
    newest = max(durations[-_NEWEST:])
    peaks, since = list[float](), _NEWEST
    for seconds in durations[:-_NEWEST]:
        if seconds <= newest:
            since += 1
            continue
        if since >= _NEWEST:
            peaks.append(seconds)
        else:
            peaks[-1] = max(peaks[-1], seconds)
        since = 0
    return sorted(peaks)[-2] if len(peaks) > 1 else newest


def answer_s(deadline: float) -> float:
    """Longest time that a member may take to answer a probe, when it matters."""
    return max(1.0, deadline / 8)


def silent(members: frozenset[WorkerId], watch: StepWatch) -> tuple[WorkerId, ...]:
    """Members that were probed and have not answered."""
    return tuple(sorted(members - watch.seen.keys()))


def behind(watch: StepWatch) -> tuple[WorkerId, ...]:
    """Members whose GPU is in no collective while those of others are: these wait for them."""
    known = {worker: one.in_collective for worker, one in watch.seen.items() if one.in_collective is not None}
    return tuple(sorted(worker for worker, inside in known.items() if not inside)) if any(known.values()) else ()


def judge(watch: StepWatch) -> HangVerdict:
    """Judge members that have all answered."""
    seen = watch.seen
    busy = tuple(sorted(worker for worker, one in seen.items() if not one.waits))
    if not busy:
        return HangVerdict(all_wait=True)
    if any(one.phase in LONG_PHASES for one in seen.values()) or len(busy) == len(seen):
        return HangVerdict()
    return HangVerdict(stuck=tuple(worker for worker in busy if worker not in watch.waited))
