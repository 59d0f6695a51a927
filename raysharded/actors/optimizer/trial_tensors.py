"""Tensors for a trial of an optimizer: random ones of the forms that its parameters have, cut at odd places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from raysharded.actors.optimizer.inner_optimizers import StandIns

Marks: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Attributes of parameters, by the parameter's id."""
_LARGE = 1e6
_LENGTH = 4099
_ELEMENTS = 1 << 14
_LEAST_ROWS, _WIDEST = 17, 4100
_MOST_MARKS = 16
"""Largest number of different attributes of which each has a parameter that is tried."""
_CUTS = (0, 1, 14, 45, 300, 1369, 2740, 2741)


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One step of a trial."""

    size: float = 1.0
    """Size of the gradient: rules with a limit must reach it."""
    count: int | None = None
    """Step count that is set before the step, where the optimizer counts steps."""
    own_rate: bool = False
    zero: bool = False
    """True if one part of each parameter, and no other, has a gradient of zeros."""
    large: bool = False
    """True if one part of each parameter, and no other, has a gradient of large numbers."""


@dataclass(slots=True)
class TrialTensors:
    """Trial tensors of one parameter: initial values, and a gradient for each step."""

    param: torch.Tensor
    """The real parameter."""
    start: torch.Tensor
    gradients: list[torch.Tensor]
    cuts: list[tuple[int, int]]

    @property
    def empty(self) -> tuple[int, int]:
        """A part without rows, as workers have of a parameter that has fewer rows than there are workers."""
        rows = len(self.start)
        return rows, rows

    def gradient(self, number: int, step: TrialStep) -> torch.Tensor:
        """Gradient of the whole parameter in a step, counted from 0."""
        gradient = self.gradients[number % len(self.gradients)]
        if not (step.zero or step.large):
            return gradient
        gradient = gradient.clone()
        zeros, large = (slice(*cut) for cut in self.cuts[1:3])  # of different halves
        if step.zero:
            gradient[zeros] = 0.0
        if step.large:
            gradient[large] *= min(_LARGE, torch.finfo(gradient.dtype).max ** 0.5)  # finite in half precision
        return gradient

    @classmethod
    def drawn(cls, param: torch.Tensor, steps: Sequence[TrialStep], generator: torch.Generator) -> TrialTensors:
        width = math.prod(param.shape[1:])
        tail = tuple(param.shape[1:]) if width <= _WIDEST else (_WIDEST + width % 64,)
        rows = max(_LEAST_ROWS, min(_LENGTH, _ELEMENTS // max(1, math.prod(tail)) | 1))
        cuts = list(pairwise([*(cut for cut in _CUTS if cut < rows), rows]))

        def draw(size: float) -> torch.Tensor:
            drawn = size * torch.randn((rows, *tail), generator=generator)
            return drawn.to(device=param.device, dtype=param.dtype)

        return cls(param=param, start=draw(1.0), gradients=[draw(step.size) for step in steps], cuts=cuts)


class Like(NamedTuple):
    """A parameter that can be tried, with what it has in common with others."""

    param: torch.Tensor
    like: object
    """Equal for parameters that the optimizer treats alike: same groups, trailing dimensions, dtype, device, marks."""


def likes_of(standing: StandIns, marks: Marks) -> dict[int, Like]:
    """Parameters that can be tried, by id."""
    held_in: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for number, held in enumerate(standing.own):
        for param in held:
            held_in.setdefault(id(param), (param, []))[1].append(number)
    texts = {number: _text_of(marks.get(number, {})) for number in held_in}
    if len(set(texts.values())) > _MOST_MARKS:  # as a name of each
        texts = {number: repr(sorted(marks.get(number, ()))) for number in held_in}
    return {
        number: Like(
            param,
            (tuple(lists), param.shape[1:], param.dtype, param.device, param.requires_grad, texts[number]),
        )
        for number, (param, lists) in held_in.items()
        if param.dim() and math.prod(param.shape[1:])
    }


def _text_of(marks: Mapping[str, Any]) -> str:
    """Attributes as text: equal for equal numbers and texts, and for other values of one class."""
    plain = (bool, int, float, str, type(None))
    return repr(sorted((key, repr(one) if type(one) in plain else type(one).__name__) for key, one in marks.items()))


def representatives(likes: Mapping[int, Like], steps: Sequence[TrialStep]) -> list[TrialTensors]:
    """Trial tensors for one of all parameters that are alike; for two if all are, which may share state."""
    found: dict[object, torch.Tensor] = {}
    for param, like in likes.values():
        found.setdefault(like, param)
    tried = [*found.values()]
    if len(tried) == 1:
        tried = [param for param, _ in likes.values()][:2]
    generator = torch.Generator().manual_seed(0)
    return [TrialTensors.drawn(param, steps, generator) for param in tried]


def at_odd_offset(gradient: torch.Tensor, place: int) -> torch.Tensor:
    """A copy of the gradient as FSDP2 passes it: an unaligned view into a shared buffer."""
    offset = 2 * place + 1
    buffer = torch.empty(offset + gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    view = buffer[offset:].view(gradient.shape)
    return view.copy_(gradient)
