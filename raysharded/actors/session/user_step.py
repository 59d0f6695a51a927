"""One step of a user's own loop, as a transaction: either all of it happened, or it is done again."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from raysharded.actors.session.orders import Training
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import naming
from raysharded.errors import CollectiveAborted, InexactError, TaskError, causes, text_of, user_traceback
from raysharded.protocol.messages import StopReason
from raysharded.task import Loss

if TYPE_CHECKING:
    import torch

    from raysharded.actors.numerics.step_consensus import Agreed
    from raysharded.actors.step.step import Step
    from raysharded.data import Loader


E = TypeVar("E", bound=BaseException)


def line_here() -> str:
    """`file.py:12` of the innermost frame of the calling thread that is neither raysharded's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("raysharded", "torch", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "the training function"


def with_line(error: E) -> E:
    """The error; a TaskError of raysharded's gets the user's part of its traceback."""
    if isinstance(error, TaskError) and not error.user_traceback:
        error.user_traceback = user_traceback(error)
        error.args = (error.args[0], error.user_traceback)
    return error


def _refuse_scaler(error: BaseException, step: int) -> None:
    """Raise a TaskError in place of that of a GradScaler, which looks for gradients of the optimizer's own."""
    if isinstance(error, AssertionError) and "No inf checks" in text_of(error):
        raise TaskError(
            f"step {step}: a GradScaler cannot see the gradients, which belong to the step. Leave it out: bfloat16 "
            '(EngineConfig.param_dtype) needs none, and FailureConfig(on_non_finite="skip") leaves out steps whose '
            "numbers are not finite.",
            user_traceback(error),
        ) from error


_REST = -2


