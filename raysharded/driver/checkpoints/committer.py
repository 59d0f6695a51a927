"""Commits a run's checkpoints in order and deletes old ones, in the background of the driver's loop."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from raysharded.checkpoint import Manifest, SigningKey, Storage, TensorInfo
from raysharded.checkpoint.claims import Claims, commit_claimed
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.retention.policy import Keep
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.checkpoint.stored_claims import Claim, find_newest, list_numbers
from raysharded.clock import Clock
from raysharded.driver.checkpoints.begun_saves import BegunSaves
from raysharded.driver.checkpoints.protected import ProtectedCheckpoints
from raysharded.driver.state.arithmetic import own_blocks, own_build_seed, own_contents
from raysharded.driver.state.commands import CommitSave
from raysharded.driver.state.events import CommitFailed, Committed, Deleted, LeadershipLost, Overtaken
from raysharded.errors import RayshardedError, RunOwnedElsewhere, StaleGeneration, StorageError
from raysharded.ids import GenerationId
from raysharded.journal.backlog import MOST_BYTES
from raysharded.journal.verified import JournalReader
from raysharded.layout import combine, digest
from raysharded.overrides import Decisions, Skips, consumed, own_weights, rates_before, skipped_before, weights_before
from raysharded.protocol.messages import REGISTERED_STATE, Saved, save_id, save_prefix

_log = logging.getLogger("raysharded.driver")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """A run on its storage."""

    name: str
    storage: Storage
    keep: Keep
    """Retention rules."""
    metadata: Mapping[str, Any]
    """Metadata for every checkpoint's manifest."""
    global_batch_size: int
    """Samples that a step consumes."""
    key: SigningKey | None = None
    """Key that signs the run's objects on storage. Objects that it did not sign decide nothing."""
    accept_unsigned: bool = False
    """Whether a user accepts what the key did not sign, as it is now."""
    at_least_step: int = 0
    """The newest checkpoint must be of this step or a later one."""
    patience_s: float = 3600.0
    """Time for which storage may take no entries of the journal before the run ends."""
    backlog_bytes: int = MOST_BYTES
    """Bytes of entries that are kept meanwhile."""

    def journal(self) -> JournalReader:
        """A reader of the run's journal, as far as the key and the user let it count."""
        return JournalReader(self.storage, self.key, accept_unsigned=self.accept_unsigned)


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestContext:
    """The driver's knowledge at a commit, which the manifest records."""

    arithmetic: Mapping[str, str]
    num_samples: int | None
    decisions: Decisions = field(default_factory=Decisions)
    build_seed: int = 0
    """Seed of the task's constructors."""
    blocks: tuple[int, int] = (1, 1)
    contents: str = ""
    """Both as in the state."""


