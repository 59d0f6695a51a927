"""Parts of an `Accelerator` in a session: what `prepare` returns, lines behind `accumulate`, refusals, its words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DistributedSampler, IterableDataset

from raysharded.actors.session.held_out import num_samples_of, remark, shared_batches
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.config import BatchConfig
from raysharded.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from raysharded.actors.optimizer.registered_state import RegisteredState
    from raysharded.actors.session.user_session import Session
    from raysharded.actors.session.user_step import UserStep

_WITH = "`with accelerator.accumulate(model):`"


class TrainBatches:
    """The training data, in place of its `DataLoader`: the microbatches of the run."""

    def __init__(self, loader: DataLoader[Any], accelerator: Any) -> None:
        self.dataset, self._accelerator = loader.dataset, accelerator
        self._batch: BatchConfig = accelerator.session.batch
        self._samples = len(loader.dataset)  # type: ignore[arg-type]  # `require_loader` has looked
        self._require_samples(num_samples_of(accelerator.session))

    def _require_samples(self, found: int | None) -> None:
        if found != self._samples:
            has = "is left out" if found is None else f"has {found} samples"
            raise ConfigError(
                f"accelerator.prepare(...): ElasticTrainer(data=...) {has}, and the dataset of the first data loader, "
                f"which is the training data's, has {self._samples}. Both are one thing: give "
                f"ElasticTrainer(data=range({self._samples})), or that dataset."
            )

    def require_steps(self, epochs: float) -> None:
        """Raise ConfigError if the run's last step is in no step of the last of so many epochs."""
        session, size = self._accelerator.session, self._batch.global_batch_size
        if math.isinf(epochs):
            return
        last, given = self.last_step(math.ceil(epochs) - 1), session.max_steps
        asked = f"accelerator.epochs({epochs}) is {last} steps of {size} of {self._samples} samples"
        if given > last:
            raise ConfigError(
                f"{asked}, and RunConfig(max_steps={given}) has more: give RunConfig(max_steps={last}), or "
                f"accelerator.epochs({self.epoch_of(given) + 1})."
            )
        if self.epoch_of(given) + 1 < epochs:
            raise ConfigError(
                f"{asked}, and RunConfig(max_steps={given}) ends before its last epoch: give "
                f"RunConfig(max_steps={last}), or accelerator.epochs({self.epoch_of(given) + 1})."
            )
        if given < last:
            remark(
                session,
                "accelerator.epochs",
                f"{asked}, and RunConfig(max_steps={given}) ends within the last epoch, as a script with "
                f"max_train_steps={given} does. For whole epochs give RunConfig(max_steps={last}).",
            )

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0 on, in which a step begins."""
        return (step - 1) * self._batch.global_batch_size // self._samples

    def last_step(self, epoch: int) -> int:
        """The last step that begins in an epoch; 0 before the first."""
        return -(-(epoch + 1) * self._samples // self._batch.global_batch_size)

    def __len__(self) -> int:
        steps = math.ceil(self._samples / self._batch.global_batch_size)
        return steps * int(self._accelerator.gradient_accumulation_steps)

    def __iter__(self) -> Iterator[Any]:
        yield from self._accelerator.microbatches()


class HeldOutBatches:
    """Held-out data, in place of their `DataLoader`: the batches are shared among the workers, in rounds.

    `Accelerator.gather_for_metrics` brings a round's results together, in the order of the data.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Any) -> None:
        self._loader, self._accelerator = loader, accelerator
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader, accelerator = self._loader, self._accelerator
        session, size = accelerator.session, loader.batch_size or 1
        try:
            for accelerator.sizes, samples in shared_batches(session, loader.dataset, size):
                yield send_to_device(loader.collate_fn(samples), accelerator.device)
        finally:
            accelerator.sizes = None


class StepOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no annotations
    """An optimizer that steps at a step's last microbatch alone, in `accumulate`."""

    def __init__(self, optimizer: Optimizer, accelerator: Any) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:
        if not self._accelerator.accumulates:  # there `sync_gradients` is False if the step is done again
            raise TaskError(f"{line_here()}: optimizer.step() belongs into {_WITH}, behind accelerator.backward(loss).")
        super().step(closure)


