"""What the engine finds in place of a task, if the loop is a user's: functions of the session, and held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.actors.session.user_step import UserStep
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.config import BatchConfig
from raysharded.data.loader import MicrobatchLoader
from raysharded.errors import TaskError
from raysharded.protocol.job import Job
from raysharded.task import Loss, Task, TrainFunction

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raysharded.actors.session.user_session import Session

_MOST_READERS = 4


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


class HeldOut:
    """Readers of the newest few held-out datasets of a session. Thread of the function only."""

    def __init__(self, batch: BatchConfig) -> None:
        self._batch = batch
        self._known: list[tuple[Any, MicrobatchLoader]] = []

    def evaluate(self, step: UserStep | None, data: Any, num_samples: int | None, name: str) -> dict[str, float]:
        """As `Session.evaluate`, once the loss is set."""
        loader = next((loader for known, loader in self._known if known is data), None)
        if loader is None:
            loader = MicrobatchLoader(data, self._batch)
            self._known = [*self._known[1 - _MOST_READERS :], (data, loader)]
        count = loader.num_samples if num_samples is None else num_samples
        if count < 1:
            raise TaskError(f"{line_here()}: session.evaluate(num_samples={num_samples}): give 1 or more.")
        if step is None:
            raise TaskError(f"{line_here()}: session.evaluate() belongs into `with step:`, behind optimizer.step().")
        return step.evaluate(loader, count, name)