class Committer:
    """Commits a run's checkpoints, one after the other in a separate thread, and reports every outcome as an event."""

    def __init__(
        self,
        files: RunFiles,
        driver: str,
        clock: Clock,
        tell: Callable[[Committed | CommitFailed | Overtaken | LeadershipLost | Deleted], None],
        spared: Callable[[], ProtectedCheckpoints],
    ) -> None:
        """`driver`: this driver's unique name.

        `spared` returns the checkpoints that retention must not delete; it is called in another thread, and again just
        before each deletion.
        """
        self._files, self._driver, self._clock, self._tell, self._spared = files, driver, clock, tell, spared
        self.claims = Claims(files.storage, driver, wall=clock.wall, key=files.key)
        self._committing, self._pruning = _Lane("commit"), _Lane("prune")
        self._has_committed = False
        self._begun = BegunSaves(driver)
        self._owed: set[str] = set()
        """Prefixes whose deletion was ordered and is not done. Changes of a set are atomic."""
        self._deleting = threading.Lock()
        self._claims_read: dict[int, Claim] = {}
        """Claims that a prune has read, by number."""

    def owns(self) -> bool:
        """Whether no other driver has claimed the run since, as far as storage answers."""
        return _newest_owner(self._files.storage, self._files.key) in (self._driver, None)

    def begin(self, generation: GenerationId, step: int) -> None:
        """Note that workers begin to write a save, and start to delete earlier ones that the driver has abandoned.

        Otherwise these fill the disk until the next commit, which they may prevent.
        """
        self._begun.begin(generation, step)
        if self._begun.abandoned(self._spared().prefixes):
            self._pruning.do_once("abandoned saves", self._delete_abandoned)

    def _delete_abandoned(self) -> None:
        try:
            writing = self._spared().prefixes
            prune(
                self._files.storage,
                None,
                in_flight=writing,
                abandoned=self._begun.abandoned(writing),
                keep_references=True,
                key=self._files.key,
                read_before=self._claims_read,
            )
        except Exception as error:  # noqa: BLE001 - thread boundary: the next call continues
            self._log_kept(error, "abandoned saves")

    def commit(self, command: CommitSave, known: ManifestContext, after: Callable[[], None] = lambda: None) -> None:
        """Start to commit a checkpoint, after earlier ones. `after` is called before it, and may block."""
        self._begun.give(command.generation, command.step)
        self._committing.do(lambda: self._commit(command, known, after))

    def distrust(self, prefixes: Collection[str]) -> None:
        """Start to delete checkpoints that may hold wrong numbers. A pinned one stays, with a warning.

        If that fails, it is repeated before old checkpoints are deleted: until then these stay.
        """
        self._owed.update(prefixes)
        self._committing.do(lambda: self._distrust(prefixes))

    def _distrust(self, prefixes: Collection[str]) -> None:
        self._owed.update(prefixes)  # again: a commit that was under way may have put one of them there since
        try:
            self._delete_owed()
        except Exception as error:  # noqa: BLE001 - thread boundary: a later prune, or the next driver, continues
            self._log_kept(error, "undone checkpoints")

    def _delete_owed(self) -> None:
        """Delete what is owed. If it fails, all of it stays owed."""
        with self._deleting:
            owed = sorted(self._owed)
            for prefix in distrust(self._files.storage, owed, self._files.key, self._still_leads):
                _log.warning("the checkpoint under %s may hold wrong numbers; it stays because it is pinned", prefix)
            self._owed.difference_update(owed)

    def close(self, timeout_s: float, *, ended: bool = False) -> None:
        """Return when all work is done, or after `timeout_s`.

        `ended`: the run has done its last step. Old checkpoints that it might have needed go now, with their data.
        """
        self._committing.close(timeout_s)
        if ended and self._has_committed:
            self._pruning.do(self._prune_at_the_end)
        elif self._owed:
            self._pruning.do(lambda: self._distrust(()))
        self._pruning.close(timeout_s)

    def _commit(self, command: CommitSave, known: ManifestContext, after: Callable[[], None]) -> None:
        try:
            after()
            committed = self._committed(command, known)
        except Exception as error:  # noqa: BLE001 - thread boundary: training continues
            if not isinstance(error, RayshardedError | OSError):
                _log.exception("committing the checkpoint of step %d", command.step)
            self._tell(self._failure(command, error))
        else:
            self._tell(committed)
            self._begun.committed(command.generation, command.step)
            self._pruning.do_once("old checkpoints", lambda: self._prune(committed.prefix))

    def _committed(self, command: CommitSave, known: ManifestContext) -> Committed:
        storage, before = self._files.storage, self._files.storage.retries
        prefix = save_prefix(command.step, command.generation, self._driver)
        self._check_keep_best(command)
        fingerprint = fingerprint_of(command.parts)
        manifest = manifest_of(self._files, self._driver, self._clock, command, known, fingerprint)
        manifest_digest = commit_claimed(storage, self.claims, prefix, manifest, key=self._files.key)
        return Committed(
            generation=command.generation,
            step=command.step,
            prefix=prefix,
            digest=manifest_digest,
            fingerprint=fingerprint,
            retries=storage.retries - before,
        )

    def _check_keep_best(self, command: CommitSave) -> None:
        """Warn once if the first checkpoint lacks the number that `keep_best` names."""
        best, is_first, self._has_committed = self._files.keep.best, not self._has_committed, True
        if best is None or not is_first or best.metric in command.measured:
            return
        known = ", ".join(sorted(command.measured)) or "no numbers"
        _log.warning(
            "CheckpointConfig.keep_best: the checkpoint of step %d has no %r; it has %s. Checkpoints without that "
            "number are never among the best: evaluate at the steps that are saved, or name another number.",
            command.step,
            best.metric,
            known,
        )

    def _failure(self, command: CommitSave, error: Exception) -> CommitFailed | Overtaken | LeadershipLost:
        """The event of a failed commit: this one failed, or this driver can commit no more.

        The driver that leads next deletes the files that this one wrote.
        """
        why = f"{type(error).__name__}: {error}"
        if not isinstance(error, RunOwnedElsewhere) and self.owns():
            if isinstance(error, StaleGeneration):
                return Overtaken(generation=command.generation, step=command.step, reason=why)
            return CommitFailed(generation=command.generation, step=command.step, error=why)
        return LeadershipLost(
            reason=f"another driver has taken over run {self._files.name!r} under {self._files.storage.url}; this one "
            f"({self._driver}) ends. It could not commit step {command.step}: {why} Start each run name from one place "
            "at a time."
        )

    def _prune_at_the_end(self) -> None:
        try:
            self._delete_owed()
            spared = self._spared()
            prune(
                self._files.storage,
                self._files.keep,
                in_flight=spared.lasting,
                keep_references=spared.parents,
                may_go=lambda _: self._still_leads(),
                ended=True,
                key=self._files.key,
                read_before=self._claims_read,
            )
        except Exception as error:  # noqa: BLE001 - thread boundary: `raysharded checkpoint gc` continues
            self._log_kept(error)

    def _prune(self, newest: str) -> None:
        try:
            self._delete_owed()  # or else retention counts what is undone
            spared = self._spared()
            pruned = prune(
                self._files.storage,
                self._files.keep,
                in_flight={*spared.prefixes, newest},
                keep_references=spared.parents,
                may_go=lambda prefix: prefix not in self._spared().prefixes and self._still_leads(),
                key=self._files.key,
                read_before=self._claims_read,
            )
            if pruned.retired or pruned.references:
                self._tell(Deleted(prefixes=pruned.retired, parents=bool(pruned.references)))
        except Exception as error:  # noqa: BLE001 - thread boundary: the next call continues
            self._log_kept(error)

    def _still_leads(self) -> bool:
        """Whether no other driver has claimed the run since this one did. Raises StorageError."""
        return self.claims.find_rival() is None

    def _log_kept(self, error: Exception, which: str = "old checkpoints") -> None:
        explained = isinstance(error, StorageError)  # it has the cause and the remedy
        said, trace = (f": {error}", None) if explained else ("", error)
        _log.warning("%s under %s could not be deleted%s", which, self._files.storage.url, said, exc_info=trace)


