"""Decisions about a run hold for the same steps on all workers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from raysharded.overrides import (
    WEIGHTS as FIELD,
    Decisions,
    Rates,
    WeightChanges,
    after,
    agree,
    changed,
    decided,
    factor_at,
    own_weights,
    rates_resumed,
    reweighted,
    skipped_before,
    weights_before,
    weights_of,
    weights_resumed,
)

RATES = st.lists(st.tuples(st.integers(1, 20), st.floats(0, 4)), unique_by=lambda rate: rate[0], max_size=4).map(
    lambda them: tuple(sorted(them))
)
SKIPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), unique_by=lambda skip: skip[0], max_size=4).map(
    lambda them: tuple(sorted(them))
)


def _weights(changes: list[tuple[int, int, tuple[tuple[str, float], ...]]]) -> WeightChanges:
    """Changes of (first step, samples skipped since the one before, weights), with 10 samples for each step."""
    skipped, found = 0, []
    for step, more, weights in sorted(changes):
        skipped += more
        found.append((step, 10 * (step - 1) + skipped, weights))
    return tuple(found)


WEIGHTS = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.just(0) | st.integers(0, 60),
        st.sampled_from([(("a", 1.0),), (("a", 0.5), ("b", 2.0))]),
    ),
    unique_by=lambda change: change[0],
    max_size=4,
).map(_weights)
DECISIONS = st.builds(Decisions, skips=SKIPS, rates=RATES, weights=WEIGHTS)


@given(RATES, st.integers(1, 25), st.floats(0, 4))
def test_a_factor_holds_from_its_step_on_and_changes_none_before(rates: Rates, first: int, factor: float) -> None:
    then = changed(rates, from_step=first, factor=factor)
    for step in range(1, 40):
        assert factor_at(then, step) == (factor if step >= first else factor_at(rates, step))
    assert factor_at((), first) == 1.0


@given(RATES, RATES, st.integers(1, 25))
def test_a_checkpoint_has_what_held_up_to_its_step_and_the_journal_what_was_decided_after_it(
    rates: Rates, told: Rates, step: int
) -> None:
    then = rates_resumed(rates, step=step, told=told)
    first_later = min((first for first, _ in rates if first > step), default=99)
    for k in range(1, 40):
        expected = factor_at(rates, k) if k >= first_later else factor_at(told, min(k, step))
        assert factor_at(then, k) == expected


@given(DECISIONS, DECISIONS, st.integers(0, 25))
def test_decisions_agree_up_to_a_step_if_no_step_until_then_shows_a_difference(
    one: Decisions, other: Decisions, step: int
) -> None:
    def shown(of: Decisions) -> list[Any]:
        weights = [change for change in of.weights if change[0] <= step]
        return [*((skipped_before(of.skips, k), factor_at(of.rates, k)) for k in range(1, step + 1)), weights]

    assert agree(one, other, step) == (shown(one) == shown(other))


@given(DECISIONS)
def test_what_an_entry_has_is_what_is_read_from_it(decisions: Decisions) -> None:
    assert after(Decisions(), {"kind": "started", **decisions.fields()}) == decisions
    assert after(decisions, {"kind": "step"}) == decisions


def test_the_journal_has_all_decisions_in_their_order() -> None:
    entries: list[dict[str, Any]] = [
        {"kind": "started", "skips": []},  # as an older version wrote it
        {"kind": "learning_rate", "step": 3, "factor": 0.5, "from_step": 4},
        {"kind": "rewind", "skips": [[2, 8]]},  # because a number was not finite: the learning rate stays
        {"kind": "learning_rate", "step": 9, "factor": 0.25, "from_step": 10},
    ]
    assert decided(entries) == Decisions(skips=((2, 8),), rates=((4, 0.5), (10, 0.25)))
    weights = {"kind": "mixture_weights", "step": 9, "weights": {"a": 2.0}, "from_step": 10, "from_position": 44}
    later = {"kind": "rewind", "skips": [[2, 8], [5, 20]]}  # because a number was not finite: the weights stay
    assert decided([*entries, weights, later]).weights == ((10, 44, (("a", 2.0),)),)
    undone = {"kind": "rewind", "skips": [[2, 8]], "learning_rate": [[4, 0.5]], "who": "asked"}
    assert decided([*entries, weights, undone]) == Decisions(skips=((2, 8),), rates=((4, 0.5),))


@given(WEIGHTS, WEIGHTS, st.integers(0, 450))
def test_a_checkpoint_has_the_weights_of_what_was_consumed_and_the_journal_the_later_ones(
    weights: WeightChanges, told: WeightChanges, position: int
) -> None:
    then = weights_resumed(weights, position=position, told=told)
    assert [change for change in then if change[1] < position] == [one for one in told if one[1] < position]
    assert [change for change in then if change[1] >= position] == [one for one in weights if one[1] >= position]
    more = reweighted(then, from_step=9, position=position, weights=(("c", 1.0),))
    assert more == (*weights_before(then, position), (9, position, (("c", 1.0),)))


def test_weights_agree_with_those_that_a_manifest_returns_in_the_order_of_their_names() -> None:
    entry = {"kind": "mixture_weights", "step": 3, "weights": {"web": 1.0, "books": 2.0}, "from_step": 4}
    live = after(Decisions(), {**entry, "from_position": 12})
    told = json.loads(json.dumps(own_weights(live.weights), sort_keys=True))[FIELD]
    assert agree(live, Decisions(weights=weights_of(told)), 9)
