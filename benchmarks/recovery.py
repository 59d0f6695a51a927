"""What a fault costs, side by side: a worker is killed or stopped, a node is lost, the number of workers changes.

A fault strikes in the middle of the fifth step after a checkpoint (one is written every eight steps), when all workers
have been there for a while. What follows is read from the lines that the trained processes say (`benchmarks.lines`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.incidents import (
    Incident,
    Struck,
    final_steps,
    incident,
    loss_difference,
    normal_step_s,
    samples_amiss,
)
from benchmarks.result import Line, alternate, machine, ratios, write
from benchmarks.subjects import (
    CHECKPOINT_EVERY,
    OURS,
    RAY_TRAIN_ELASTIC,
    SUBJECTS,
    TORCHRUN,
    WORKERS,
    NotSeen,
    Session,
    Subject,
)
from benchmarks.workload import BATCH

Fault = Literal["SIGKILL", "SIGSTOP", "node loss"]
LIMIT_S = 120.0
"""Whoever is not beyond the broken step by then is not waited for any longer."""
_START_S = 240.0
_SETTLED = 6
"""Steps with all workers before a fault."""
_AFTER_CHECKPOINT = 4
"""Finished steps that are in no checkpoint when a fault strikes: half of those between two."""


def measure(subject: Subject, fault: Fault, number: int, undisturbed: Mapping[int, float]) -> Incident:
    """Start a subject, hurt it, see what follows. `number` chooses whom it hits."""
    with Session() as session:
        start = subject.start_nodes if fault == "node loss" else subject.start
        assert start is not None
        start(session)
        session.wait(lambda: _is_settled(session), _START_S, f"{subject.name}: {_SETTLED} steps of {WORKERS} workers")
        time.sleep(0.5 * normal_step_s(session.done()[-_SETTLED:]))
        struck = strike(session, fault, number)
        found = follow(session, struck)
        final = final_steps(session.done())
        last = max(final)
        lost, repeated = (0, 0)
        if any(step.samples for step in final.values()):
            order = np.load(session.order, mmap_mode="r").reshape(-1, BATCH.global_batch_size)
            lost, repeated = samples_amiss(final, last, lambda step: order[step - 1].tolist())
        else:
            lost, repeated = ledger(session.storage)
        return replace(
            found,
            samples_lost=lost,
            samples_repeated=repeated,
            loss_difference=loss_difference(final, undisturbed),
        )


def _is_settled(session: Session) -> bool:
    """All workers have done some steps, and the newest is so many after a checkpoint."""
    newest = session.done()[-_SETTLED:]
    together = len(newest) == _SETTLED and all(step.workers == WORKERS for step in newest)
    return together and newest[-1].step % CHECKPOINT_EVERY == _AFTER_CHECKPOINT


def strike(session: Session, fault: Fault, number: int) -> Struck:
    """Hurt a worker, or the newest node."""
    pids = session.pids()
    victims = session.node() if fault == "node loss" else [pids[number % len(pids)]]
    how = signal.SIGSTOP if fault == "SIGSTOP" else signal.SIGKILL
    at = time.time()
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    return Struck(at=at, victims=frozenset(victims), ended={})


def follow(session: Session, struck: Struck) -> Incident:
    """Until the run is two steps beyond the broken one, or the limit is over."""
    survivors = set(session.pids().values()) - struck.victims
    ended: dict[int, float] = {}
    before = max(step.step for step in session.done() if step.at <= struck.at)

    def is_beyond() -> bool:
        for pid in survivors - ended.keys():
            if _is_gone(pid):
                ended[pid] = time.time()
        return max(step.step for step in session.done()) >= before + 3

    with suppress(NotSeen):
        session.wait(is_beyond, LIMIT_S, "progress beyond the broken step")
    return incident(session.read(), replace(struck, ended=ended))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def ledger(storage: Path) -> tuple[int, int]:
    """Samples lost and repeated by the digests in the journal of our only run there."""
    from raysharded.report import load

    found = load(str(storage / "ours")).ledger
    assert found is not None, "the journal does not say what should have been read"
    return found.samples_lost, found.samples_repeated


def undisturbed_losses(subject: Subject, steps: int) -> dict[int, float]:
    """Of the same subject, with nothing happening to it."""
    with Session() as session:
        subject.start(session)
        session.wait(
            lambda: max((step.step for step in session.done()), default=0) >= steps, _START_S, f"{steps} steps"
        )
        return {step.step: step.loss for step in session.done()}


if __name__ == "__main__":
    import sys
    name, fault = sys.argv[1:3]
    subject = next(s for s in SUBJECTS if s.name == name)
    print(measure(subject, fault, 1, {}))
