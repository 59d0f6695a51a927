"""The consensus of all workers, once per step, as one sum of 64-bit integers.

All values are sent exactly: counts as they are, floats as their bits in a slot that only one worker fills. The task's
metrics have the same names on every worker, since they determine the layout of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from raysharded.actors.numerics.grad_norm import NORM_WORDS, norm_from_words
from raysharded.actors.numerics.summation_tree import tree_sums
from raysharded.errors import TaskError
from raysharded.ids import derive_seed
from raysharded.protocol.messages import NonFinite

Pair = tuple[float, float]
"""(sum, weight)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags that any worker may raise and on which all workers act."""

    non_finite_gradient: bool = False
    boundary: bool = False
    """Stop after this step: the driver wants to change the membership."""
    save_busy: bool = False
    """The previous checkpoint is still being written."""
    save_now: bool = False
    """A checkpoint of this step is requested."""

    def as_ints(self) -> list[int]:
        return [int(self.non_finite_gradient), int(self.boundary), int(self.save_busy), int(self.save_now)]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Flags:
        """The flags that at least one worker raised, from the sums of `as_ints` over the workers."""
        non_finite_gradient, boundary, save_busy, save_now = map(bool, counts)
        return cls(non_finite_gradient=non_finite_gradient, boundary=boundary, save_busy=save_busy, save_now=save_now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One worker's contribution to the consensus."""

    losses: Mapping[int, Pair]
    """Microbatch -> (sum, weight), of the microbatches that this worker computed."""
    metrics: Mapping[int, Sequence[Pair]]
    """Microbatch -> the task's metrics in the order of `metric_names`."""
    metric_names: tuple[str, ...]
    norm_words: torch.Tensor
    read_digest: tuple[int, int]
    num_reads: int
    flags: Flags
    uses: Sequence[int] = ()
    """For each parameter of the model: 1 if this worker's microbatches used it, else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The result of the consensus, with the same bits on all workers."""

    loss_sum: float
    weight: float
    metrics: dict[str, Pair]
    gradient_norm: float
    """Norm of the gradient of the summed loss; divide by `weight`."""
    read_digest: tuple[int, int]
    num_reads: int
    flags: Flags = field(default_factory=Flags)
    bad_losses: tuple[int, ...] = ()
    """The microbatches whose loss is NaN or infinite."""
    uses: tuple[int, ...] = ()
    """For each parameter of the model, the number of workers on which a microbatch used it."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight if self.weight else float("nan")

    def averages(self) -> dict[str, float]:
        """The task's metrics as sum / weight over the whole step."""
        return {name: total / weight if weight else float("nan") for name, (total, weight) in self.metrics.items()}


_NUM_FLAGS = len(Flags().as_ints())
_HEAD = _NUM_FLAGS + NORM_WORDS + 3


def agree(own: Contribution, num_microbatches: int, sum_over_workers: Callable[[torch.Tensor], torch.Tensor]) -> Agreed:
    """Combine the workers' contributions; every worker of the generation must call it."""
    pairs_per_slot = 1 + len(own.metric_names)
    pairs = _HEAD + len(own.uses)
    values = torch.zeros(pairs + num_microbatches * pairs_per_slot * 2, dtype=torch.int64)
    head = [*own.flags.as_ints(), *own.norm_words.tolist(), _signed(own.read_digest[0]), _signed(own.read_digest[1])]
    values[:pairs] = torch.tensor([*head, own.num_reads, *own.uses], dtype=torch.int64)
    if own.losses:
        floats = [(*pair, *chain.from_iterable(own.metrics[index])) for index, pair in own.losses.items()]
        slots = values[pairs:].numpy().view(np.float64).reshape(num_microbatches, pairs_per_slot * 2)
        slots[list(own.losses)] = np.array(floats, dtype=np.float64)
    return _decode(sum_over_workers(values).numpy(), num_microbatches, own.metric_names, len(own.uses))


def non_finite(agreed: Agreed) -> NonFinite | None:
    """The value that keeps the step from being applied; None if its loss and gradient are finite."""
    if not math.isfinite(agreed.loss_sum):
        return NonFinite(what="loss", loss=agreed.loss, microbatches=agreed.bad_losses)
    if agreed.flags.non_finite_gradient:
        return NonFinite(what="gradient", loss=agreed.loss)
    return None


def require_weight(step: int, agreed: Agreed) -> None:
    """Raise TaskError, the same on every worker, unless the step's weight is positive and finite."""
    if not 0 < agreed.weight < math.inf:
        raise TaskError(
            f"step {step}: the weights of all microbatches add up to {agreed.weight}; a step needs items to "
            "average over, and a finite number of them."
        )


def _decode(
    values: NDArray[np.int64], num_microbatches: int, metric_names: tuple[str, ...], num_parameters: int
) -> Agreed:
    pairs = _HEAD + num_parameters
    head: list[int] = values[:pairs].tolist()
    digits = head[_NUM_FLAGS : _NUM_FLAGS + NORM_WORDS]
    first, second, num_reads = head[_NUM_FLAGS + NORM_WORDS : _HEAD]
    floats = values[pairs:].view(np.float64).reshape(num_microbatches, 2 * (1 + len(metric_names)))
    sums = tree_sums(floats)
    return Agreed(
        loss_sum=sums[0],
        weight=sums[1],
        metrics={name: (sums[2 + 2 * i], sums[3 + 2 * i]) for i, name in enumerate(metric_names)},
        gradient_norm=norm_from_words(digits),
        read_digest=(first % 2**64, second % 2**64),
        num_reads=num_reads,
        flags=Flags.of(head[:_NUM_FLAGS]),
        bad_losses=tuple(np.flatnonzero(~np.isfinite(floats[:, 0])).tolist()),
        uses=tuple(head[_HEAD:]),
    )


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


class MetricNames:
    """The metric names of one generation, for each purpose: training, evaluation."""

    def __init__(self, task_name: str, max_over_workers: Callable[[int], int]) -> None:
        self._task_name, self._max = task_name, max_over_workers
        self._names: dict[str, tuple[str, ...]] = {}

    def of(self, purpose: str) -> tuple[str, ...] | None:
        """The names that the workers agreed on; None before that."""
        return self._names.get(purpose)

    def agree(self, purpose: str, own: tuple[str, ...]) -> None:
        """Compare the workers' names, once; every worker must call it. Raises TaskError if they differ."""
        if purpose in self._names:
            return
        seed = derive_seed(*own)
        if self._max(seed) != -self._max(-seed):
            raise TaskError(
                f"{self._task_name} returned other metrics on this worker than on others (here {list(own)}); return "
                "the same names for every microbatch."
            )
        self._names[purpose] = own
