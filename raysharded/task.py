"""A user's task: the model, its optimizer and its loss.

Standard library only; torch appears only in annotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raysharded.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


Strategy = Literal["full", "gradients", "replicate"]
"""The sharding of a unit's weights."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A microbatch's loss as a sum and its weight.

    The step's loss is sum(total) / sum(weight) over its microbatches, which weights masked tokens correctly. Return the
    summed loss of the unmasked tokens, and their number.
    """

    total: torch.Tensor
    """Scalar; the sum of the losses. Its gradient is taken."""
    weight: float | torch.Tensor
    """The number of items in the sum (tokens, samples); not negative."""
    metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]] = field(default_factory=dict)
    """Custom metrics as name -> (sum, weight); reported as sum / weight over the whole step. Every microbatch must
    return the same names."""


class Task:
    """Base class of a user's task. It is pickled to every worker; its methods must be free of side effects.

    `build_model` and `build_optimizer` are called once in a worker's process; `build_model` also when the worker
    starts, and for the first weights of a run. They are called for every generation of workers with tensor parallelism,
    and if the optimizer or the task holds parameters outside the optimizer's groups.
    """

    max_grad_norm: float | None = None
    """Clip the gradient's global 2-norm to this, a number above 0; None or infinity: do not clip."""

    def build_model(self) -> nn.Module:
        """The model, on the default device, with its usual initial weights."""
        raise NotImplementedError(f"{type(self).__name__} must define build_model()")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters, in any parameter groups."""
        raise NotImplementedError(f"{type(self).__name__} must define build_optimizer(model)")

    collate: Callable[[list[Any]], Any] | None = None
    """Define `collate(self, samples)` to make a microbatch of samples, for example to pad sequences. It is called on
    the CPU. Its draws from the generators of torch, NumPy and Python depend only on the run's seed, the step and the
    microbatch. It must not change samples that the dataset keeps. Without it, torch's `default_collate` is used."""

    def loss(self, model: nn.Module, batch: Any) -> Loss | torch.Tensor:
        """The loss of one microbatch, with `batch` collated and on the worker's device.

        A plain scalar tensor is treated as the mean over the microbatch's samples.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def evaluate(self, model: nn.Module, batch: Any) -> Loss | torch.Tensor:
        """The loss of held-out data: as `loss`, but called in eval mode without gradients."""
        return self.loss(model, batch)

    def lr_scale(self, step: int) -> float:
        """The factor of each group's initial learning rate in optimizer step `step` (from 1 on): a finite number, 0 or
        more."""
        return 1.0

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules that are sharded as separate units; None: the blocks of every `ModuleList`."""
        return None

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        """The sharding of a unit, one of `wrap`; None: as `EngineConfig.reshard_after_forward` sets.

        "full": the weights are gathered for the forward, freed, and gathered again for the backward. "gradients": they
        stay gathered from forward to backward (ZeRO-2; Rajbhandari et al., ZeRO, 2020, section 5), for less traffic and
        more memory. "replicate": every worker has the whole unit with its optimizer state, and nothing is gathered; for
        small units. The bits are the same. `name` is the module's name in the model.
        """
        return None

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle] | None:
        """The model's tensor parallel plan; required if `ScalingConfig.tensor_parallel_degree` is above 1.

        Return torch's parallel styles by module (`{"blocks.*.up": ColwiseParallel(), ...}`; `*` is any name). Or apply
        `parallelize_module` over `mesh`, the workers of one tensor parallel group, and return None. The parameters have
        no values yet. FSDP2 then shards the rest over the other workers. Each worker of a group calls `loss` with the
        same microbatch. A sharded module sees only its part: derive a number of heads, for example, from the tensors'
        sizes. Every worker must return the whole loss, as a plain tensor.
        """
        return None

    init_weights: Callable[[nn.Module, torch.Generator], None] | None = None
    """Define `init_weights(self, module, generator)` to draw a large model's weights one module at a time. It is called
    for every module that directly has parameters, materialised, with torch's default generators seeded as `generator`
    is. So `module.reset_parameters()` works too. Without it, the first generation builds the whole model once on every
    worker's CPU."""


class TrainFunction(Task):
    """A training function in place of a task: it owns the loop, and gets everything from its session.

    Nothing of a task is known before a worker calls the function.
    """

    def __init__(self, function: Callable[[Any], None], max_steps: int | None = None) -> None:
        """`function`: called with the session, once in each worker's process.

        `max_steps`: `session.max_steps` in a run that ends before; None: the run's.
        """
        self.function, self.max_steps = function, max_steps


def require_methods(task: Task, where: str) -> None:
    """Raise ConfigError if a training function is given in place of a task. `where`: the caller, for people."""
    if isinstance(task, TrainFunction):
        raise ConfigError(
            f"{where} needs a raysharded.Task: it calls its methods, and a train_fn has none. Run the function for a "
            "few steps with raysharded.testing.processes.fit."
        )


def overrides(task: Task, method: str) -> bool:
    """True if the task itself defines a method, in its class or on the object."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


def has_tensor_parallelism(task: Task) -> bool:
    """True if the task defines a tensor parallel plan."""
    return type(task).parallelize is not Task.parallelize


def require_tensor_parallelism(task: Task, degree: int) -> None:
    """Raise ConfigError for a tensor parallel degree above 1 if the task has no tensor parallel plan."""
    if degree > 1 and not has_tensor_parallelism(task):
        raise ConfigError(
            f"tensor_parallel_degree is {degree}, but {type(task).__name__} has no parallelize(model, mesh): define "
            "it, or leave the degree at 1."
        )


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_scale: float = 0.1) -> float:
    """Linear warm-up to 1 over `warmup_steps`, then a cosine down to `final_scale` at `total_steps`.

    For `Task.lr_scale`; `step` counts from 1.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_scale + (1 - final_scale) * 0.5 * (1 + math.cos(math.pi * progress))
