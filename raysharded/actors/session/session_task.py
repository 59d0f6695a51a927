"""The task that a session fills in: the engine finds functions there that the session is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.protocol.job import Job
from raysharded.task import Loss, Task, TrainFunction

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raysharded.actors.session.user_session import Session


class SessionTask(Task):
    """The task that a session fills in: its methods are functions that the user has given."""

    def __init__(self, function: Callable[[Session], None]) -> None:
        self.function = function
        self.make: Callable[[], nn.Module] | None = None
        self.held_out_loss: Callable[[Any], Loss | torch.Tensor] | None = None
        self.units: Callable[[nn.Module], Sequence[nn.Module] | None] | None = None

    def build_model(self) -> nn.Module:
        assert self.make is not None, "session.build comes first"
        return self.make()

    def evaluate(self, model: nn.Module, batch: Any) -> Loss | torch.Tensor:
        assert self.held_out_loss is not None, "session.evaluate comes first"
        return self.held_out_loss(batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        found = None if self.units is None else self.units(model)
        return None if found is None else list(found)


def with_session_task(job: Job) -> Job:
    """The job, with a `SessionTask` that has the name of its training function; unchanged if it has a task."""
    if not isinstance(job.task, TrainFunction):
        return job
    name = getattr(job.task.function, "__name__", type(job.task.function).__name__)
    return replace(job, task=type(name, (SessionTask,), {})(job.task.function))
