"""One worker's training in one generation. Knows torch, and no Ray. A step's body is in `step.py`."""

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
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import leave_when
from raysharded.actors.model.build import Wrapped
from raysharded.actors.model.inventory import Item, compare
from raysharded.actors.shards.device_state import shard_bytes
from raysharded.actors.shards.parity import keeper_of
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.restore import Restored, hand_over, moving_memory, restore
from raysharded.actors.shards.saver import Saver
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.actors.step.assembly import Surroundings, assemble, call_in_the_middle
from raysharded.actors.step.pending_reports import Reports
from raysharded.actors.step.step import Step, Steps
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.task_calls.task_errors import naming
from raysharded.actors.telemetry.phases import Phases
from raysharded.checkpoint import Storage
from raysharded.data import Loader
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId
from raysharded.overrides import Decisions
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
        `notes`: the worker's. `compilation`: compilations of this process, in exact mode."""
        self._job, self._place, self._groups, self._store = job, place, groups, store
        self._saver, self._probe, self._task_calls = saver, probe, task_calls
        self._in_phase = Phases(self.generation, lambda: groups.aborted)
        self._around = Surroundings(
            job=job,
            place=place,
            groups=groups,
            store=store,
            loader=loader,
            eval_loader=eval_loader,
            device=device,
            in_phase=self._in_phase,
            say=partial(notes.say, aloud=place.rank == 0),
            compilation=compilation,
            storage=storage,
            keeper=keeper_of(place, groups, store),
            saver=saver,
            reports=Reports(self.generation, place.spec.world_size, self._in_phase, notes),
            probe=probe,
            calling_the_task=self._calling_the_task,
            boundary=threading.Event(),
            save_asked=threading.Event(),
        )
        self._steps: Steps | None = None
        """None until the generation is prepared."""
        if kept := accelerator().kept_settings():
            self._around.say("environment", f"settings of the environment that are kept: {'; '.join(kept)}")
        decisions = place.spec.decisions
        loader.skip(decisions.skips, place.number_of("order"), place.spec.blocks, decisions.weights)

    @property
    def generation(self) -> GenerationId:
        return self._place.spec.generation

    @property
    def driver(self) -> str:
        """Name of the driver that formed the generation."""
        return self._place.spec.driver

    @property
    def step(self) -> int:
        """The newest step that is done. Any thread."""
        return self._place.spec.source.step if self._steps is None else self._steps.done

    @property
    def rank(self) -> int:
        """This worker's rank in the generation."""
        return self._place.rank

    @property
    def is_last(self) -> bool:
        """True if the newest step is the run's last one."""
        return self.step >= self._job.max_steps if self._steps is None else self._steps.is_last(self.step)

    @property
    def is_aborted(self) -> bool:
        """True if the generation's collectives were aborted, or one has failed. Any thread."""
        return self._groups.aborted or self._groups.failed

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
        return self._around.reports.recent

    @property
    def reports_when_stopped(self) -> tuple[StepReport, ...]:
        """Reports for the driver at the end, in case it has missed some."""
        return self._around.reports.when_stopped(self._place.rank)

    @property
    def updated(self) -> threading.Condition:
        """Notified when a report is added."""
        return self._around.reports.updated

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
        leave_when(lambda: groups.aborted)
        compilation = self._around.compilation
        if compilation is not None:
            compilation.settle(self._place.number_of("compile"))
        with self._in_phase("build"):
            parts = assemble(
                self._around,
                prepared,
                objects,
                is_new=self.step == 0 or not isinstance(self._place.spec.source, FromMemory),
                on_reduce=lambda: self._probe("backward", self.step + 1),
            )
            live, optimizer = parts.live, parts.optimizer
            if compilation is not None:
                compilation.watch(parts.sharded, self._in_phase)
            call_in_the_middle(parts.sharded, lambda: self._probe("forward", self.step + 1))

        def compare_built(drawn: Iterable[Item]) -> None:
            """Raise InexactError if the members have built, or drawn, different things."""
            own = [*live.inventory.items_without(live.carried), *optimizer.group_items(), *drawn]
            compare(own, self._place.spec.members, type(job.task).__name__, groups.state)

        self._place.expect_shards(self._store, shard_bytes(parts.sharded, parts.tried.keeps))
        with self._in_phase("reshard"), moving_memory(self._place, job, groups):
            if objects.registered is not None:
                hand_over(objects.registered, self._place, self._store, self._around.storage, groups)
            restored = restore(
                self._place,
                job,
                live,
                self._store,
                self._around.storage,
                groups,
                self._around.keeper,
                lambda p: self._probe(p, self.step + 1),
                compare_built,
                is_loop=objects.registered is not None,
            )
        with self._in_phase("load"):
            left_out = live.load_from(restored.own)
            restored.remark(self._around.say)
            if isinstance(self._place.spec.source, FromCheckpoint):
                optimizer.remark_changes(left_out, None)
            else:  # a worker that joins does not know the previous optimizer
                optimizer.remark_changes(left_out, (tried or parts.tried).kind)
            parts.gradient.watch_buffers()
            self._steps = Steps(self._around, parts, restored.own.spec if self.step else None, objects.registered)
            groups.state.barrier()
        return restored

    @property
    def preparation_seconds(self) -> dict[str, float]:
        """Seconds of `prepare`, by phase."""
        return self._in_phase.seconds

    def settle(self) -> list[ShardBuffer]:
        """After an abort: return when nothing writes into this worker's buffers any more.

        Returns those of a step that does not count, which are forgotten.
        """
        if self._steps is not None and self._steps.own is not None:
            with suppress(Exception):  # a failed copy does not count
                self._steps.own.wait()
        self._around.keeper.settle()
        return [] if self._steps is None else self._steps.meetings.give_up()

    def request_boundary(self) -> None:
        """Request, through the next agreement, that all workers stop after the step it closes. Any thread."""
        self._around.boundary.set()

    def request_save(self) -> None:
        """Request a checkpoint from all workers, through the next agreement. Any thread.

        It is of the step that the agreement closes, or of the first later step at which the previous checkpoint is
        written.
        """
        self._around.save_asked.set()

    def save_held(self) -> None:
        """Begin to write the step that is held, while no other checkpoint is being written."""
        own = self._store.find(self.step, self.generation, "snapshot")
        self._saver.begin(own, self.generation, self.driver, self._place.share)

    # -- training --

    def run(self) -> StopReason:
        """Train to the end, or to a boundary that the driver requested; the last step is committed on return."""
        self.begin()
        while not self.is_last:
            step = self.next_step()
            self._train(step)
            assert step.agreed is not None
            if step.agreed.flags.boundary and not self.is_last:
                self.commit_last()
                return StopReason.BOUNDARY
        self.commit_last()
        return StopReason.FINISHED

    def _train(self, step: Step) -> None:
        """The step of a task."""
        task, model = self._job.task, self._trained().parts.sharded.model
        with step:
            for batch in step.microbatches():
                with naming(step.where, "loss"):
                    loss = task.loss(model, batch)
                step.backward(loss)
                del batch, loss
            if task.max_grad_norm is not None:
                step.clip_grad_norm_(task.max_grad_norm)
            step.apply()

    def begin(self) -> None:
        """Begin to read for the first step, or to write the run's last step, if the generation begins with that."""
        steps = self._trained()
        steps.parts.gradient.plan_reading(self.step + 1)
        is_saved = self.step < self._job.max_steps and isinstance(self._place.spec.source, FromCheckpoint)
        if self.is_last and self._job.save_at_end and not is_saved:
            steps.save(self._store.find(self.step, self.generation, "snapshot"))

    def next_step(self) -> Step:
        """The step after the newest one."""
        return Step(self._trained(), self.step + 1)

    @property
    def steps(self) -> Steps:
        """The common ground of its steps, once the generation is prepared."""
        return self._trained()

    @property
    def decisions(self) -> Decisions:
        """Decisions that its steps are computed with."""
        return self._place.spec.decisions

    def commit_last(self) -> None:
        """Commit the newest step, which no agreement of a next one does. All workers call this together."""
        self._trained().commit_last()

    def _trained(self) -> Steps:
        assert self._steps is not None, "prepare comes first"
        return self._steps

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

    @property
    def corruption(self) -> Corruption | None:
        """Finding of an audit or a proof that ended the training."""
        if self._steps is None:
            return None
        return self._steps.parts.proof.corruption or self._steps.parts.audit.corruption