class StepScheduler:
    """A scheduler that steps once with each step of the optimizer, at every number of workers."""

    def __init__(self, scheduler: LRScheduler, accelerator: Any) -> None:
        self.scheduler, self._accelerator = scheduler, accelerator

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step behind the optimizer's step; nothing behind other microbatches."""
        if self._accelerator.sync_gradients:
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


@dataclass(frozen=True, slots=True)
class _Place:
    """State of a step at a place behind its update."""

    registered: dict[str, Any]
    """Registered state, and the optimizer's groups, as plain data."""
    calls: object
    """Changes with each call that communicates."""
    tensors: int
    """Digest of parameters and the optimizer's state, if the step is watched."""
    orders: str = field(default="", compare=False)
    """Order of the dicts in registered state, as its text has it."""


class LinesBehind:
    """Lines of a script behind `accumulate`, when their step is done again: `sync_gradients` is False there.

    For a script counts its steps by it. Registered state that the lines changed is loaded instead. If they have
    communicated, or changed tensors, the function is called again.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._newest = self._newest_change = 0
        """The newest step behind which such lines have run, and the newest in which they changed anything."""
        self._change_tensors = False
        """True if they have changed tensors in a watched step."""
        self._ahead: _Place | None = None
        """As the lines of the present step began."""
        self._is_again = False
        self._kept: dict[int, tuple[_Place, _Place]] = {}
        """Step -> the state ahead of the lines and behind them, of the newest two steps in which it differs."""

    def begin(self, step: UserStep) -> bool:
        """Call as `accumulate` ends behind a step's update. True if the step is new to the script."""
        self._ahead = ahead = self._place(step)
        kept = self._kept.get(step.number)
        self._is_again = step.number <= self._newest and (kept is None or kept[0].registered == ahead.registered)
        self._newest = max(self._newest, step.number)
        return not self._is_again

    def end(self) -> None:
        """Call ahead of the end of a step that is open."""
        step, ahead, self._ahead = self._session.step, self._ahead, None
        if step is None or ahead is None or not step.stays_open:
            return
        now, kept = self._place(step), self._kept.get(step.number)
        if self._is_again and kept is not None and now.registered != kept[1].registered:
            values = json.loads(self._registered.text().partition("\n")[0]) | kept[1].registered
            self._registered.load(f"{json.dumps(values)}\n\n{kept[1].orders}")
        elif not self._is_again:
            self._kept = {number: one for number, one in self._kept.items() if self._newest - 1 <= number < step.number}
            if now != ahead:
                self._newest_change, self._kept[step.number] = step.number, (ahead, now)
                self._change_tensors |= now.tensors != ahead.tensors

    def are_lost(self, number: int) -> bool:
        """True if a step is done again whose lines must run again: they were those of a new step before."""
        if number in self._kept:
            ahead, behind = self._kept[number]
            return self._change_tensors or ahead.calls != behind.calls
        return number <= self._newest_change and (self._change_tensors or number < self._newest - 1)

    @property
    def _registered(self) -> RegisteredState:
        found = self._session._objects.registered
        assert found is not None, "prepare comes first"
        return found

    def _place(self, step: UserStep) -> _Place:
        text, _, others = self._registered.text().partition("\n")
        values = json.loads(text)
        for name in ("modes", "log", "last"):  # the script's lines set the first, and count for the others
            values.pop(name, None)
        engine = step._step
        digest = engine.steps.digest("state") if engine is not None and step.watch.is_watched else 0
        calls = (self._session.draws._place, tuple(self._registered.calls))
        return _Place(values, calls, digest, others.partition("\n")[2])


