"""One step of a user's own loop, as a transaction: either all of it happened, or it is done again."""

from __future__ import annotations

import contextlib
import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from raysharded.actors.session.loop_errors import (
    as_lost,
    as_one,
    misplaced,
    misplaced_forward,
    placed,
    with_line,
    with_numbers,
)
from raysharded.actors.session.orders import Training
from raysharded.actors.session.step_comparisons import Attempts, StepWatch
from raysharded.actors.step.forward_backward import DRAWS
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import line_here, naming
from raysharded.errors import CollectiveAborted, TaskError, causes
from raysharded.ids import derive_seed
from raysharded.protocol.messages import StopReason
from raysharded.task import Loss

if TYPE_CHECKING:
    from raysharded.actors.numerics.step_consensus import Agreed
    from raysharded.actors.step.step import Step


T = TypeVar("T")

REST, ENTRY, LEFT, EVALUATED = -2, -3, -4, -5
"""Places in a step, beside the microbatches: behind them, as the step begins, as it has ended, and behind evaluations
(-5, -6, ...). Step 0 is ahead of the loop, and has ENTRY, and LEFT as `shard` returns."""
_RULE = 2
"""Number of the rule `draws` that seeds all generators of the process."""


class Draws:
    """Generators of one worker's loop: the same numbers in the same step, at every number of workers.

    The engine seeds the process's generators for each microbatch, also held-out ones; each worker has others. So they
    are seeded again behind the microbatches, and behind an evaluation. Thread of the function only.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: the run's."""
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._place: tuple[int | str, ...] = (0, ENTRY)
        """The newest place: (step, place), or that of a held-out microbatch."""

    def generator(self, name: str, device: torch.device | str) -> torch.Generator:
        """The generator of a name, always the same object."""
        found = self._generators.get(name)
        if found is None:
            found = self._generators[name] = torch.Generator(device)
            found.manual_seed(derive_seed(self._seed, "session", name, *self._place))
        return found

    def seed(self, step: int, place: int) -> None:
        """Seed the named generators; and those of the process, if the place is no microbatch, nor padding (-1)."""
        if place < -1:
            DRAWS[_RULE](self._seed, "session", step, place)
        self._seed_named(step, place)

    def seed_held_out(self, step: int, microbatch: int) -> None:
        """Seed the named generators for a held-out microbatch, as the engine seeds those of the process."""
        self._seed_named("evaluate", step, microbatch)

    def _seed_named(self, *place: int | str) -> None:
        self._place = place
        for name, generator in self._generators.items():
            generator.manual_seed(derive_seed(self._seed, "session", name, *place))


