"""The cost of a planned change of the number of workers, side by side: from 4 to 3, and from 3 to 4."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.effort import Effort
from benchmarks.recovery_lines import Planned, planned_lines
from benchmarks.result import Line, machine
from benchmarks.subjects import SUBJECTS, versions
from benchmarks.trials import changed, in_turn, undisturbed_by

NAME = "resizes"


def run(effort: Effort) -> list[Line]:
    """All lines; none when quick, as no goal depends on them."""
    if effort is Effort.QUICK:
        return []
    about = machine(effort, peers=versions())
    there = [subject for subject in SUBJECTS if subject.is_installed and subject.start_planned]
    undisturbed = undisturbed_by(there, effort)
    found: dict[str, dict[str, list[Planned | None]]] = {}
    for _, subject in in_turn(there, effort.pick(quick=0, hour=1, full=5)):
        for what, one in changed(subject, undisturbed[subject.name]).items():
            found.setdefault(what, {}).setdefault(subject.name, []).append(one)
    lines = [
        line for what, by in found.items() for name, ones in by.items() for line in planned_lines(what, name, ones)
    ]
    return [replace(line, benchmark=NAME, machine=about) for line in lines]
