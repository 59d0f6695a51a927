"""Forward and backward of one step's microbatches: losses and gradients that do not depend on the rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from raysharded.actors.device.accelerator import seed_torch
from raysharded.actors.device.device_waits import on_device, on_host
from raysharded.actors.guards.outputs import OutputWatch
from raysharded.actors.model.meta_watch import MemoryWatch
from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.numerics.exact_sums import Rows
from raysharded.actors.numerics.microbatch_schedule import microbatch_name
from raysharded.actors.task_calls.explanations import narrowed
from raysharded.actors.task_calls.object_contents import reachable
from raysharded.actors.task_calls.task_errors import naming
from raysharded.actors.task_calls.task_numbers import HALF, TENSORS, kind_of, number_of
from raysharded.data.access import generators
from raysharded.errors import TaskError
from raysharded.ids import derive_seed
from raysharded.task import Loss, Task

_ROWS_PER_BLOCK = 256


def operand_name(model: nn.Module, tensor: torch.Tensor) -> str:
    """Description of a tensor without memory, for errors. Call it where the tensor is met.

    It is the path from the model to the tensor, or to one that the tensor is a view of; otherwise the module whose
    forward meets it.
    """
    storage, shape = tensor.untyped_storage()._cdata, f"a tensor of shape {list(tensor.shape)}"
    for path, one in reachable(model, most=sys.maxsize):
        if isinstance(one, torch.Tensor) and one.is_meta and one.untyped_storage()._cdata == storage:
            return f"{clean_name(path.lstrip('.'))!r}, {shape}"
    names = {id(module): clean_name(name) or "the model" for name, module in model.named_modules()}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return f"{shape} in the forward of {name}, which the model itself does not hold"
    return f"{shape}, which the model itself does not hold"


@dataclass(slots=True)
class Results:
    """Results of a worker's microbatches; floats are read from the device once, at the end."""

    where: str
    """Source of the results, for errors."""
    metric_names: tuple[str, ...] | None = None
    numbers: int = max(TENSORS)
    """Number of the rule `numbers`."""
    half: dict[str, torch.dtype] = field(default_factory=dict)
    """Values in half precision: description -> dtype."""
    microbatches: list[int] = field(default_factory=list)
    _rows: list[torch.Tensor] = field(default_factory=list)
    """Newest rows: sum and weight of a microbatch's loss, then of each metric, sorted by name."""
    _blocks: list[torch.Tensor] = field(default_factory=list)
    """Earlier rows, many to a tensor."""

    def note_names(self, loss: Loss) -> None:
        """Record the metric names. Raises TaskError unless every microbatch has the same ones."""
        names = tuple(sorted(loss.metrics))
        if self.metric_names is None:
            self.metric_names = names
        elif names != self.metric_names:
            raise TaskError(
                f"{self.where} returned different metric names for two microbatches: {list(names)} and "
                f"{list(self.metric_names)}. Return the same names every time."
            )

    def add(self, index: int, loss: Loss) -> None:
        values = [loss.total, loss.weight]
        for name in sorted(loss.metrics):
            values.extend(loss.metrics[name])
        device = loss.total.device
        self._rows.append(torch.stack([self._tensor_of(number_of(value), device) for value in values]))
        self.microbatches.append(index)
        if len(self._rows) == _ROWS_PER_BLOCK:
            self._join_rows()

    def _join_rows(self) -> None:
        if self._rows:
            self._blocks.append(torch.stack(self._rows))
            self._rows.clear()

    def note_half(self, loss: Loss) -> None:
        """Record values in half precision, also of a loss that does not count."""
        pairs = loss.metrics.values()
        values = (loss.total, loss.weight, *(value for pair in pairs for value in pair))
        if not any(isinstance(value, torch.Tensor) and value.dtype in HALF for value in values):
            return
        named = {f"the metric {name!r}": pair for name, pair in sorted(loss.metrics.items())}
        for name, each in {"the loss": (loss.total,), "the weight": (loss.weight,), **named}.items():
            for value in each:
                if isinstance(value, torch.Tensor) and value.dtype in HALF:
                    self.half[name] = value.dtype

    def _tensor_of(self, number: float | torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """A number as a 0-dimensional float64 on the device, without a wait for it: backward is not launched yet."""
        assert number is not None  # checked when it was returned
        if isinstance(number, torch.Tensor):
            return on_device(number.detach().double(), device).reshape(())
        value = TENSORS[self.numbers](number).double()
        return torch.full((), value.item(), dtype=value.dtype, device=device) if value.device != device else value

    def values(self) -> Rows:
        """[microbatches, columns], read from the device at once. Raises TaskError for a negative weight."""
        self._join_rows()
        if not self._blocks:
            return np.empty((0, 2 + 2 * len(self.metric_names or ())))
        self._blocks = [torch.cat(self._blocks)]
        values: Rows = on_host(self._blocks[0]).numpy()
        is_negative = values[:, 1] < 0
        if is_negative.any():
            place = int(is_negative.argmax())
            raise _bad_weight(f"{self.where}, microbatch {self.microbatches[place]}", str(values[place, 1]))
        return values

    def by_microbatch(self) -> dict[int, list[float]]:
        """Microbatch -> its row of `values`."""
        return dict(zip(self.microbatches, self.values().tolist(), strict=True))


def _seed_torch(seed: int, purpose: str, step: int, microbatch: int) -> None:
    seed_torch(derive_seed(seed, purpose, step, microbatch))


def _seed_all(seed: int, purpose: str, step: int, microbatch: int) -> None:
    number = derive_seed(seed, purpose, step, microbatch)
    seed_torch(number)
    generators.seed(number, with_torch=False)


DRAWS: dict[int, Callable[[int, str, int, int], None]] = {1: _seed_torch, 2: _seed_all, 3: _seed_all}
"""Seeding of the process's generators from (run's seed, purpose, step, microbatch), by the number of the rule `draws`.
1: torch's alone. 2: Python's `random` and NumPy's, too."""


class Computer:
    """Calls of the task's code, on the worker's device, with random state that follows the data and not the rank."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        seed: int,
        draws: int = 1,
        *,
        watches_memory: bool = False,
    ) -> None:
        """`draws`: number of the rule. `watches_memory`: check each purpose's first forward for operands without
        memory."""
        self._unwatched = {"train", "evaluate"} if watches_memory else set[str]()
        self._draws = DRAWS[draws]
        self._task = task
        self._model = model
        self._seed = seed

    def evaluate(self, step: int, microbatch: int, batch: Any, num_samples: int) -> Loss:
        """The task's held-out loss of a microbatch."""
        where = f"{self.name_of('evaluate', step)}, {microbatch_name(microbatch)}"
        with naming(where, "loss"), self.computing("evaluate", step, microbatch):
            value = self._task.evaluate(self._model, batch)
        return as_loss(value, num_samples, where)

    def predict(self, step: int, microbatch: int, outputs_of: Callable[[Any], Any], batch: Any) -> Any:
        """The result of a user's function for a batch of held-out data."""
        with (
            naming(f"{self.name_of('evaluate', step)}, {microbatch_name(microbatch)}", "loss"),
            self.computing("evaluate", step, microbatch),
        ):
            return outputs_of(batch)

    def computing(self, purpose: str, step: int, microbatch: int) -> AbstractContextManager[object]:
        """A context in which a microbatch's loss is computed; draws, also in backward, depend on (seed, step,
        microbatch)."""
        self._draws(self._seed, purpose, step, microbatch)
        torch.clear_autocast_cache()  # under an autocast around the step, casts of other weights would be in it
        if purpose not in self._unwatched:
            return nullcontext()
        where = f"{self.name_of(purpose, step)}, {microbatch_name(microbatch)}"
        self._unwatched.remove(purpose)
        return MemoryWatch(
            lambda tensor: TaskError(
                f"{where} used {operand_name(self._model, tensor)}: it has no values, as it was made of parameters "
                "while the model was built, and those have none then. Compute it in forward, or register it as a "
                "buffer."
            )
        )

    def name_of(self, purpose: str, step: int) -> str:
        """Name of the task's method that computes the losses, with the step, for errors."""
        return f"{type(self._task).__name__}.{'evaluate' if purpose == 'evaluate' else 'loss'} in step {step}"

    def backward(self, step: int, microbatch: int, loss: Loss, outputs: OutputWatch, scale: float = 1.0) -> None:
        """Backward of the summed loss.

        For a loss that has no graph and does not count, `outputs` of the model's forward give gradients of zeros.
        """
        where = f"the backward of {self.name_of('train', step)}, {microbatch_name(microbatch)}"
        total = loss.total if scale == 1.0 else loss.total * scale
        try:
            with naming(where, "backward"):
                if not total.requires_grad and outputs.has_edges and float(loss.weight) == 0:
                    outputs.backward_of_nothing()
                else:
                    torch.autograd.backward(total)
        except TaskError as error:
            text = narrowed(str(error), outputs.suspects())
            if text == str(error):
                raise
            raise TaskError(text, error.user_traceback) from error


def as_loss(value: Any, num_samples: int, where: str) -> Loss:
    """A task's loss as a sum and its weight. Raises TaskError for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return Loss(value.reshape(()) * num_samples, float(num_samples))
    if isinstance(value, Loss) and isinstance(value.total, torch.Tensor) and value.total.numel() == 1:
        _check_weight(value.weight, where)
        _check_metrics(value.metrics, where)
        return value
    if isinstance(value, Loss):
        raise TaskError(
            f"{where} returned a Loss whose total is {kind_of(value.total)}; give the sum as a scalar tensor with its "
            "graph, without item()."
        )
    raise TaskError(
        f"{where} returned {kind_of(value)}; return raysharded.Loss(sum, weight) or the mean loss as a scalar tensor."
    )


def _check_weight(weight: Any, where: str) -> None:
    """Check a weight. A tensor's value is checked on the host: see `Results`."""
    number = number_of(weight)
    if number is None:
        raise _bad_weight(where, kind_of(weight))
    if not isinstance(number, torch.Tensor) and not (math.isfinite(number) and number >= 0):
        raise _bad_weight(where, str(weight))


def _bad_weight(where: str, shown: str) -> TaskError:
    return TaskError(
        f"{where} returned a Loss whose weight is {shown}; give the number of items in the sum, 0 or more."
    )


def _check_metrics(metrics: Any, where: str) -> None:
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{where} returned {kind_of(metrics)} as metrics; give a dict of name -> (sum, weight).")
    for name, pair in metrics.items():
        if not _is_pair(pair):
            parts = ", ".join(map(kind_of, pair)) if isinstance(pair, (tuple, list)) else kind_of(pair)
            raise TaskError(
                f"{where} returned the metric {name!r} as ({parts}); give (sum, weight), each a number or a "
                "scalar tensor."
            )


def _is_pair(value: Any) -> bool:
    try:
        return len(value) == 2 and all(number_of(one) is not None for one in value)
    except TypeError:  # it has no length, or is not iterable
        return False
