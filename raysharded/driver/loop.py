"""The driver's edge: turns what happens into events, and commands into calls, journal entries and manifests."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from raysharded.checkpoint import Manifest, Storage, TensorInfo, commit, list_checkpoints, newest_complete, prune
from raysharded.clock import Clock
from raysharded.driver import machine
from raysharded.driver.events import (
    AskFingerprint,
    AskReport,
    CollectSave,
    Command,
    CommitFailed,
    CommitSave,
    Committed,
    End,
    Event,
    Fingerprinted,
    Form,
    Interrupt,
    KillWorker,
    Lost,
    Poll,
    Ready,
    Record,
    RequestBoundary,
    Said,
    StartWorker,
    StopRequested,
    SumFingerprint,
    Tick,
    Train,
)
from raysharded.driver.journal import Journal, newest_generation, read
from raysharded.driver.launching import Gone, Launcher, Reply
from raysharded.driver.messages import Facts, FromCheckpoint, Saved, save_id, save_prefix
from raysharded.driver.state import Checkpointed, Limits, Phase, State
from raysharded.errors import ClusterError, RayshardedError, StaleGeneration, StorageError
from raysharded.ids import GenerationId
from raysharded.layout import combine, digest

_log = logging.getLogger("raysharded.driver")
_TICK_S = 0.25
_POLL_TIMEOUT_S = 5.0
_STORAGE_PATIENCE_S = 300.0
"""How long the journal may fail to be written before the run ends."""
_SAY_WAITING_AFTER_S = 10.0
"""How long the run waits for workers before it says what is missing, each time."""

Listener = Callable[[str, dict[str, Any]], None]
"""Called with every journal entry as it is made: (kind, fields)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The run on its storage."""

    name: str
    storage: Storage
    keep_last: int
    metadata: dict[str, Any]
    """Written into every checkpoint's manifest."""


