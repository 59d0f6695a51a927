"""What a fault costs, side by side: a worker is killed, or stopped. The death of a node: `benchmarks.nodes`; planned
changes: `benchmarks.resizes`.

python -m benchmarks.recovery [--subject torchft] [--fault SIGSTOP] [--rounds 1]    some trials, printed
python -m benchmarks.recovery --shard-group-size 2    of ours in groups: the state comes from another group

A fault strikes in the middle of the fifth step after a checkpoint (one is written every eight steps), when all workers
have been there for a while.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.effort import Effort
from benchmarks.incidents import Incident
from benchmarks.recovery_lines import compared_lines, incident_lines
from benchmarks.result import Line, machine
from benchmarks.subjects import OURS, RAY_TRAIN_ELASTIC, SUBJECTS, TORCHFT, Subject, in_groups, versions
from benchmarks.trials import Fault, changed, in_turn, measure, undisturbed_by

NAME = "recovery"
_ROUNDS = 3
"""When full."""
_KILLS_OF_A_ROUND = 2
"""A worker is killed, another when all are back: starting anew takes some of the subjects a minute."""
_STOPS_OF = {"raysharded": _ROUNDS, "torchft": 2, "Ray Train, elastic": 0}
"""In how many rounds a worker is stopped, when full; once if it does not say so: they are stuck for minutes."""


def _faults(subject: Subject, number: int, effort: Effort) -> list[Fault]:
    """Those of a subject's round."""
    kills = effort.pick(quick=1, hour=1, full=1 if subject is RAY_TRAIN_ELASTIC else _KILLS_OF_A_ROUND)
    stops = effort.pick(
        quick=int(subject is OURS), hour=int(subject in (OURS, TORCHFT)), full=_STOPS_OF.get(subject.name, 1)
    )
    faults: list[Fault] = ["SIGKILL"] * kills
    return [*faults, "SIGSTOP"] if number < stops else faults


def run(effort: Effort, subjects: Sequence[Subject] = SUBJECTS) -> list[Line]:
    """All lines."""
    about = machine(effort, peers=versions())
    left_out = effort.pick(quick=[RAY_TRAIN_ELASTIC], hour=[], full=[])
    there = [subject for subject in subjects if subject.is_installed and subject not in left_out]
    undisturbed = undisturbed_by(there, effort)
    found: dict[str, dict[str, list[Incident]]] = {"SIGKILL": {}, "SIGSTOP": {}}
    for number, subject in in_turn(there, effort.pick(quick=1, hour=1, full=_ROUNDS)):
        for fault, one in measure(subject, _faults(subject, number, effort), number, undisturbed[subject.name]):
            found[fault].setdefault(subject.name, []).append(one)
    lines = []
    for struck, by_subject in found.items():
        lines += [line for name, ones in by_subject.items() for line in incident_lines(struck, name, ones)]
        lines += compared_lines(struck, by_subject)
    return [replace(line, benchmark=NAME, machine=about) for line in lines]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--subject", choices=[subject.name for subject in SUBJECTS], default=OURS.name)
    arguments.add_argument("--fault", choices=["SIGKILL", "SIGSTOP", "node loss", "planned"], default="SIGKILL")
    arguments.add_argument("--shard-group-size", type=int, choices=(2,))
    arguments.add_argument("--rounds", type=int, default=1)
    options = arguments.parse_args()
    subject = next(one for one in SUBJECTS if one.name == options.subject)
    if options.shard_group_size:
        subject = in_groups(options.shard_group_size)
    for number in range(options.rounds):
        if options.fault == "planned":
            changed(subject, {})
        else:
            measure(subject, [options.fault], number, {})


if __name__ == "__main__":
    main()
