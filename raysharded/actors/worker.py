"""A worker: one rank, one device. A launcher may call its methods, each from a separate thread.

The worker does not depend on its launcher: the Ray launcher makes it an actor, tests make it a plain process.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm import link_check
from raysharded.actors.comm.abortable_wait import keep_until_ended
from raysharded.actors.comm.groups import Groups
from raysharded.actors.compilation.compiled_blocks import Compilation
from raysharded.actors.device.device_errors import require_device
from raysharded.actors.model.build import Wrapped
from raysharded.actors.preparation import Preparations
from raysharded.actors.process import environment, preemption_notices
from raysharded.actors.process.leave_signal import LeaveInbox
from raysharded.actors.process.stop_reason import Ends, travelling
from raysharded.actors.session.computing_threads import computing_thread
from raysharded.actors.session.session_task import SessionTask, with_session_task, words_for
from raysharded.actors.shards.erasure import erasure_code
from raysharded.actors.shards.position import ARRIVAL_TIMEOUT_S, MEETING_TIMEOUT_S, RankPosition, rendezvous_of
from raysharded.actors.shards.restore import serve
from raysharded.actors.shards.saver import Saver, fingerprint_of
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.collation import AheadOfUse
from raysharded.actors.step.engine import Engine
from raysharded.actors.step.pending_reports import REPORTS_KEPT, add_newest
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.telemetry.busy_sampler import Sampler
from raysharded.checkpoint import Storage, open_storage
from raysharded.errors import RayshardedError, StaleGeneration
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Share, parity_of
from raysharded.overrides import Decisions
from raysharded.protocol.job import Job
from raysharded.protocol.messages import (
    GenerationReady,
    GenerationSpec,
    Prepared,
    ProbeReply,
    Progress,
    Saved,
    StepReport,
    Stopped,
    StopReason,
    WorkerInfo,
    WorkerNotice,
)
from raysharded.protocol.session import PartOf, for_next_driver

T = TypeVar("T")


class Worker:
    """One worker of a run. Either `form` or `train` runs at a time; the other methods may be called meanwhile."""

    def __init__(self, worker: WorkerId, job: Job, storage: Storage | None = None) -> None:
        """`storage`: the run's; None: that of the job's URL."""
        self._worker, job = worker, with_session_task(job)
        self._device, self._refused = environment.prepare_worker(job)
        is_exact = job.engine.reduction == "exact"
        self._compilation = Compilation(job.engine, self._device) if is_exact else None
        self._storage = storage or open_storage(job.run_url)
        self._store = ShardStore(pin_memory=job.use_gpu)
        self._saver, self._share = Saver(self._storage), Share()
        self._sources = environment.sources_of(job, collates_later=isinstance(job.task, SessionTask))
        self._sources.training.ahead = AheadOfUse(job.task, self._device)
        self._job = job = job if self._sources.process is None else job.without_data()
        self._compute_thread: int | None = None
        self._changing = threading.Lock()
        """Guards the next five fields: an interrupt may arrive before the generation that it is meant for."""
        self._asked = self._generation = self._interrupted = GenerationId(0)
        self._decisions = Decisions()
        self._groups: Groups | None = None
        self._engine: Engine | None = None
        self._task_calls = threading.Lock()
        """Held by a thread while it calls the task's code."""
        self._objects = BuiltObjects(job.task, job.engine, self._sources.training)
        self._computing = computing_thread(self._begin_computing, job, self._device, self._objects, self._store)
        self._preparations = Preparations(job, self._task_calls, self._objects)
        self._reports_before: deque[StepReport] = deque(maxlen=REPORTS_KEPT)
        """Step reports of older generations: the driver may die before it has recorded them in the journal."""
        self._sampler = Sampler(lambda: self._compute_thread, lambda: self._engine)
        self._sampler.start()
        self._words = words_for(job.task)
        self._notes, self._ends, self._left_s = Notes(self._words), Ends(worker), 0.0
        self._leaving = LeaveInbox(worker, grace_s=job.grace_s)
        self._leaving.listen()
        preemption_notices.watch(job.preemption_notices, self._leaving.tell_node)

    def _begin_computing(self) -> None:
        environment.use_threads(self._job.num_threads)
        if self._compilation is not None:
            self._compilation.settle()
        self._compute_thread = threading.get_ident()

    # -- called once --
    def ready(self) -> WorkerInfo:
        """Describe this worker, after it has read some samples and built the model once without memory.

        This finds errors and runs torch's lazy imports before any other worker waits for this one.
        """
        try:
            return self._get_ready()
        except RayshardedError as error:
            raise travelling(error, self._words) from None

    def _get_ready(self) -> WorkerInfo:
        if self._refused is not None:
            raise self._refused
        parity = parity_of(self._job.engine.redundancy)
        if parity is not None:
            erasure_code(parity)  # a missing requirement fails here, not when the run first has enough workers
        self._computing.build()
        if self._sources.collates_later and self._objects.loader(self._sources.training) is self._sources.training:
            self._sources.collate_by(self._job.task.collate)  # known since the function came to `session.shard`
        self._sources.check()
        self._computing.submit(environment.warm_up_gpu, self._device, self._job.engine).result()
        if self._compilation is not None:
            catch_up, seed = self._compilation.catch_up, self._job.batch.seed
            self._computing.submit(catch_up, self._job.task, self._job.engine, self._storage, seed).result()
        gc.collect()
        gc.freeze()  # imported objects stay: otherwise every recovery's collection would scan them
        self._probe("ready", 0)
        return environment.facts_of(self._device, self._job.num_threads, self._sources.training)

    # -- the long calls --

    def prepare(self, spec: GenerationSpec) -> Prepared:
        """Prepare the next generation in the background: connect to its members and build its model.

        A newer preparation replaces this one; forming a generation in any other way discards it.
        """
        where = rendezvous_of(spec, self._worker, self._job, MEETING_TIMEOUT_S)
        error = self._preparations.try_to_make(self._worker, spec, where)
        return Prepared(prefix=spec.prefix, error=error)

    def form(self, spec: GenerationSpec) -> GenerationReady | Stopped:
        """Join a generation: connect, build the model, take over this worker's share of the state."""
        with self._changing:
            self._asked = max(self._asked, spec.generation)
        self._preparations.begin_forming(spec.generation)
        return self._computing.submit(self._form_guarded, spec).result()

    def _form_guarded(self, spec: GenerationSpec) -> GenerationReady | Stopped:
        if spec.generation <= self._generation:
            raise StaleGeneration(f"generation {spec.generation} came after {self._generation}")
        if (failed := self._ends.device_failure) is not None:
            return self._hand_over(spec, failed)
        started = time.perf_counter()
        self._leave()
        self._left_s = time.perf_counter() - started
        prepared = self._preparations.take(spec.prepared)
        self._enter(spec, Groups(self._job.use_gpu) if prepared is None else prepared[0])
        return self._guarded(lambda: self._form(spec, prepared and prepared[1]))

    def _enter(self, spec: GenerationSpec, groups: Groups) -> None:
        with self._changing:
            self._generation, self._decisions, self._groups = spec.generation, spec.decisions, groups
            is_interrupted = self._interrupted >= spec.generation
        if is_interrupted:
            groups.abort()

    def _hand_over(self, spec: GenerationSpec, failed: RayshardedError) -> Stopped:
        """Serve the members of a generation from host memory, if they need what this worker holds; ABORTED: in vain."""
        self._ends.keep_if_failed(self._groups, self._store.stop_pinning())
        self._enter(spec, groups := Groups(use_gpu=False))
        reason, error = StopReason.DEVICE, failed
        if self._worker in spec.failed_devices:
            try:
                serve(spec, self._worker, self._job, groups, self._store, is_loop=self._objects.registered is not None)
            except Exception as problem:  # noqa: BLE001 - the boundary of the actor: everything becomes a message
                found = self._ends.of(problem, self._device, interrupted=groups.aborted)
                groups.abort()
                reason, error = StopReason.ABORTED, travelling(found.error, self._words).with_traceback(None)
        return replace(self._stopped(reason, error), reports=())

    def _form(self, spec: GenerationSpec, wrapped: Wrapped | None) -> GenerationReady:
        assert self._groups is not None
        require_device(self._device)
        place = RankPosition.of(spec, self._worker, self._job.engine)
        place.expect(self._store)
        self._share = place.share
        self._probe("form", spec.source.step + 1)
        started = time.perf_counter()
        if not spec.prepared:
            self._groups.form(rendezvous_of(spec, self._worker, self._job, ARRIVAL_TIMEOUT_S))
        else:
            self._groups.take_over()
        connected_s = time.perf_counter() - started
        engine = Engine(
            self._job,
            place,
            self._groups,
            self._store,
            self._objects.loader(self._sources.training),
            self._sources.held_out,
            self._storage,
            self._saver,
            self._device,
            self._probe,
            self._task_calls,
            self._notes,
            self._compilation,
        )
        self._engine = engine
        self._sources.training.require_steps(self._job.max_steps)
        restored = engine.prepare(wrapped, self._objects)
        return GenerationReady(
            generation=spec.generation,
            step=engine.step,
            spec=restored.own.spec,
            seconds={"leave": self._left_s, "connect": connected_s, **engine.preparation_seconds},
            bytes_received=restored.bytes_received,
            bytes_read=restored.bytes_read,
        )

    def train(self, generation: GenerationId) -> Stopped:
        """Train until the end, a boundary, an error or an abort.

        All members hold the new layout, so this worker first frees all other layouts.
        """

        def begin() -> Engine:
            engine = self._engine_of(generation)
            self._store.drop_other_layouts(generation)
            return engine

        return self._computing.train(begin, lambda run: self._guarded(lambda: self._stopped(run())))

    def rest(self, generation: GenerationId) -> Stopped:
        """Report the buffers that this worker holds, in place of `train`; do no step. Frees layouts as `train` does."""
        return self._computing.submit(self._rest, generation).result()

    def _rest(self, generation: GenerationId) -> Stopped:
        self._engine_of(generation)
        self._store.drop_other_layouts(generation)
        return self._stopped(StopReason.BOUNDARY)

    def save_held(self, generation: GenerationId) -> None:
        """Begin this worker's part of a checkpoint of the step that it holds.

        Call after `train` or `rest` has stopped between two steps. Waits for a part that is still being written.
        """
        self._computing.submit(self._save_held, generation).result()

    def _save_held(self, generation: GenerationId) -> None:
        engine = self._engine_of(generation)
        if self._saver.wait_until_idle(lambda: self._asked > generation):
            engine.save_held()

    def _engine_of(self, generation: GenerationId) -> Engine:
        if generation != self._generation or self._engine is None:
            raise StaleGeneration(f"generation {generation} is over: this worker is in {self._generation}")
        return self._engine

    def _guarded(self, work: Callable[[], T]) -> T | Stopped:
        """Run a long call; an error that ends it frees the peers and becomes a message."""
        try:
            return work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the actor: everything becomes a message
            found = self._ends.of(error, self._device, interrupted=self._groups is not None and self._groups.aborted)
            return self._broken(found.reason, found.error)

    def _broken(self, reason: StopReason, error: RayshardedError) -> Stopped:
        if self._groups is not None:
            self._groups.abort()
        forgotten = [] if self._engine is None else self._engine.settle()
        self._ends.keep_if_failed(self._engine, forgotten, self._store.drop_incomplete())
        return self._stopped(reason, travelling(error, self._words).with_traceback(None))

    def _stopped(self, reason: StopReason, error: RayshardedError | None = None) -> Stopped:
        engine = self._engine
        return Stopped(
            generation=self._generation,
            reason=reason,
            step=engine.step if engine else 0,
            phase=engine.phase if engine else "form",
            stopped_at=time.time(),
            held=self._store.held(self._worker),
            specs=self._store.specs(),
            reports=engine.reports_when_stopped if engine else (),
            error=error,
            corruption=engine.corruption if engine and reason is StopReason.CORRUPT else None,
        )

    def _leave(self) -> None:
        """Release the previous generation's groups and parameters, but not its shards in host memory."""
        if self._engine is not None:
            add_newest(self._reports_before, self._engine.reports)
        self._engine, aborted, ended = None, self._groups is not None and self._groups.aborted, list[Any]()
        self._objects.release()
        if self._groups is not None:
            ended = self._groups.close()
            self._groups = None
        environment.free_memory(self._device, twice=aborted)
        keep_until_ended(ended)

    # -- short calls, from other threads --
    check_links = staticmethod(link_check.check_links)

    def interrupt(self, generation: GenerationId) -> None:
        """Abort every collective of `generation`, or of an older one, that this worker is in or will enter."""
        with self._changing:
            self._interrupted = max(self._interrupted, generation)
            groups = self._groups if generation >= self._generation else None
        if groups is not None:  # the thread that computes may release them now
            groups.abort()

    def report(self, generation: GenerationId) -> Stopped:
        """The buffers that this worker holds, after a generation that it formed failed before training."""
        self.interrupt(generation)
        return self._computing.submit(self._stopped, StopReason.ABORTED).result()

    @property
    def generation(self) -> GenerationId:
        """The newest generation that this worker was to form, even if forming has not begun; 0 before the first."""
        return self._asked

    @property
    def decisions(self) -> Decisions:
        """The overrides that this worker's generation was formed with."""
        return self._decisions

    def newest_reports(self, after_step: int) -> tuple[StepReport, ...]:
        """The reports kept of all steps after this one, and of checkpoints shortly before it; of all generations."""
        engine = self._engine
        reports = (*self._reports_before, *(tuple(engine.reports) if engine else ()))
        return for_next_driver(reports, after_step)

    def write_part(self, part: PartOf, generation: GenerationId, driver: str) -> Saved:
        """Write a buffer that this worker holds as its rank's part of a checkpoint, once no computation runs."""

        def write() -> Saved:
            buffer = self._store.find(part.step, GenerationId(part.layout), part.medium, part.rank)
            return self._saver.write(buffer, generation, driver)

        return self._computing.submit(write).result()

    def request_boundary(self, generation: GenerationId) -> None:
        """Request that the whole generation stops after its current step."""
        engine = self._engine
        if generation == self._generation and engine is not None:
            engine.request_boundary()

    def request_save(self, generation: GenerationId) -> None:
        """Request a checkpoint of the current step from the whole generation."""
        engine = self._engine
        if generation == self._generation and engine is not None:
            engine.request_save()

    def look(self, generation: GenerationId) -> ProbeReply:
        """The step, phase and stack of this worker now, in any generation."""
        return self._sampler.look(generation, self._sources.stacks)

    def notice(self, after: int, timeout_s: float) -> WorkerNotice | None:
        """The next leave notice after the first `after` ones; waits for it up to `timeout_s`."""
        return self._leaving.next(after, timeout_s)

    def poll(self, generation: GenerationId, after_step: int, timeout_s: float) -> Progress:
        """The reports of steps after `after_step`; waits for one up to `timeout_s`."""
        engine = self._engine
        if generation != self._generation or engine is None:
            return Progress(generation=generation, reports=())
        reports, changed = engine.reports, engine.updated
        del engine  # a waiting call must not keep the model of a generation that is over

        def news() -> tuple[StepReport, ...]:
            return tuple(report for report in tuple(reports) if report.step > after_step)

        with changed:
            changed.wait_for(lambda: bool(news()) or self._generation != generation, timeout_s)
        return Progress(generation=generation, reports=news())

    def collect_save(self, generation: GenerationId, step: int, timeout_s: float) -> Saved:
        """The outcome of this worker's part of a checkpoint; waits for it up to `timeout_s`."""
        return self._saver.collect(generation, step, timeout_s)

    def fingerprint(self, generation: GenerationId) -> Saved:
        """This worker's part of the fingerprint of the newest state; between `train` calls only."""
        own = self._store.newest_own()
        assert own is not None
        return fingerprint_of(own, self._share, generation)

    def finish(self, timeout_s: float) -> None:
        """Let a user's training function return, as the run is over; waits for it up to `timeout_s`."""
        self._computing.finish(timeout_s)

    def _probe(self, phase: str, step: int) -> None:
        if self._job.faults is not None:
            self._job.faults.strike(self._worker, step, phase)
