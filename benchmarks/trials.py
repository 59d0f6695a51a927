"""One trial: a subject is started, something happens to it, and the consequences are read from the lines that the
trained processes write (`benchmarks.lines`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.effort import Effort
from benchmarks.incidents import (
    Incident,
    Struck,
    final_steps,
    incident,
    loss_difference,
    normal_step_s,
    resized,
    samples_amiss,
)
from benchmarks.recovery_lines import LIMIT_S, Planned, compared_lines, incident_lines
from benchmarks.result import Line, machine
from benchmarks.subjects import (
    OURS,
    RAY_TRAIN,
    RAY_TRAIN_ELASTIC,
    TORCHRUN,
    Change,
    NotSeen,
    Session,
    Subject,
    versions,
    wait_until_settled,
)
from benchmarks.workload import BATCH

Fault = Literal["SIGKILL", "SIGSTOP", "node loss"]
_AFTER_CHECKPOINT = 4
"""Finished steps that are in no checkpoint when a fault strikes: half of those between two."""
_UNDISTURBED_STEPS = 32
_TRIES = 3
"""Rounds for a subject that never continues: each takes the whole limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The state of samples and losses since the last look."""

    samples_lost: int
    samples_repeated: int
    loss_difference: float | None


class Keeper:
    """Compares a session's steps with what they should have read, and with the losses of an undisturbed run."""

    def __init__(self, session: Session, undisturbed: Mapping[int, float]) -> None:
        self._session, self._undisturbed = session, undisturbed
        self._order = np.load(session.order, mmap_mode="r").reshape(-1, BATCH.global_batch_size)
        self._looked_at, self._of_journal = 0, (0, 0)

    def look(self) -> Kept:
        """Compare the steps that are new since the last look."""
        final = final_steps(self._session.done())
        steps = range(self._looked_at + 1, max(final) + 1)
        self._looked_at = max(final)
        if any(step.samples for step in final.values()):
            lost, repeated = samples_amiss(final, steps, lambda step: self._order[step - 1].tolist())
        else:
            before, self._of_journal = self._of_journal, ledger(self._session.storage)
            lost, repeated = self._of_journal[0] - before[0], self._of_journal[1] - before[1]
        difference = loss_difference(final, steps, self._undisturbed)
        return Kept(samples_lost=lost, samples_repeated=repeated, loss_difference=difference)


def ledger(storage: Path) -> tuple[int, int]:
    """Samples lost and repeated, by the digests in the journal of our only run there."""
    from raysharded.report import load

    found = load(str(storage / "ours")).ledger
    assert found is not None, "the journal does not record the samples that should have been read"
    return found.samples_lost, found.samples_repeated


def measure(subject: Subject, faults: Sequence[Fault], number: int, undisturbed: Mapping[int, float]) -> list[Incident]:
    """Start a subject, hurt it, watch the consequences, and repeat it when all are back. `number` selects the victim.

    Incidents found so far stay if the subject does not come back.
    """
    found: list[Incident] = []
    with Session() as session:
        start = subject.start_nodes if "node loss" in faults else subject.start
        assert start is not None
        start(session)
        keeper = Keeper(session, undisturbed)
        for nth, fault in enumerate(faults):
            try:
                wait_until_settled(session, subject.name, after_checkpoint=_AFTER_CHECKPOINT)
            except NotSeen as late:
                print(late, file=sys.stderr, flush=True)
                break
            time.sleep(0.5 * normal_step_s(session.done()[-6:]))
            struck = strike(session, fault, number * len(faults) + nth)
            seen, kept = follow(session, struck), keeper.look()
            one = replace(
                seen,
                samples_lost=kept.samples_lost,
                samples_repeated=kept.samples_repeated,
                loss_difference=kept.loss_difference,
            )
            found.append(one)
            print(f"{subject.name}, {fault}: {one}", file=sys.stderr, flush=True)
            if one.beyond_s is None:
                break
    return found


def strike(session: Session, fault: Fault, number: int) -> Struck:
    """Hurt a worker, or the newest node."""
    pids = session.pids()
    victims = session.node() if fault == "node loss" else [pids[number % len(pids)]]
    how = signal.SIGSTOP if fault == "SIGSTOP" else signal.SIGKILL
    at = time.time()
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    return Struck(at=at, victims=frozenset(victims), survivors=frozenset(pids.values()) - frozenset(victims))


