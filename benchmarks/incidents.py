"""The cost of a fault, from the lines that the processes wrote: steps done, their times and workers, repetitions.
Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.lines import Event

IdsOfStep = Callable[[int], Sequence[int]]
"""The samples that a step must read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A step that is done by all its processes."""

    step: int
    at: float
    loss: float
    workers: int
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """The consequences of a fault, in seconds from it on; None: not seen."""

    found_s: float | None
    """Until a survivor noticed it, or was ended because of it."""
    stopped_s: float | None
    """Until all survivors had stopped or were ended."""
    restored_s: float | None
    """Until the last of the processes that continued held a state to resume from."""
    first_step_s: float | None
    """Until any step was done, even one that had been done before."""
    beyond_s: float | None
    """Until the step that the fault broke was done."""
    steps_again: int
    """Steps that had been done before, and were computed again."""
    samples_lost: int
    samples_repeated: int
    loss_difference: float | None
    """The largest difference to the undisturbed run, over the steps that were compared, from the first on."""
    workers_after: int
    """Number of workers that did the step that the fault broke."""
    normal_step_s: float
    """The median step before the fault."""

    @property
    def extra_s(self) -> float | None:
        """More than a normal step, from the fault to progress."""
        return None if self.beyond_s is None else self.beyond_s - self.normal_step_s


def steps_done(events: Iterable[Event]) -> list[StepDone]:
    """Every step in the order in which they were done, as often as they were."""
    parts: dict[int, dict[int, Event]] = {}
    found: list[StepDone] = []
    for event in sorted((one for one in events if one.event == "step"), key=lambda one: one.at):
        said = parts.setdefault(event.step, {})
        if event.rank in said or any(other.world != event.world for other in said.values()):
            said.clear()  # left by an earlier attempt
        said[event.rank] = event
        if len(said) == event.world:
            found.append(_whole(list(parts.pop(event.step).values())))
    return found


def _whole(parts: Sequence[Event]) -> StepDone:
    """One step from the lines of its processes."""
    weights = [max(1, len(part.samples)) for part in parts]
    known = [
        (part.loss, weight)
        for part, weight in zip(parts, weights, strict=True)
        if part.loss is not None and not math.isnan(part.loss)
    ]
    return StepDone(
        step=parts[0].step,
        at=max(part.at for part in parts),
        loss=sum(loss * weight for loss, weight in known) / sum(weight for _, weight in known),
        workers=parts[0].workers or parts[0].world,
        samples=tuple(sample for part in parts for sample in part.samples),
    )


def final_steps(done: Iterable[StepDone]) -> dict[int, StepDone]:
    """The last execution of each step: earlier ones were rolled back."""
    return {one.step: one for one in done}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The use of a stretch of time."""

    steps: int
    """Number of different steps that were done."""
    again: int
    """Number of times that a step was done that had been done before."""
    wall_s: float
    useful_s: float
    """Time of the steps that count: the last time that each was done. A step during which something happened counts as
    much as the median of the others."""
    rate: float
    """Different steps per second."""
    undisturbed_rate: float
    """Steps per second before the first fault."""

    @property
    def useful_share(self) -> float:
        """1 - (computed again + recovering + paused) / wall."""
        return self.useful_s / self.wall_s

    @property
    def rate_share(self) -> float:
        """Useful steps per second over the undisturbed rate."""
        return self.rate / self.undisturbed_rate


def goodput(done: Sequence[StepDone], faults: Sequence[float], began: float, ended: float) -> Goodput:
    """Goodput of the time from `began`, when a step was just done, to `ended`. The faults' times are in order, and two
    steps at the least come before the first."""
    within = [one for one in done if began < one.at <= ended]
    undisturbed = [one for one in within if one.at <= faults[0]] if faults else within
    if len(undisturbed) < 2:
        raise ValueError(f"{len(undisturbed)} steps before the first fault: no undisturbed rate; strike later")
    final = final_steps(within)
    times: list[float] = []
    for earlier, later in pairwise(within):
        is_last = final[later.step] is later
        is_calm = later.step == earlier.step + 1 and not any(earlier.at < fault <= later.at for fault in faults)
        if is_last and is_calm:
            times.append(later.at - earlier.at)
    rest = len(final) - len(times)
    wall_s = ended - began
    return Goodput(
        steps=len(final),
        again=len(within) - len(final),
        wall_s=wall_s,
        useful_s=sum(times) + rest * statistics.median(times),
        rate=len(final) / wall_s,
        undisturbed_rate=(len(undisturbed) - 1) / (undisturbed[-1].at - undisturbed[0].at),
    )


