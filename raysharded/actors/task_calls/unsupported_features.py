"""Features of torch that a run cannot have: GradScaler, and graphs of a device's kernels. Their use raises by name.

A GradScaler multiplies the loss by a factor that each process changes by itself, and divides gradients that a step has
already summed. A graph of kernels has fixed addresses, where FSDP2 and each generation allocate anew, and its
collectives could not be aborted. torch has no hook for either, so functions of torch are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import TaskError


def refuse_scaler() -> NoReturn:
    """Raise TaskError for a task or a loop that uses a GradScaler."""
    raise TaskError(
        f"{line_here()}: a GradScaler changes gradients, whose scale belongs to the step. Leave it out: bfloat16 "
        '(EngineConfig.param_dtype, or torch.autocast) needs none, and FailureConfig(on_non_finite="skip") leaves out '
        "steps whose numbers are not finite."
    )


def refuse_graph() -> NoReturn:
    """Raise TaskError for a graph of kernels that begins."""
    raise TaskError(
        f"{line_here()}: CUDA graphs have fixed addresses of memory, and parameters are gathered to new ones in each "
        'step. Leave them out: no torch.cuda.graph, and no mode "reduce-overhead" or "max-autotune" of torch.compile '
        '("max-autotune-no-cudagraphs" works); EngineConfig(compile=True) compiles each block.'
    )


def is_installed() -> bool:
    """True if this process refuses these features."""
    return getattr(torch.amp.GradScaler.scale, "_refuses", False)


def install() -> None:
    """Let all later uses in this process raise TaskError. Further calls change nothing."""
    if is_installed():
        return
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        vars_of: Any = scaler
        vars_of.scale = _refusing(scaler.scale)
    accelerator().forbid_graphs(refuse_graph)


def _refusing(scale: Callable[..., Any]) -> Callable[..., Any]:
    def refused(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            refuse_scaler()
        return scale(self, outputs)

    vars(refused)["_refuses"] = True
    return refused
