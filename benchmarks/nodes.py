"""The cost of losing a node with two of four workers, side by side: the newest of two is killed, with all that runs on
it, in the middle of the fifth step after a checkpoint."""

from __future__ import annotations

from benchmarks.effort import Effort
from benchmarks.result import Line
from benchmarks.subjects import OURS, RAY_TRAIN, SUBJECTS
from benchmarks.trials import struck_in_turn

NAME = "nodes"


def run(effort: Effort) -> list[Line]:
    """All lines; when quick, of raysharded alone; in an hour, only of the subjects that are known to continue."""
    able = [subject for subject in SUBJECTS if subject is not RAY_TRAIN]
    there = effort.pick(quick=[OURS], hour=able, full=SUBJECTS)
    return struck_in_turn(NAME, "node loss", there, effort, rounds=effort.pick(quick=1, hour=1, full=5))
