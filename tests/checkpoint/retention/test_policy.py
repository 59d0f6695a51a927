"""The checkpoints that stay: the newest usable always; of the others those that a rule or a pin keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raysharded.checkpoint.retention.policy import Best, Candidate, Keep, to_delete
from raysharded.errors import ConfigError


def _gone(
    steps: Sequence[int],
    keep: Keep,
    *,
    pinned: Collection[int] = (),
    damaged: Collection[int] = (),
    metrics: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[int]:
    """The steps that are deleted; each is its own prefix."""
    gone = to_delete(
        [Candidate(str(step), step) for step in steps],
        keep,
        pinned=[str(step) for step in pinned],
        usable=lambda prefix: int(prefix) not in damaged,
        metrics=lambda prefix: (metrics or {}).get(int(prefix), {}),
    )
    return [candidate.step for candidate in gone]


def test_the_last_ones_stay() -> None:
    assert _gone([1, 2, 3, 4], Keep(last=2)) == [1, 2]
    assert _gone([1, 2, 3, 4], Keep(last=1)) == [1, 2, 3]
    assert _gone([1, 2], Keep(last=2)) == []
    assert _gone([], Keep(last=1)) == []


def test_what_cannot_be_used_does_not_count_as_kept() -> None:
    assert _gone([1, 2, 3, 4], Keep(last=2), damaged=[4]) == [1]
    assert _gone([1, 2, 3, 4], Keep(last=1), damaged=[2]) == [1, 2, 3]
    assert _gone([1, 2, 3, 4], Keep(last=2), damaged=[1, 2, 3]) == []
    assert _gone([1, 2, 3, 4], Keep(last=1), damaged=[1, 2, 3, 4]) == []


def test_the_last_of_every_stretch_stays() -> None:
    assert _gone([500, 1000, 1500, 2000, 2500], Keep(last=1, every_steps=1000)) == [500, 1500]
    assert _gone([300, 900, 1700, 2100, 2500], Keep(last=1, every_steps=1000)) == [300, 2100]
    assert _gone([1, 2, 3], Keep(last=1, every_steps=1)) == []


def test_the_best_stay_at_any_age() -> None:
    losses = {step: {"loss": loss} for step, loss in zip(range(1, 7), [5, 1, 3, 2, 4, 9], strict=True)}
    assert _gone(range(1, 7), Keep(last=1, best=Best(metric="loss", mode="min", count=2)), metrics=losses) == [1, 3, 5]
    assert _gone(range(1, 7), Keep(last=1, best=Best(metric="loss", mode="max", count=2)), metrics=losses) == [
        2,
        3,
        4,
        5,
    ]


def test_of_equally_good_ones_the_newest_stays_and_what_is_no_number_is_never_best() -> None:
    best = Keep(last=1, best=Best(metric="loss", mode="min"))
    assert _gone([1, 2, 3], best, metrics={1: {"loss": 1.0}, 2: {"loss": 1.0}}) == [1]
    bad: dict[int, Mapping[str, Any]] = {1: {"loss": math.nan}, 2: {"loss": "0"}, 3: {"loss": 7}, 4: {"other": 0}}
    assert _gone([1, 2, 3, 4, 5], best, metrics=bad) == [1, 2, 4]
    assert _gone([1, 2], best, metrics={1: {"loss": -math.inf}}) == [1]


def test_pins_stay() -> None:
    assert _gone([1, 2, 3], Keep(last=1), pinned=[1]) == [2]


def test_metrics_are_not_requested_unless_they_decide() -> None:
    def never(prefix: str) -> Mapping[str, Any]:
        raise AssertionError(prefix)

    to_delete([Candidate("a", 1)], Keep(), usable=lambda _: True, metrics=never)


def test_only_the_newest_are_checked_for_being_usable() -> None:
    asked: list[str] = []

    def usable(prefix: str) -> bool:
        asked.append(prefix)
        return True

    to_delete(
        [Candidate(name, at) for at, name in enumerate("abcde")],
        Keep(last=2),
        usable=usable,
        metrics=lambda _: {},
    )
    assert asked == ["e", "d"]


@given(
    steps=st.sets(st.integers(0, 40), max_size=12),
    damaged=st.sets(st.integers(0, 40)),
    pinned=st.sets(st.integers(0, 40)),
    losses=st.dictionaries(st.integers(0, 40), st.floats()),
    last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 20),
    best=st.none()
    | st.builds(Best, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]), count=st.integers(1, 3)),
)
def test_the_newest_usable_and_the_pinned_never_go_and_a_second_query_takes_no_more(
    steps: set[int],
    damaged: set[int],
    pinned: set[int],
    losses: dict[int, float],
    last: int,
    every_steps: int | None,
    best: Best | None,
) -> None:
    keep = Keep(last=last, every_steps=every_steps, best=best)
    ordered = sorted(steps)
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    gone = _gone(ordered, keep, pinned=pinned, damaged=damaged, metrics=metrics)
    usable = [step for step in ordered if step not in damaged]
    left = [step for step in ordered if step not in gone]
    assert gone == sorted(gone)
    assert not set(gone) & set(usable[-last:])
    assert not set(gone) & pinned
    if len(usable) < last:
        assert gone == []
    if every_steps is not None:
        assert {-(-step // every_steps) for step in left} == {-(-step // every_steps) for step in ordered}
    if best is not None:
        finite = [losses[step] for step in ordered if math.isfinite(losses.get(step, math.nan))]
        ranked = sorted(finite, reverse=best.mode == "max")[: best.count]
        assert (
            ranked
            == sorted(
                [losses[step] for step in left if math.isfinite(losses.get(step, math.nan))], reverse=best.mode == "max"
            )[: best.count]
        )
    assert _gone(left, keep, pinned=pinned, damaged=damaged, metrics=metrics) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Keep(last=0),
        lambda: Keep(every_steps=0),
        lambda: Best(metric="", mode="min"),
        lambda: Best(metric="loss", mode="min", count=0),
        lambda: Best(metric="loss", mode="least"),  # type: ignore[arg-type]  # what a user may write
    ],
)
def test_a_rule_that_cannot_work_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