class UserStep(NotFollowed):
    """A step, as `session.steps()` yields it; use it as a context manager. Thread of the function only."""

    def __init__(self, training: Training, seed: Callable[[int, int], None], *, is_watched: bool) -> None:
        """`seed`: called with the step and the microbatch, or -2 for the rest of the step, before each."""
        self._training, self._seed = training, seed
        self._step: Step | None = training.engine.next_step()
        self.number: int = self._step.number
        """Number of the step, from 1 on."""
        self._agreed: Agreed | None = None
        self.is_watched = is_watched
        """True if changes at other places are looked for."""
        self._gradients: int | None = None
        self.parameters: int | None = None
        """Digest of the parameters at the step's end, if it is watched."""
        self._applying: contextlib.AbstractContextManager[None] | None = None
        self._has_begun = self._is_computed = self._is_applied = self._stays_open = False

    @property
    def loss(self) -> float:
        """The step's loss, as all workers agreed on it: sum / weight over all microbatches; NaN without any weight."""
        return self._agreement("loss").loss

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics given to `backward`, each as sum / weight over all microbatches."""
        return self._agreement("metrics").averages()

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

    @property
    def has_begun(self) -> bool:
        """True once its `with` was entered."""
        return self._has_begun

    def end(self) -> None:
        """Commit a step that `compute` has left open, if it is open. An error is the driver's."""
        if self._stays_open:
            self._stays_open = False
            self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        if self._has_begun:
            raise TaskError(f"{line_here()}: step {self.number} is over; take the next one from session.steps().")
        self._has_begun = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Commit the step. Any error ends it, and becomes the driver's: the next step may be this one again."""
        assert self._step is not None
        if error is None and self._stays_open:
            return False
        try:
            if error is not None:
                _refuse_scaler(error, self.number)
                computes = self._agreed is None and self._step.where
                with naming(self._step.where if computes else f"step {self.number}", "loss" if computes else None):
                    raise with_line(error)
            self._commit(self._step)
        except BaseException as found:  # noqa: BLE001 - the boundary to the user's function
            self._give_up(found)
            self._training.fail(self._blamed(found))
        finally:
            self._step = None
        return True

    def _commit(self, step: Step) -> None:
        engine = self._training.engine
        if engine.is_aborted:
            raise CollectiveAborted("the generation was aborted")
        if self.is_watched and self._is_applied:
            self.parameters = step.digest("parameters")
        if not self._is_applied:
            missing = "optimizer.step()" if self._is_computed else "a whole loop over step.microbatches()"
            raise TaskError(
                f"step {self.number} ended without {missing}: each `with step:` has one loop over step.microbatches(), "
                "and then one optimizer.step()."
            )
        step.commit()
        assert self._agreed is not None
        if engine.is_last:
            engine.commit_last()
            self._training.stop(StopReason.FINISHED)
        elif self._agreed.flags.boundary:
            engine.commit_last()
            self._training.stop(StopReason.BOUNDARY)

    def _blamed(self, error: BaseException) -> BaseException:
        """The error, or that of a lost worker if it followed from one that an `except` swallowed."""
        if isinstance(error, TaskError) and self._training.engine.is_aborted:
            return CollectiveAborted(f"a collective of step {self.number} failed")
        return error

    def _give_up(self, error: BaseException) -> None:
        """End what is open, and free what the frames below the `with` hold."""
        assert self._step is not None
        with contextlib.suppress(BaseException):
            self._step.give_up(error)
        applying, self._applying = self._applying, None
        if applying is not None:
            with contextlib.suppress(BaseException):
                applying.__exit__(type(error), error, error.__traceback__)
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)

    # -- in the `with` --

    def microbatches(self) -> Iterator[Any]:
        """This worker's microbatches, collated and on its device; call `backward` once for each.

        The body is a function of the microbatch: it may run for one that does not count, for another worker's, or
        again. Totals are `loss` and `metrics`. Draws of torch, NumPy and `random` are seeded for each. After the last
        one all workers have agreed on the step.
        """
        step = self._now("step.microbatches()")
        if self._is_computed:
            raise TaskError(
                f"{line_here()}: step.microbatches() was called twice in step {self.number}. Compute all that the loss "
                "needs in one loop."
            )
        self._is_computed = True
        return self._computed(step)

    def _computed(self, step: Step) -> Iterator[Any]:
        for batch in step.microbatches():
            self._seed(self.number, step.microbatch)
            yield batch
            del batch
        self._seed(self.number, _REST)
        self._agreed = step.agreed
        if self.is_watched and not step.skipped:
            self._gradients = step.digest("gradients")

    def evaluate(self, data: Loader, num_samples: int, name: str) -> dict[str, float]:
        """As `Step.evaluate`."""
        step = self._now("session.evaluate()")
        if not self._is_applied:
            raise TaskError(f"{line_here()}: session.evaluate() belongs into `with step:`, behind optimizer.step().")
        return step.evaluate(data, num_samples, name)

    def log(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the step's metrics."""
        self._now("session.log()")
        agreed = self._agreement("metrics")
        for name, number in numbers.items():
            if name in agreed.metrics:
                raise TaskError(f"{line_here()}: session.log({name}=...): the step has a metric of this name.")
            if not isinstance(number, (int, float)):
                raise TaskError(
                    f"{line_here()}: session.log({name}=...) was given a {type(number).__name__}; give a number, "
                    "the same one on every worker."
                )
        assert self._step is not None
        metrics = agreed.metrics | {name: (float(number), 1.0) for name, number in numbers.items()}
        self._agreed = self._step.agreed = replace(agreed, metrics=metrics)

    def compute(self, loss_of: Callable[[Any], Loss | torch.Tensor]) -> bool:
        """Enter the step, and compute all microbatches; False if an error ended it, which is the driver's then."""
        with self:
            for batch in self.microbatches():
                self.backward(loss_of(batch))
                del batch
            self._stays_open = True
        return self._stays_open

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
        step = self._now("step.backward(loss)")
        if weight is None and metrics is None:
            value: torch.Tensor | Loss = loss
        elif weight is None or isinstance(loss, Loss):
            raise TaskError(
                f"{line_here()}: give step.backward a summed loss with weight=, and metrics= beside them; or a "
                "raysharded.Loss alone."
            )
        else:
            value = Loss(loss, weight, metrics or {})
        step.backward(value)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the mean gradient's global 2-norm to `max_norm` in `optimizer.step()`; returns the exact norm.

        The norm has the same bits at every number of workers; NaN in a step that is left out. Call it after the
        microbatches, and before `optimizer.step()`.
        """
        step = self._now("step.clip_grad_norm_()")
        if self._agreed is None or self._is_applied:
            raise TaskError(
                f"{line_here()}: step.clip_grad_norm_() belongs between the loop over step.microbatches() and "
                "optimizer.step()."
            )
        return step.clip_grad_norm_(max_norm)

    def _now(self, call: str) -> Step:
        """The engine's step, if the `with` is open. Raises again what an `except` has swallowed."""
        if self._step is None or not self._has_begun:
            raise TaskError(f"{line_here()}: {call} belongs into `with step:`.")
        if self._training.engine.is_aborted:
            raise CollectiveAborted("the generation was aborted")
        return self._step

    # -- the optimizer's hooks --

    def begin_update(self) -> None:
        """Give the optimizer this worker's gradients; called as its step begins."""
        step = self._now("optimizer.step()")
        if self._agreed is None or self._is_applied or self._applying is not None:
            raise TaskError(
                f"{line_here()}: optimizer.step() belongs behind the loop over step.microbatches(), once in each step."
            )
        if self._gradients is not None and step.digest("gradients") != self._gradients:
            raise InexactError(
                f"{line_here()}: gradients changed between step.microbatches() and optimizer.step(). Each worker has a "
                "part of them, so that torch's clip_grad_norm_ depends on the number of workers: clip with "
                "step.clip_grad_norm_, and change gradients element by element in a hook of the optimizer's step."
            )
        applying = step.applying()
        applying.__enter__()
        self._applying = applying

    def end_update(self) -> None:
        """Take the gradients back; called as the optimizer's step ends."""
        applying, self._applying = self._applying, None
        assert applying is not None
        applying.__exit__(None, None, None)
        self._is_applied = True
