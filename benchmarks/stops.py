"""The cost of a stopped worker (SIGSTOP), side by side: it holds its connections and sends nothing, in the middle of
the fifth step after a checkpoint. Every subject gets two minutes."""

from __future__ import annotations

from benchmarks.effort import Effort
from benchmarks.result import Line
from benchmarks.subjects import OURS, SUBJECTS, TORCHFT
from benchmarks.trials import struck_in_turn

NAME = "stops"


def run(effort: Effort) -> list[Line]:
    """All lines; in an hour, only of the subjects that are known to continue."""
    there = effort.pick(quick=[OURS], hour=[OURS, TORCHFT], full=SUBJECTS)
    return struck_in_turn(NAME, "SIGSTOP", there, effort, rounds=effort.pick(quick=1, hour=1, full=5))