def follow(session: Session, struck: Struck) -> Incident:
    """The incident, when the run is two steps beyond the broken one, or the limit is over."""
    ended: dict[int, float] = {}
    before = max(step.step for step in session.done() if step.at <= struck.at)

    def is_beyond() -> bool:
        for pid in struck.survivors - ended.keys():
            if _is_gone(pid):
                ended[pid] = time.time()
        return max(step.step for step in session.done()) >= before + 3

    try:
        session.wait(is_beyond, LIMIT_S, "two steps beyond the broken one")
    except NotSeen as late:
        print(late, file=sys.stderr, flush=True)
    return incident(session.read(), replace(struck, ended=ended))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def undisturbed_by(subjects: Sequence[Subject], effort: Effort) -> dict[str, Mapping[int, float]]:
    """The losses of each subject without a fault, by its name; of ours alone, if there is no time for all."""
    found: dict[str, Mapping[int, float]] = {subject.name: {} for subject in subjects}
    same = {RAY_TRAIN.name: TORCHRUN, RAY_TRAIN_ELASTIC.name: TORCHRUN}  # their loop computes what torchrun's does
    for one in dict.fromkeys(same.get(subject.name, subject) for subject in subjects):
        if one.is_installed and (one is OURS or effort is Effort.FULL):
            found[one.name] = _undisturbed_losses(one)
    return {name: found.get(same[name].name, {}) if name in same else losses for name, losses in found.items()}


def _undisturbed_losses(subject: Subject) -> dict[int, float]:
    with Session() as session:
        subject.start(session)

        def is_done() -> bool:
            return max((step.step for step in session.done()), default=0) >= _UNDISTURBED_STEPS

        session.wait(is_done, 10 * LIMIT_S, f"{subject.name}: {_UNDISTURBED_STEPS} undisturbed steps")
        return {step.step: step.loss for step in session.done()}


def struck_in_turn(
    benchmark: str, fault: Fault, subjects: Sequence[Subject], effort: Effort, *, rounds: int, times: int = 1
) -> list[Line]:
    """All lines of one fault, which strikes each subject that is installed so many times in each round.

    A subject that was not seen beyond the broken step in any of its first rounds is not tried in more of them.
    """
    about = machine(effort, peers=versions())
    there = [subject for subject in subjects if subject.is_installed]
    undisturbed = undisturbed_by(there, effort)
    found: dict[str, list[Incident]] = {subject.name: [] for subject in there}
    for number, subject in in_turn(there, rounds):
        so_far = found[subject.name]
        if number >= _TRIES and all(one.beyond_s is None for one in so_far):
            continue
        so_far += measure(subject, [fault] * times, number, undisturbed[subject.name])
    lines = [line for name, ones in found.items() if ones for line in incident_lines(fault, name, ones)]
    lines += compared_lines(fault, found)
    return [replace(line, benchmark=benchmark, machine=about) for line in lines]


def in_turn(subjects: Sequence[Subject], rounds: int) -> Iterator[tuple[int, Subject]]:
    """A, B, A, B ...: in each round every subject is started anew."""
    return ((number, subject) for number in range(rounds) for subject in subjects)


def changed(subject: Subject, undisturbed: Mapping[int, float]) -> dict[str, Planned | None]:
    """All of a subject's planned changes, one after the other; None for one that is not done within the limit, after
    which there are no others."""
    assert subject.start_planned is not None
    found: dict[str, Planned | None] = {}
    with Session() as session:
        changes = subject.start_planned(session)
        keeper = Keeper(session, undisturbed)
        for change in changes:
            workers = 3 if change.workers == 4 else 4
            try:
                wait_until_settled(session, subject.name, workers=workers, after_checkpoint=_AFTER_CHECKPOINT)
            except NotSeen as late:
                print(late, file=sys.stderr, flush=True)
                break
            found[change.what] = one = _after(change, session, keeper, f"{subject.name}: {change.what}")
            print(f"{subject.name}, {change.what}: {one}", file=sys.stderr, flush=True)
            if one is None:
                break
    return found


def _after(change: Change, session: Session, keeper: Keeper, name: str) -> Planned | None:
    at = time.time()
    change.begin()
    try:
        session.wait(lambda: resized(session.done(), at, change.workers) is not None, LIMIT_S, name)
    except NotSeen as late:
        print(late, file=sys.stderr, flush=True)
        return None
    kept, found = keeper.look(), resized(session.done(), at, change.workers)
    assert found is not None
    return Planned(
        until_s=found.until_s,
        pause_s=found.pause_s,
        steps_again=found.steps_again,
        samples_lost=kept.samples_lost,
        samples_repeated=kept.samples_repeated,
        loss_difference=kept.loss_difference,
    )