class UserStep(NotFollowed):
    """A step, as `session.steps()` yields it; use it as a context manager. Thread of the function only."""

    def __init__(self, training: Training, draws: Draws, attempts: Attempts, *, is_watched: bool) -> None:
        """`draws`, `attempts`: the session's. `is_watched`: look for changes at other places."""
        self._training, self._draws = training, draws
        self._step: Step | None = training.engine.next_step()
        self.number: int = self._step.number
        """Number of the step, from 1 on."""
        self._agreed: Agreed | None = None
        training.engine.steps.forwards.on_own = self._meet
        training.engine.steps.parts.evaluator.on_microbatch = draws.seed_held_out
        self.watch = StepWatch(self._step, attempts, is_watched=is_watched)
        """Comparisons around the step."""
        self._evaluations = itertools.count()
        self._applying: contextlib.AbstractContextManager[None] | None = None
        self.has_begun = self._is_computed = self._is_applied = self.stays_open = False
        """`has_begun`: its `with` was entered. `stays_open`: it ends with the next request, not with its `with`."""
        self.done = False
        """True behind a `with` whose step is complete; False behind one that was undone, and is done again."""

    @property
    def loss(self) -> float:
        """The loss, as all workers agreed on it: sum / weight; NaN without any weight, and if the step was undone."""
        return math.nan if self.is_undone else self._agreement("loss").loss

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics given to `backward`, each as sum / weight over all microbatches; empty if it was undone."""
        return {} if self.is_undone else self._agreement("metrics").averages()

    @property
    def is_undone(self) -> bool:
        """True behind a `with` that an error has ended, such as the loss of a worker."""
        return self.has_begun and self._step is None and not self.done

    @property
    def is_open(self) -> bool:
        """True in its `with`. False for one that stays open until the next is requested."""
        return self.has_begun and self._step is not None and not self.stays_open

    def _agreement(self, name: str) -> Agreed:
        if self._agreed is None:
            raise TaskError(
                f"{line_here()}: step.{name} is known once all workers have computed their microbatches: read it after "
                "the loop over step.microbatches()."
            )
        return self._agreed

    @property
    def microbatch(self) -> int:
        """Number of the newest microbatch in its step, the same at every number of workers; -1 for padding."""
        return self._now("step.microbatch").microbatch

    def end(self) -> bool:
        """Commit the step if `compute` has left it open. True if an error undid it, which is the driver's."""
        if not self.stays_open:
            return False
        self.stays_open = False
        self.__exit__(None, None, None)
        return not self.done

    def __enter__(self) -> Self:
        if self.has_begun:
            raise TaskError(f"{line_here()}: step {self.number} is over; take the next one from session.steps().")
        self.has_begun = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Commit the step. Any error ends it, and becomes the driver's: the next step may be this one again."""
        assert self._step is not None
        if error is None and self.stays_open:
            return False
        try:
            if error is not None:
                computes = self._is_computed and self._agreed is None and self._step.where
                with naming(self._step.where if computes else f"step {self.number}", "loss" if computes else None):
                    raise with_line(error)
            self._commit(self._step)
            self.done = True
            self._draws.seed(self.number, LEFT)
        except BaseException as found:  # noqa: BLE001 - the boundary to the user's function
            self._give_up(found)
            self._training.fail(as_lost(placed(found), self.number, is_aborted=self._training.is_aborted))
        finally:
            self._step, self.stays_open = None, False
            self.watch.end()
        return True

    def _commit(self, step: Step) -> None:
        engine = self._training.engine
        if engine.is_aborted:
            raise CollectiveAborted("the generation was aborted")
        if not self._is_applied:
            missing = "optimizer.step()" if self._is_computed else "a whole loop over step.microbatches()"
            raise TaskError(
                f"step {self.number} ended without {missing}: each `with step:` has one loop over step.microbatches(), "
                "and then one optimizer.step()."
            )
        self.watch.commit()
        assert self._agreed is not None
        if engine.is_last:
            engine.commit_last()
            self._training.stop(StopReason.FINISHED)
        elif self._agreed.flags.boundary:
            engine.commit_last()
            self._training.stop(StopReason.BOUNDARY)

    def _give_up(self, error: BaseException) -> None:
        """End what is open, and free what the frames below the `with` hold."""
        assert self._step is not None
        applying, self._applying = self._applying or contextlib.nullcontext(), None
        with contextlib.suppress(BaseException):
            self._step.give_up(error)
        with contextlib.suppress(BaseException):
            applying.__exit__(type(error), error, error.__traceback__)
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)

    # -- in the `with` --

    def microbatches(self) -> Iterator[Any]:
        """This worker's microbatches, collated and on its device; call `backward` once for each.

        The body is a function of the microbatch: it may run for one that does not count, for another worker's, or
        again. Totals are `loss` and `metrics`. Draws are seeded for each. Behind the last all workers have agreed.
        """
        step = self._now("step.microbatches()")
        if self._is_computed:
            raise TaskError(
                f"{line_here()}: step.microbatches() was called twice in step {self.number}. Compute all that the loss "
                "needs in one loop."
            )
        self._is_computed = True
        self.watch.begin_microbatches()
        step.steps.parts.modes.take_over()
        return self._computed(step)

    def _computed(self, step: Step) -> Iterator[Any]:
        for batch in step.microbatches():
            self._draws.seed(self.number, step.microbatch)
            yield batch
            del batch
        self._draws.seed(self.number, REST)
        self._agreed = step.agreed
        if not step.skipped:
            self.watch.computed()

    def behind_update(self, call: str, communicate: Callable[[Step], T]) -> T:
        """Do what communicates behind `optimizer.step()`. Raises CollectiveAborted if the workers change meanwhile."""
        step = self.require_update(call)
        try:
            found = communicate(step)
        except BaseException as error:
            if self._training.engine.is_aborted:
                raise CollectiveAborted(f"a collective of step {self.number} failed") from error
            raise
        self._draws.seed(self.number, EVALUATED - next(self._evaluations))
        return found

    def require_update(self, call: str) -> Step:
        """The engine's step. Raises TaskError if `optimizer.step()` is still to come."""
        step = self._now(call)
        if not self._is_applied:
            raise TaskError(f"{line_here()}: {call} belongs into `with step:`, behind optimizer.step().")
        return step

    def _meet(self) -> None:
        """Meet the other workers ahead of a forward of the model that is of no microbatch and no evaluation."""
        step = self._now("a forward of the model")
        if self._agreed is None:
            raise misplaced_forward(is_behind_backward=self._is_computed)
        step.steps.meetings.meet(self.number, "forward")

    def log(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the step's metrics."""
        step = self._now("session.log()")
        self._agreed = step.agreed = with_numbers(self._agreement("metrics"), numbers)

    def compute(self, loss_of: Callable[[Any], Loss | torch.Tensor], begin: Callable[[], object]) -> bool:
        """Enter the step, call `begin()`, and compute all microbatches; False if an error ended it."""
        with self:
            begin()
            for batch in self.microbatches():
                self.backward(loss_of(batch))
                del batch
            self.stays_open = True
        return self.stays_open

    def backward(
        self,
        loss: torch.Tensor | Loss,
        weight: float | torch.Tensor | None = None,
        metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> None:
        """Add the gradient of a microbatch's loss.

        With `weight`, `loss` is the sum over so many items (tokens, samples); without it, the mean over the
        microbatch's samples. The step's loss and gradient are the sum over all microbatches divided by all weights.
        `metrics`: name -> (sum, weight); they need `weight`, and the same names in each microbatch. Or give all in one
        `raysharded.Loss`.
        """
        self._now("step.backward(loss)").backward(as_one(loss, weight, metrics))

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the mean gradient's global 2-norm to `max_norm` in `optimizer.step()`; returns the exact norm.

        The norm has the same bits at every number of workers; NaN in a step that is left out. Call it after the
        microbatches, and before `optimizer.step()`.
        """
        step = self._now("step.clip_grad_norm_()")
        if self._agreed is None or self._is_applied:
            raise misplaced("step.clip_grad_norm_()", is_in_loop=self._is_computed and self._agreed is None)
        self.watch.limit(max_norm)
        return step.clip_grad_norm_(max_norm)

    def _now(self, call: str) -> Step:
        """The engine's step, if the `with` is open. Raises again what an `except` has swallowed."""
        if self._step is None or not self.has_begun:
            raise TaskError(f"{line_here()}: {call} belongs into `with step:`.")
        if self._training.engine.is_aborted and not self.stays_open:  # otherwise its end raises it
            raise CollectiveAborted("the generation was aborted")
        return self._step

    # -- the optimizer's hooks --

    def begin_update(self) -> None:
        """Give the optimizer this worker's gradients; called as its step begins."""
        step = self._now("optimizer.step()")
        if self._agreed is None or self._is_applied or self._applying is not None:
            raise misplaced("optimizer.step()", is_in_loop=self._is_computed and self._agreed is None)
        self.watch.begin_update()
        applying: contextlib.AbstractContextManager[None] = step.applying()
        try:
            applying.__enter__()
        except CollectiveAborted:
            if not self.stays_open:
                raise
            applying = contextlib.nullcontext()  # what the optimizer changes now is undone: the end raises this again
        self._applying = applying

    def end_update(self) -> None:
        """Take the gradients back; called as the optimizer's step ends."""
        applying, self._applying = self._applying, None
        assert applying is not None
        applying.__exit__(None, None, None)
        self._is_applied = True
        self.watch.end_update()