def compare_horizon(scheduler: Any, session: Any) -> None:
    """Remark on a scheduler of transformers whose number of steps is twice the run's, or more."""
    rates = getattr(scheduler, "lr_lambdas", ())
    horizons = [getattr(rate, "keywords", {}).get("num_training_steps", 0) for rate in rates]
    if horizons and min(horizons) >= 2 * session.max_steps:
        remark(
            session,
            "num_training_steps",
            f"the learning rate scheduler has num_training_steps={min(horizons)}, and the run has {session.max_steps} "
            "steps: it steps once in each, and ends far from its last value. For the run's steps give "
            "num_training_steps=session.max_steps.",
        )


def require_supported(accelerator: Any, batch: BatchConfig) -> None:
    """Raise ConfigError for an `Accelerator` that the session cannot keep."""
    if accelerator.distributed_type != DistributedType.NO:
        raise ConfigError(
            f"the environment makes this process a part of {accelerator.distributed_type.value}: start the script with "
            "python, not with accelerate launch, and leave plugins out. raysharded starts the workers, and shards."
        )
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}): give EngineConfig(param_dtype=...), or put "
            "torch.autocast around the forward."
        )
    if batch.num_microbatches % accelerator.gradient_accumulation_steps:
        raise ConfigError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}): a step of the run "
            f"has {batch.num_microbatches} microbatches, which is no multiple."
        )


def require_loader(loader: Any, batch: BatchConfig) -> None:
    """Raise ConfigError for training data that the session cannot keep."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError("accelerator.prepare(DataLoader(...)): the training data need a length and items.")
    if isinstance(loader.sampler, DistributedSampler):
        raise ConfigError(
            "DataLoader(sampler=DistributedSampler(...)): the order of samples belongs to the run. Leave it out."
        )
    if loader.batch_size != batch.microbatch_size:
        raise ConfigError(
            f"DataLoader(batch_size={loader.batch_size}) and BatchConfig(microbatch_size={batch.microbatch_size}) are "
            "one thing: set both to one number."
        )


WORDS = (
    (
        r"(step \d+ ended without )optimizer\.step\(\):.*",
        (
            rf"\1optimizer.step(): in {_WITH} call it for each microbatch, or `if accelerator.sync_gradients:`, and "
            r"not by a count of the script, as `if step % n == 0:`. It works at the step's last microbatch alone."
        ),
    ),
    (
        r"optimizer\.step\(\) came before the loop over step\.microbatches\(\) has ended\..*",
        (
            "optimizer.step() came before the step's last microbatch: call that of the optimizer which "
            "accelerator.prepare has returned."
        ),
    ),
    (
        r"iterate over session\.steps\(\) without break or return",
        (
            "the loop over accelerator.epochs(num_epochs) trains until then. A script that leaves it by `break`, as at "
            "max_train_steps, needs that number in RunConfig(max_steps=...)"
        ),
    ),
    (
        r"call step\.backward\(loss\) once for each microbatch\.",
        (
            "call accelerator.backward(loss) once for each batch, and leave none out, as by `continue`. Leave samples "
            'out in the dataset, and steps with a NaN by FailureConfig(on_non_finite="skip").'
        ),
    ),
    (r"session\.shard\(collate=\.\.\.\)", "collate_fn of the training data's DataLoader"),
    (r"session\.shard\(model, optimizer, scheduler=scheduler\)", "accelerator.prepare(..., scheduler)"),
    (r"session\.shard\(\.\.\., name=object\)", "accelerator.register_for_checkpointing(object), before prepare"),
    (r"session\.shard(\(model, optimizer\))?", "accelerator.prepare"),
    (r"session\.steps\(\)", "accelerator.epochs(num_epochs)"),
    (r"`with step:`", _WITH),
    (r"\bcall session\.evaluate\b", "evaluate, gather, reduce or wait for everyone"),
    (r"\bstep\.backward\(loss\)", "accelerator.backward(loss)"),
    (r"\bstep\.clip_grad_norm_", "accelerator.clip_grad_norm_"),
    (r"\bstep\.microbatches\(\)", "the training data"),
)
"""(pattern, replacement), in this order: sentences of a session about its loop, in the words of such a script."""
