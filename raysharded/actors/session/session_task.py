"""The task that a session fills in: the engine finds functions there that the session is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raysharded.protocol.job import Job
from raysharded.task import Loss, Task, TrainFunction

if TYPE_CHECKING:
    import torch
    from torch import nn


class SessionTask(Task):
    """The task that a session fills in: its methods are functions that the user has given."""

    def __init__(self, function: Callable[[Any], None], max_steps: int | None) -> None:
        """`function`: called with the session. `max_steps`: as for `TrainFunction`."""
        self.function, self.max_steps = function, max_steps
        self.make: Callable[[], nn.Module] | None = None
        self.held_out_loss: Callable[[Any], Loss | torch.Tensor] | None = None
        self.sets_modes = False
        """True if the loop is an adapter's, which sets the modes itself in each step."""
        self.units: Callable[[nn.Module], Sequence[nn.Module] | None] | None = None
        self.words: Sequence[tuple[str, str]] = ()
        """(pattern, replacement) for sentences about a loop, in the words of an adapter."""

    def build_model(self) -> nn.Module:
        assert self.make is not None, "session.build comes first"
        return self.make()

    def evaluate(self, model: nn.Module, batch: Any) -> Loss | torch.Tensor:
        assert self.held_out_loss is not None, "session.evaluate comes first"
        return self.held_out_loss(batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        found = None if self.units is None else self.units(model)
        return None if found is None else list(found)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a training function; of a `functools.partial` that of its function."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def with_session_task(job: Job) -> Job:
    """The job, with a `SessionTask` that has the name of its training function; unchanged if it has a task."""
    if not isinstance(job.task, TrainFunction):
        return job
    kind = type(name_of(job.task.function), (SessionTask,), {})
    return replace(job, task=kind(job.task.function, job.task.max_steps))


_WORDS = (
    (r"({name}\.)?build_model and ({name}\.)?build_optimizer", "session.build(make) and the optimizer"),
    (r"({name}\.)?\bbuild_model\b", "session.build(make)"),
    (r"\bRegister it in build_optimizer\b", "Register it before session.shard"),
    (r"({name}\.)?\bbuild_optimizer\b", "the optimizer of session.shard"),
    (r"({name}|Task)\.init_weights\b", "session.build(init_weights=...)"),
    (r"({name}|Task)\.wrap\b", "session.shard(wrap=...)"),
    (r"({name}|Task)\.collate\b", "session.shard(collate=...)"),
    (r"({name}|Task)\.evaluate\b", "session.evaluate(loss_of)"),
    (r", which Task\.lr_scale multiplies;", ";"),
    (
        r"raysharded sets the rates in .* what a scheduler sets is lost\. Give the schedule as [\w.]+\(step\)",
        "In optimizer.step() and its hooks no rate may change: call scheduler.step() behind it, in the `with`",
    ),
    (r"\bset max_grad_norm\b", "clip by step.clip_grad_norm_"),
    (r"\bTask\.max_grad_norm\b", "step.clip_grad_norm_"),
    (r"\breturn Loss\((\w+), ([\w ]+)\)", r"call step.backward(\1, weight=\2)"),
    (r"\breturn raysharded\.Loss\(sum, weight\)", "call step.backward(sum, weight=...)"),
    (
        r"raysharded calls backward itself(.*), when the loss has returned: do not call backward\(\) in it, return",
        r"call step.backward(loss)\1, not loss.backward(), and give it",
    ),
    (
        r"raysharded calls backward itself(.*): do not call backward\(\) in the loss,",
        r"call step.backward(loss)\1, not loss.backward(),",
    ),
    (r"(buffer '[^']*' changed) during forward;", r"\1 in a forward, or in the loop;"),
    (r"\bthe task's computation\b", "the loop's computation"),
)
"""Methods of a task, as errors and remarks name them -> what a loop has in their place."""


def words_for(task: object) -> Callable[[str], str]:
    """Function from a sentence about a task to the same about this one, which may be a user's loop."""
    if not isinstance(task, SessionTask):
        return lambda sentence: sentence
    name = re.escape(type(task).__name__)
    words = [(re.compile(pattern.replace("{name}", name)), by) for pattern, by in _WORDS]

    def reworded(sentence: str) -> str:
        for pattern, by in words:
            sentence = pattern.sub(by, sentence)
        for own, by in task.words:
            sentence = re.sub(own, by, sentence)
        return sentence

    return reworded
