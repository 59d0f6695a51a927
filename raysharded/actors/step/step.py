"""One step as one body, which a loop outside drives: a task's in `Engine.run`, or a user's own.

- `microbatches` and `backward` compute: forward and backward, gradients reduced in the canonical order;
- at its end `microbatches` agrees: one small sum over all workers;
- `apply` clips, and makes the optimizer's step;
- `commit` starts the snapshot's copy to host memory, and the transfers of its mirror or parity.

The agreement of step `s` also commits step `s - 1`: a worker reaches it only with everything that it holds of `s - 1`
for others. Audits, the first step's proof and the search for a number that is not finite yield more microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self

import torch

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.inventory import compare, find_difference
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.numerics.bit_digest import flip_bit, tensor_digest
from raysharded.actors.numerics.step_consensus import Agreed
from raysharded.actors.optimizer.learning_rate import schedule_item
from raysharded.actors.optimizer.loaded_state import is_registered
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.shards.saver import decide
from raysharded.actors.shards.store import ShardBuffer
from raysharded.actors.shards.whole_tensors import whole_weights
from raysharded.actors.step.agreement import Agreement
from raysharded.actors.step.assembly import Parts, Surroundings
from raysharded.actors.step.evaluation import OtherForwards
from raysharded.actors.step.gradient import Batches
from raysharded.actors.step.meetings import Meetings
from raysharded.actors.task_calls.process_state import refusing_changes
from raysharded.data import Loader
from raysharded.errors import CollectiveAborted, InexactError
from raysharded.layout import StateSpec
from raysharded.protocol.messages import NonFinite


class Steps:
    """The common ground of the steps of one generation. Training thread only."""

    def __init__(
        self, around: Surroundings, parts: Parts, spec: StateSpec | None, registered: RegisteredState | None = None
    ) -> None:
        """`spec`: contents of the state that was loaded; None before the run's first step. `registered`: a session's
        state, which is loaded."""
        self.around, self.parts, self.registered = around, parts, registered
        self.done = around.place.spec.source.step
        """The newest step that is done."""
        self.own: ShardBuffer | None = None
        """The newest snapshot; it may still be filling."""
        self.agreement = Agreement(around, parts)
        self.meetings = Meetings(around, registered)
        self._spec = spec
        self._spec_is_final = False
        """True once the optimizer has made its state of the used parameters, in its first step."""
        self._memory_is_checked = self._state_is_compared = False
        self.forwards = OtherForwards(
            parts.sharded, lambda: parts.gradient.forward is not None, watch=registered is not None
        )
        """Forwards of the model that are of no microbatch."""
        parts.gradient.rounds.on_gradient = self._on_gradient

    def _on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Handle one unit's gradient of a microbatch, before anything else is done with it."""
        faults = self.around.job.faults
        if faults is not None and faults.corrupts(self.around.place.worker, self.done + 1):
            flip_bit(gradient)
        if not self.parts.gradient.rounds.first_alone:  # a proof's recomputation is no part of the step
            self.parts.audit.note(index, gradient)
            self.parts.proof.note(index, gradient)
            self.parts.attribute_proof.note(index, gradient)

    def check_memory(self) -> None:
        """Check the units' memory once: FSDP2 completes its initialisation in the first forward."""
        if not self._memory_is_checked:
            self.parts.check_memory()
            self._memory_is_checked = True

    def is_last(self, step: int) -> bool:
        """True if this is the run's last step, also by the decision of a user's loop in it."""
        return step >= self.around.job.max_steps or (self.registered is not None and self.registered.is_last)

    def snapshot(self, step: int) -> ShardBuffer:
        """Begin to copy the state as of this step, and to send it to those that hold it for this worker."""
        self._settle_spec()
        assert self._spec is not None
        own = self.around.place.begin_snapshot(self.around.store, step, self._spec)
        self.parts.live.copy_to(own)
        self.own = own
        self.around.probe("snapshot", step)
        self.around.keeper.start(own)
        return own

    def join_copies(self) -> None:
        """Return when the newest snapshot is complete, and what others hold of it: then the live state may change."""
        if self.own is not None:
            self.own.wait()
        self.around.keeper.join()

    def _settle_spec(self) -> None:
        """Settle the contents of the state.

        This happens with the optimizer's first step in this generation, and with each step that is a parameter's first
        one.
        """
        applying, live = self.parts.applying, self.parts.live
        if self._spec_is_final:
            live.check_spec(applying.begun)
            if not applying.begun:
                return
        spec = live.spec()
        names = {tensor.name for tensor in self._spec.tensors} if self._spec else set()
        self._spec = self._spec if names == {tensor.name for tensor in spec.tensors} else spec
        self._spec_is_final = applying.has_applied

    def compare_state(self, step: int) -> None:
        """Compare the names and types of the optimizer's state, once, behind its first step. All workers call it.

        Raises InexactError, on every worker, if they differ: parts of it could not be exchanged.
        """
        if self._state_is_compared or not self.parts.applying.has_applied:
            return
        self._state_is_compared = True
        members, group = self.around.place.spec.members, self.around.groups.state
        with self.around.in_phase("agree"):
            found = find_difference(self.parts.live.forms(), len(members), group)
        if found is not None:
            raise InexactError(
                f"step {step}: the optimizer keeps other state on some workers than on others: worker {members[0]} has "
                f"{found.first}, where worker {members[found.rank]} has {found.other}. A step that skips a parameter "
                "by its values makes no state. Let it make the state of all parameters that have a .grad."
            )

    def digest(self, what: Literal["gradients", "optimizer", "parameters", "state"]) -> int:
        """Digest of this worker's shards, to find changes of them in places where nothing may change them.

        `optimizer`: the optimizer's state without what a loop has registered. `state`: parameters and all of it.
        """
        optimizer = self.parts.optimizer
        found = optimizer.gradients() if what == "gradients" else []
        if what in ("parameters", "state"):
            found += optimizer.written.values()
        if what in ("optimizer", "state"):
            kept = optimizer.state().items()
            found += [one for name, one in kept if what == "state" or not is_registered(name.rpartition(".")[2])]
        words = numbers_of(tensor_digest(local_of(tensor)) for tensor in found)
        return hash(tuple(words)) if words else 0

    def save(self, own: ShardBuffer) -> None:
        """Begin to write this worker's part of a checkpoint."""
        around, spec = self.around, self.around.place.spec
        around.probe("save", own.step)
        if not around.saver.wait_until_idle(lambda: around.groups.aborted):  # only the last step's save has to wait
            raise CollectiveAborted("aborted while waiting for the previous checkpoint")
        around.saver.begin(own, spec.generation, spec.driver, around.place.share)

    def commit_last(self) -> None:
        """Commit the newest step, which no agreement of a next one does."""
        with self.around.in_phase("commit"):
            self.meetings.settle()
            self.join_copies()
            self.around.groups.state.barrier()


