"""Parts of an `Accelerator` in a session: the loaders and schedulers that `prepare` returns, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DistributedSampler, IterableDataset

from raysharded.actors.session.held_out import shared_batches
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
