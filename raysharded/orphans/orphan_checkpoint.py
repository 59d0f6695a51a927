"""The orphan checkpoint of workers without a driver, made by one of them.

That worker acquires the run as any driver would: it waits until no other driver can hold it, and later drivers wait for
it. If there is a driver, it leaves everything to that driver, also if one follows before the checkpoint is complete.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from raysharded import numerics
from raysharded.checkpoint import Claims, Storage, commit_claimed
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.claim_history import History
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import Clock, SystemClock
from raysharded.driver.checkpoints.committer import ManifestContext, RunFiles, fingerprint_of, manifest_of
from raysharded.driver.membership.state_source import choose_source
from raysharded.driver.startup.resume_point import distrusted, is_covered, rollbacks, undone
from raysharded.driver.state.arithmetic import begun_blocks, blocks_of, build_seed_of, rules_on_record
from raysharded.driver.state.commands import CommitSave
from raysharded.errors import CheckpointError, RunOwnedElsewhere, StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal, read
from raysharded.overrides import decided
from raysharded.ownership.leadership import Leadership, LeaseTerms, RunLeadership
from raysharded.protocol.messages import FromMemory, Saved, save_prefix
from raysharded.protocol.session import (
    DriverSession,
    FreedWorker,
    believed,
    last_recorded_step,
    parts_to_write,
    taken_back,
    unrecorded,
)

_log = logging.getLogger("raysharded.worker")
_LOOK_S = 5.0
_LOOKS_PER_LEASE = 10
_TURN_S = 2.0
"""Pause between checks whether a lower-numbered worker can lead, for each such worker: few query at a time."""
_ANSWER_S = 30.0
_WRITE_S = 150.0
_LET_GO_S = 5.0

Entries = Sequence[Mapping[str, Any]]
"""Entries of the run's journal."""


class Peers(Protocol):
    """The run's live workers, as one of them reaches them (itself included)."""

    def before(self, worker: WorkerId) -> list[WorkerId]:
        """Workers with a lower number; some may not have started, or may not answer."""
        ...

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        """Results of a `LeasedWorker` method on these workers (None: on all), by worker.

        Each worker's own arguments follow `args`. Workers that raise or do not answer are omitted.
        """
        ...

    def end_all(self) -> None:
        """End all the others, even if they are busy."""
        ...


Taken = tuple[Claims, Leadership]
"""Claims with which the orphan checkpoint is committed, and the leadership that is to be acquired."""


def wait_for_turn(me: WorkerId, peers: Peers, pause: Callable[[float], None] = time.sleep) -> None:
    """Return when no worker with a lower number can lead. The leader requests that the others leave."""
    while before := peers.before(me):
        pause(_TURN_S * len(before))
        if not any(peers.ask(dict.fromkeys(before, ()), "is_orphan", timeout_s=_LOOK_S).values()):
            return


def write_orphan_checkpoint(
    me: WorkerId,
    terms: DriverSession,
    storage: Storage,
    peers: Peers,
    prepare: Callable[[DriverSession, Storage], Taken] | None = None,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
    may_retry: Callable[[], bool] = lambda: False,
) -> bool:
    """Commit what the workers hold, if it is newer than the newest checkpoint, and end all others.

    False if there may be a driver: no worker was ended, since it may take them over. `prepare`, `clock` and `pause`
    default to those of a process.

    If storage takes no writes: raises StorageError if it `may_retry`, with no worker ended; otherwise ends all.
    """
    clock = clock or SystemClock()
    if not _all_are_orphans(peers, terms.lease_s, clock, pause):
        _log.warning("worker %s alone is without a driver", me)
        return False
    claims, leadership = (prepare or _prepare)(terms, storage)
    try:
        epoch = leadership.acquire().first
    except RunOwnedElsewhere as error:
        _log.warning("worker %s: no last checkpoint: %s", me, error)
        return False
    try:
        return _write_as_owner(me, terms, storage, peers, claims, epoch, clock, may_retry)
    finally:
        leadership.end(_LET_GO_S)


def _write_as_owner(
    me: WorkerId,
    terms: DriverSession,
    storage: Storage,
    peers: Peers,
    claims: Claims,
    epoch: GenerationId,
    clock: Clock,
    may_retry: Callable[[], bool],
) -> bool:
    journal = Journal(storage, clock, claims.writer, still_owns=lambda: claims.find_rival() is None)
    journal.fence()
    entries = list(read(storage))
    recorded = last_recorded_step(entries)
    heard: dict[WorkerId, FreedWorker] = peers.ask(None, "last_words", epoch, recorded, timeout_s=_ANSWER_S)
    try:
        _commit(terms, storage, claims, journal, clock, epoch, entries, peers, heard)
    except Exception as error:
        if isinstance(error, StorageError) and may_retry():
            raise
        _log.warning("worker %s: no last checkpoint", me, exc_info=True)  # with any other error, all must end
    if claims.find_rival() is not None:
        return False
    peers.ask({worker: () for worker in heard if worker != me}, "leave", epoch, timeout_s=1.0)
    if claims.find_rival() is not None:
        return False
    peers.end_all()
    return True


