"""The driver's edge: turns occurrences into events, and commands into calls, journal entries and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from queue import Empty, SimpleQueue
from typing import Any

from raysharded import numerics
from raysharded.clock import Clock
from raysharded.driver import last_words, machine
from raysharded.driver.checkpoints import saves
from raysharded.driver.checkpoints.committer import Committer, ManifestContext, RunFiles, fingerprint_of
from raysharded.driver.checkpoints.protected import protected_checkpoints
from raysharded.driver.checkpoints.requests import Promise, Requests, SaveCallThrottle
from raysharded.driver.gcs_loss import GcsLoss
from raysharded.driver.generation.link_tests import left_out
from raysharded.driver.handlers.run_changes import asked_mesh
from raysharded.driver.replay.recorder import Machine, Transcript
from raysharded.driver.replies import ReplyTranslator
from raysharded.driver.shortages import Shortages
from raysharded.driver.startup import other_versions
from raysharded.driver.startup.run_startup import RunStartup
from raysharded.driver.state.arithmetic import build_seed_of
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import (
    Answer,
    CollectSave,
    Command,
    CommitSave,
    DeleteCheckpoints,
    End,
    KillWorker,
    Record,
    StartWorker,
    SumFingerprint,
    calls_of,
    with_secret,
)
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import (
    Annotation,
    CheckpointRequested,
    DrainRequested,
    Event,
    Fingerprinted,
    LeadershipLost,
    LearningRateRequested,
    MixtureWeightsRequested,
    PauseRequested,
    Recorded,
    ReshardRequested,
    ResizeRequested,
    ResumeRequested,
    RewindRequested,
    StopRequested,
    Tick,
)
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import State
from raysharded.driver.workers import node_verdicts
from raysharded.errors import ClusterError, RayshardedError, RunOwnedElsewhere
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.entry_text import LOUD, incident_text
from raysharded.journal.log import Journal, refusing_damage
from raysharded.journal.verified import JournalReader
from raysharded.journal.writer import Recorder
from raysharded.ownership.leadership import LeaseTerms, RunLeadership
from raysharded.protocol.worker_launcher import Launcher

EVENTS_LOG = "raysharded.driver.events"
"""Logger of journal entries that a person should not miss."""
_events_log = logging.getLogger(EVENTS_LOG)
_TICK_S = 0.25
_CLEANING_PATIENCE_S = 10.0
"""Longest wait of a finished run for the deletion of its old checkpoints."""

Listener = Callable[[str, dict[str, Any]], None]
"""Callback for every journal entry as it is made: (kind, fields)."""


class Driver:
    """Runs the state machine of one run to its end."""

    def __init__(
        self,
        limits: DriverConfig,
        launcher: Launcher,
        files: RunFiles,
        clock: Clock,
        listen: Listener,
        lease: LeaseTerms | None = None,
        orphan_wait_s: float = 300.0,
        *,
        record_events: bool = False,
        function_s: float = 0.0,
    ) -> None:
        """`function_s`: time that a user's training function has at the end of the run; 0: there is none."""
        self._launcher, self._files, self._clock, self._listen = launcher, files, clock, listen
        name, self._function_s = secrets.token_hex(4), function_s
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._committer = Committer(files, name, clock, self._inbox.put, lambda: protected_checkpoints(self.state))
        owns, most = self._committer.owns, files.backlog_bytes
        journal = Journal(files.storage, clock, name, most_bytes=most, still_owns=owns, key=files.key)
        recorder = self._recorder = Recorder(journal, clock)
        patience_s = files.patience_s
        self.shortages = Shortages(launcher, recorder, clock, self._tell, self._record, storage_patience_s=patience_s)
        self._machine: Machine = Transcript(self._recorder) if record_events else machine
        self._throttle = SaveCallThrottle(self._collect)
        self._translator = ReplyTranslator(launcher, self._throttle, self._record)
        lease, claims = lease or LeaseTerms(), self._committer.claims
        self._ownership = RunLeadership(
            files.name,
            files.storage,
            claims,
            clock,
            lease,
            lambda reason: self._inbox.put(LeadershipLost(reason=reason)),
            lambda fields: self._tell("waiting_for_owner", fields),
            where=launcher.where(),
            has_ended=launcher.has_ended,
            key=files.key,
        )
        self._startup = RunStartup(
            files,
            self._ownership,
            launcher.enter,
            claims,
            journal,
            clock,
            lease_s=lease.lease_s,
            orphan_wait_s=orphan_wait_s,
            before=partial(
                other_versions.wait_for_their_checkpoint,
                files.name,
                launcher.of_another_version,
                self._ownership.require_free,
                self._ownership.pause,
                clock,
                lambda fields: self._tell("waiting_for_workers", dict(fields)),
                take_over=lease.take_over,
            ),
        )
        self._requests = Requests()
        self._gcs = GcsLoss(launcher.gcs_health, clock, self._record, self, lease_s=lease.lease_s)
        self._error: BaseException | None = None
        self._ended, self._unwritten, self._ticked_at = False, "", 0.0
        self.state = State(
            limits=limits, driver=name, numerics=numerics.newest(), build_seed=build_seed_of(files.metadata)
        )

    def restore(self, journal: JournalReader | None = None) -> None:
        """Acquire the run, and prepare to resume from its newest checkpoint. `journal`: a reader used before."""
        self.state = self._startup.own(self.state, journal)
        self.state, found = self._startup.resume(self.state)
        for step, reason in found.damaged:
            self._record("checkpoint_skipped", {"step": step, "reason": reason})

    def asked_last(self, scaling: Mapping[str, Any]) -> tuple[int | None, int] | None:
        """Result of `run_changes.asked_mesh` for earlier drivers. Call it after `restore`."""
        with refusing_damage(self._files.storage):
            return asked_mesh(self._startup.entries, scaling)

    def begin_with(self, grouping: Grouping | None) -> None:
        """Set the groups that the run begins with. Call it before `run`."""
        self.state = replace(self.state, limits=replace(self.state.limits, grouping=grouping))

    def stop(self, *, checkpoint_within_s: float | None = None) -> None:
        """Request the end of the run: now, or after one more checkpoint. The run can be resumed.

        A second request ends it at once. Any thread, and signal handlers.
        """
        self._inbox.put(StopRequested(checkpoint_within_s=checkpoint_within_s))

    def checkpoint(self) -> Promise:
        """Request a checkpoint of the next step. Any thread. Raises RunFailed if the run is over."""
        request, promise = self._requests.add()
        self._inbox.put(CheckpointRequested(request=request))
        return promise

    def reshard(self, grouping: Grouping | None) -> None:
        """Request other shard groups or tensor parallel groups, or none, at the next step boundary. Any thread."""
        self._inbox.put(ReshardRequested(grouping=grouping))

    def set_learning_rate(self, factor: float) -> None:
        """Scale the learning rates by `factor` from the next step boundary on. Any thread.

        Each is the optimizer's own rate, times the task's schedule, times `factor`; 1.0 removes an earlier request.
        `run_changes.rate_refusal` returns the reason for a refusal beforehand; the journal records a later one.
        """
        self._inbox.put(LearningRateRequested(factor=float(factor)))

    def set_mixture_weights(self, weights: Mapping[str, float]) -> None:
        """As `set_learning_rate`, for weights of the mixture's sources; `run_changes.weights_refusal`. Any thread."""
        self._inbox.put(MixtureWeightsRequested(weights=tuple(sorted((k, float(one)) for k, one in weights.items()))))

    def rewind(self, step: int, skip_data: bool = False) -> None:
        """Go back to the checkpoint of `step` at the next step boundary, and continue from there. Any thread.

        The samples read since are read again, or skipped with `skip_data`. Later steps are undone, with their
        checkpoints and changes of the learning rate. `run_changes.rewind_refusal` returns the reason for a refusal
        beforehand; the journal records a later one.
        """
        self._inbox.put(RewindRequested(step=index(step), skip_data=skip_data))

    def pause(self) -> None:
        """Stop the workers at the next step boundary, with the state in memory, until `resume`. Any thread.

        `user_requests.pause_refusal` returns the reason if it is too late.
        """
        self._inbox.put(PauseRequested())

    def resume(self) -> None:
        """End a pause: the run continues from the workers' memory. Any thread."""
        self._inbox.put(ResumeRequested())

    def resize(self, workers: int) -> None:
        """Request this number of workers from now on. Any thread. `user_requests.resize_refusal` checks the number."""
        self._inbox.put(ResizeRequested(workers=workers))

    def drain(self, node: str, within_s: float) -> None:
        """Request that all workers leave a node, given by id or host name, within `within_s` seconds. Any thread.

        No worker starts there from then on. `user_requests.drain_refusal` checks the node.
        """
        self._inbox.put(DrainRequested(node=node, within_s=within_s))

    def remark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a journal entry about something that the driver cannot observe itself. Any thread."""
        self._inbox.put(Annotation(kind=kind, fields=fields))

    def warnings(self) -> tuple[str, ...]:
        """The conditions that a person should know now, one sentence each. Any thread."""
        ways = (self.shortages.storage_failing, saves.stop_warning, self._gcs.warning, left_out, node_verdicts.text)
        return tuple(filter(None, (self._unwritten,) if self._ended else (way(self.state) for way in ways)))

    def run(self) -> State:
        """Drive the run until it is over. Raises the error that the run failed with.

        On return all workers have ended, or are left to the driver that leads the run by then.
        """
        try:
            return self._run()
        except RunOwnedElsewhere:  # another driver owns the journal and the workers
            self._recorder.abandon()
            self._launcher.abandon()
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._record(
                    "stopped", {"step": self.state.step, "fingerprint": None, "interrupted": True}, durable=True
                )
            with contextlib.suppress(RayshardedError):  # the error of the run matters more
                words_s = self._last_words_s() if isinstance(error, Exception) else last_words.AT_ONCE_S
                self._recorder.close(words_s, repeat_s=last_words.STOPPED_S)
            raise
        finally:
            with contextlib.ExitStack() as last:  # in reverse: the lease ends, although Ctrl-C interrupts the rest
                last.callback(self._startup.let_go)
                last.callback(self._committer.close, 0.0)
                last.callback(self._launcher.close)
                self._requests.end(f"Run {self._files.name!r} ended before the checkpoint was committed.")

    def _run(self) -> State:
        self._enter()
        while not self._ended:
            self._recorder.raise_error()
            events = self._next_events()
            self._ownership.check_awake()
            for event in events:
                self._do(self._machine.step(self.state, event, self._clock.monotonic()))
            self.shortages.report(self.state)
            self._gcs.look(self.state)
        self._error = self._error or self._gcs.error(self.state)
        if self._error is not None:
            raise self._error
        self._unwritten = last_words.write(
            self._recorder, self._last_words_s(), self._files.name, is_stopped=self.state.stop_requested
        )
        if self._function_s and self.state.result_fingerprint is not None:
            last_words.let_functions_return(self._launcher, self.state.members, self._function_s)
        if not self.state.stop_requested:  # a stop request does not wait for deletions
            self._committer.close(_CLEANING_PATIENCE_S, ended=True)
        return self.state

    def _enter(self) -> None:
        self.state = self._startup.own(self.state)
        host, port = self._launcher.rendezvous()
        keys = f"{self._files.name}/{self.state.driver}"
        self.state, found, workers = self._startup.take_over(replace(self.state, rendezvous=(host, port, keys)))
        for worker in workers:
            self._translator.welcome(worker)
        self._record("started", self._startup.about(self.state), durable=True)
        self._gcs.begin(self._startup.give_up_entries())
        self._do((self.state, found))
        self._do(self._machine.begin(self.state, self._clock.monotonic()))

    def _last_words_s(self) -> float:
        return last_words.limit_s(self.state, self._clock.monotonic())

    # -- in --

    def _next_events(self) -> list[Event]:
        events: list[Event] = []
        for happened in self._launcher.wait(_TICK_S if self._inbox.empty() else 0.0):
            event = self._translator.event_of(happened)
            if event is not None:
                events.append(event)
        with contextlib.suppress(Empty):
            while True:
                events.append(self._inbox.get_nowait())
        now = self._clock.monotonic()
        if not events or now - self._ticked_at >= _TICK_S:  # thousands of workers always produce events
            self._ticked_at = now
            events.append(Tick())
        return events

    # -- out --

    def _do(self, outcome: tuple[State, list[Command]]) -> None:
        self.state, commands = outcome
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        for worker, method, args in calls_of(with_secret(command, self._launcher.secret)):
            self._launcher.call(worker, method, *args)
        match command:
            case StartWorker(worker=worker, avoid=avoid):
                self._launcher.start(worker, avoid)
            case KillWorker(worker=worker, at_once=at_once):
                self._translator.forget(worker)
                self._launcher.kill(worker, at_once=at_once)
            case CollectSave(generation=generation, step=step, members=members):
                self._committer.begin(generation, step)
                for member in members:
                    self._throttle.ask(member, generation, step)
            case SumFingerprint(parts=parts):
                self._inbox.put(Fingerprinted(fingerprint=fingerprint_of(parts)))
            case CommitSave():  # its generation and the steps before it are in the journal first
                self._committer.commit(command, self._known(), after=self._recorder.mark())
            case DeleteCheckpoints(prefixes=prefixes):
                self._committer.distrust(prefixes)
            case Answer():
                self._requests.answer(command)
            case Record(kind=kind, fields=fields, durable=durable, awaited_by=generation):
                self._record(kind, dict(fields), durable=durable, awaited_by=generation)
            case End(error=error):
                self._ended, self._error = True, self._explained(error)

    def _collect(self, worker: WorkerId, generation: GenerationId, step: int) -> None:
        self._launcher.call(worker, "collect_save", generation, step, self.state.limits.save_timeout_s)

    def _explained(self, error: BaseException | None) -> BaseException | None:
        shortage = self._launcher.describe_shortage() if isinstance(error, ClusterError) else ""
        return ClusterError(f"{error} {shortage}") if shortage else error

    def _known(self) -> ManifestContext:
        return ManifestContext(
            arithmetic={**(self.state.arithmetic or {}), numerics.KEY: numerics.whole(self.state.numerics)},
            num_samples=self.state.num_samples,
            blocks=self.state.blocks,
            contents=self.state.contents,
            decisions=self.state.decisions,
            build_seed=self.state.build_seed,
        )

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        self._listen(kind, fields)
        if kind in LOUD:
            _events_log.log(LOUD[kind], "run %s: %s", self._files.name, incident_text(kind, fields))

    def _record(
        self, kind: str, fields: dict[str, Any], *, durable: bool = False, awaited_by: GenerationId | None = None
    ) -> None:
        written = None if awaited_by is None else partial(self._inbox.put, Recorded(generation=awaited_by))
        self._recorder.record(kind, fields, durable=durable, written=written)  # first: Ctrl-C may interrupt a listener
        self._tell(kind, fields)
        self._gcs.on_entry(kind, fields)
