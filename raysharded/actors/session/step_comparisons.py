"""Comparisons around one step of a user's loop: what changes at a place where nothing may change it.

Settings are compared in every step that is computed again. Bits of gradients and parameters are compared in the steps
1, 2, 4, 8, ... of a worker, which are called watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.optimizer.registered_state import first_change, settings_of
from raysharded.actors.session.loop_errors import changed_gradients
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError
from raysharded.overrides import Decisions

if TYPE_CHECKING:
    import torch

    from raysharded.actors.step.step import Step

Place = Literal["microbatches", "update", "end"]


class Attempts:
    """Settings of the newest steps at their places, to be the same if a step is computed again."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, Place], str] = {}
        self._decisions = Decisions()

    def begin(self, decisions: Decisions) -> None:
        """Begin a generation. With other decisions, such as skipped data, a step has other results: forget all."""
        if decisions != self._decisions:
            self._decisions, self._noted = decisions, {}

    def note(self, step: int, place: Place, text: str) -> None:
        """Note the state at a place. Raises InexactError if it was another one at an earlier attempt."""
        before = self._noted.get((step, place), text)
        if change := first_change(before, text):
            raise InexactError(
                f"step {step} is computed again, as workers have changed, with other settings than before: {change}. "
                "The loop depends on something that does not go back with the step, such as a counter: compute it from "
                "step.number, or register it: session.shard(..., name=object)."
            )
        self._noted = {key: one for key, one in self._noted.items() if key[0] >= step - 1}
        self._noted[step, place] = text


class StepWatch:
    """The comparisons of one step. Thread of the function only."""

    def __init__(self, step: Step, attempts: Attempts, *, is_watched: bool) -> None:
        self._step, self._steps, self._attempts, self.is_watched = step, step.steps, attempts, is_watched
        self._with_gradient: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: int | None = None
        self._updated: int | None = None
        self._parameters = step.steps.digest("parameters") if is_watched else None
        self.at_end: int | None = None
        """Digest of the parameters at the step's end, if it is watched."""

    def begin_microbatches(self) -> None:
        """Call ahead of the microbatches."""
        self._note("microbatches")
        if self.is_watched:
            self._refuse_hooks()

    def computed(self) -> None:
        """Call behind the microbatches, unless the step is left out."""
        for param, own in self._shards():
            if param.grad is not None:
                if own is not param:
                    own.grad = local_of(param.grad)
                self._with_gradient.append((param, own))
        if self.is_watched:
            self._gradients = self._steps.digest("gradients")

    def begin_update(self) -> None:
        """Call ahead of the optimizer's step. Raises InexactError."""
        self._note("update")
        if self._step.skipped:
            return
        if any(own.grad is None or param.grad is None for param, own in self._with_gradient):
            raise _dropped()
        if self._gradients is not None and self._steps.digest("gradients") != self._gradients:
            raise changed_gradients()
        if self._parameters is not None and self._steps.digest("parameters") != self._parameters:
            raise InexactError(
                f"{line_here()}: parameters changed between the step's beginning and optimizer.step(). Change them "
                "behind it, in a way that each element's new value depends on that element alone, such as clamping; "
                "draw first weights in the function that session.build calls."
            )

    def end_update(self) -> None:
        """Call behind the optimizer's step and its hooks."""
        if self.is_watched:
            self._updated = self._steps.digest("parameters")

    def commit(self) -> None:
        """Commit the step, at the end of the `with`."""
        if self._updated is not None:
            self.at_end = self._steps.digest("parameters")
            if self.at_end != self._updated:
                self._steps.around.say("parameters in the with", _CHANGED_BEHIND)
        self._step.commit()
        text = self._steps.around.store.registered(self._step.number)
        assert text is not None
        self._attempts.note(self._step.number, "end", settings_of(text))

    def _note(self, place: Place) -> None:
        assert self._steps.registered is not None
        self._attempts.note(self._step.number, place, self._steps.registered.settings())

    def _shards(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(trained parameter, the optimizer's own tensor for it, which may be the same)."""
        parameters = self._steps.parts.sharded.parameters
        for name, own in self._steps.parts.optimizer.written.items():
            if own.requires_grad:
                yield parameters[name], own

    def _refuse_hooks(self) -> None:
        for name, param in self._steps.parts.sharded.parameters.items():
            if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise InexactError(
                    f"a gradient hook was registered on the parameter {name!r} behind session.shard, where it is never "
                    "called: workers have parts of it. Register it in the function that session.build calls."
                )


_CHANGED_BEHIND = (
    "the loop changes parameters behind optimizer.step(). That is exact if each element's new value depends on that "
    "element alone, as in clamping. A norm, a mean or a random draw over a parameter is over a worker's part of it, "
    "and depends on the number of workers."
)


def _dropped() -> InexactError:
    return InexactError(
        f"{line_here()}: gradients were dropped between step.microbatches() and optimizer.step(), as by zero_grad(): "
        "the optimizer would not step. Call zero_grad() behind optimizer.step(), or not at all; to leave a parameter "
        "alone, freeze it (requires_grad=False) in the function that session.build calls."
    )
