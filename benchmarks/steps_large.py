"""`benchmarks.steps` with a model ten times as large, apart as its steps take ten times as long."""

from __future__ import annotations

from benchmarks.result import Line
from benchmarks.steps import EXACT, FAST_ALONE, Case, lines_of

NAME = "steps-large"
CASES = tuple(
    Case(
        parameters="50M",
        workers=workers,
        ways=(way,),
        rounds=6,
        steps_of_a_turn=1,
        ray_train=way is FAST_ALONE and workers == 2,
        name=name,
    )
    for workers in (4, 2)
    for way, name in ((EXACT, "exact"), (FAST_ALONE, "fast"))
)
"""Four workers of each of three subjects took 22 GB, with which Ray ends some of them on a machine of 24."""


def run(*, quick: bool) -> list[Line]:
    """All lines; nothing when quick, as the smaller model shows that it works."""
    return [] if quick else lines_of(CASES, NAME)
