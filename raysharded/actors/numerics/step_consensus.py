"""The consensus of all workers, once per step, as one sum of 64-bit integers, or two.

All values are sent exactly: counts as they are, floats as `column_sums` has them. The task's metrics have the same
names on every worker, since they determine the layout of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raysharded.actors.numerics.column_sums import LAYOUTS, ByMicrobatch, OwnMicrobatches, Sum
from raysharded.actors.numerics.exact_sums import Rows
from raysharded.actors.numerics.grad_norm import NORM_WORDS, norm_from_words
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

    microbatches: Sequence[int]
    """The microbatches that this worker computed."""
    values: Rows
    """[microbatches, 2 + 2 * metrics]: sum and weight of the loss, then of each metric in the order of
    `metric_names`."""
    metric_names: tuple[str, ...]
    norm_words: torch.Tensor
    read_digest: tuple[int, int]
    num_reads: int
    flags: Flags
    uses: Sequence[bool] = ()
    """For each parameter of the model: True if this worker's microbatches used it."""
    presumed: Sequence[bool] = ()
    """The presumption about all workers, for one whose own microbatches used no parameter."""


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
    used: tuple[bool, ...] = ()
    """For each parameter of the model: True if a microbatch used it."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight if self.weight else float("nan")

    def averages(self) -> dict[str, float]:
        """The task's metrics as sum / weight over the whole step."""
        return {name: total / weight if weight else float("nan") for name, (total, weight) in self.metrics.items()}


_NUM_FLAGS = len(Flags().as_ints())
_HEAD = _NUM_FLAGS + NORM_WORDS + 3


def agree(own: Contribution, num_microbatches: int, sum_over_workers: Sum, *, numbers: int) -> Agreed:
    """Combine the workers' contributions; every worker of the generation must call it. `numbers`: of the rule."""
    mine = OwnMicrobatches(microbatches=own.microbatches, values=own.values, uses=own.uses, presumed=own.presumed)
    layout = LAYOUTS[numbers](mine, num_microbatches)
    reads = [*map(_signed, own.read_digest), own.num_reads]
    head = [np.array(own.flags.as_ints()), own.norm_words.numpy(), np.array(reads, dtype=np.int64)]
    words = sum_over_workers(torch.from_numpy(np.concatenate([*head, layout.words()]))).numpy()
    counts: list[int] = words[:_HEAD].tolist()
    first, second, num_reads = counts[_NUM_FLAGS + NORM_WORDS :]
    found = layout.read(words[_HEAD:], sum_over_workers)
    sums = found.sums
    return Agreed(
        loss_sum=sums[0],
        weight=sums[1],
        metrics={name: (sums[2 + 2 * i], sums[3 + 2 * i]) for i, name in enumerate(own.metric_names)},
        gradient_norm=norm_from_words(counts[_NUM_FLAGS : _NUM_FLAGS + NORM_WORDS]),
        read_digest=(first % 2**64, second % 2**64),
        num_reads=num_reads,
        flags=Flags.of(counts[:_NUM_FLAGS]),
        bad_losses=found.bad_losses,
        used=found.used,
    )


def microbatch_losses(own: Contribution, num_microbatches: int, sum_over_workers: Sum) -> tuple[Pair, ...]:
    """(sum, weight) of the loss of each microbatch; every worker of the generation must call it."""
    losses = OwnMicrobatches(microbatches=own.microbatches, values=own.values[:, :2], uses=(), presumed=())
    layout = ByMicrobatch(losses, num_microbatches)
    words = sum_over_workers(torch.from_numpy(layout.words())).numpy()
    return tuple((total, weight) for total, weight in layout.slots(words).tolist())


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
