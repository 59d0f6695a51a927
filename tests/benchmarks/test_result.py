"""A line of results: its goal, its ratios, and its conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.effort import Effort
from benchmarks.result import Line, Measured, alternate, machine, ratios, read, write


def line(**fields: Any) -> Line:
    return Line(
        **{"benchmark": "steps", "what": "step", "subject": "raysharded", "unit": "s", "values": [1.0], **fields}
    )


@pytest.mark.parametrize(
    ("asked", "values", "met"),
    [
        ("at most 1.05", [1.0, 1.05, 9.0], True),
        ("at most 1.05", [1.0, 1.06, 9.0], False),
        ("under 0.5 s", [0.5], False),
        ("at least 8", [7.0, 8.0, 30.0], True),
        ("over 2", [2.0], False),
        ("exactly 0", [0.0, 0.0], True),
        ("exactly 0", [0.0, 0.0, 1.0], False),  # of every value, not of the median
    ],
)
def test_a_goal_is_judged_by_the_median_and_exactness_by_every_value(
    asked: str, values: list[float], met: bool
) -> None:
    assert line(asked=asked, values=values).met is met


def test_a_goal_is_of_the_ratio_where_there_is_one() -> None:
    assert line(asked="at most 1.05", values=[9.0], ratio=[1.0]).met is True
    assert line(asked="at most 1.05", values=[1.0], ratio=[1.2]).met is False
    assert line(values=[1.0]).met is None
    assert line(values=[], note="no GPU", asked="at most 1").met is None


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="begin with"):
        line(asked="less than 2")
    with pytest.raises(ValueError, match="no note with the reason"):
        line(values=[])
    with pytest.raises(ValueError, match="no median"):
        Measured([])


def test_subjects_alternate_and_ratios_are_of_neighbours() -> None:
    order: list[str] = []

    def subject(name: str, *values: float) -> Any:
        left = iter(values)

        def turn() -> float:
            order.append(name)
            return next(left)

        return turn

    found = alternate({"a": subject("a", 2.0, 6.0), "b": subject("b", 1.0, 2.0)}, 2)
    assert order == ["a", "b", "a", "b"]
    assert ratios(found["a"], found["b"]) == [2.0, 3.0]


def test_a_file_of_results_has_the_conditions_of_every_line(tmp_path: Path) -> None:
    about = machine(Effort.QUICK, peers={"torchft": "0.2.0"})
    kept = line(what="kept", machine={"commit": "older"})
    write(tmp_path / "x" / "steps.json", [line(ratio=[1.0], against="times", note="so"), kept], about)
    first, second = read(tmp_path / "x" / "steps.json")
    assert (first.ratio, first.against, first.note) == ([1.0], "times", "so")
    assert first.machine == about
    assert first.machine["versions"]["torchft"] == "0.2.0"
    assert {"commit", "date", "versions", "cpu", "cores", "load_before"} <= set(first.machine)
    assert second.machine == {"commit": "older"}