def _all_are_orphans(peers: Peers, lease_s: float, clock: Clock, pause: Callable[[float], None]) -> bool:
    """Whether no worker that answers has a driver.

    Another worker may have received the driver's last call a moment later than this one: its lease ends soon.
    """
    deadline = clock.monotonic() + lease_s
    while not all(peers.ask(None, "is_orphan", timeout_s=_LOOK_S).values()):
        if clock.monotonic() > deadline:
            return False
        pause(lease_s / _LOOKS_PER_LEASE)
    return True


def _prepare(terms: DriverSession, storage: Storage) -> Taken:
    clock = SystemClock()
    claims = Claims(storage, secrets.token_hex(4), wall=clock.wall)
    ownership = RunLeadership(
        terms.run_name,
        storage,
        claims,
        clock,
        LeaseTerms(lease_s=terms.lease_s, ending=True),
        lambda reason: _log.warning("%s", reason),
        lambda waiting: _log.info("the last checkpoint waits for the driver's lease to end: %s", waiting),
        where=("", ""),
        has_ended=lambda _cluster, _job: False,
    )
    return claims, ownership


def _commit(
    terms: DriverSession,
    storage: Storage,
    claims: Claims,
    journal: Journal,
    clock: Clock,
    epoch: GenerationId,
    entries: Entries,
    peers: Peers,
    heard: Mapping[WorkerId, FreedWorker],
) -> None:
    after, decisions = taken_back(entries), decided(entries)
    holdings = {worker: believed(words.stopped, words.decisions, after, decisions) for worker, words in heard.items()}
    source = choose_source(holdings, frozenset(holdings), None, rebuilding=False)  # no generation exists to rebuild
    if terms.signed or not isinstance(source, FromMemory) or source.step <= _saved_step(storage, entries):
        return
    generation = GenerationId(max(epoch, *(words.fence for words in heard.values())))
    saved = _written(source, generation, epoch, claims.writer, peers)
    reports = [report for words in heard.values() for report in words.reports]
    for report in unrecorded(reports, last_recorded_step(entries), source.step):
        journal.append("step", report.fields())
    journal.append("orphaned", {"step": source.step, "workers": sorted(heard)}, durable=True)
    facts = next(words.facts for words in heard.values() if words.facts is not None)
    measured = next((report.measured() for report in reports if report.step == source.step), {})
    command = CommitSave(generation=generation, step=source.step, parts=saved, measured=measured)
    files = RunFiles(
        name=terms.run_name,
        storage=storage,
        keep=Keep(),
        metadata=terms.metadata,
        global_batch_size=terms.global_batch_size,
    )
    rules = numerics.whole(rules_on_record(entries) or "")
    arithmetic = {**numerics.of_machine(facts.arithmetic), numerics.KEY: rules}
    started = next((entry for entry in reversed(entries) if entry["kind"] == "started"), terms.metadata)
    known = ManifestContext(
        arithmetic=arithmetic,
        num_samples=facts.num_samples,
        decisions=decisions,
        build_seed=build_seed_of(started),
        blocks=begun_blocks(blocks_of(started), facts, terms.global_batch_size),
        contents=facts.contents,
    )
    fingerprint = fingerprint_of(saved)
    manifest = manifest_of(files, claims.writer, clock, command, known, fingerprint)
    prefix = save_prefix(source.step, generation, claims.writer)
    commit_claimed(storage, claims, prefix, manifest)
    journal.append(
        "checkpoint", {"step": source.step, "prefix": prefix, "fingerprint": fingerprint, "orphans": True}, durable=True
    )


def _saved_step(storage: Storage, entries: Entries) -> int:
    """Step of the newest checkpoint that no rollback has undone."""
    newest = History(storage).newest_commit()
    if newest is None:
        return 0
    if newest.prefix not in distrusted(entries) and not is_covered(rollbacks(entries), newest.generation, newest.step):
        return newest.step  # commits that are not undone have growing steps
    refs = list_checkpoints(storage)
    gone = undone(entries, refs)
    return max((ref.step for ref in refs if ref.complete and ref.prefix not in gone), default=0)


def _written(
    source: FromMemory, generation: GenerationId, epoch: GenerationId, writer: str, peers: Peers
) -> tuple[Saved, ...]:
    """Every rank's part of the checkpoint, by rank. Raises CheckpointError if one is missing, and StorageError."""
    parts = parts_to_write(source)
    if not parts:
        raise CheckpointError(f"no layout of step {source.step} is whole")
    saved: list[Saved] = []
    waiting = list(parts)
    while waiting:
        batch = {part.holder: part for part in reversed(waiting)}  # one at a time for each worker
        answers = peers.ask(
            {holder: (part, generation, writer) for holder, part in batch.items()},
            "write_part",
            epoch,
            timeout_s=_WRITE_S,
        )
        for holder, part in batch.items():
            answer: Saved | None = answers.get(holder)
            if answer is None or answer.error is not None:
                why = answer.error if answer else "no answer"
                kind = CheckpointError if answer is None or answer.unknown else StorageError
                raise kind(f"worker {holder} could not write the part of rank {part.rank}: {why}")
            saved.append(answer)
            waiting.remove(part)
    return tuple(saved)
