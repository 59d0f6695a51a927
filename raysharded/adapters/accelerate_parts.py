"""Parts of an `Accelerator` in a session: loaders and schedulers that `prepare` returns, its refusals, its words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DistributedSampler, IterableDataset

from raysharded.actors.session.held_out import num_samples_of, remark, shared_batches
from raysharded.config import BatchConfig
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader


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


_WITH = "`with accelerator.accumulate(model):`"

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
    (r"session\.shard\(collate=\.\.\.\)", "collate_fn of the training data's DataLoader"),
    (r"session\.shard\(model, optimizer, scheduler=scheduler\)", "accelerator.prepare(..., scheduler)"),
    (r"session\.shard\(\.\.\., name=object\)", "accelerator.register_for_checkpointing(object), before prepare"),
    (r"session\.shard(\(model, optimizer\))?", "accelerator.prepare"),
    (r"session\.steps\(\)", "accelerator.epochs(num_epochs)"),
    (r"`with step:`", _WITH),
    (r"\bstep\.backward\(loss\)", "accelerator.backward(loss)"),
    (r"\bstep\.clip_grad_norm_", "accelerator.clip_grad_norm_"),
    (r"\bstep\.microbatches\(\)", "the training data"),
)
"""(pattern, replacement), in this order: sentences of a session about its loop, in the words of such a script."""
