"""Errors of a user's loop, each with the loop's line and the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raysharded.actors.task_calls.explanations import During, explanation
from raysharded.actors.task_calls.task_errors import (
    NO_LINE,
    is_installed,
    is_raised_in_torch,
    line_here,
    line_of,
    task_error,
)
from raysharded.errors import CollectiveAborted, InexactError, TaskError, text_of, user_traceback
from raysharded.task import Loss

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raysharded.actors.numerics.step_consensus import Agreed

E = TypeVar("E", bound=BaseException)
_LINE = re.compile(r":\d+: ")


def with_line(error: E) -> E:
    """The error; a TaskError of raysharded's gets the user's part of its traceback, and a hook's error a line."""
    if isinstance(error, TaskError) and not error.user_traceback:
        error.user_traceback = user_traceback(error)
        error.args = (error.args[0], error.user_traceback)
    elif isinstance(error, InexactError) and is_raised_in_torch(error):
        line = line_of(error)
        error.args = (str(error.args[0]) if line in str(error.args[0]) else f"{line}: {error.args[0]}",)
    return error


def placed(error: E) -> E:
    """The error; a TaskError that names no line gets the one of the training function that led to it."""
    if type(error) is TaskError and not _LINE.search(str(error)):
        line = line_of(error)
        line = line_here() if line == NO_LINE else line
        if line != NO_LINE and not is_installed(line):
            error.args = (f"{line}: {error}", *error.args[1:])
    return error


def explained(session: Any, name: str, error: BaseException) -> TaskError | None:
    """The error by which a training function ended, with an explanation; None if it is no known one of torch's.

    `name`: the function's.
    """
    during: During = "ahead" if session._optimizer is None else "behind"
    if session._built is None or explanation(error, during) is None:
        return None
    return task_error(f"{line_of(error)}: {name}", error, during)


def require_built(built: nn.Module | None, model: nn.Module, *, is_sharded: bool) -> None:
    """Raise TaskError unless this is the model of `session.build`, which is shared for the first time."""
    call = f"{line_here()}: session.shard"
    if built is None:
        raise TaskError(f"{call} comes behind session.build: build the model with model = session.build(make).")
    if model is not built:
        raise TaskError(
            f"{call} was given another model than session.build has returned. Build it there with all its parts, also "
            "what wraps it."
        )
    if is_sharded:
        raise TaskError(f"{call} is called once, with the model that session.build returned.")


def require_number(name: str, number: object, agreed: Agreed) -> None:
    """Raise TaskError for what cannot be logged beside the step's metrics."""
    if name in agreed.metrics:
        raise TaskError(f"{line_here()}: session.log({name}=...): the step has a metric of this name.")
    if not isinstance(number, (int, float)):
        raise TaskError(
            f"{line_here()}: session.log({name}=...) was given a {type(number).__name__}; give a number, the same one "
            "on every worker."
        )


def with_numbers(agreed: Agreed, numbers: Mapping[str, float]) -> Agreed:
    """The agreement with logged numbers beside the step's metrics. Raises TaskError."""
    for name, number in numbers.items():
        require_number(name, number, agreed)
    return replace(agreed, metrics=agreed.metrics | {name: (float(one), 1.0) for name, one in numbers.items()})


def as_one(
    loss: torch.Tensor | Loss,
    weight: float | torch.Tensor | None,
    metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]] | None,
) -> torch.Tensor | Loss:
    """Arguments of `UserStep.backward` as a result of `Task.loss`. Raises TaskError."""
    if weight is None and metrics is None:
        return loss
    if weight is None or isinstance(loss, Loss):
        raise TaskError(
            f"{line_here()}: give step.backward a summed loss with weight=, and metrics= beside them; or a "
            "raysharded.Loss alone."
        )
    return Loss(loss, weight, metrics or {})


def changed_gradients() -> InexactError:
    """The error for gradients that are not those of the backward when the optimizer's step begins."""
    return InexactError(
        f"{line_here()}: gradients changed between step.microbatches() and optimizer.step(). Each worker has a part of "
        "them, so that torch's clip_grad_norm_ depends on the number of workers: clip with step.clip_grad_norm_, and "
        "change gradients element by element in a hook of the optimizer's step."
    )


