"""Hugging Face's `Accelerator` in a session: an ordinary script's loop, elastic, with the bits of one worker.

`elastic(Accelerator, session)` overrides the methods by which the loop meets data, gradients and files. The `with
accelerator.accumulate(model)` of a microbatch is the session's. Tested with accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree
from torch.utils.data import DataLoader

from raysharded.actors.session.held_out import begin_step, copy_of, gathered, leave_modes_to_loop, weights_of
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.adapters.accelerate_parts import (
    WORDS,
    HeldOutBatches,
    StepScheduler,
    TrainBatches,
    compare_horizon,
    require_loader,
    require_supported,
)
from raysharded.errors import CollectiveAborted, ConfigError, TaskError

if TYPE_CHECKING:
    from accelerate import Accelerator as Base

    from raysharded.actors.session.user_session import Session
else:
    Base = object

_NOTHING = object()


def elastic(accelerator: type[Any], session: Session) -> type[Any]:
    """An `Accelerator` that trains in this session; use it as that class, with its arguments.

    `prepare` is called once: with the model that `session.build` returned, its optimizer, its scheduler, and data
    loaders, of which the first is the training data's. The loop over epochs is `for epoch in accelerator.epochs(n)`.
    """
    session._task.words = WORDS
    return type(accelerator.__name__, (Elastic, accelerator), {"session": session})


class Elastic(Base):  # type: ignore[misc]  # accelerate has no annotations
    """The methods of an `Accelerator` that are overridden."""

    session: Session
    sizes: Sequence[int | None] | None = None
    """Samples of the present batch of held-out data on each rank."""
    _train: TrainBatches | None = None
    _first, _last_step = 1, 0
    """Numbers of the first and the last step of the present epoch."""
    _done = 0
    """The newest step that the loop has made."""
    _counted = 0
    """The newest step behind which `sync_gradients` was True."""
    _accumulates = False
    """True in `accumulate`."""
    _batches: Iterator[Any] = iter(())
    _next: Any = _NOTHING

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(self, self.session.batch)

    @property
    def is_main_process(self) -> bool:
        return self._train is not None and self.session.rank == 0

    is_local_main_process = is_main_process

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
        more: dict[str, Any] = {f"object{place}": one for place, one in enumerate(self._custom_objects)}
        collate, data = train.collate_fn, train.dataset
        leave_modes_to_loop(self.session)
        self.session.shard(
            model[0],
            optimizer[0],
            collate=lambda samples: collate([data[one] if isinstance(one, int) else one for one in samples]),
            **(schedulers | more),
        )
        self._train = TrainBatches(train, self)
        for scheduler in schedulers.values():
            compare_horizon(scheduler, self.session)
        self._done = self.session.first_step - 1
        return tuple(self._prepared(one, train) for one in args)

    def _prepared(self, one: Any, train: Any) -> Any:
        if isinstance(one, DataLoader):
            return self._train if one is train else HeldOutBatches(one, self)
        if isinstance(one, torch.optim.Optimizer):
            return AcceleratedOptimizer(one, device_placement=False)
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
            is_undone = epoch + 1 < count and self._last_step < self.session.max_steps and self.session.end()
            self._done -= is_undone
            epoch = self._train.epoch_of(self._done + 1)

    def microbatches(self) -> Iterator[Any]:
        """The microbatches of this worker until the end of the epoch; the last step stays open."""
        if not self._last_step:
            raise TaskError("write `for epoch in accelerator.epochs(num_epochs)` around the loop over the data.")
        while self._done < self._last_step:
            step = begin_step(self.session)
            try:
                if step.number < self._first:  # of an epoch that the script has left: the function is called again
                    raise CollectiveAborted(f"step {step.number} belongs to an earlier epoch")
                self._batches = step.microbatches()
                batch = next(self._batches, _NOTHING)
            except BaseException as error:
                step.__exit__(type(error), error, error.__traceback__)
                if step.number < self._first:
                    raise
                continue
            while batch is not _NOTHING and not step.is_undone:
                yield batch
                batch, self._next = self._next, _NOTHING
            self._done = step.number - step.is_undone

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        self.gradient_state._set_sync_gradients(False)
        step = self.session.step
        self._accumulates = True
        try:
            yield
        except BaseException as error:
            if step is None or step.is_undone or step.done:
                raise
            step.__exit__(type(error), error, error.__traceback__)
            self.gradient_state._set_sync_gradients(False)
            return
        finally:
            self._accumulates = False
        if self.sync_gradients and step is not None:
            self.gradient_state._set_sync_gradients(step.number > self._counted)
            self._counted = max(self._counted, step.number)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        step = self.session.step
        if step is None or not self._accumulates:
            raise TaskError(
                f"{line_here()}: accelerator.backward(loss) belongs into `with accelerator.accumulate(model):`. Put "
                "that line around the body of the loop over the training data: when a worker is lost, it takes the "
                "error, and the loop continues with the step that is done again."
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

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ConfigError("accelerator.clip_grad_value_: change gradients in a hook of the optimizer's step.")

    # -- results and files --

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        leaves, form = _pytree.tree_flatten(input_data)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise ConfigError("accelerator.gather_for_metrics: a session gathers tensors alone.")
        by_rank = gathered(self.session.step, [leaf.reshape(leaf.shape or (1,)) for leaf in leaves])
        sizes = self.sizes or [None] * len(by_rank)
        whole = [
            torch.cat([mine[place][:size] for mine, size in zip(by_rank, sizes, strict=True)])
            for place in range(len(leaves))
        ]
        return _pytree.tree_unflatten([one.to(self.device) for one in whole], form)

    gather = gather_for_metrics

    def wait_for_everyone(self) -> None:
        """Workers wait for each other where they communicate."""

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A whole copy of the model behind the last step, on every worker; the model itself before."""
        if self._done < self.session.max_steps:
            return model
        weights = weights_of(self.session.step, everywhere=True)
        assert weights is not None
        return copy_of(self.session, weights)

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str | None:
        """Request a checkpoint of the run, which has the whole state."""
        self.session.save()
        return output_dir

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Nothing: the run resumes from its own checkpoints."""
