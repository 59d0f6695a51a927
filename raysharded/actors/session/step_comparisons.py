"""Comparisons around one step of a user's loop: what changes at a place where nothing may change it.

Settings are compared in every step that is computed again. Bits of gradients and parameters are compared in the steps
1, 2, 4, 8, ... of a worker, which are called watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from raysharded.actors.guards.parameters import RefusedGradient
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.optimizer.held_parameters import ParameterPlaces
from raysharded.actors.optimizer.registered_state import RegisteredState, first_change, settings_of
from raysharded.actors.session.loop_errors import changed_gradients, changed_parameters, require_limit
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError, TaskError
from raysharded.overrides import Decisions

if TYPE_CHECKING:
    import torch

    from raysharded.actors.session.orders import Training
    from raysharded.actors.step.engine import Engine
    from raysharded.actors.step.step import Step

Place = Literal["microbatches", "update", "end"]


class Attempts:
    """Settings of the newest steps at their places, to be the same if a step is computed again."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, Place], str] = {}
        self._decisions, self._save_asked_in = Decisions(), -1
        self.replaced: Callable[[], str] = str
        """The name of a parameter of the model, or of a layer, that was replaced; empty if none was."""

    def begin(self, engine: Engine) -> None:
        """Begin a generation. With other decisions, such as skipped data, a step has other results: forget all."""
        if engine.decisions != self._decisions:
            self._decisions, self._noted = engine.decisions, {}
        self.replaced = ParameterPlaces(engine.steps.parts.sharded.model).replaced
        if engine.step == self._save_asked_in:  # the request may be lost; before that step the loop makes it again
            engine.request_save()

    def end(self) -> None:
        """Forget the generation's parameters: the next one gets its memory."""
        self.replaced = str

    def request_save(self, training: Training | None, newest: int | None) -> None:
        """Request a checkpoint of the step that is computed, or of the next, also if that is of another generation.

        `training`: the present one; None: the run is over. `newest`: the loop's newest step; None: it has begun none in
        this generation.
        """
        engine = None if training is None or training.is_over else training.engine
        if newest is not None:
            self._save_asked_in = newest
        elif engine is not None:
            self._save_asked_in = engine.step
        if engine is not None:
            engine.request_save()

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
        self._is_clipped = False
        self._with_gradient: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: int | None = None
        self._updated: int | None = None
        self._parameters = step.steps.digest("parameters") if is_watched else None
        self._kept = step.steps.digest("optimizer") if is_watched else None
        self._lengths = step.steps.parts.optimizer.built.parts.lengths()
        self.at_end: int | None = None
        """Digest of the parameters at the step's end, if it is watched."""
        self.identities: int | None = None
        """Those of the optimizer's state at the step's end."""

    @property
    def _registered(self) -> RegisteredState:
        assert self._steps.registered is not None
        return self._steps.registered

    def begin_microbatches(self) -> None:
        """Call ahead of the microbatches. Raises InexactError."""
        self._refuse_replaced()
        if self._steps.parts.optimizer.assigned.is_waiting:
            raise changed_parameters(self._step.number - 1)
        self._note("microbatches")
        if self.is_watched:
            self._refuse_hooks()

    def computed(self) -> None:
        """Call behind the microbatches, unless the step is left out."""
        for param, own in self._shards():
            if own is not param and own.grad is not None:
                raise InexactError(
                    "a gradient came to a parameter in the optimizer's groups, which is a worker's part: a penalty on "
                    "weights there would be lost. Compute it in the model's forward, or use weight decay."
                )
            if param.grad is not None:
                if own is not param:
                    own.grad = local_of(param.grad)
                self._with_gradient.append((param, own))
        if self.is_watched:
            self._gradients = self._steps.digest("gradients")
            self._refuse_added()
            if self._steps.digest("optimizer") != self._kept:
                raise InexactError(
                    f"step {self._step.number}: the optimizer's state changed between the step's beginning and the end "
                    "of its microbatches, while it is copied. Change it behind optimizer.step(), in place."
                )

    def begin_update(self) -> None:
        """Call ahead of the optimizer's step. Raises InexactError."""
        self._refuse_added()
        self._registered.in_update.append(self._note("update"))
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
        self._registered.in_update.append(self._registered.settings())
        self._lengths = self._steps.parts.optimizer.built.parts.lengths()
        if self.is_watched:
            self._updated, self._kept = self._steps.digest("parameters"), self._steps.digest("optimizer")

    def commit(self) -> None:
        """Commit the step, at the end of the `with`."""
        self._refuse_replaced(self._steps.parts.optimizer.assigned.elsewhere())
        self._refuse_added()
        self._steps.parts.modes.take_over()
        self._steps.parts.optimizer.assigned.take()
        if self._updated is not None:
            if self._steps.digest("parameters") != self._updated:
                self._steps.around.say("parameters in the with", _CHANGED_BEHIND.format("parameters"))
            if self._steps.digest("optimizer") != self._kept:
                self._steps.around.say("state in the with", _CHANGED_BEHIND.format("the optimizer's state"))
            self.at_end = self._steps.digest("state")
        self._step.commit()
        self.identities = self._steps.parts.optimizer.built.parts.identities()
        kept = self._steps.parts.optimizer.built.former.end_step(self._steps.parts.sharded.parameters.values)
        if kept:
            self._steps.around.say("views of parameters", _KEEPS_VIEW.format(kept))
        text = self._steps.around.store.registered(self._step.number)
        assert text is not None
        self._attempts.note(self._step.number, "end", settings_of(text))

    def end(self) -> None:
        """Forget the generation, which a loop's variable would keep alive. `at_end` and `identities` stay."""
        self._with_gradient.clear()
        del self._step, self._steps

    def limit(self, max_norm: float) -> None:
        """Note the limit of the gradient's norm. Raises TaskError if it is invalid, or the second one."""
        require_limit(max_norm)
        if self._is_clipped:
            raise TaskError(
                f"{line_here()}: step.clip_grad_norm_() was called twice in step {self._step.number}: the second limit "
                "would replace the first. Call it once, with the smaller one."
            )
        self._is_clipped = True
        self.note_call("step.clip_grad_norm_", repr(float(max_norm)))

    def note_call(self, name: str, value: str) -> None:
        """Note a call that all workers make alike, with a value that is the same on all."""
        self._registered.calls.append(f"{name} = {value}")

    def _refuse_replaced(self, elsewhere: str = "") -> None:
        """Raise InexactError for what a loop has put in the place of the optimizer's or the model's own objects.

        `elsewhere`: the name of a parameter that is known to have been assigned to.
        """
        where, parts = f"step {self._step.number}", self._steps.parts
        if not parts.optimizer.built.is_as_built:
            raise InexactError(
                f"{where}: the optimizer has other groups, or another state, than session.shard was given, as after "
                "load_state_dict() or add_param_group(). A run loads the optimizer's state by itself; change the "
                "numbers of its groups in place, and build all groups ahead of session.shard."
            )
        known = parts.sharded.parameters
        replaced = elsewhere or self._attempts.replaced()
        if replaced:
            raise InexactError(
                f"step {self._step.number}: {replaced!r}, a parameter of the model or a layer, was replaced, or "
                "assigned to: the assignment would be lost. Change it in place (param.data.clamp_(), param.copy_())."
            )
        own = self._steps.parts.optimizer.written
        frozen = next((name for name, one in own.items() if one.requires_grad != known[name].requires_grad), "")
        if frozen:
            raise InexactError(
                f"step {self._step.number}: requires_grad of {frozen!r} was changed. Freeze parameters in the function "
                "that session.build calls; a rate of 0 in a separate group stops a part for a while."
            )

    def _refuse_added(self) -> None:
        """Raise InexactError for entries of the optimizer's state that the loop has made."""
        parts = self._steps.parts.optimizer.built.parts
        if parts.lengths() != self._lengths and (keys := parts.added(self._lengths)):
            raise InexactError(
                f"step {self._step.number}: the loop adds {', '.join(map(repr, keys))} to optimizer.state, which "
                "optimizer.step() does not make: after a change of the workers it is left out. Register such tensors: "
                f"session.shard(model, optimizer, {keys[0]}=raysharded.ParameterTensors())."
            )

    def _note(self, place: Place) -> str:
        text = self._registered.settings()
        self._attempts.note(self._step.number, place, text)
        return text

    def _shards(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(trained parameter, the optimizer's own tensor for it, which may be the same)."""
        parameters = self._steps.parts.sharded.parameters
        for name, own in self._steps.parts.optimizer.written.items():
            if own.requires_grad:
                yield parameters[name], own

    def _refuse_hooks(self) -> None:
        for name, param in self._steps.parts.sharded.parameters.items():
            hooks = [hook for hook in (param._backward_hooks or {}).values() if not isinstance(hook, RefusedGradient)]
            if hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise InexactError(
                    f"a gradient hook was registered on the parameter {name!r} behind session.shard, where it is never "
                    "called: workers have parts of it. Register it in the function that session.build calls."
                )


_KEEPS_VIEW = (
    "the loop keeps a view of {!r}, such as param.detach() or param.data, from before a change of the workers. What is "
    "written there is lost, and what is read there is old: take it from model.parameters() in each step that needs it."
)
_CHANGED_BEHIND = (
    "the loop changes {} behind optimizer.step(). That is exact if each element's new value depends on that "
    "element alone, as in clamping. A norm, a mean or a random draw over a parameter is over a worker's part of it, "
    "and depends on the number of workers."
)


def _dropped() -> InexactError:
    return InexactError(
        f"{line_here()}: gradients were dropped between step.microbatches() and optimizer.step(), as by zero_grad(): "
        "the optimizer would not step. Call zero_grad() behind optimizer.step(), or not at all; to leave a parameter "
        "alone, freeze it (requires_grad=False) in the function that session.build calls."
    )
