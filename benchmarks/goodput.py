"""How much of the time goes into steps that count, while a worker is killed every minute; side by side.

python -m benchmarks.goodput [--minutes 10] [--every 60]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace

from benchmarks.incidents import Goodput, goodput
from benchmarks.result import Line, machine, ratios
from benchmarks.subjects import OURS, RAY_TRAIN, TORCHRUN, Session, Subject, versions, wait_until_settled

NAME = "goodput"
_MINUTES = 4.0
"""Of `make bench`, which has an hour for everything; the figures of ten minutes are about the same."""
_QUICK_MINUTES, _QUICK_EVERY_S = 0.5, 12.0
_SUBJECTS = (OURS, TORCHRUN, RAY_TRAIN)


def killed_every(subject: Subject, every_s: float, minutes: float) -> Goodput:
    """Run for so long from when all workers are there, killing one after another."""
    with Session() as session:
        subject.start(session)
        wait_until_settled(session, subject.name)
        began, faults = session.done()[-1].at, list[float]()
        ended = began + minutes * 60
        while (strikes_at := began + (len(faults) + 1) * every_s) < ended:
            session.pause_until(strikes_at)
            pids = session.pids()
            faults.append(time.time())
            with suppress(ProcessLookupError):  # of a run that has not come back from the last one
                os.kill(pids[len(faults) % len(pids)], signal.SIGKILL)
        session.pause_until(ended)
        return goodput(session.done(), faults, began, ended)


def run(*, quick: bool, minutes: float | None = None, every_s: float | None = None) -> list[Line]:
    """All lines; takes `minutes` and half a minute for each subject."""
    about = machine(quick=quick, peers=versions())
    minutes = minutes or (_QUICK_MINUTES if quick else _MINUTES)
    every_s = every_s or (_QUICK_EVERY_S if quick else 60.0)
    found = {
        subject.name: killed_every(subject, every_s, minutes)
        for subject in _SUBJECTS
        if subject.is_installed and not (quick and subject is TORCHRUN)
    }
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
    for line in run(quick=False, minutes=options.minutes, every_s=options.every):
        print(f"{line.subject}: {line.what}: {line.values[0]:.3f} {line.unit}")


if __name__ == "__main__":
    main()
