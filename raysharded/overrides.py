"""A run's control log: the decisions made while it trains that its steps depend on. Pure.

A step is a function of the previous state and of these decisions. Every computation of a step uses the same ones.

Learning rates: a factor holds from its first step until the first step of the next decision, in every computation of
those steps.

Weights of a mixture: they hold from their first position on. The source at a position follows from them, also when it
is read again.

Skipped data: how far the run's positions are ahead of those that the step number gives. A run that returns to step `c`
because step `s` went wrong continues with the samples after those of `s`. Positions depend only on the step and on
these decisions, so everything computed later, or again, is determined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

WEIGHTS = "mixture_weights"
"""Name of the field, of journal entries and checkpoints, that has the changes of a mixture's weights."""
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


def consumed(skips: Skips, step: int, global_batch_size: int) -> int:
    """The number of samples read or skipped up to `step`: the position after its last sample."""
    return step * global_batch_size + skipped_before(skips, step)


WeightChanges: TypeAlias = tuple[tuple[int, int, tuple[tuple[str, float], ...]], ...]
"""(first step, first position, weights by source), ascending: from that position on the mixture has these weights."""


def weights_before(changes: WeightChanges, position: int) -> WeightChanges:
    """The decisions that begin before a position."""
    return tuple(change for change in changes if change[1] < position)


def reweighted(
    changes: WeightChanges, *, from_step: int, position: int, weights: tuple[tuple[str, float], ...]
) -> WeightChanges:
    """The decisions after one more, which replaces those that would begin later."""
    return (*weights_before(changes, position), (from_step, position, weights))


def weights_resumed(changes: WeightChanges, *, position: int, told: WeightChanges) -> WeightChanges:
    """The decisions of a run that resumes from a checkpoint that had consumed `position` samples, with `told`.

    The checkpoint's decisions hold up to there, as it may come from another run. The run's later decisions remain.
    """
    return (*weights_before(told, position), *(change for change in changes if change[1] >= position))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """All decisions, each with the step from which it holds."""

    skips: Skips = ()
    """The data that the run has skipped."""
    rates: Rates = ()
    """The factors of the run's learning rate."""
    weights: WeightChanges = ()
    """The weights of its mixture that were set while it trained."""

    def fields(self) -> dict[str, Any]:
        """The decisions as fields of a journal entry."""
        return {
            "skips": [list(skip) for skip in self.skips],
            "learning_rate": [list(rate) for rate in self.rates],
            **own_weights(self.weights),
        }


def after(decisions: Decisions, entry: Mapping[str, Any]) -> Decisions:
    """The decisions after one more entry of the run's journal; most entries change nothing."""
    match entry["kind"]:
        case "started" | "rewind":
            skips = skips_of(entry["skips"]) if "skips" in entry else decisions.skips
            rates = rates_of(entry["learning_rate"]) if "learning_rate" in entry else decisions.rates
            weights = decisions.weights if "learning_rate" not in entry else weights_of(entry.get(WEIGHTS, ()))
            return Decisions(skips=skips, rates=rates, weights=weights)
        case "learning_rate":
            step, factor = int(entry["from_step"]), float(entry["factor"])
            return replace(decisions, rates=changed(decisions.rates, from_step=step, factor=factor))
        case "mixture_weights":
            ((step, position, given),) = weights_of([(entry["from_step"], entry["from_position"], entry["weights"])])
            then = reweighted(decisions.weights, from_step=step, position=position, weights=given)
            return replace(decisions, weights=then)
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
    mine, others = (tuple(change for change in of.weights if change[0] <= step) for of in (one, other))
    if mine != others:
        return False
    first = [1, *(rate[0] for rate in (*one.rates, *other.rates))]
    return all(factor_at(one.rates, k) == factor_at(other.rates, k) for k in first if k <= step)


def skips_of(told: Iterable[Iterable[Any]]) -> Skips:
    """Skips from JSON. Raises TypeError or ValueError for invalid values."""
    return tuple((int(step), int(samples)) for step, samples in told)


def rates_of(told: Iterable[Iterable[Any]]) -> Rates:
    """Rates from JSON. Raises TypeError or ValueError for invalid values."""
    return tuple((int(step), float(factor)) for step, factor in told)


def weights_of(told: Iterable[Iterable[Any]]) -> WeightChanges:
    """Weights of a mixture from JSON, by name. Raises TypeError, ValueError or AttributeError for invalid values."""
    return tuple(
        (int(step), int(position), tuple(sorted((str(name), float(weight)) for name, weight in weights.items())))
        for step, position, weights in told
    )


def own_weights(changes: WeightChanges) -> dict[str, Any]:
    """Weights of a mixture as a field for JSON; empty if none were set."""
    told = [[step, position, dict(weights)] for step, position, weights in changes]
    return {WEIGHTS: told} if told else {}
