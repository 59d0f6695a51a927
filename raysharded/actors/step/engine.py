"""One worker's training in one generation. Knows torch, and no Ray.

A step has four parts:

- compute: forward and backward of the microbatches, gradients reduced in the canonical order;
- agree: one small sum over all workers;
- apply: clip, optimizer;
- snapshot: start its copy to host memory and the transfers of its mirror or parity.

The agreement of step `s` also commits step `s - 1`: a worker reaches it only with everything that it holds of `s - 1`
for others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.groups import Groups
from raysharded.actors.compilation.compiled_blocks import Compilation
from raysharded.actors.model.build import Wrapped
from raysharded.actors.model.inventory import Item, compare
from raysharded.actors.model.param_layout import Replication
from raysharded.actors.numerics.bit_digest import flip_bit
from raysharded.actors.numerics.grad_norm import NORM_WORDS, square_sum_words
from raysharded.actors.numerics.step_consensus import Agreed, Contribution, Flags, agree
from raysharded.actors.shards.parity import keeper_of
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.restore import Restored, restore
from raysharded.actors.shards.saver import Saver, decide
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.actors.step.assembly import Surroundings, assemble, call_in_the_middle
from raysharded.actors.step.gradient import Computed
from raysharded.actors.step.pending_reports import Reports
from raysharded.actors.task_calls.remarks import Notes, Say
from raysharded.actors.telemetry.phases import Phases
from raysharded.checkpoint import Storage
from raysharded.data import Loader
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId
from raysharded.layout import StateSpec
from raysharded.protocol.job import Job
from raysharded.protocol.messages import Corruption, FromCheckpoint, FromMemory, StepReport, StopReason

_POLL_S = 0.05


class Engine:
    """The model of one generation on one worker, and its training loop.

    One thread trains; other threads call `request_boundary` and `request_save`.
    """

    def __init__(
        self,
        job: Job,
        place: RankPosition,
        groups: Groups,
        store: ShardStore,
        loader: Loader,
        eval_loader: Loader | None,
        storage: Storage,
        saver: Saver,
        device: torch.device,
        probe: Callable[[str, int], None],
        task_calls: threading.Lock,
        notes: Notes,
        compilation: Compilation | None = None,
    ) -> None:
        """`task_calls`: held during calls of the task's code; another thread may build the next generation's model.
        `notes`: the worker's. `compilation`: blocks compiled in this process, if their bits must not depend on it."""
        self._say: Say = partial(notes.say, aloud=place.rank == 0)
        self._task_calls, self._compilation = task_calls, compilation
        self._job, self._place, self._groups, self._store = job, place, groups, store
        self._loader, self._eval_loader, self._storage, self._saver = loader, eval_loader, storage, saver
        self._device, self._probe = device, probe
        self.step = place.spec.source.step
        self._in_phase = Phases(self.generation, lambda: groups.aborted)
        self._reports = Reports(self.generation, place.spec.world_size, self._in_phase, notes)
        self._keeper = keeper_of(place, groups, store)
        self._boundary, self._save_asked = threading.Event(), threading.Event()
        self._exact = job.engine.reduction == "exact"
        self._own: ShardBuffer | None = None
        """The newest snapshot; it may still be filling."""
        self._spec: StateSpec | None = None
        self._spec_is_final = False
        """True once the optimizer has made its state of the used parameters, in its first step."""
        self._memory_is_checked = False
        loader.skip(place.spec.decisions.skips, place.number_of("order"), place.spec.blocks)

    @property
    def generation(self) -> GenerationId:
        return self._place.spec.generation

    @property
    def driver(self) -> str:
        """Name of the driver that formed the generation."""
        return self._place.spec.driver

    @property
    def phase(self) -> str:
        """Current phase of the training thread. Any thread."""
        return self._in_phase.name

    @property
    def phase_since(self) -> float:
        """Start of that phase in monotonic seconds. Any thread."""
        return self._in_phase.since

    @property
    def reports(self) -> deque[StepReport]:
        """Reports of the newest steps. Any thread."""
        return self._reports.recent

    @property
    def reports_when_stopped(self) -> tuple[StepReport, ...]:
        """Reports for the driver at the end, in case it has missed some."""
        return self._reports.when_stopped(self._place.rank)

    @property
    def updated(self) -> threading.Condition:
        """Notified when a report is added."""
        return self._reports.updated

    # -- before training --

    def prepare(self, prepared: Wrapped | None, objects: BuiltObjects) -> Restored:
        """Give the model its parameters and state for this generation.

        `prepared`: nodes of the model that are wrapped already. `objects`: the model and optimizer of this process,
        built if they are not; their owner releases them.
        """
        with self._calling_the_task():
            return self._prepare(prepared, objects)

    def _prepare(self, prepared: Wrapped | None, objects: BuiltObjects) -> Restored:
        job, groups, tried = self._job, self._groups, objects.tried
        with self._in_phase("build"):
            parts = assemble(
                Surroundings(
                    job=job,
                    place=self._place,
                    groups=groups,
                    store=self._store,
                    loader=self._loader,
                    eval_loader=self._eval_loader,
                    device=self._device,
                    in_phase=self._in_phase,
                    say=self._say,
                ),
                prepared,
                objects,
                is_new=self.step == 0 or not isinstance(self._place.spec.source, FromMemory),
                on_reduce=lambda: self._probe("backward", self.step + 1),
            )
            self._optimizer, self._gradient, self._live = parts.optimizer, parts.gradient, parts.live
            self._names, self._evaluator, self._applying = parts.names, parts.evaluator, parts.applying
            self._audit, self._proof, self._check_memory = parts.audit, parts.proof, parts.check_memory
            self._gradient.rounds.on_gradient = self._on_gradient
            if self._compilation is not None:
                self._compilation.watch(parts.sharded, self._in_phase)
            call_in_the_middle(parts.sharded, lambda: self._probe("forward", self.step + 1))
        with self._in_phase("reshard"):
            restored = restore(
                self._place,
                job,
                self._live,
                self._store,
                self._storage,
                groups,
                self._keeper,
                lambda p: self._probe(p, self.step + 1),
                self._compare_built,
            )
        with self._in_phase("load"):
            left_out = self._live.load_from(restored.own)
            restored.remark(self._say)
            if isinstance(self._place.spec.source, FromCheckpoint):
                self._optimizer.remark_changes(left_out, None)
            else:  # a worker that joins does not know the previous optimizer
                self._optimizer.remark_changes(left_out, (tried or parts.tried).kind)
            self._spec = restored.own.spec if self.step else None
            self._gradient.watch_buffers()
            groups.state.barrier()
        return restored

    def _compare_built(self, drawn: Iterable[Item]) -> None:
        """Raise InexactError if the members have built, or drawn, different things."""
        own = [*self._live.inventory.items_without(self._live.carried), *self._optimizer.group_items(), *drawn]
        compare(own, self._place.spec.members, type(self._job.task).__name__, self._groups.state)

    @property
    def preparation_seconds(self) -> dict[str, float]:
        """Seconds of `prepare`, by phase."""
        return self._in_phase.seconds

    def settle(self) -> None:
        """After an abort: return when nothing writes into this worker's buffers any more."""
        if self._own is not None:
            with suppress(Exception):  # a failed copy does not count
                self._own.wait()
        self._keeper.settle()

    def request_boundary(self) -> None:
        """Request, through the next agreement, that all workers stop after the step it closes. Any thread."""
        self._boundary.set()

    def request_save(self) -> None:
        """Request a checkpoint from all workers, through the next agreement. Any thread.

        It is of the step that the agreement closes, or of the first later step at which the previous checkpoint is
        written.
        """
        self._save_asked.set()

    def save_held(self) -> None:
        """Begin to write the step that is held, while no other checkpoint is being written."""
        own = self._store.find(self.step, self.generation, "snapshot")
        self._saver.begin(own, self.generation, self.driver, self._place.share)

    # -- training --

    def run(self) -> StopReason:
        """Train to the end, or to a boundary that the driver requested; the last step is committed on return."""
        self._gradient.plan_reading(self.step + 1)
        if self.step >= self._job.max_steps and self._job.saves_at(self.step):
            self._save(self._store.find(self.step, self.generation, "snapshot"))
        while self.step < self._job.max_steps:
            agreed = self._one_step(self.step + 1)
            if self._compilation is not None:
                self._compilation.end_step(self.step, self._storage, self.request_save)
            if agreed.flags.boundary and self.step < self._job.max_steps:
                self._commit_last()
                return StopReason.BOUNDARY
        self._commit_last()
        return StopReason.FINISHED

    def _one_step(self, step: int) -> Agreed:
        self._in_phase.restart()
        self._audit.begin(step)
        self._proof.begin()
        with self._in_phase("data"):
            self._probe("data", step)
        with self._calling_the_task():
            computed = self._gradient.compute(step)
        if not self._memory_is_checked:  # FSDP2 completes its initialisation in the first forward
            self._check_memory()
            self._memory_is_checked = True
        self._gradient.plan_reading(step + 1)
        contribution = self._contribution(computed)
        if self._proof.is_due:
            with self._calling_the_task():
                self._proof.check(step, computed.results)
        with self._in_phase("mirror"):
            self._join_copies()
        if self._audit.is_due:
            with self._calling_the_task():
                self._audit.check(step, computed.results)
        self._probe("agree", step)
        with self._in_phase("agree"):
            agreed = agree(contribution, self._job.batch.num_microbatches, self._groups.state.sum_int64)
        with self._calling_the_task():
            skipped = self._applying.why_not(step, agreed)
            with self._in_phase("apply"):
                lr = self._apply(step, agreed) if skipped is None else self._applying.leave_out(step)
        self.step = step
        evaluation: dict[str, float] = {}
        if self._evaluator.is_due(step):
            with self._calling_the_task(), self._in_phase("evaluate"):
                evaluation = self._evaluator.evaluate(step)
                self._gradient.check_buffers("evaluation", step)
        with self._in_phase("snapshot"):
            own = self._snapshot(step)
        last = step >= self._job.max_steps
        decision = decide(agreed.flags, due=self._job.saves_at(step), last=last)
        if last:  # its checkpoint may have to wait for the previous one
            self._reports.add(step, agreed, lr, evaluation, decision, skipped, self._audit.seconds)
        if decision.start:
            with self._in_phase("save"):
                self._save(own)
            if contribution.flags.save_now:  # otherwise it was requested later: it stays pending
                self._save_asked.clear()
        if not last:
            self._reports.add(step, agreed, lr, evaluation, decision, skipped, self._audit.seconds)
        return agreed

    @contextmanager
    def _calling_the_task(self) -> Iterator[None]:
        """A context in which no other thread calls the task's code: its draws and settings would change the numbers.

        Raises CollectiveAborted if the generation is aborted while waiting: a constructor may take long.
        """
        if not self._task_calls.acquire(blocking=False):
            with self._in_phase("prepare"):
                while not self._task_calls.acquire(timeout=_POLL_S):
                    if self._groups.aborted:
                        raise CollectiveAborted("aborted while another thread called the task's code")
        try:
            yield
        finally:
            self._task_calls.release()

    def _on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Handle one unit's gradient of a microbatch, before anything else is done with it."""
        faults = self._job.faults
        if faults is not None and faults.corrupts(self._place.worker, self.step + 1):
            flip_bit(gradient)
        if not self._gradient.rounds.first_alone:  # a proof's recomputation is no part of the step
            self._audit.note(index, gradient)
            self._proof.note(index, gradient)

    @property
    def corruption(self) -> Corruption | None:
        """Finding of an audit or a proof that ended the training."""
        return self._proof.corruption or self._audit.corruption

    def _contribution(self, computed: Computed) -> Contribution:
        names = computed.results.metric_names or ()
        self._names.agree("train", names)
        with self._in_phase("norm"):
            digits, finite = self._norm_words()
        speaks = self._place.tensor_rank == 0  # the others of its tensor parallel group computed the same
        losses, metrics = computed.results.pairs() if speaks else ({}, {})
        return Contribution(
            losses=losses,
            metrics=metrics,
            metric_names=names,
            norm_words=digits,
            read_digest=computed.read_digest if speaks else (0, 0),
            num_reads=computed.num_reads if speaks else 0,
            flags=Flags(
                non_finite_gradient=not finite,
                boundary=self._boundary.is_set(),
                save_busy=self._saver.busy,
                save_now=self._save_asked.is_set(),
            ),
            uses=computed.uses,
        )

    def _norm_words(self) -> tuple[torch.Tensor, bool]:
        """Norm words of the gradients that this worker reports, and whether all of its gradients are finite."""
        words, finite = torch.zeros(NORM_WORDS, dtype=torch.int64), True
        for holders in Replication:
            own, own_finite = square_sum_words(self._optimizer.gradients(holders))
            words, finite = words + own if self._place.speaks_for(holders) else words, finite and own_finite
        return words, finite

    def _apply(self, step: int, agreed: Agreed) -> float:
        self._probe("apply", step)
        return self._applying.apply(step, agreed)

    def _snapshot(self, step: int) -> ShardBuffer:
        self._settle_spec()
        assert self._spec is not None
        own = self._place.begin_snapshot(self._store, step, self._spec)
        self._live.copy_to(own)
        self._own = own
        self._probe("snapshot", step)
        self._keeper.start(own)
        return own

    def _join_copies(self) -> None:
        """Return when the newest snapshot is complete, and what others hold of it: then the live state may change."""
        if self._own is not None:
            self._own.wait()
        self._keeper.join()

    def _settle_spec(self) -> None:
        """Settle the contents of the state.

        This happens with the optimizer's first step in this generation, and with each step that is a parameter's first
        one.
        """
        if self._spec_is_final:
            self._live.check_spec(self._applying.begun)
            if not self._applying.begun:
                return
        spec = self._live.spec()
        names = {tensor.name for tensor in self._spec.tensors} if self._spec else set()
        self._spec = self._spec if names == {tensor.name for tensor in spec.tensors} else spec
        self._spec_is_final = self._applying.has_applied

    def _save(self, own: ShardBuffer) -> None:
        self._probe("save", own.step)
        if not self._saver.wait_until_idle(lambda: self._groups.aborted):  # only the last step's save has to wait
            raise CollectiveAborted("aborted while waiting for the previous checkpoint")
        self._saver.begin(own, self.generation, self.driver, self._place.share)

    def _commit_last(self) -> None:
        with self._in_phase("commit"):
            self._join_copies()
            self._groups.state.barrier()
