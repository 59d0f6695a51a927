"""Who slows the others down: every member's seconds per step that it does not wait, against its peers'. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from raysharded.ids import WorkerId
from raysharded.protocol.messages import ProbeReply

SLOW = 1.25
"""Who takes so many times as long as its peers is slow."""
_LEAST_S = 0.005
"""Less than so much per step is noise."""
_STEPS = 5
"""Of how many an average must be."""
_TIMES = 3
"""How often in a row somebody must be found slow."""
_EVERY_S_PER_WORKER = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """How fast one member is."""

    score: float
    """Its seconds per step over its peers' median; 1 is like them, more is slower."""
    phase: str
    """In which it loses the most."""
    lost_s: float
    """Seconds per step that it takes longer than they."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What is known of the members' speed."""

    asked_at: float = 0.0
    asking: bool = False
    """Whether answers are waited for: what members say for another reason says nothing new of their speed."""
    answers: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """Since then."""
    slow: Mapping[WorkerId, int] = field(default_factory=dict)
    """How often in a row each was found slow."""
    newest: Mapping[WorkerId, ProbeReply] = field(default_factory=dict)
    """What all members answered last; without their stacks. For people."""


def is_due(paces: StepTimes, num_members: int, every_s: float, at: float) -> bool:
    """Whether the members are to be asked again; seldom enough that thousands cost the driver little."""
    return num_members > 1 and at - paces.asked_at >= max(every_s, _EVERY_S_PER_WORKER * num_members)


def paces_of(answers: Mapping[WorkerId, ProbeReply]) -> dict[WorkerId, StepTime]:
    """Of all who have answered; of none if one has not trained long enough to say."""
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


def judged(paces: StepTimes, found: Mapping[WorkerId, StepTime]) -> tuple[StepTimes, list[WorkerId]]:
    """After a look at everybody: and who has now been slow so often in a row that it is worth saying."""
    slow = {
        worker: paces.slow.get(worker, 0) + 1
        for worker, pace in found.items()
        if pace.score >= SLOW and pace.lost_s >= _LEAST_S
    }
    told = sorted(worker for worker, times in slow.items() if times % _TIMES == 0)
    return StepTimes(asked_at=paces.asked_at, slow=slow, newest=paces.answers), told