class Step:
    """One step of a generation. All workers make the same calls together. Training thread only."""

    def __init__(self, steps: Steps, number: int) -> None:
        self.number = number
        """Number of the step, from 1 on."""
        self.agreed: Agreed | None = None
        """The agreement of all workers; None before the end of `microbatches`."""
        self.skipped: NonFinite | None = None
        """Why the step is left out, known with `agreed`."""
        self.steps, self._around, self._parts = steps, steps.around, steps.parts
        self._batches: Batches[None] | None = None
        self._asked_for_a_save = False
        self._max_norm: float | None = None
        self._lr = 0.0
        self._evaluation: dict[str, float] = {}

    @property
    def where(self) -> str:
        """Source of the newest microbatch's loss, for errors."""
        return self._parts.gradient.where

    @property
    def microbatch(self) -> int:
        """Number of the newest microbatch; -1 for padding."""
        _, index, _ = self._parts.gradient.at
        return -1 if index is None else index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.give_up(error)
            return
        try:
            self.commit()
        except BaseException as failed:
            self.give_up(failed)
            raise

    def microbatches(self) -> Iterator[Any]:
        """This worker's batches, collated and on its device; `backward` is called once for each.

        The loop's body is a function of the batch. It may run for padding, for another worker's microbatch, or again.
        After the last one the workers have agreed. Raises NonFiniteLoss, InexactError, CorruptNumbers or TaskError.
        """
        self._batches = self._compute()
        return self._batches

    def _compute(self) -> Batches[None]:
        steps, around, parts, step = self.steps, self._around, self._parts, self.number
        around.in_phase.restart()
        parts.audit.begin(step)
        parts.proof.begin(step)
        parts.attribute_proof.begin(step)
        with around.in_phase("data"):
            around.probe("data", step)
        with around.calling_the_task():
            computed = yield from parts.gradient.compute(step)
        steps.check_memory()
        parts.gradient.plan_reading(step + 1)
        parts.evaluator.plan_reading(step)
        contribution = steps.agreement.contribution(computed)
        self._asked_for_a_save = contribution.flags.save_now
        if parts.proof.is_due:
            with around.calling_the_task():
                yield from parts.proof.check(step, computed.results)
        with around.calling_the_task():
            yield from parts.attribute_proof.check(step, computed.results)
        with around.in_phase("mirror"):
            steps.join_copies()
        if parts.audit.is_due:
            with around.calling_the_task():
                yield from parts.audit.check(step, computed.results)
        around.probe("agree", step)
        with around.in_phase("agree"):
            steps.meetings.settle()
            agreed = steps.agreement.agree(contribution)
        with around.calling_the_task():
            self.skipped = yield from parts.applying.why_not(step, agreed)
        self.agreed = agreed

    def backward(self, loss: Any) -> None:
        """Add the gradient of the newest batch's loss to the step's. `loss`: as the result of `Task.loss`."""
        self._parts.gradient.backward(loss)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the mean gradient's global 2-norm to `max_norm` in the optimizer's step; returns the norm."""
        assert self.agreed is not None, "the workers have not agreed"
        self._max_norm = max_norm
        return math.nan if self.skipped else self.agreed.gradient_norm / self.agreed.weight

    def apply(self) -> None:
        """Make the optimizer's step with the task's learning rate, or none if the step is skipped."""
        applying, agreed = self._parts.applying, self.agreed
        assert agreed is not None, "the workers have not agreed"
        with self._around.calling_the_task(), self._around.in_phase("apply"):
            if self.skipped:
                self._lr = applying.leave_out(self.number)
            else:
                self._around.probe("apply", self.number)
                where = f"{type(self._around.job.task).__name__}.lr_scale, or a step hook, in step {self.number}"
                is_watched = self.number & (self.number - 1) == 0
                with refusing_changes(where) if is_watched else nullcontext():
                    if not applying.has_applied:
                        self._compare_schedules()
                    self._lr = applying.apply(self.number, agreed, self._max_norm)

    def _compare_schedules(self) -> None:
        """Raise InexactError if the workers' schedules give different rates, as a count of calls does after a join."""
        around, task = self._around, self._around.job.task
        own = [schedule_item(task, self.number)]
        compare(own, around.place.spec.members, type(task).__name__, around.groups.state)

    @contextmanager
    def applying(self) -> Iterator[None]:
        """As `apply`: a context in which the optimizer makes its step, with its own learning rates."""
        applying, agreed = self._parts.applying, self.agreed
        assert agreed is not None, "the workers have not agreed"
        with self._around.calling_the_task(), self._around.in_phase("apply"):
            if self.skipped:
                self._lr = applying.leave_out_by_itself(self.number)
                yield
            else:
                self._around.probe("apply", self.number)
                with applying.applying(self.number, agreed, self._max_norm) as self._lr:
                    yield

    def evaluate(self, data: Loader, num_samples: int, name: str) -> dict[str, float]:
        """The task's loss and metrics on the first samples of these data. `name`: prefix of their names in the report.

        All workers call it together, after the optimizer's step.
        """
        steps, around, parts, step = self.steps, self._around, self._parts, self.number
        steps.meetings.meet_alike(step, "evaluation", f"num_samples={num_samples}, name={name!r}")
        with around.calling_the_task(), around.in_phase("evaluate"), self._evaluating():
            found = parts.evaluator.evaluate(step, data, num_samples, name)
            parts.gradient.check_buffers("evaluation", step)
        self._evaluation |= {f"{name}.{key}" if name else key: value for key, value in found.items()}
        return found

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self.steps.forwards.evaluating(), refusing_changes(self._parts.evaluator.where(self.number)):
            yield

    def predict(self, compute: Callable[[Any], Any], data: Loader, num_samples: int, batch_size: int) -> list[Any]:
        """The outputs for each batch of the first samples of these data, on every worker. As `evaluate`."""
        steps, around, parts, step = self.steps, self._around, self._parts, self.number
        steps.meetings.meet_alike(step, "evaluation", f"num_samples={num_samples}, batch_size={batch_size}")
        with around.calling_the_task(), around.in_phase("evaluate"), self._evaluating():
            found = parts.evaluator.predict(step, compute, data, num_samples, batch_size)
            parts.gradient.check_buffers("evaluation", step)
        return found

    def shared(self, data: Loader, num_samples: int, batch_size: int) -> Iterator[tuple[list[int], list[Any]]]:
        """As `Evaluator.shared`. The phase stays until the next one begins: what computes with the batches is in it."""
        with self._around.in_phase("evaluate"):
            return self._parts.evaluator.shared(data, num_samples, batch_size)

    def weights(self, *, everywhere: bool) -> dict[str, torch.Tensor] | None:
        """As `whole_weights`. All workers call it together, after the optimizer's step.

        The phase stays until the next one begins: rank 0 may write the weights for longer than a step takes.
        """
        self.steps.meetings.meet(self.number, "weights")
        parts, around = self._parts, self._around
        with around.in_phase("save"):
            return whole_weights(parts.sharded, around.place, around.groups.state, everywhere=everywhere)

    def commit(self) -> None:
        """Evaluate if that is due; begin the snapshot, and a checkpoint if one is due; report the step."""
        steps, around, parts, step, agreed = self.steps, self._around, self._parts, self.number, self.agreed
        assert agreed is not None, "the workers have not agreed"
        steps.meetings.end(step)
        steps.done = step
        evaluation = self._evaluation
        if parts.evaluator.is_due(step):
            with around.calling_the_task(), around.in_phase("evaluate"), self._evaluating():
                evaluation = parts.evaluator.evaluate_due(step)
                parts.gradient.check_buffers("evaluation", step)
        steps.compare_state(step)
        microbatches = steps.agreement.exchange_microbatches() if around.job.records_microbatches else ()
        with around.in_phase("snapshot"):  # from here to the report nothing waits for another worker
            own = steps.snapshot(step)
        last = steps.is_last(step)
        due = around.job.save_at_end if last else around.job.saves_at(step)
        decision = decide(agreed.flags, due=due, last=last)
        if last or decision.start:
            steps.meetings.settle()
        report = (step, agreed, self._lr, evaluation, decision, self.skipped, parts.audit.seconds, microbatches)
        if last:  # its checkpoint may have to wait for the previous one
            around.reports.add(*report)
        try:
            if decision.start:
                with around.in_phase("save"):
                    steps.save(own)
                if self._asked_for_a_save:  # otherwise it was requested later: it stays pending
                    around.save_asked.clear()
        finally:
            if not last:  # also if the generation was aborted meanwhile: the step may be recovered from memory
                around.reports.add(*report)
        if around.compilation is not None:
            around.compilation.end_step(step, around.storage, around.save_asked.set)

    def give_up(self, error: BaseException) -> None:
        """End what the step has left open that raised this error. Idempotent."""
        try:
            self._parts.gradient.give_up(error)
        finally:
            if self._batches is not None:
                self._batches.close()
