"""The cost of a worker's death, side by side. For a stopped worker see `benchmarks.stops`; for the death of a node
`benchmarks.nodes`; for planned changes `benchmarks.resizes`.

python -m benchmarks.recovery [--subject torchft] [--fault SIGSTOP] [--rounds 1]    some trials, printed
python -m benchmarks.recovery --shard-group-size 2    of raysharded in groups: the state comes from another group

A fault strikes in the middle of the fifth step after a checkpoint (one is written every eight steps), when all workers
have been there for a while.
"""

from __future__ import annotations

import argparse

from benchmarks.effort import Effort
from benchmarks.result import Line
from benchmarks.subjects import OURS, RAY_TRAIN_ELASTIC, SUBJECTS, in_groups
from benchmarks.trials import changed, measure, struck_in_turn

NAME = "recovery"


def run(effort: Effort) -> list[Line]:
    """All lines; when quick, without Ray Train's elastic way. When full, each round kills a worker, and another when
    all are back: a new start takes some of the subjects a minute."""
    quickly = [subject for subject in SUBJECTS if subject is not RAY_TRAIN_ELASTIC]
    there = effort.pick(quick=quickly, hour=SUBJECTS, full=SUBJECTS)
    rounds, times = effort.pick(quick=(1, 1), hour=(1, 1), full=(3, 2))
    return struck_in_turn(NAME, "SIGKILL", there, effort, rounds=rounds, times=times)


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
