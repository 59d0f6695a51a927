"""Splits forward and backward into phases, one unit at a time, as FSDP2's hooks do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from raysharded.planning.trace import OUTSIDE, Phase
from raysharded.planning.tracing.tensor_lifetimes import MemoryFollower


class PhaseRecorder:
    """Hooks on the units of a model that runs once. A unit's gradients are dropped when backward leaves it.

    `compute_dtype`: the dtype to which FSDP2 casts the inputs of units; None: no cast.
    """

    def __init__(
        self, units: Sequence[nn.Module], follower: MemoryFollower, *, compute_dtype: torch.dtype | None
    ) -> None:
        self._units, self._follower, self._dtype = units, follower, compute_dtype
        self._found: list[Phase] = []
        self._stack: list[int] = [OUTSIDE]
        self._backward = False
        self._own = [_own_parameters(units, place) for place in range(len(units))]
        self._start = follower.restart()
        self._handles: list[Any] = []
        for place, unit in enumerate(units):
            self._handles.append(unit.register_forward_pre_hook(self._before(place), with_kwargs=True, prepend=True))
            self._handles.append(unit.register_forward_hook(self._after(place)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended."""
        return tuple(self._found)

    def begin_backward(self) -> None:
        """Call between the loss and its backward."""
        self._switch(OUTSIDE)
        self._backward = True

    def close(self) -> None:
        """End the last phase and remove the hooks."""
        self._switch(OUTSIDE)
        for handle in self._handles:
            handle.remove()

    def _switch(self, unit: int, *, ends: bool = False) -> None:
        """End the current phase and begin one of `unit`."""
        end = self._follower.now()
        phase = Phase(
            unit=self._stack[-1],
            backward=self._backward,
            start=self._start,
            peak=self._follower.peak,
            end=end,
            ends_unit=ends,
        )
        self._found.append(phase)
        self._stack[-1] = unit
        self._start = self._follower.restart()

    def _before(self, place: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._backward:  # recomputation
                return None
            self._switch(place)
            leaves, spec = tree_flatten((args, kwargs))
            leaves = [self._cast(leaf) for leaf in leaves]
            learning = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if learning:
                marked = _Mark.apply(self, place, *(leaves[i] for i in learning))  # type: ignore[no-untyped-call]
                for i, leaf in zip(learning, marked, strict=True):
                    leaves[i] = leaf
            return tree_unflatten(leaves, spec)

        return hook

    def _after(self, place: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self._backward:
                return
            root = len(self._units) - 1
            self._switch(OUTSIDE if place == root else root)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._enter(place))

        return hook

    def _enter(self, place: int) -> None:
        if self._stack[-1] != place:
            self._switch(place)

    def leave(self, place: int) -> None:
        """Backward has passed through a unit: drop its gradients, as FSDP2 reduces them here."""
        self._switch(len(self._units) - 1, ends=True)
        for param in self._own[place]:
            param.grad = None
        self._start = self._follower.restart()

    def _cast(self, leaf: Any) -> Any:
        if self._dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(self._dtype)
        return leaf


def _own_parameters(units: Sequence[nn.Module], place: int) -> list[nn.Parameter]:
    inner = {
        id(param)
        for other in units
        if other is not units[place] and other in set(units[place].modules())
        for param in other.parameters()
    }
    return [param for param in units[place].parameters() if id(param) not in inner]


class _Mark(torch.autograd.Function):
    """Signals that the gradient of a unit's inputs is ready, as `RegisterPostBackwardFunction` does in FSDP2."""

    @staticmethod
    def forward(ctx: Any, recorder: PhaseRecorder, place: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.place = recorder, place
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.recorder.leave(ctx.place)
        return None, None, *gradients
