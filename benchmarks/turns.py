"""Several programs on one machine: one runs at a time while all processes of the others are stopped.

So all meet the same state of the machine: a turn is a few steps, and nothing is started anew. A step that a stop fell
into is not counted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.incidents import StepDone
from benchmarks.subjects import Session
from raysharded.testing.ray_nodes import descendants

PATIENCE_S = 3600.0
"""Time that a program must wait without doubting its own processes, as they may be stopped for so long."""
_TURN_S = 600.0


def halt(session: Session) -> None:
    """Stop all of its processes, also those that are started meanwhile."""
    while new := _all_of(session) - session.halted:
        _signal(new, signal.SIGSTOP)
        session.halted |= new


def resume(session: Session) -> None:
    """Continue all processes that were stopped, also one that has lost its parent since."""
    _signal(session.halted, signal.SIGCONT)
    session.halted.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of a session."""

    steps: list[StepDone]
    """The whole steps, and the one before them."""
    workers_s: float
    """Processor time of its workers, per whole step."""
    others_s: float
    """Processor time of all its other processes, per whole step."""

    @property
    def seconds(self) -> list[float]:
        """Time of each whole step."""
        return [step.at - before.at for before, step in pairwise(self.steps)]


def take_turns(sessions: Mapping[str, Session], rounds: int, steps: int) -> dict[str, list[Turn]]:
    """In every round each session in turn does so many whole steps, there and back: A B C, C B A, A B C ... So a
    machine that becomes slower does so for all. All must be halted, and are so at the end."""
    found: dict[str, list[Turn]] = {name: [] for name in sessions}
    for number in range(rounds):
        for name in list(sessions)[:: -1 if number % 2 else 1]:
            found[name].append(_turn(name, sessions[name], steps))
    return found


@dataclass(slots=True)
class OwnTime:
    """The time of a session that is halted now and then: its clock stops meanwhile."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    """When it was continued and halted, in seconds since 1970."""

    def of(self, at: float) -> float:
        """Seconds that it had run by then, since its first start."""
        return sum(max(0.0, min(at, until) - begin) for begin, until in self.spans)

    @property
    def now(self) -> float:
        """The time at the end of the last span."""
        return sum(until - begin for begin, until in self.spans)

    @contextmanager
    def turn(self, session: Session) -> Iterator[None]:
        """Run the session within the block."""
        resume(session)
        begin = time.time()
        yield
        halt(session)
        self.spans.append((begin, time.time()))


def _turn(name: str, session: Session, steps: int) -> Turn:
    before = len(session.done())
    resume(session)
    session.wait(lambda: len(session.done()) > before, _TURN_S, f"{name}: the step that it was halted in")
    began, used = len(session.done()), _processor_s(session)
    session.wait(lambda: len(session.done()) >= began + steps, _TURN_S, f"{name}: {steps} steps in a turn")
    whole = len(session.done()) - began
    halt(session)
    now = _processor_s(session)
    spent = {pid: now[pid] - used.get(pid, 0.0) for pid in now}
    of_workers = sum(spent.get(pid, 0.0) for pid in session.pids().values())
    return Turn(
        steps=session.done()[before:][: steps + 1],
        workers_s=of_workers / whole,
        others_s=(sum(spent.values()) - of_workers) / whole,
    )


def _processor_s(session: Session) -> dict[int, float]:
    """Processor time of each of its processes, by process id."""
    found = {}
    for pid in _all_of(session):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system
    return found


def _all_of(session: Session) -> set[int]:
    programs = [process.pid for process in session.processes]
    return {pid for program in programs for pid in (program, *descendants(program))}


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