def refuse_forward() -> None:
    """Raise TaskError: a forward of the model is called outside a step."""
    raise TaskError(f"{line_here()}: a forward of the model belongs into `with step:`, as it communicates.")


def misplaced_forward(*, is_behind_backward: bool) -> TaskError:
    """The error for a further forward ahead of the microbatches' end. `is_behind_backward`: in their loop."""
    if is_behind_backward:
        return TaskError(
            f"{line_here()}: a forward of the model came behind step.backward(loss). Add all losses of a microbatch, "
            "and call it once."
        )
    return TaskError(
        f"{line_here()}: a forward of the model came ahead of the microbatches. Other forwards belong behind the loop "
        "over step.microbatches(), in the `with`, equally often on every worker."
    )


def refuse_tensor_parallelism(parallelize: object) -> None:
    """Raise TaskError for an argument of `session.shard` that is given."""
    if parallelize is not None:
        raise TaskError(
            f"{line_here()}: session.shard(parallelize=...): torch's tensor parallel styles cannot be undone in place, "
            "so a session has none. Leave the degree at 1, or train with a raysharded.Task."
        )


def changed_parameters(step: int | None) -> InexactError:
    """The error for parameters that are not those of a step's end when the next begins; None: not those of `shard`."""
    if step is None:
        return InexactError(
            f"{line_here()}: parameters changed between session.shard and the first step: a worker that joins would "
            "change them again. Draw first weights in the function that session.build calls, or by "
            "session.build(init_weights=...)."
        )
    return InexactError(
        f"{line_here()}: parameters changed between step {step} and the next: a checkpoint and a worker that joins "
        "would not have the change. Move what changes them into `with step:`, behind optimizer.step()."
    )


def blamed_behind(number: int, error: BaseException, *, is_undone: bool, is_aborted: bool) -> BaseException:
    """The error of a line behind a step, by which the function ended; a TaskError if a change of workers led to it.

    `number`: the step's. `is_undone`: it was undone. `is_aborted`: the workers change now.
    """
    if not (is_undone or is_aborted):
        return error
    return TaskError(
        f"{line_of(error)}: a line behind the step's `with`, or behind session.gradient(), raised an error as the "
        f"workers had just changed, and step {number} is done again. Lines there run for such a step, too: read "
        "step.loss and what the `with` sets only `if step.done:`, or move them into the `with`. "
        f"({text_of(error)})",
        user_traceback(error),
    )


def misplaced(call: str, *, is_in_loop: bool) -> TaskError:
    """The error for a call that belongs behind the microbatches. `is_in_loop`: their loop has begun, and not ended."""
    if is_in_loop:
        return TaskError(
            f"{line_here()}: {call} came before the loop over step.microbatches() has ended. Every microbatch of the "
            f"step is computed: leave the loop by no `break` or `return`, and call {call} behind it."
        )
    if call == "optimizer.step()":
        return TaskError(f"{line_here()}: {call} belongs behind the loop over step.microbatches(), once in each step.")
    return TaskError(f"{line_here()}: {call} belongs between the loop over step.microbatches() and optimizer.step().")


def require_limit(max_norm: float) -> None:
    """Raise TaskError unless a limit of the gradient's norm is above 0; infinity is valid."""
    if not max_norm > 0:
        raise TaskError(f"{line_here()}: step.clip_grad_norm_({max_norm!r}): give a number above 0.")


def as_lost(error: BaseException, step: int, *, is_aborted: bool) -> BaseException:
    """The error; that of a lost worker if it followed from one that an `except` swallowed in an aborted generation."""
    if isinstance(error, TaskError) and is_aborted:
        return CollectiveAborted(f"a collective of step {step} failed")
    return error


def require_sharded(optimizer: object, call: str) -> None:
    """Raise TaskError unless `session.shard` has set an optimizer."""
    if optimizer is None:
        raise TaskError(f"{line_here()}: {call} comes after session.shard(model, optimizer).")
