"""The share of time that goes into steps that count, while a worker is killed every minute; side by side.

python -m benchmarks.goodput [--minutes 10] [--every 60]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from benchmarks.effort import Effort
from benchmarks.incidents import Goodput, goodput
from benchmarks.result import Line, machine, ratios
from benchmarks.subjects import OURS, RAY_TRAIN, TORCHRUN, Session, Subject, spawn_ours, versions, wait_until_settled
from benchmarks.turns import PATIENCE_S, OwnTime, halt

NAME = "goodput"
_PATIENT = replace(OURS, start=lambda session: spawn_ours(session, "--patience-s", str(PATIENCE_S)))
_SUBJECTS = (_PATIENT, TORCHRUN, RAY_TRAIN)
_STRUCK_AFTER = 0.1
"""Delay of the kill, as a share of a turn."""


@dataclass(slots=True)
class Struck:
    """A subject that loses a worker now and then."""

    subject: Subject
    session: Session
    clock: OwnTime = field(default_factory=OwnTime)
    faults: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.subject.start(self.session)
        wait_until_settled(self.session, self.subject.name)
        halt(self.session)

    def turn(self, seconds: float, *, hurt: bool) -> None:
        """Continue for so long."""
        with self.clock.turn(self.session):
            began = time.time()
            if hurt:
                self.session.pause_until(began + _STRUCK_AFTER * seconds)
                self._kill()
            self.session.pause_until(began + seconds)

    def _kill(self) -> None:
        pids = self.session.pids()
        self.faults.append(time.time())
        with suppress(ProcessLookupError):  # of a run that has not recovered from the last one
            os.kill(pids[len(self.faults) % len(pids)], signal.SIGKILL)

    def found(self) -> Goodput:
        own = self.clock.of
        done = [replace(step, at=own(step.at)) for step in self.session.done() if own(step.at) > 0]
        return goodput(done, [own(at) for at in self.faults], done[0].at, self.clock.now)


def killed_every(subjects: Sequence[Subject], every_s: float, minutes: float) -> dict[str, Goodput]:
    """Goodput of each subject, while one worker after another is killed.

    They take turns of `every_s`; in each but the first a worker is killed. The others are stopped meanwhile, and their
    time with them.
    """
    with ExitStack() as stack:
        all_of_them = [Struck(subject, stack.enter_context(Session())) for subject in subjects]
        for one in all_of_them:
            one.start()
        for number in range(1 + round(minutes * 60 / every_s)):
            for one in all_of_them:
                one.turn(every_s, hurt=number > 0)
        return {one.subject.name: one.found() for one in all_of_them}


def run(effort: Effort, minutes: float | None = None, every_s: float | None = None) -> list[Line]:
    """All lines; takes `minutes` and two more for each subject."""
    about = machine(effort, peers=versions())
    minutes = minutes or effort.pick(quick=0.5, hour=2.0, full=10.0)
    every_s = every_s or effort.pick(quick=12.0, hour=60.0, full=60.0)
    able = [one for one in _SUBJECTS if one.is_installed]
    there = effort.pick(quick=[one for one in able if one is not TORCHRUN], hour=able, full=able)
    found = killed_every(there, every_s, minutes)
    when = f"a kill every {every_s:.0f} s, {minutes:g} minutes"
    lines: list[Line] = []
    for name, one in found.items():
        ours = name == OURS.name
        lines += [
            Line(
                benchmark=NAME,
                what=f"1 - (computed again + recovering + paused) / wall; {when}",
                subject=name,
                unit="%",
                values=[100 * one.useful_share],
                asked="at least 95" if ours else None,
            ),
            Line(
                benchmark=NAME,
                what=f"useful steps per second over the undisturbed rate; {when}",
                subject=name,
                unit="%",
                values=[100 * one.rate_share],
            ),
            Line(benchmark=NAME, what=f"useful steps per second; {when}", subject=name, unit="1/s", values=[one.rate]),
            Line(benchmark=NAME, what=f"steps done again; {when}", subject=name, unit="steps", values=[one.again]),
        ]
    if OURS.name in found and RAY_TRAIN.name in found:
        lines.append(
            Line(
                benchmark=NAME,
                what=f"useful steps per second, beside Ray Train; {when}",
                subject=OURS.name,
                unit="1/s",
                values=[found[OURS.name].rate],
                ratio=ratios([found[OURS.name].rate], [found[RAY_TRAIN.name].rate]),
                against=f"over {RAY_TRAIN.name}",
                asked="at least 1.3",
            )
        )
    return [replace(line, machine=about) for line in lines]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--every", type=float, default=60.0)
    options = arguments.parse_args()
    for line in run(Effort.FULL, minutes=options.minutes, every_s=options.every):
        print(f"{line.subject}: {line.what}: {line.values[0]:.3f} {line.unit}")


if __name__ == "__main__":
    main()
