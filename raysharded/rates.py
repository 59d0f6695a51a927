"""Learning rates that a person changed while the run trained: by what, and from which step on. Pure.

A factor holds from its first step until that of the next decision, whoever computes the step, and however often.
"""

from __future__ import annotations

from typing import TypeAlias

Rates: TypeAlias = tuple[tuple[int, float], ...]
"""(first step, factor), ascending by step: from that step on every learning rate is the task's times the factor."""


def factor_at(rates: Rates, step: int) -> float:
    """By what the task's learning rate is multiplied in `step`."""
    return next((factor for first, factor in reversed(rates) if first <= step), 1.0)


def changed(rates: Rates, *, from_step: int, factor: float) -> Rates:
    """The decisions after one more: it takes the place of those that were to hold later."""
    return (*rates_before(rates, from_step), (from_step, factor))


def rates_before(rates: Rates, step: int) -> Rates:
    """The decisions that hold from a step before `step` on."""
    return tuple(rate for rate in rates if rate[0] < step)


def rates_resumed(rates: Rates, *, step: int, told: Rates) -> Rates:
    """The decisions of a run that goes on from a checkpoint of `step`, which was computed with `told`.

    What the checkpoint says counts up to its step: it may come from another run. What was decided after it stays.
    """
    return (*rates_before(told, step + 1), *(rate for rate in rates if rate[0] > step))
