"""The session that a user's own training function is given: its model, its optimizer and its steps.

The user's objects stay the same for the whole run. A generation gives them other memory while the function waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.model.build import build_on_meta
from raysharded.actors.optimizer.registered_state import RegisteredState, Stateful
from raysharded.actors.session.built_model import BuiltModel
from raysharded.actors.session.loop_checks import built_optimizer, hook, require_registered, require_unchanged
from raysharded.actors.session.loop_errors import blamed_behind
from raysharded.actors.session.orders import Orders, Training
from raysharded.actors.session.step_watch import Attempts
from raysharded.actors.session.user_step import ENTRY, LEFT, Draws, UserStep
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import line_here, naming
from raysharded.data.loader import MicrobatchLoader
from raysharded.errors import CollectiveAborted, TaskError
from raysharded.overrides import Decisions
from raysharded.protocol.job import Job
from raysharded.protocol.messages import StopReason
from raysharded.task import Loss, Task, TrainFunction

if TYPE_CHECKING:
    from torch import nn

    from raysharded.actors.model.construction import Construction


_MOST_LOADERS = 4
"""Number of the newest datasets that were evaluated on whose readers are kept."""


class SessionTask(Task):
    """The task that a session fills in: its methods are functions that the user has given."""

    def __init__(self, function: Callable[[Session], None]) -> None:
        self.function = function
        self.make: Callable[[], nn.Module] | None = None
        self.held_out_loss: Callable[[Any], Loss | torch.Tensor] | None = None
        self.units: Callable[[nn.Module], Sequence[nn.Module] | None] | None = None

    def build_model(self) -> nn.Module:
        assert self.make is not None, "session.build comes first"
        return self.make()

    def evaluate(self, model: nn.Module, batch: Any) -> Loss | torch.Tensor:
        assert self.held_out_loss is not None, "session.evaluate comes first"
        return self.held_out_loss(batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        found = None if self.units is None else self.units(model)
        return None if found is None else list(found)


def with_session_task(job: Job) -> Job:
    """The job, with a `SessionTask` that has the name of its training function; unchanged if it has a task."""
    if not isinstance(job.task, TrainFunction):
        return job
    name = getattr(job.task.function, "__name__", type(job.task.function).__name__)
    return replace(job, task=type(name, (SessionTask,), {})(job.task.function))


class Session(NotFollowed):
    """A run, seen from a worker's training function. Thread of the function only."""

    def __init__(
        self,
        job: Job,
        task: SessionTask,
        device: torch.device,
        objects: BuiltObjects,
        store: ShardStore,
        orders: Orders,
    ) -> None:
        self._job, self._task, self._objects, self._store, self._orders = job, task, objects, store, orders
        self.device = device
        """The worker's device."""
        self.max_steps: int = job.max_steps
        """Number of the run's last step."""
        self._built: Construction | None = None
        self._before: BuiltModel | None = None
        """The model, until `shard` has given it memory."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._training: Training | None = None
        self._step: UserStep | None = None
        self._things: dict[str, Stateful] = {}
        self.draws = Draws(job.batch.seed)
        """Seeds of its draws."""
        self._held_out: list[tuple[Any, MicrobatchLoader]] = []
        self._num_steps = 1
        self._attempts, self._decisions = Attempts(), Decisions()
        self._at_shard: int | None = None
        """Digest of the parameters as `shard` returned, until the first step, or another generation, begins."""
        self._rank: int | None = None
        self._first_step: int | None = None
        self.on_sharded: Callable[[], None] = lambda: None
        """Called once everything is built: the worker is ready then."""

    @property
    def rank(self) -> int:
        """This worker's rank in the newest generation, from 0 on; another one after a change. After `shard`."""
        return self._known(self._rank, "session.rank")

    @property
    def first_step(self) -> int:
        """Number of the first step that `steps` yields: 1 at the start of a run, later for a worker that joins."""
        return self._known(self._first_step, "session.first_step")

    def _known(self, number: int | None, name: str) -> int:
        if number is None:
            raise TaskError(f"{line_here()}: {name} is known after session.shard(model, optimizer).")
        return number

    # -- before the loop --

    def build(
        self, make: Callable[[], nn.Module], *, init_weights: Callable[[nn.Module, torch.Generator], None] | None = None
    ) -> nn.Module:
        """The model that `make()` returns, with parameters that have no memory until `shard`.

        The run's first weights are those that `make()` draws, with generators seeded by the run's seed; it is called
        again for them. `init_weights`: draws them a module at a time, as `Task.init_weights`.
        """
        if self._built is not None:
            raise TaskError(f"{line_here()}: session.build was called twice. Build one model, with all its parts.")
        self._task.make = make
        if init_weights is not None:
            self._task.init_weights = init_weights
        with naming("session.build(make)", "build"):
            self._built = build_on_meta(self._task, self._job.engine, self._job.batch.seed)
        self._before = BuiltModel(self._built.model)
        return self._built.model

    def shard(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        wrap: Callable[[nn.Module], Sequence[nn.Module] | None] | None = None,
        parallelize: object = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **registered: Stateful | None,
    ) -> None:
        """Share the model and its optimizer over the workers, in place, and return with the state of `first_step`.

        `wrap`: as `Task.wrap`, `collate`: as `Task.collate`. Each other keyword registers an object by its name, which
        has `state_dict()` and `load_state_dict()`: a learning rate scheduler, counters. Its state is plain data of at
        most 64 KiB in all; it goes back with the step, as the numbers in the optimizer's groups do.
        """
        built, before = self._built, self._before
        if built is None or before is None or model is not built.model:
            raise TaskError(f"{line_here()}: session.shard is called once, with the model that session.build returned.")
        if parallelize is not None:
            raise TaskError(
                f"{line_here()}: session.shard(parallelize=...): torch's tensor parallel styles cannot be undone in "
                "place, so a session has none. Leave the degree at 1, or train with a raysharded.Task."
            )
        before.end()
        before.require_unchanged()
        self._before = None
        self._task.units, self._task.collate = wrap, collate
        things = {name: thing for name, thing in registered.items() if thing is not None}
        own = built_optimizer(model, optimizer, things)
        before.renew(own)
        self._objects.adopt(built, own, RegisteredState(own.parts.groups, things), self._job.batch.seed)
        self._optimizer, self._things = optimizer, things
        require_registered(optimizer, things)
        hook(optimizer, self._before_update, self._after_update)
        self.on_sharded()
        training = self._now()
        with training.failing():
            self._at_shard = training.engine.steps.digest("parameters")
        self.draws.seed(0, LEFT)

    # -- the loop --

    def steps(self) -> Iterator[UserStep]:
        """The steps of the run, from `first_step` on. After a change of the workers the same function continues.

        The next step has the next number, or that of a step that is done again. The lines between two steps run at
        least once.
        """
        if self._optimizer is None:
            raise TaskError(f"{line_here()}: session.steps() comes after session.shard(model, optimizer).")
        while True:
            step = self._step = self._next_step()
            if step is not None:
                yield step
                if not step.has_begun:
                    raise TaskError(
                        f"step {step.number} was not entered: write `with step:` around the body of the loop."
                    )
                del step

    def gradient(self, loss_of: Callable[[Any], Loss | torch.Tensor]) -> UserStep:
        """Compute the next step's gradient, as often as it takes: for loops whose body cannot be put in a `with`.

        `loss_of(batch)` returns a microbatch's loss as `Task.loss` does. `optimizer.step()`, the scheduler and changes
        of registered state come behind this call. The step ends when the next one is requested, or when the function
        returns. After the loss of a worker the same step may be returned again, with registered state as of then.
        """
        if self._optimizer is None:
            raise TaskError(f"{line_here()}: session.gradient() comes after session.shard(model, optimizer).")
        self.end()
        while True:
            self._step = self._next_step()
            if self._step is not None and self._step.compute(loss_of):
                return self._step

    def _next_step(self) -> UserStep | None:
        """None if the training ended instead."""
        training = self._now()
        with training.failing():
            if training.engine.is_aborted:
                raise CollectiveAborted("the generation was aborted between two steps")
            if training.engine.is_last:
                training.engine.commit_last()
                training.stop(StopReason.FINISHED)
                return None
            is_watched = self._num_steps & (self._num_steps - 1) == 0
            if is_watched and self._optimizer is not None:  # others may have been made behind `shard`
                require_registered(self._optimizer, self._things)
            assert self._objects.registered is not None
            before, self._at_shard = self._at_shard, None
            is_first = before is not None
            if self._step is not None:
                before = self._step.watch.at_end
            require_unchanged(training.engine, self._objects.registered, self._store, before, is_first=is_first)
            self._objects.registered.logged = {}
            self.draws.seed(training.engine.step + 1, ENTRY)
            self._num_steps += 1
            return UserStep(training, self.draws, self._attempts, is_watched=is_watched)
        return None

    def _now(self) -> Training:
        """The present training; waits for one, and serves the driver meanwhile."""
        if self._training is None or self._training.is_over:
            self._step = self._training = self._at_shard = None
            self._training = self._orders.next_training()
            engine = self._training.engine
            engine.steps.on_own_forward = self._own_forward
            if engine.decisions != self._decisions:
                self._attempts.forget()
            self._rank, self._decisions = engine.rank, engine.decisions
            if self._first_step is None:
                self._first_step = self._training.engine.step + 1
        return self._training

    def _before_update(self, *_: object) -> None:
        if self._training is not None:
            if self._step is None:
                raise TaskError(f"{line_here()}: optimizer.step() belongs into `with step:`.")
            self._step.begin_update()

    def _after_update(self, *_: object) -> None:
        if self._training is not None and self._step is not None:
            self._step.end_update()

    def _own_forward(self) -> None:
        if self._step is None:
            raise TaskError(f"{line_here()}: a forward of the model communicates: it belongs into `with step:`.")
        self._step.own_forward()

    # -- in a step --

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for draws of the loop: the same numbers in the same step, at every number of workers.

        It is seeded from the run's seed, the name and the step: as a step begins, for each microbatch, and after the
        microbatches. So it needs no state, and goes back with the step. The same object for each name.
        """
        return self.draws.generator(name, device)

    def log(self, **numbers: float) -> None:
        """Add numbers to the step's metrics, in the journal and for metrics writers; each step is there once.

        They are the same on every worker. Call it in the `with`, after the microbatches.
        """
        step, registered = self._step, self._objects.registered
        if step is None or registered is None:
            raise TaskError(f"{line_here()}: session.log() belongs into `with step:`.")
        step.log(numbers)
        registered.logged |= {name: float(number) for name, number in numbers.items()}

    def evaluate(
        self,
        loss_of: Callable[[Any], Loss | torch.Tensor],
        data: Any,
        *,
        num_samples: int | None = None,
        name: str = "",
    ) -> dict[str, float]:
        """The loss of held-out data and its metrics, the same bits at every number of workers; the journal has them.

        Call it in the `with`, behind `optimizer.step()`, equally often on every worker. `loss_of(batch)` returns the
        loss as `Task.loss` does; it is called in eval mode, without gradients. `data`: a map-style dataset, of which
        the first `num_samples` count; None: all. `name`: prefix in the journal, for several evaluations in a step.
        """
        if self._step is None:
            raise TaskError(f"{line_here()}: session.evaluate() belongs into `with step:`, behind optimizer.step().")
        loader = next((loader for known, loader in self._held_out if known is data), None)
        if loader is None:
            loader = MicrobatchLoader(data, self._job.batch)
            self._held_out = [*self._held_out[1 - _MOST_LOADERS :], (data, loader)]
        count = loader.num_samples if num_samples is None else num_samples
        if count < 1:
            raise TaskError(f"{line_here()}: session.evaluate(num_samples={num_samples}): give 1 or more.")
        self._task.held_out_loss = loss_of
        return self._step.evaluate(loader, count, name)

    def save(self) -> None:
        """Request a checkpoint: of this step if its microbatches are not computed yet, otherwise of the next."""
        self._now().engine.request_save()

    def blamed(self, error: BaseException) -> BaseException:
        """The error that has left the function; a TaskError with the way out if a change of workers led to it."""
        if self._before is not None:
            self._before.end()
        step, training = self._step, self._training
        if step is None or training is None:
            return error
        return blamed_behind(step.number, error, is_undone=step.is_undone, is_aborted=training.is_aborted)

    def end(self) -> None:
        """Commit the step that `gradient` has left open: the function has returned."""
        if self._step is not None:
            self._step.end()

    def serve_after(self, error: BaseException) -> None:
        """Answer the driver for ever: the function has ended. A training that has a step to do ends with this error."""
        while True:
            training = self._now()
            with training.failing():
                if not training.engine.is_last:
                    raise error
                training.engine.commit_last()
                training.stop(StopReason.FINISHED)