def normal_step_s(done: Sequence[StepDone]) -> float:
    """The median time from one step to the next."""
    times = [b.at - a.at for a, b in pairwise(done) if b.step == a.step + 1]
    return statistics.median(times) if times else math.nan


def samples_amiss(final: Mapping[int, StepDone], steps: Iterable[int], ids: IdsOfStep) -> tuple[int, int]:
    """The numbers of samples that these steps left out, and that they read twice, or instead."""
    lost = repeated = 0
    for step in steps:
        wanted, read = list(ids(step)), list(final[step].samples) if step in final else []
        lost += len(set(wanted) - set(read))
        repeated += len(read) - len(set(read) & set(wanted))
    return lost, repeated


def loss_difference(
    final: Mapping[int, StepDone], steps: Iterable[int], undisturbed: Mapping[int, float]
) -> float | None:
    """The largest loss difference in those of these steps that both have; None if there is none."""
    both = set(steps) & final.keys() & undisturbed.keys()
    return max((abs(final[step].loss - undisturbed[step]) for step in both), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """A fault: its time and its victims."""

    at: float
    victims: frozenset[int]
    """Process ids."""
    survivors: frozenset[int]
    """Process ids of the surviving workers."""
    ended: Mapping[int, float] = field(default_factory=dict)
    """Time when each survivor's process ended, if it did."""


def incident(events: Sequence[Event], struck: Struck, *, settled: int = 5) -> Incident:
    """The consequences of a fault, except for samples and losses.

    `settled`: the normal step is the median of so many steps before the fault.
    """
    done = steps_done(events)
    before, after = [one for one in done if one.at <= struck.at], [one for one in done if one.at > struck.at]
    newest = max((one.step for one in before), default=0)
    beyond = next((one for one in after if one.step > newest), None)
    until = beyond.at if beyond else math.inf
    noticed = [one.at for one in events if one.event == "failed" and struck.at < one.at < until]
    ended = [at for pid, at in struck.ended.items() if pid in struck.survivors and struck.at < at < until]
    stopped = [one.at for one in events if one.event == "stopped" and struck.at < one.at < until]
    restored = [one.at for one in events if one.event == "restored" and struck.at < one.at < until]
    again = [one.step for one in after if one.step <= newest and one.at <= until]

    def since(at: float | None) -> float | None:
        return None if at is None else at - struck.at

    return Incident(
        found_s=since(min(noticed + ended, default=None)),
        stopped_s=since(max(stopped or noticed + ended, default=None)),
        restored_s=since(max(restored, default=None)),
        first_step_s=since(after[0].at if after else None),
        beyond_s=since(beyond.at if beyond else None),
        steps_again=len(again),
        samples_lost=0,
        samples_repeated=0,
        loss_difference=None,
        workers_after=beyond.workers if beyond else 0,
        normal_step_s=normal_step_s(before[-settled - 1 :]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """The consequences of a request for another number of workers."""

    until_s: float
    """Time until the first step of the new number of workers."""
    pause_s: float
    """The longest time between two new steps, less a normal step before."""
    steps_again: int


def resized(done: Sequence[StepDone], at: float, workers: int, *, settled: int = 5) -> Resized | None:
    """The consequences of the request at this time; None until two new steps of so many workers are done.

    A step is new that was not done before: a subject that returns to a checkpoint repeats some, among them those that
    came between the request and the change.
    """
    newest, new, again = 0, list[StepDone](), 0
    for one in done:
        if one.step > newest:
            newest = one.step
            new.append(one)
        elif one.at > at:
            again += 1
    before = [one for one in new if one.at <= at]
    after = [one for one in new if one.at > at]
    if not before or sum(one.workers == workers for one in after) < 2:
        return None
    return Resized(
        until_s=next(one.at for one in done if one.at > at and one.workers == workers) - at,
        pause_s=max(b.at - a.at for a, b in pairwise([before[-1], *after])) - normal_step_s(before[-settled - 1 :]),
        steps_again=again,
    )
