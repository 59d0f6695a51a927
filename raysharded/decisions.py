"""What was decided of a run while it trained, by people or for them: its control log. Pure.

A step is a function of the state before it and of these decisions. Whoever computes it again takes the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raysharded.rates import Rates, changed, factor_at
from raysharded.skips import Skips, skipped_before


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """All of them, each with the step from which it holds."""

    skips: Skips = ()
    """The data that the run has passed over."""
    rates: Rates = ()
    """The factors of its learning rate."""

    def fields(self) -> dict[str, Any]:
        """As a journal's entry keeps them."""
        return {
            "skips": [list(skip) for skip in self.skips],
            "learning_rate": [list(rate) for rate in self.rates],
        }


def after(decisions: Decisions, entry: Mapping[str, Any]) -> Decisions:
    """The decisions after one more entry of the run's journal; most change nothing."""
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
    """All decisions that a journal says of."""
    decisions = Decisions()
    for entry in entries:
        decisions = after(decisions, entry)
    return decisions


def agree(one: Decisions, other: Decisions, step: int) -> bool:
    """Whether the steps up to `step` are the same with both."""
    first = [1, *(skip[0] + 1 for skip in (*one.skips, *other.skips))]
    if any(skipped_before(one.skips, k) != skipped_before(other.skips, k) for k in first if k <= step):
        return False
    first = [1, *(rate[0] for rate in (*one.rates, *other.rates))]
    return all(factor_at(one.rates, k) == factor_at(other.rates, k) for k in first if k <= step)


def skips_of(told: Iterable[Iterable[Any]]) -> Skips:
    """From JSON. Raises TypeError or ValueError for anything else."""
    return tuple((int(step), int(samples)) for step, samples in told)


def rates_of(told: Iterable[Iterable[Any]]) -> Rates:
    """From JSON. Raises TypeError or ValueError for anything else."""
    return tuple((int(step), float(factor)) for step, factor in told)
