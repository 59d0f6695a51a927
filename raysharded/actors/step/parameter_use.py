"""Parameters that a step's microbatches use: plain torch does not change one without a gradient in the whole step.

FSDP2 fills in zeros for a parameter without a gradient, so that the workers' collectives match. The parameter then
looks like one whose gradient is zero, which decays and keeps its momentum. So each unit is inspected just before, when
autograd has left the gradients of its microbatch. A parameter counts as used if any of its uses has a gradient (tied
ones are one), with any values. It counts on every worker, with any rows.
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
"""By the number of the rule `unused`: True if a parameter that no microbatch of a step used stays unchanged. Under
number 1 its gradient is zero: it decays, and its momentum and its count of steps advance."""


class ParameterUse:
    """Parameter use of one generation's model on one worker. Training thread only, and the one that runs backward."""

    def __init__(self, units: Sequence[tuple[str, FSDPModule]], parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: all by name, including frozen ones: every worker counts them in the same order."""
        self.names = tuple(parameters)
        self._place = {id(param): place for place, param in enumerate(parameters.values())}
        self._used: set[int] = set()
        self._waiting: dict[int, list[Any]] = {}
        """Parameters of each group, by its id, that no microbatch of the step has used yet."""
        self._groups: dict[int, Any] = {}
        self._counts = False
        self.arrivals = 0
        """Number of times that a backward has reached a unit."""
        for _, unit in units:
            for group in _groups_of(unit):
                self._groups[id(group)] = group
                group.post_backward = self._looking_first(group, group.post_backward)

    def restart(self) -> None:
        """Drop the uses of the previous step."""
        self._used.clear()
        self._waiting = {key: list(group.fsdp_params) for key, group in self._groups.items()}

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """A context around the backward of one microbatch. `counts`: True for one of the step's, False for padding."""
        self._counts = counts
        try:
            yield
        finally:
            self._counts = False

    def note(self, params: Iterable[nn.Parameter]) -> None:
        """Record uses of parameters outside all units, after a backward: those with a gradient were used."""
        if self._counts:
            self._used |= {self._place[id(param)] for param in params if param.grad is not None}

    def uses(self) -> tuple[bool, ...]:
        """True for each parameter that this worker's microbatches of the step used, in the order of `names`."""
        return tuple(place in self._used for place in range(len(self.names)))

    def _looking_first(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Wrapper of `post_backward`, which FSDP2 calls by name when a unit's gradients are complete, to take them."""

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
    """FSDP2's parameter groups of a unit. Raises InexactError if this torch has them under other names."""
    groups = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None or not all(hasattr(group, "post_backward") for group in groups):
        raise InexactError(
            f"torch {torch.__version__} does not show which parameters a microbatch uses. Install a version that "
            "raysharded was tested with."
        )
    return tuple(groups)


def _has_gradient(param: Any) -> bool:
    """True for a parameter of FSDP2 that the microbatch used, or, while it is not reduced, an earlier one."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None
