"""The work that preemptions with notice waste, side by side: the schedule of Ray Train's own benchmark of preemptions
(ray-project/ray, release/train_tests/preemption), scaled to one machine.

python -m benchmarks.preemptions [--steps 160] [--every 40] [--notice-s 5] [--save-s 15] [--subjects 0,1,2]

There, 8 workers train 1,600 steps with a checkpoint every 400, and 4 nodes are taken away with a notice of 30 s. Here
4 workers, on a node each, train `--steps` with a checkpoint `--every` so many. The newest node is drained 4 times, 0.6
of the way from one checkpoint to the next. It is killed when its notice ends, and another one is started.
Storage takes `--save-s` for each worker's part of a checkpoint. Wasted steps are those done beyond the run's number.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.effort import Effort
from benchmarks.incidents import final_steps
from benchmarks.result import machine
from benchmarks.subjects import OURS, WORKERS, Session, Subject, spawn_ours, spawn_ray_train, versions

_PREEMPTIONS = 4
_PLACE = 0.6
"""Place of a notice between two checkpoints."""
_PATIENCE_S = 1200.0
_NODES = ",".join(["1"] * WORKERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The steps and preemptions of each subject."""

    steps: int
    every: int
    """Number of steps between checkpoints."""
    notice_s: int
    save_s: float
    """Seconds that storage takes for a worker's part of a checkpoint."""

    def arguments(self) -> list[str]:
        return ["--steps", str(self.steps), "--save-s", str(self.save_s), "--nodes", _NODES]

    def notices(self) -> list[int]:
        """The steps after which a node gets notice: in the middle of evenly spread intervals between checkpoints."""
        intervals = self.steps // self.every
        chosen = [number * intervals // _PREEMPTIONS for number in range(_PREEMPTIONS)]
        return [round((interval + _PLACE) * self.every) for interval in chosen]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A subject under the schedule."""

    executed: int
    """Number of times that any step was done."""
    wasted: int
    preemptions: int
    restarts_from: list[int]
    """Steps whose state was restored, oldest first, without the start."""
    seconds: float
    """From the first step to the last."""


def subjects(schedule: Schedule) -> list[Subject]:
    """raysharded, and Ray Train without and with a checkpoint when there is a notice."""
    more, every = schedule.arguments(), schedule.every
    return [
        Subject(name=OURS.name, start=lambda session: spawn_ours(session, *more, every=every)),
        Subject(
            name="Ray Train",
            start=lambda session: spawn_ray_train(session, *more, every=every),
            environment="ray-train",
        ),
        Subject(
            name="Ray Train, checkpoints at notices",
            start=lambda session: spawn_ray_train(session, *more, "--notices", every=every),
            environment="ray-train",
        ),
    ]


def preempted(subject: Subject, schedule: Schedule) -> Outcome:
    """Run a subject to its end, under the schedule."""
    with Session() as session:
        subject.start(session)
        for after in schedule.notices():
            _wait_for(session, subject, after)
            session.tell(f"drain {schedule.notice_s}")
            session.pause_until(time.time() + schedule.notice_s)
            for pid in session.node():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            session.tell("add 1")
        _wait_for(session, subject, schedule.steps)
        done = session.done()
        restored = {event.at: event.step for event in session.read() if event.event == "restored" and event.rank == 0}
        return Outcome(
            executed=len(done),
            wasted=len(done) - len(final_steps(done)),
            preemptions=len(schedule.notices()),
            restarts_from=[restored[at] for at in sorted(restored) if at > done[0].at],
            seconds=done[-1].at - done[0].at,
        )


def _wait_for(session: Session, subject: Subject, step: int) -> None:
    def is_done() -> bool:
        return max((one.step for one in session.done()), default=0) >= step

    session.wait(is_done, _PATIENCE_S, f"{subject.name}: step {step}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=160)
    arguments.add_argument("--every", type=int, default=40)
    arguments.add_argument("--notice-s", type=int, default=5)
    arguments.add_argument("--save-s", type=float, default=15.0)
    arguments.add_argument("--subjects", default="0,1,2", help="those of raysharded, Ray Train, and it with notices")
    options = arguments.parse_args()
    schedule = Schedule(steps=options.steps, every=options.every, notice_s=options.notice_s, save_s=options.save_s)
    print(machine(Effort.FULL, peers=versions()), flush=True)
    print("| subject | preemptions | steps done | wasted | continued after steps | seconds |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    there = subjects(schedule)
    for number in map(int, options.subjects.split(",")):
        found = preempted(there[number], schedule)
        after = ", ".join(map(str, found.restarts_from))
        cells = (found.preemptions, found.executed, found.wasted, after, f"{found.seconds:.0f}")
        print(f"| {there[number].name} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
