"""What the death of a node costs that has two of four workers, side by side: the newest of two is killed, with all that
runs on it, in the middle of the fifth step after a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.effort import Effort
from benchmarks.incidents import Incident
from benchmarks.recovery_lines import compared_lines, incident_lines
from benchmarks.result import Line, machine
from benchmarks.subjects import OURS, SUBJECTS, versions
from benchmarks.trials import Fault, in_turn, measure, undisturbed_by

NAME = "nodes"
_FAULT: Fault = "node loss"


def run(effort: Effort) -> list[Line]:
    """All lines; when quick, ours alone."""
    about = machine(effort, peers=versions())
    able = [subject for subject in SUBJECTS if subject.is_installed and subject.start_nodes]
    there = effort.pick(quick=[OURS], hour=able, full=able)
    undisturbed = undisturbed_by(there, effort)
    found: dict[str, list[Incident]] = {}
    for number, subject in in_turn(there, effort.pick(quick=1, hour=1, full=5)):
        for _, one in measure(subject, [_FAULT], number, undisturbed[subject.name]):
            found.setdefault(subject.name, []).append(one)
    lines = [line for name, ones in found.items() for line in incident_lines(_FAULT, name, ones)]
    lines += compared_lines(_FAULT, found)
    return [replace(line, benchmark=NAME, machine=about) for line in lines]
