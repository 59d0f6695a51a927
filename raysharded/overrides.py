"""A run's control log: the decisions made while it trains that its steps depend on. Pure.

A step is a function of the previous state and of these decisions. Every computation of a step uses the same ones.

Learning rates: a factor holds from its first step until the first step of the next decision, in every computation of
those steps.

Skipped data: how far the run's positions are ahead of those that the step number gives. A run that returns to step `c`
because step `s` went wrong continues with the samples after those of `s`. Positions depend only on the step and on
these decisions, so everything computed later, or again, is determined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Rates: TypeAlias = tuple[tuple[int, float], ...]
"""(first step, factor), ascending by step: from that step on, every learning rate is the task's times the factor."""


def factor_at(rates: Rates, step: int) -> float:
    """The factor of the task's learning rate in `step`."""
    return next((factor for first, factor in reversed(rates) if first <= step), 1.0)


def changed(rates: Rates, *, from_step: int, factor: float) -> Rates:
    """The decisions after one more, which replaces those that would begin later."""
    return (*rates_before(rates, from_step), (from_step, factor))


def rates_before(rates: Rates, step: int) -> Rates:
    """The decisions that begin before `step`."""
    return tuple(rate for rate in rates if rate[0] < step)


def rates_resumed(rates: Rates, *, step: int, told: Rates) -> Rates:
    """The decisions of a run that resumes from a checkpoint of `step`, which was computed with `told`.

    The checkpoint's decisions hold up to its step, as it may come from another run. The run's later decisions remain.
    """
    return (*rates_before(told, step + 1), *(rate for rate in rates if rate[0] > step))


Skips: TypeAlias = tuple[tuple[int, int], ...]
"""(step, samples), ascending by step: the number of samples skipped in total after `step`."""


def skipped_before(skips: Skips, step: int) -> int:
    """The number of samples skipped in total before `step` takes its samples."""
    return next((samples for after, samples in reversed(skips) if after < step), 0)


def rewound(skips: Skips, *, to_step: int, bad_step: int, global_batch_size: int) -> Skips:
    """The decisions after a return to `to_step` that skips the data of `bad_step` and of all steps between.

    Law: `to_step + 1` then takes the samples right after those that `bad_step` had taken.
    """
    samples = (bad_step - to_step) * global_batch_size + skipped_before(skips, bad_step)
    return (*(skip for skip in skips if skip[0] < to_step), (to_step, samples))


def passed_over(skips: Skips, *, to_step: int, done_step: int, global_batch_size: int) -> Skips:
    """The decisions after a return to `to_step` that skips all data read by steps up to `done_step`.

    It also skips the data that was to be skipped after `done_step`.

    Law: `to_step + 1` then takes the samples that the step after `done_step` would have taken.
    """
    samples = (done_step - to_step) * global_batch_size + skipped_before(skips, done_step + 1)
    return (*(skip for skip in skips if skip[0] < to_step), (to_step, samples))


def skips_resumed(skips: Skips, *, step: int, samples: int, global_batch_size: int) -> Skips:
    """The decisions of a run that resumes from a checkpoint of `step`, at which `samples` had been consumed.

    The checkpoint's count holds up to its step, as it may come from another run. The run's later decisions remain.
    """
    ahead = samples - step * global_batch_size
    if ahead == skipped_before(skips, step):
        return skips
    later = tuple(skip for skip in skips if skip[0] >= step)
    return later if later and later[0][0] == step else ((step, ahead), *later)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """All decisions, each with the step from which it holds."""

    skips: Skips = ()
    """The data that the run has skipped."""
    rates: Rates = ()
    """The factors of the run's learning rate."""

    def fields(self) -> dict[str, Any]:
        """The decisions as fields of a journal entry."""
        return {
            "skips": [list(skip) for skip in self.skips],
            "learning_rate": [list(rate) for rate in self.rates],
        }


def after(decisions: Decisions, entry: Mapping[str, Any]) -> Decisions:
    """The decisions after one more entry of the run's journal; most entries change nothing."""
    match entry["kind"]:
        case "started" | "rewind":
            skips = skips_of(entry["skips"]) if "skips" in entry else decisions.skips
            rates = rates_of(entry["learning_rate"]) if "learning_rate" in entry else decisions.rates
            return Decisions(skips=skips, rates=rates)
        case "learning_rate":
            step, factor = int(entry["from_step"]), float(entry["factor"])
            return replace(decisions, rates=changed(decisions.rates, from_step=step, factor=factor))
    return decisions


def decided(entries: Iterable[Mapping[str, Any]]) -> Decisions:
    """All decisions that a journal records."""
    decisions = Decisions()
    for entry in entries:
        decisions = after(decisions, entry)
    return decisions


def agree(one: Decisions, other: Decisions, step: int) -> bool:
    """True if the steps up to `step` are the same under both."""
    first = [1, *(skip[0] + 1 for skip in (*one.skips, *other.skips))]
    if any(skipped_before(one.skips, k) != skipped_before(other.skips, k) for k in first if k <= step):
        return False
    first = [1, *(rate[0] for rate in (*one.rates, *other.rates))]
    return all(factor_at(one.rates, k) == factor_at(other.rates, k) for k in first if k <= step)


def skips_of(told: Iterable[Iterable[Any]]) -> Skips:
    """Skips from JSON. Raises TypeError or ValueError for invalid values."""
    return tuple((int(step), int(samples)) for step, samples in told)


def rates_of(told: Iterable[Iterable[Any]]) -> Rates:
    """Rates from JSON. Raises TypeError or ValueError for invalid values."""
    return tuple((int(step), float(factor)) for step, factor in told)
