"""The session that a user's own training function is given: its model, its optimizer and its steps.

The user's objects stay the same for the whole run. A generation gives them other memory while the function waits here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.model.build import build_on_meta
from raysharded.actors.optimizer.registered_state import RegisteredState, Stateful
from raysharded.actors.session.built_model import BuiltModel
from raysharded.actors.session.held_out import HeldOut, gradient
from raysharded.actors.session.loop_checks import (
    built_optimizer,
    hook,
    keep_modes_behind,
    require_registered,
    require_unchanged,
)
from raysharded.actors.session.loop_errors import (
    refuse_forward,
    refuse_tensor_parallelism,
    require_built,
    require_sharded,
)
from raysharded.actors.session.orders import Orders, RunOver, Training
from raysharded.actors.session.own_data import OwnData
from raysharded.actors.session.parameter_tensors import ParameterTensors, RegisteredTensors, plain_of
from raysharded.actors.session.session_task import SessionTask
from raysharded.actors.session.step_comparisons import Attempts
from raysharded.actors.session.user_step import ENTRY, LEFT, Draws, UserStep
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import line_here, naming
from raysharded.errors import CollectiveAborted, TaskError
from raysharded.protocol.job import Job
from raysharded.task import Loss

if TYPE_CHECKING:
    from torch import nn


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
        self.device, self.max_steps, self.batch = device, task.max_steps or job.max_steps, job.batch
        """The worker's device, the number of the run's last step, and the run's batch."""
        self._built: BuiltModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._training: Training | None = None
        self.step: UserStep | None = None
        """The newest step of this generation."""
        self._things: dict[str, Stateful] = {}
        self.draws = Draws(job.batch.seed)
        """Seeds of its draws."""
        self._held_out, self._num_steps = HeldOut(job), 1
        self._attempts, self._tensors, self._own_data = Attempts(), RegisteredTensors({}), OwnData(job)
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
            self._built = BuiltModel(build_on_meta(self._task, self._job.engine, self._job.batch.seed))
        return self._built.model

    def streams(self, make: Callable[[int, int], Any]) -> None:
        """Read microbatch i of a step's M from the iterable `make(i, M)`. Call it before `shard`; there is no `data`.

        The iterable has `state_dict()` and `load_state_dict()`, and its state goes back with the step."""
        self._own_data.streams(make)

    def reads(self, read: Callable[[int, int], Any]) -> None:
        """Read microbatch i of step s by `read(s, i)`, a pure function. As `streams`."""
        self._own_data.reads(read)

    def shard(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        wrap: Callable[[nn.Module], Sequence[nn.Module] | None] | None = None,
        parallelize: object = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **registered: Stateful | ParameterTensors | None,
    ) -> None:
        """Share the model and its optimizer over the workers, in place, and return with the state of `first_step`.

        `wrap`: as `Task.wrap`, `collate`: as `Task.collate`. Each other keyword registers an object by its name, which
        has `state_dict()` and `load_state_dict()`: a learning rate scheduler, counters. Its state is plain data of at
        most 64 KiB in all; it goes back with the step, as the numbers in the optimizer's groups do. Or the object is a
        `raysharded.ParameterTensors`.
        """
        built = self._built
        require_built(None if built is None else built.model, model, is_sharded=self._optimizer is not None)
        assert built is not None
        refuse_tensor_parallelism(parallelize)
        built.end()
        self._task.units, self._task.collate = wrap, self._own_data.collate(collate)
        things = plain_of(registered)
        built.renew(own := built_optimizer(model, optimizer, things))
        self._tensors = RegisteredTensors(registered, own.parts)
        state = RegisteredState(own.parts.groups, things, self._own_data.with_states, own.names)
        self._objects.adopt(built.construction, own, state, self._own_data.loader, self._job.batch.seed)
        self._optimizer, self._things = optimizer, things
        require_registered(optimizer, things)
        hook(own, self._before_update, self._after_update)
        self.on_sharded()
        self._at_shard = self._now().engine.steps.digest("state")
        self.draws.seed(0, LEFT)

    # -- the loop --

    def steps(self) -> Iterator[UserStep]:
        """The steps of the run, from `first_step` on; after a change of the workers the same function continues.

        The next one has the next number, or that of a step that is done again. Lines between two run at least once.
        """
        require_sharded(self._optimizer, "session.steps()")
        with contextlib.suppress(RunOver):
            while True:
                step = self.next_step()
                if step is not None:
                    yield step
                    if not step.has_begun:
                        raise TaskError(f"step {step.number} was not entered: write `with step:` around the body.")
                    del step

    def gradient(self, loss_of: Callable[[Any], Loss | torch.Tensor]) -> UserStep:
        """Compute the next step's gradient, as often as it takes: for loops whose body cannot be put in a `with`.

        `loss_of(batch)` returns a loss as `Task.loss`. `optimizer.step()` and changes of registered state come behind
        this call. The step ends when the next one is requested, or when the function returns. After a loss of a worker
        it may be returned again, with registered state as of then.
        """
        require_sharded(self._optimizer, "session.gradient()")
        return gradient(self, loss_of)

    def next_step(self) -> UserStep | None:
        """Begin the next step, for loops that enter it themselves; None if the training ended instead."""
        training = self._now()
        with training.failing():
            if training.engine.is_aborted:
                raise CollectiveAborted("the generation was aborted between two steps")
            is_watched = self._num_steps & (self._num_steps - 1) == 0
            if is_watched and self._optimizer is not None:  # others may have been made behind `shard`
                require_registered(self._optimizer, self._things)
            assert self._objects.registered is not None
            at_shard, self._at_shard = self._at_shard, None
            newest = None if self.step is None else self.step.watch
            require_unchanged(training.engine, self._objects.registered, self._store, at_shard, newest)
            self._objects.registered.begin_step()
            self.draws.seed(training.engine.step + 1, ENTRY)
            self._num_steps += 1
            self.step = UserStep(training, self.draws, self._attempts, is_watched=is_watched)
            self._tensors.begin_step(self.step)
            return self.step
        return None

    def _now(self) -> Training:
        """The present training, which has a step to do; waits for one, and serves the driver meanwhile."""
        while self._training is None or self._training.is_over:
            keep_modes_behind(self.step, self._objects.registered, self._store)
            self.step = self._training = self._at_shard = None
            self._attempts.end()
            self._tensors.end()
            self._training = self._orders.next_training()
            if self._training.ends_if_done():
                continue
            engine = self._training.engine
            engine.steps.forwards.on_own = refuse_forward
            self._attempts.begin(engine)
            self._rank, self._first_step = engine.rank, self._first_step or engine.step + 1
            self._tensors.begin(engine.steps.parts.optimizer)
        return self._training

    def _before_update(self, *_: object) -> None:
        if self._training is not None:
            if self.step is None:
                raise TaskError(f"{line_here()}: optimizer.step() belongs into `with step:`.")
            self.step.begin_update()

    def _after_update(self, *_: object) -> None:
        if self._training is not None and self.step is not None:
            self.step.end_update()

    # -- in a step --

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for draws of the loop: the same numbers in the same step, at every number of workers.

        It is seeded from the run's seed, the name and the step: as a step begins, for each microbatch (also a held-out
        one), and behind them. So it needs no state, and goes back with the step. The same object for each name.
        """
        return self.draws.generator(name, device)

    def log(self, **numbers: float) -> None:
        """Add numbers to the step's metrics, in the journal and for metrics writers; each step is there once.

        They are the same on every worker. Call it in the `with`, after the microbatches.
        """
        step, registered = self.step, self._objects.registered
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

        Call it in the `with`, behind `optimizer.step()`, equally often on every worker. `loss_of(batch)` as in
        `Task.loss`, in eval mode, without gradients. `data`: a map-style dataset; its first `num_samples` count, None:
        all. `name`: prefix in the journal, for several evaluations in a step.
        """
        self._task.held_out_loss = loss_of
        return self._held_out.evaluate(self.step, data, num_samples, name)

    def save(self) -> None:
        """Request a checkpoint: of this step if its microbatches are not computed yet, otherwise of the next.

        Behind the last step it does nothing: that has the last checkpoint."""
        require_sharded(self._optimizer, "session.save()")
        self._attempts.request_save(self._training, None if self.step is None else self.step.number)

    def stop(self) -> None:
        """Make the present step the run's last one, with the last checkpoint. In the `with`, on every worker."""
        if self.step is None or self._objects.registered is None:
            raise TaskError(f"{line_here()}: session.stop() belongs into `with step:`.")
        self._objects.registered.is_last = True

    @property
    def is_interrupted(self) -> bool:
        """True if the workers change now: an open step is done again, and nothing can communicate until then."""
        return self._training is not None and self._training.is_aborted

    def end(self) -> bool:
        """Commit the step that `gradient` has left open; True if it was undone instead."""
        return self.step is not None and self.step.end()

    def serve_after(self, error: BaseException) -> None:
        """Answer the driver for ever: the function has ended. A training that has a step to do ends with this error."""
        while True:
            self._now().fail(error)