def distrust(
    storage: Storage, prefixes: Collection[str], key: SigningKey | None, may_go: Callable[[], bool] = lambda: True
) -> list[str]:
    """Retire these checkpoints. Returns the folders of those that stay because they are pinned.

    `may_go()` decides just before each; the first that may not ends it.
    """
    listed = list_checkpoints(storage, key=key) if prefixes else ()
    refs = [ref for ref in listed if ref.complete and ref.prefix in prefixes]
    number = max(list_numbers(storage), default=0) if refs else 0
    stay: list[str] = []
    for ref in refs:
        if not may_go():
            break
        if not retire(storage, ref, number=number, key=key):
            stay.append(ref.prefix)
    return stay


def manifest_of(
    files: RunFiles, driver: str, clock: Clock, command: CommitSave, known: ManifestContext, fingerprint: str
) -> Manifest:
    """Manifest of a checkpoint whose parts are all written."""
    spec = command.parts[0].spec
    assert spec is not None
    rates = rates_before(known.decisions.rates, command.step + 1)
    position = consumed(known.decisions.skips, command.step, files.global_batch_size)
    registered = next((part.registered for part in command.parts if part.registered), "")
    return Manifest(
        run=files.name,
        step=command.step,
        generation=command.generation,
        save_id=save_id(command.generation, driver),
        writer=driver,
        created_at=clock.wall(),
        tensors={t.name: TensorInfo(dtype=t.dtype, shape=t.shape) for t in spec.tensors},
        files=tuple(record for part in command.parts for record in part.files),
        data=data_position(command.step, files.global_batch_size, known.num_samples, known.decisions.skips),
        metadata={
            **files.metadata,
            "fingerprint": fingerprint,
            "workers": len(command.parts),
            "arithmetic": dict(known.arithmetic),
            "num_samples": known.num_samples,
            **own_blocks(known.blocks),
            **own_contents(known.contents),
            "metrics": dict(command.measured),
            **({"learning_rate": [list(rate) for rate in rates]} if rates else {}),
            **own_weights(weights_before(known.decisions.weights, position)),
            **own_build_seed(known.build_seed, files.metadata),
            **({REGISTERED_STATE: registered} if registered else {}),
        },
    )


def fingerprint_of(parts: Sequence[Saved]) -> str:
    """Fingerprint of the whole state, from the workers' parts."""
    spec = parts[0].spec
    assert spec is not None
    return digest(spec, combine([part.fingerprint for part in parts]))


def data_position(step: int, global_batch_size: int, num_samples: int | None, skips: Skips = ()) -> dict[str, int]:
    """Position in the data after `step`: the samples consumed or skipped so far, and the epoch."""
    consumed = step * global_batch_size + skipped_before(skips, step)
    if not num_samples:
        return {"samples": consumed}
    return {"samples": consumed, "epoch": consumed // num_samples, "samples_per_epoch": num_samples}


def _newest_owner(storage: Storage, key: SigningKey | None) -> str | None:
    with contextlib.suppress(StorageError):
        _, newest = find_newest(storage, key=key)
        return newest.writer if newest else None
    return None


class _Lane:
    """A daemon thread that runs work in order; it starts with the first piece of work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: set[str] = set()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def do_once(self, name: str, work: Callable[[], None]) -> None:
        """As `do`, unless work of this name is waiting."""
        if name not in self._waiting:
            self._waiting.add(name)
            self.do(lambda: self._begin(name, work))

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        self._waiting.discard(name)
        work()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Return when all work is done, or after `timeout_s`."""
        with self._starting:
            thread = self._thread
        if thread is not None:
            self._work.put(None)
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            work()
