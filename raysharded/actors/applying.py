"""What becomes of a step's gradient: the optimizer's step, nothing, or an error; the same on every worker."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raysharded.actors.agreement import Agreed, non_finite, require_weight
from raysharded.actors.gradient import StepGradient
from raysharded.actors.non_finite import error_of, located
from raysharded.actors.notes import Say
from raysharded.actors.optimizer import ShardOptimizer
from raysharded.actors.parameter_use import LEAVES_ALONE
from raysharded.actors.phases import Phases
from raysharded.driver.messages import Job, NonFinite

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Applying:
    """Of one generation. Training thread only."""

    def __init__(
        self,
        job: Job,
        optimizer: ShardOptimizer,
        gradient: StepGradient,
        phases: Phases,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        *,
        unused: int,
        say: Say | None,
    ) -> None:
        """`unused`: the number of the rule. `say`: what is to be remarked of the first step; None: nothing."""
        self._say = say
        self._job, self._optimizer, self._gradient = job, optimizer, gradient
        self._in_phase, self._sum = phases, sum_over_workers
        self.has_applied = False
        """Whether the optimizer has made a step, and with it its state."""
        self.begun: frozenset[str] = frozenset()
        """The parameters of which the newest step was the optimizer's first one in this generation."""
        self._stepped: set[str] = set()
        self._leaves_alone = LEAVES_ALONE[unused]

    def why_not(self, step: int, agreed: Agreed) -> NonFinite | None:
        """Why the step is to be left out, if it is. Raises NonFiniteLoss or TaskError if it cannot be."""
        found = non_finite(agreed)
        if found is None:
            require_weight(step, agreed)
            return None
        with self._in_phase("locate"):
            found = located(found, step, self._gradient, self._sum)
        if self._job.on_non_finite != "skip":
            raise error_of(found, step, is_located=bool(self._gradient.reducers))
        return found

    def leave_out(self, step: int) -> float:
        """Change nothing; the learning rate that the step would have had."""
        self.begun = frozenset()
        self._optimizer.clear_gradients()
        return self._optimizer.lr_of(step)

    def apply(self, step: int, agreed: Agreed) -> float:
        """Clip and make the optimizer's step of what the step's microbatches used; its learning rate."""
        scale = 1.0 / agreed.weight
        limit = self._job.task.max_grad_norm
        if limit is not None:
            scale *= min(1.0, float(limit) / (agreed.gradient_norm / agreed.weight + _CLIP_EPSILON))
        used = self._to_be_changed(agreed)
        if self._say is not None:
            self._name_unused(step, agreed, self._say)
            self._say = None
        lr = self._optimizer.apply(step, scale, used)
        self.has_applied = True
        self.begun = frozenset(used - self._stepped)
        self._stepped |= used
        return lr

    def _name_unused(self, step: int, agreed: Agreed, say: Say) -> None:
        names = [name for name, count in zip(self._gradient.use.names, agreed.uses, strict=True) if not count]
        unused = [name for name in names if self._optimizer.trains(name)]
        if unused:
            effect = "is left as it is" if self._leaves_alone else "has a gradient of zeros, and decays"
            say(
                "unused parameters",
                f"no microbatch of step {step} used {len(unused)} of the parameters, first {unused[0]!r}: a parameter "
                f"{effect} in a step that does not use it. Freeze what is never used (requires_grad=False), or leave "
                "it out of the model, and its memory is free.",
            )

    def _to_be_changed(self, agreed: Agreed) -> frozenset[str]:
        """The parameters that the step changes, by name; the same on every worker, whichever rows it has of them."""
        names = self._gradient.use.names
        if not self._leaves_alone:
            return frozenset(names)
        return frozenset(name for name, count in zip(names, agreed.uses, strict=True) if count)
