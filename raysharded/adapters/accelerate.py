"""Hugging Face's `Accelerator` in a session: an ordinary script's loop, elastic, with the bits of one worker.

`elastic(Accelerator, session)` overrides the methods by which the loop meets data, gradients and files. The `with
accelerator.accumulate(model)` of a microbatch is the session's. Tested with accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from raysharded.actors.session.held_out import begin_step, leave_modes_to_loop, reads_places, refuse_numbers
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.adapters.accelerate_calls import Calls
from raysharded.adapters.accelerate_parts import (
    WORDS,
    HeldOutBatches,
    LinesBehind,
    StepOptimizer,
    StepScheduler,
    TrainBatches,
    compare_horizon,
    require_loader,
    require_supported,
)
from raysharded.errors import CollectiveAborted, ConfigError, TaskError

if TYPE_CHECKING:
    from raysharded.actors.session.user_session import Session
    from raysharded.actors.session.user_step import UserStep

_NOTHING, _MISSING = object(), object()
"""In place of a microbatch: there is none any more; `backward` has not been called for the one before."""


def elastic(accelerator: type[Any], session: Session) -> type[Any]:
    """An `Accelerator` that trains in this session; use it as that class, with its arguments.

    `prepare` is called once: with the model that `session.build` returned, its optimizer, its scheduler, and data
    loaders, of which the first is the training data's. The loop over epochs is `for epoch in accelerator.epochs(n)`.
    """
    session._task.words = WORDS
    return type(accelerator.__name__, (Elastic, accelerator), {"session": session})


class Elastic(Calls):
    """The methods of an `Accelerator` that are overridden: `prepare`, and those of the loop."""

    _first, _last_step = 1, 0
    """Numbers of the first and the last step of the present epoch."""
    accumulates = False
    """True in `accumulate`."""
    _behind: LinesBehind
    _batches: Iterator[Any] = iter(())
    _next: Any = _NOTHING

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(self, self.session.batch)

    @property
    def completed_steps(self) -> int:
        """Steps that the run has made: for scripts that count on, in a worker that joined later."""
        return self._done

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        loaders = [one for one in args if isinstance(one, DataLoader)]
        model = [one for one in args if isinstance(one, nn.Module)]
        optimizer = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        schedulers = {f"scheduler{place}": one for place, one in enumerate(args) if isinstance(one, LRScheduler)}
        if self._train is not None or not (len(model) == len(optimizer) == 1 and loaders):
            raise ConfigError(
                "accelerator.prepare(...): call it once, with one model, one optimizer, the data loaders and the "
                "schedulers together."
            )
        train = loaders[0]
        require_loader(train, self.session.batch)
        collate, data = train.collate_fn, train.dataset
        if not reads_places(self.session):
            refuse_numbers("accelerator.prepare(...): the training data", data)
        more: dict[str, Any] = {f"object{place}": one for place, one in enumerate(self._custom_objects)}
        leave_modes_to_loop(self.session)
        self.session.shard(
            model[0],
            optimizer[0],
            collate=lambda samples: collate([data[one] if isinstance(one, int) else one for one in samples]),
            **(schedulers | more),
        )
        self._train, self._behind = TrainBatches(train, self), LinesBehind(self.session)
        for scheduler in schedulers.values():
            compare_horizon(scheduler, self.session)
        self._done = self.session.first_step - 1
        return tuple(self._prepared(one, train) for one in args)

    def _prepared(self, one: Any, train: Any) -> Any:
        if isinstance(one, DataLoader):
            return self._train if one is train else HeldOutBatches(one, self)
        if isinstance(one, torch.optim.Optimizer):
            return StepOptimizer(one, self)
        return StepScheduler(one, self) if isinstance(one, LRScheduler) else one

    # -- the loop --

    def epochs(self, count: float) -> Iterator[int]:
        """The epochs that are not done, from 0 on, in place of `range(count)`; one that is undone comes again."""
        assert self._train is not None, "prepare comes first"
        self._train.require_steps(count)
        epoch = self._train.epoch_of(self._done + 1)
        while epoch < count and self._done < self.session.max_steps:
            self._first = self._train.last_step(epoch - 1) + 1
            self._last_step = min(self._train.last_step(epoch), self.session.max_steps)
            yield epoch
            self._behind.end()
            is_undone = epoch + 1 < count and self._last_step < self.session.max_steps and self.session.end()
            self._done -= is_undone
            epoch = self._train.epoch_of(self._done + 1)

    def microbatches(self) -> Iterator[Any]:
        """The microbatches of this worker until the end of the epoch; the last step stays open."""
        if not self._last_step:
            raise TaskError("write `for epoch in accelerator.epochs(num_epochs)` around the loop over the data.")
        while self._done < self._last_step:
            self._behind.end()
            step = begin_step(self.session)
            is_left = step.number < self._first or self._behind.are_lost(step.number)
            try:
                if is_left:  # the script cannot go back to these lines: the function is called again
                    raise CollectiveAborted(f"step {step.number} belongs to lines that the script has left")
                self._batches = step.microbatches()
                batch = next(self._batches, _NOTHING)
            except BaseException as error:
                step.__exit__(type(error), error, error.__traceback__)
                if is_left:
                    raise
                continue
            while batch is not _NOTHING and not step.is_undone:
                self._next = _MISSING
                yield batch
                if self._next is _MISSING and not step.is_undone:
                    self._take_next(step)
                batch, self._next = self._next, _NOTHING
            self._done = step.number - step.is_undone

    def _take_next(self, step: UserStep) -> None:
        """Behind a body without `backward`: the session has an error for it, which ends the step."""
        try:
            self._next = next(self._batches, _NOTHING)
        except BaseException as error:  # noqa: BLE001 - becomes the driver's answer
            step.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        self.gradient_state._set_sync_gradients(False)
        step = self.session.step
        self.accumulates = True
        try:
            yield
        except BaseException as error:
            if step is None or step.is_undone or step.done:
                raise
            step.__exit__(type(error), error, error.__traceback__)
            self.gradient_state._set_sync_gradients(False)
            return
        finally:
            self.accumulates = False
        if self.sync_gradients and step is not None:
            self.gradient_state._set_sync_gradients(self._behind.begin(step))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        step = self.session.step
        if step is None or not self.accumulates:
            raise TaskError(
                f"{line_here()}: accelerator.backward(loss) belongs into `with accelerator.accumulate(model):`. Put "
                "that line around the body of the loop over the training data: when a worker is lost, it takes the "
                "error, and the loop continues with the step that is done again."
            )
        if self._next is not _MISSING and not step.is_undone:
            raise TaskError(
                f"{line_here()}: accelerator.backward(loss) was called twice; add the losses, and call it once."
            )
        step.backward(loss)
        self._next = next(self._batches, _NOTHING)
        is_last = self._next is _NOTHING
        self.gradient_state._set_sync_gradients(is_last)
        if is_last:
            step.stays_open = True

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if norm_type != 2:
            raise ConfigError(f"accelerator.clip_grad_norm_(norm_type={norm_type}): a session clips the 2-norm.")
        step = self.session.step
        return torch.tensor(step.clip_grad_norm_(max_norm)) if self.sync_gradients and step is not None else None
