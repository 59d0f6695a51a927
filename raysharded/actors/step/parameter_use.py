"""Which parameters the microbatches of a step use: plain torch leaves one alone that has no gradient in the whole step.

FSDP2 fills in zeros for a parameter without a gradient, so that the workers' collectives belong together; then nobody
can tell it from one whose gradient is zero, which decays and keeps its momentum. So each unit is looked at just before,
when the gradients of its microbatch are where autograd has left them. A parameter counts as used if any of its uses has
a gradient (tied ones are one), whatever the gradient's values are, and on every worker, whichever rows that has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharded.errors import InexactError

LEAVES_ALONE: dict[int, bool] = {1: False, 2: True}
"""By the number of the rule `unused`: whether a parameter that no microbatch of a step used is left as it is. Under the
first its gradient is zero: it decays, and its momentum and its count of steps go on."""


class ParameterUse:
    """Of one generation's model on one worker. Training thread only, and the one that runs backward."""

    def __init__(self, units: Sequence[tuple[str, FSDPModule]], parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: all, by name, frozen ones too: every worker counts the same in the same order."""
        self.names = tuple(parameters)
        self._place = {id(param): place for place, param in enumerate(parameters.values())}
        self._used: set[int] = set()
        self._waiting: dict[int, list[Any]] = {}
        """By a group's id: those of its parameters that no microbatch of the step has used yet."""
        self._groups: dict[int, Any] = {}
        self._counts = False
        self.arrivals = 0
        """How often a backward has come to a unit."""
        for _, unit in units:
            for group in _groups_of(unit):
                self._groups[id(group)] = group
                group.post_backward = self._looking_first(group, group.post_backward)

    def restart(self) -> None:
        """Forget the step before."""
        self._used.clear()
        self._waiting = {key: list(group.fsdp_params) for key, group in self._groups.items()}

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Around the backward of one microbatch; `counts`: it is one of the step's, and no padding."""
        self._counts = counts
        try:
            yield
        finally:
            self._counts = False

    def note(self, params: Iterable[nn.Parameter]) -> None:
        """After a backward: of parameters that are in no unit, those that have a gradient were used."""
        if self._counts:
            self._used |= {self._place[id(param)] for param in params if param.grad is not None}

    def counts(self) -> tuple[int, ...]:
        """1 for each parameter that this worker's microbatches of the step used, or else 0, in the order of `names`."""
        return tuple(int(place in self._used) for place in range(len(self.names)))

    def _looking_first(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        """FSDP2 calls it by its name when the gradients of a unit are complete, and takes them away."""

        def looked(*args: Any) -> None:
            self.arrivals += 1
            if self._counts and self._waiting.get(id(group)):
                self._look(group)
            post_backward(*args)

        return looked

    def _look(self, group: Any) -> None:
        left = []
        for param in self._waiting[id(group)]:
            if _has_gradient(param):
                self._used.add(self._place[id(param.sharded_param)])
            else:
                left.append(param)
        self._waiting[id(group)] = left


def _groups_of(unit: FSDPModule) -> Sequence[Any]:
    """FSDP2's own, of the parameters of a unit. Raises InexactError if this torch has them under other names."""
    groups = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None or not all(hasattr(group, "post_backward") for group in groups):
        raise InexactError(
            f"with torch {torch.__version__} it cannot be seen which parameters a microbatch uses. Install a version "
            "that raysharded was tested with."
        )
    return tuple(groups)


def _has_gradient(param: Any) -> bool:
    """True for one of FSDP2's parameters that the microbatch used, or, where it is not reduced yet, one before it."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None
