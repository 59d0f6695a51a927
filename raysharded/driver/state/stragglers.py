"""Detection of stragglers: every member's seconds per step without waiting, compared with its peers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from raysharded.ids import WorkerId
from raysharded.protocol.messages import ProbeReply

SLOW = 1.25
"""A worker that takes this many times as long as its peers is slow."""
_LEAST_S = 0.005
"""Smaller differences per step are noise."""
_LEAST_SHARE = 0.1
"""Smaller shares of a step are no reason for its length.

Where one node's network is slow, all wait for it in most of the step. A healthy worker may then be slower than its
peers in the little that they compute.
"""
_STEPS = 5
"""Smallest number of steps in an average."""
_TIMES = 3
"""Consecutive findings before a slow worker is reported."""
_EVERY_S_PER_WORKER = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The speed of one member."""

    score: float
    """Seconds per step over the peers' median; 1 is like them, more is slower."""
    phase: str
    """Phase in which it loses the most."""
    lost_s: float
    """Seconds per step that it takes longer than its peers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The members' speed, as far as known."""

    asked_at: float = 0.0
    asking: bool = False
    """Whether answers are expected. Probe replies for another reason carry no new information about speed."""
    answers: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """Answers since then."""
    slow: Mapping[WorkerId, int] = field(default_factory=dict)
    """Worker -> times in a row that it was found slow."""
    newest: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """The newest answers of all members, without their stacks. For people."""


def is_due(paces: StepTimes, num_members: int, every_s: float, at: float) -> bool:
    """Whether another probe is due; rarely enough that thousands of members cost the driver little."""
    return num_members > 1 and at - paces.asked_at >= max(every_s, _EVERY_S_PER_WORKER * num_members)


def paces_of(answers: Mapping[WorkerId, ProbeReply]) -> dict[WorkerId, StepTime]:
    """Step times of all members; empty if one has not trained long enough."""
    if len(answers) < 2 or any(seen.num_steps < _STEPS for seen in answers.values()):
        return {}
    phases = sorted({phase for seen in answers.values() for phase in seen.busy})
    usual = {phase: median_low(seen.busy.get(phase, 0.0) for seen in answers.values()) for phase in phases}
    totals = {worker: sum(seen.busy.values()) for worker, seen in answers.items()}
    middle = median_low(totals.values())
    paces = {}
    for worker, seen in answers.items():
        lost = {phase: seen.busy.get(phase, 0.0) - usual[phase] for phase in phases}
        worst = max(lost, key=lambda phase: lost[phase], default="")
        score = totals[worker] / middle if middle > 0 else 1.0
        paces[worker] = StepTime(score=score, phase=worst, lost_s=totals[worker] - middle)
    return paces


def judged(paces: StepTimes, found: Mapping[WorkerId, StepTime], *, step_s: float) -> tuple[StepTimes, list[WorkerId]]:
    """The step times after a comparison, and the workers now slow so often in a row that they are reported.

    `step_s`: seconds that a step takes.
    """
    slow = {
        worker: paces.slow.get(worker, 0) + 1
        for worker, pace in found.items()
        if pace.score >= SLOW and pace.lost_s >= max(_LEAST_S, _LEAST_SHARE * step_s)
    }
    told = sorted(worker for worker, times in slow.items() if times % _TIMES == 0)
    return StepTimes(asked_at=paces.asked_at, slow=slow, newest=paces.answers), told
