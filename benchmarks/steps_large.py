"""`benchmarks.steps` with a model ten times as large; separate, as its steps take ten times as long."""

from __future__ import annotations

from benchmarks.effort import Effort
from benchmarks.result import Line
from benchmarks.steps import EXACT, FAST_ALONE, Case, lines_of

NAME = "steps-large"


def run(effort: Effort) -> list[Line]:
    """All lines; none when quick, as the smaller model checks that it works."""
    return [] if effort is Effort.QUICK else lines_of(cases(rounds=effort.pick(quick=0, hour=1, full=6)), NAME)


def cases(rounds: int) -> list[Case]:
    """Cases in pairs: 4 workers of each of three subjects took 22 GB, with which Ray ends some on a machine of 24."""
    return [
        Case(
            parameters="50M",
            workers=workers,
            ways=(way,),
            rounds=rounds,
            steps_of_a_turn=1,
            ray_train=way is FAST_ALONE and workers == 2,
            name=name,
        )
        for workers in (4, 2)
        for way, name in ((EXACT, "exact"), (FAST_ALONE, "fast"))
    ]
