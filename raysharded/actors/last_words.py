"""The last checkpoint of workers whose driver is gone, made on its behalf by one of them.

Whoever owns the run by then is not disturbed: the claim that would make the checkpoint real is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from raysharded.checkpoint import Claims, Storage, commit_claimed
from raysharded.checkpoint.claims import find_newest
from raysharded.checkpoint.keeping.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver.committing import Known, RunFiles, fingerprint_of, manifest_of
from raysharded.driver.events import CommitSave
from raysharded.driver.journal import Journal, read
from raysharded.driver.membership import choose_source
from raysharded.driver.messages import FromMemory, Saved, save_prefix
from raysharded.driver.tenancy import (
    LastWords,
    Terms,
    believed,
    decided_skips,
    last_recorded_step,
    parts_to_write,
    taken_back,
    unrecorded,
)
from raysharded.errors import CheckpointError
from raysharded.ids import GenerationId, WorkerId

_log = logging.getLogger("raysharded.worker")
_ANSWER_S = 30.0
_WRITE_S = 150.0


class Peers(Protocol):
    """The run's workers that are alive, as one of them reaches them (and itself)."""

    def before(self, me: WorkerId) -> int:
        """How many of them have a lower number."""
        ...

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        """What a method of `Tenant` gives on each of these workers (None: on all), with its own arguments after
        `args`; who raises or is silent is left out."""
        ...

    def end_others(self, epoch: int, but: Collection[WorkerId]) -> None:
        """End those that drivers of this epoch and older ones have started, whatever they do."""
        ...


def write_last_words(me: WorkerId, terms: Terms, storage: Storage, peers: Peers) -> bool:
    """Commit what the workers hold, if it is newer than the newest checkpoint, and end all others.

    False if there may be a driver: nobody was ended, for it may take them over.
    """
    answers: dict[WorkerId, LastWords | None] = peers.ask(None, "last_words", terms, me, timeout_s=_ANSWER_S)
    heard = {worker: words for worker, words in answers.items() if words is not None}
    if len(heard) < len(answers) or not _owns(terms, storage):
        return False
    try:
        _commit(terms, storage, peers, heard)
    except Exception:  # noqa: BLE001 - whatever it is, all must end
        _log.warning("worker %s: no last checkpoint", me, exc_info=True)
    if not _owns(terms, storage):
        return False
    peers.ask({worker: () for worker in heard if worker != me}, "leave", terms.epoch, timeout_s=1.0)
    if _owns(terms, storage):
        peers.end_others(terms.epoch, but=heard)
    return True


def _owns(terms: Terms, storage: Storage) -> bool:
    _, newest = find_newest(storage)
    return newest is None or newest.id == terms.claimer


def _commit(terms: Terms, storage: Storage, peers: Peers, heard: Mapping[WorkerId, LastWords]) -> None:
    clock = SystemClock()
    journal = Journal(storage, clock, terms.driver)  # before the claims are looked at: who comes later writes before it
    entries = list(read(storage))
    after, decided = taken_back(entries), decided_skips(entries)
    holdings = {worker: believed(words.stopped, words.skips, after, decided) for worker, words in heard.items()}
    source = choose_source(holdings, frozenset(holdings), None)
    _, newest = find_newest(storage)
    if newest is not None and newest.id != terms.claimer:
        return
    saved_step = newest.step if newest is not None and newest.kind == "commit" else 0
    if terms.signed or not isinstance(source, FromMemory) or source.step <= saved_step:
        return
    generation = GenerationId(max(words.fence for words in heard.values()))
    saved = _written(terms, source, generation, peers)
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
    known = Known(arithmetic=facts.arithmetic, num_samples=facts.num_samples, skips=decided, in_use=())
    fingerprint = fingerprint_of(saved)
    manifest = manifest_of(files, terms.driver, clock, command, known, fingerprint)
    prefix = save_prefix(source.step, generation, terms.driver)
    commit_claimed(storage, Claims.on_behalf(storage, terms.driver, terms.claimer), prefix, manifest)
    journal.append(
        "checkpoint", {"step": source.step, "prefix": prefix, "fingerprint": fingerprint, "orphans": True}, durable=True
    )


def _written(terms: Terms, source: FromMemory, generation: GenerationId, peers: Peers) -> tuple[Saved, ...]:
    """Every rank's part of the checkpoint, by rank. Raises CheckpointError if one is missing."""
    parts = parts_to_write(source)
    if not parts:
        raise CheckpointError(f"no layout of step {source.step} is whole")
    saved: list[Saved] = []
    waiting = list(parts)
    while waiting:
        batch = {part.holder: part for part in reversed(waiting)}  # one at a time for each worker
        answers = peers.ask(
            {holder: (part, generation) for holder, part in batch.items()},
            "write_part",
            terms.epoch,
            timeout_s=_WRITE_S,
        )
        for holder, part in batch.items():
            answer: Saved | None = answers.get(holder)
            if answer is None or answer.error is not None:
                why = answer.error if answer else "no answer"
                raise CheckpointError(f"worker {holder} could not write the part of rank {part.rank}: {why}")
            saved.append(answer)
            waiting.remove(part)
    return tuple(saved)
