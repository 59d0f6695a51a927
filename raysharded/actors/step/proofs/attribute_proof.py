"""The proof that gradients do not depend on what a task, or its model, has kept in attributes since it was built.

Variables of modules and closures that the task's code uses count as such attributes.

A step's number that `lr_scale` keeps, a count of a step hook, or a weight that `evaluate` sets is in no state. A run
that resumes and a worker that joins have such an attribute as it was built: other weights, and no error. In the steps
2, 4, 8, ... each worker therefore computes its first microbatch again with the attributes as they were built, if any
has changed. Equal gradients and losses show that the change does not matter, as of a counter that is only printed.

A user's loop may set an attribute of the model from the step's number, which is exact. So what depends on one is no
error there, but a remark. Only numbers that are floats are tried: with others, such as a length, the loop's next lines
may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raysharded.actors.step.forward_backward import Results
from raysharded.actors.step.gradient import Batches, StepGradient
from raysharded.actors.step.proofs.repeated_pass import NOT_FINITE, Pass
from raysharded.actors.task_calls.plain_attributes import Change, PlainAttributes, as_built
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.telemetry.phases import Phases
from raysharded.errors import InexactError

_MOST_NAMES = 4


class AttributeProof:
    """The proofs of one generation. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        gradient: StepGradient,
        attributes: Callable[[], Sequence[PlainAttributes]],
        phases: Phases,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        *,
        say_of_loop: Say | None = None,
    ) -> None:
        """`attributes`: those of the task and the model, as built; empty: nothing is proven. `say_of_loop`: reports
        remarks on a user's own loop; None: there is no such loop.

        They are taken at the first step: by then every worker has the run's drawn constants.
        """
        self._gradient, self._find, self._in_phase, self._sum = gradient, attributes, phases, sum_over_workers
        self._say = say_of_loop
        self._attributes: Sequence[PlainAttributes] | None = None
        self._first: Pass | None = None

    def begin(self, step: int) -> None:
        """Call before a step is computed."""
        if self._attributes is None:
            self._attributes = self._find()
        is_watched = bool(self._attributes) and step > 1 and step & (step - 1) == 0
        self._first = Pass(looks_for_not_finite=True) if is_watched else None

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Note one unit's gradient of a microbatch, as this worker computed it and before it is exchanged."""
        if self._first is not None and self._gradient.rounds.index == 0:
            self._first.note(index, gradient)

    def check(self, step: int, results: Results) -> Batches[None]:
        """Compute the first round of the newest step with the attributes as they were built, if any has changed.

        The step's gradient and the attributes stay. Raises InexactError on every worker if it makes a difference; of a
        user's loop it is a remark.
        """
        first, self._first = self._first, None
        if first is None:
            return
        changes = [change for each in self._attributes or () for change in each.changes()]
        if self._say is not None:
            changes = [change for change in changes if _is_float(change)]
        if not self._total(bool(changes)):
            return
        first.results = results
        with self._in_phase.apart("prove"):
            again = Pass(looks_for_not_finite=True)
            with as_built(changes):
                again.results = yield from self._gradient.compute_first_round_again(step, 0, again.note)
            differs = _differ(first, again)
            if self._total(differs):
                if self._say is None:
                    raise _depends(step, changes if differs else [])
                names = _listed(changes) or "attributes of the model on another worker"
                self._say(f"attributes {names}", _REMARK.format(names))

    def _total(self, flag: bool) -> bool:
        """True if the flag is set on any worker."""
        return bool(self._sum(torch.tensor([int(flag)], dtype=torch.int64)).tolist()[0])


def _differ(first: Pass, again: Pass) -> bool:
    """True if a gradient or a loss is another one; metrics may count."""
    before, after = first.parts(), again.parts()
    return any(
        parts[:2] != after[index][:2]
        for index, parts in before.items()
        if index in after and NOT_FINITE not in (parts[0], after[index][0])
    )


def _is_float(change: Change) -> bool:
    """True for a number, or a tensor of one number, that was a float as built and is one now."""
    return bool(change.built) and all(
        isinstance(value, float)
        or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point())
        for value in (change.built[0].copy, change.holder.get(change.key))
    )


def _listed(changes: list[Change]) -> str:
    names = [*dict.fromkeys(change.name for change in changes)]  # closures may be copied cell by cell
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


_REMARK = (
    "the loss, or its gradient, depends on {0}, changed since the model was built. That is exact if the loop sets it "
    "from step.number in each step, or if a registered object does as it is loaded. Otherwise a run that resumes has "
    "it as it was built, and so has a worker that joins."
)


def _depends(step: int, changes: list[Change]) -> InexactError:
    listed = _listed(changes)
    which = (
        f"attributes, or variables, that have changed since they were built: {listed}"
        if listed
        else "attributes, or variables, on another worker"
    )
    return InexactError(
        f"step {step}: the loss, or its gradient, depends on {which}. A run that resumes and a worker that joins have "
        "them as build_model and build_optimizer left them, and each worker evaluates other samples. Compute the loss "
        "from the batch and the weights. What depends on the step needs a custom loop (train_fn), which has "
        "step.number and registered state: in the loop's body, not in collate."
    )