class Driver:
    """Runs the state machine of one run to its end."""

    def __init__(self, limits: Limits, launcher: Launcher, files: RunFiles, clock: Clock, listen: Listener) -> None:
        self._launcher, self._files, self._clock, self._listen = launcher, files, clock, listen
        self._name = secrets.token_hex(4)
        self._journal = Journal(files.storage, clock, self._name)
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._error: BaseException | None = None
        self._ended = False
        self._said_waiting_at = 0.0
        self._data_recorded = False
        self._storage_failing_since: float | None = None
        self._being_read = ""
        """The checkpoint that a generation is formed from: it must not be deleted meanwhile."""
        self.state = State(limits=limits)

    def resume(self) -> None:
        """Prepare to go on from the newest checkpoint, if there is one: with its data and its kind of machines."""
        newest = newest_complete(self._files.storage, skip_damaged=True)
        for skipped in newest.skipped:
            if skipped.ref.complete:
                self._record("checkpoint_skipped", {"step": skipped.ref.step, "reason": skipped.reason})
        generation = newest_generation(read(self._files.storage))
        self.state = replace(self.state, generation=GenerationId(generation))
        found = newest.checkpoint
        if found is None:
            return
        metadata = dict(found.manifest.metadata)
        older = [ref for ref in list_checkpoints(self._files.storage) if ref.complete and ref.step < found.step]
        self.state = replace(
            self.state,
            checkpoint=Checkpointed(
                step=found.step, prefix=found.prefix, fingerprint=str(metadata.get("fingerprint", ""))
            ),
            older_checkpoints=tuple(Checkpointed(step=ref.step, prefix=ref.prefix) for ref in older),
            arithmetic=metadata.get("arithmetic") or None,
            num_samples=metadata.get("num_samples"),
        )

    def stop(self) -> None:
        """Ask the run to end now; it can be resumed. Any thread."""
        self._inbox.put(StopRequested())

    def run(self) -> State:
        """Block until the run is over; raises what it failed with. All workers are gone on return."""
        try:
            return self._run()
        except BaseException:
            with contextlib.suppress(RayshardedError):  # what the run failed with matters more
                self._journal.flush()
            raise
        finally:
            self._launcher.close()

    def _run(self) -> State:
        about = {"driver": self._name, "run": self._files.name, "resumed_after_step": self._resume_step()}
        self._record("started", {**about, **self._files.metadata}, durable=True)
        self._do(machine.begin(self.state, self._clock.monotonic()))
        host, port = self._launcher.rendezvous()
        self.state = replace(self.state, rendezvous=(host, port, f"{self._files.name}/{self._name}"))
        while not self._ended:
            for event in self._next_events():
                self._do(machine.step(self.state, event, self._clock.monotonic()))
            self._say_what_is_missing()
        if self._error is not None:
            raise self._error
        self._journal.flush()
        return self.state

    def _say_what_is_missing(self) -> None:
        state, now = self.state, self._clock.monotonic()
        waiting = state.phase is Phase.GATHERING and len(state.ready) < state.limits.min_workers
        if waiting and now - max(state.since, self._said_waiting_at) >= _SAY_WAITING_AFTER_S:
            self._said_waiting_at = now
            missing = self._launcher.describe_shortage()
            fields = {"ready": len(state.ready), "needed": state.limits.min_workers, "missing": missing}
            self._record("waiting", fields)

    def _resume_step(self) -> int:
        return self.state.checkpoint.step if self.state.checkpoint else 0

    # -- in --

    def _next_events(self) -> list[Event]:
        events: list[Event] = []
        for happened in self._launcher.wait(_TICK_S if self._inbox.empty() else 0.0):
            event = self._event_of(happened)
            if event is not None:
                events.append(event)
        while True:
            try:
                events.append(self._inbox.get_nowait())
            except Empty:
                return events or [Tick()]

    def _event_of(self, happened: Reply | Gone) -> Event | None:
        match happened:
            case Gone(worker=worker, reason=reason, error=error):
                return Lost(worker=worker, reason=reason, error=error)
            case Reply(error=StaleGeneration()):
                return None
            case Reply(worker=worker, method=method, error=error) if error is not None:
                self._launcher.kill(worker)
                return Lost(worker=worker, reason=f"{method} failed: {type(error).__name__}: {error}", error=error)
            case Reply(worker=worker, value=Facts() as facts):
                if not self._data_recorded:
                    self._data_recorded = True
                    self._record("data", {"num_samples": facts.num_samples})
                return Ready(worker=worker, facts=facts)
            case Reply(worker=worker, value=None):
                return None
            case Reply(worker=worker, value=value):
                return Said(worker=worker, message=value)
        return None

    # -- out --

    def _do(self, outcome: tuple[State, list[Command]]) -> None:
        self.state, commands = outcome
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        call = self._launcher.call
        match command:
            case StartWorker(worker=worker):
                self._launcher.start(worker)
            case KillWorker(worker=worker):
                self._launcher.kill(worker)
            case Form(spec=spec):
                self._being_read = spec.source.prefix if isinstance(spec.source, FromCheckpoint) else ""
                for member in spec.members:
                    call(member, "form", spec)
            case Train(generation=generation, members=members):
                for member in members:
                    call(member, "train", generation)
            case Interrupt(worker=worker, generation=generation):
                call(worker, "interrupt", generation)
            case AskReport(worker=worker, generation=generation):
                call(worker, "report", generation)
            case RequestBoundary(worker=worker, generation=generation):
                call(worker, "request_boundary", generation)
            case Poll(worker=worker, generation=generation, after_step=after_step):
                call(worker, "poll", generation, after_step, _POLL_TIMEOUT_S)
            case CollectSave(generation=generation, step=step, members=members):
                for member in members:
                    call(member, "collect_save", generation, step, self.state.limits.save_timeout_s)
            case AskFingerprint(generation=generation, members=members):
                for member in members:
                    call(member, "fingerprint", generation)
            case SumFingerprint(parts=parts):
                self._inbox.put(Fingerprinted(fingerprint=_fingerprint_of(parts)))
            case CommitSave():
                self._journal.flush()  # the steps before a checkpoint are on record before it is real
                threading.Thread(target=self._commit, args=(command,), daemon=True, name="commit").start()
            case Record(kind=kind, fields=fields, durable=durable):
                self._record(kind, dict(fields), durable=durable)
            case End(error=error):
                self._ended, self._error = True, self._explained(error)

    def _explained(self, error: BaseException | None) -> BaseException | None:
        shortage = self._launcher.describe_shortage() if isinstance(error, ClusterError) else ""
        return ClusterError(f"{error} {shortage}") if shortage else error

    def _record(self, kind: str, fields: dict[str, Any], *, durable: bool = False) -> None:
        self._listen(kind, fields)
        try:
            self._journal.append(kind, fields, durable=durable)
            self._storage_failing_since = None
        except StorageError as error:  # the entries are kept, and written with the next
            now = self._clock.monotonic()
            since = self._storage_failing_since = self._storage_failing_since or now
            if now - since > _STORAGE_PATIENCE_S:
                raise
            _log.warning("the journal could not be written; trying again: %s", error)

    def _commit(self, command: CommitSave) -> None:
        """Write a checkpoint's manifest, beside the loop; the outcome comes back as an event."""
        prefix = save_prefix(command.step, command.generation)
        try:
            fingerprint = self._write_manifest(command, prefix)
        except (RayshardedError, OSError) as error:
            self._inbox.put(CommitFailed(step=command.step, error=f"{type(error).__name__}: {error}"))
            return
        self._inbox.put(Committed(step=command.step, prefix=prefix, fingerprint=fingerprint))
        try:
            prune(self._files.storage, self._files.keep_last, in_flight=(prefix, self._being_read))
        except (RayshardedError, OSError):
            _log.warning("old checkpoints under %s could not be deleted", self._files.storage.url, exc_info=True)

    def _write_manifest(self, command: CommitSave, prefix: str) -> str:
        spec = command.parts[0].spec
        assert spec is not None
        fingerprint = _fingerprint_of(command.parts)
        manifest = Manifest(
            run=self._files.name,
            step=command.step,
            generation=command.generation,
            save_id=save_id(command.generation),
            writer=self._name,
            created_at=self._clock.wall(),
            tensors={t.name: TensorInfo(dtype=t.dtype, shape=t.shape) for t in spec.tensors},
            files=tuple(record for part in command.parts for record in part.files),
            metadata={
                **self._files.metadata,
                "fingerprint": fingerprint,
                "workers": len(command.parts),
                "arithmetic": dict(self.state.arithmetic or {}),
                "num_samples": self.state.num_samples,
            },
        )
        if not commit(self._files.storage, prefix, manifest):
            raise StaleGeneration(f"{prefix} was committed by another driver")
        return fingerprint


def _fingerprint_of(parts: Sequence[Saved]) -> str:
    """Of the whole state, from its workers' parts."""
    spec = parts[0].spec
    assert spec is not None
    return digest(spec, combine([part.fingerprint for part in parts]))
