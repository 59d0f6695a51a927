"""Results of the steps of a trial: on whole parameters, and on the parts that workers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from raysharded.actors.optimizer.inner_optimizers import bits_of


@dataclass(slots=True)
class Outcome:
    """Result of the steps: for each parameter that was tried, its parts in order."""

    params: list[list[torch.Tensor]]
    kept: list[list[dict[str, Any]]]
    first_types: list[list[dict[str, str]]] = field(default_factory=list)
    """Type of the state of each part after the first step, by key."""


class Difference(NamedTuple):
    """The first difference between the whole and its parts."""

    key: str
    """State that differs; empty: the parameter."""


def difference(whole: Outcome, halves: Sequence[Outcome]) -> Difference | None:
    """The first difference between whole parameters and two workers' halves, which hold alternate parts; or None.

    Each part must have the keys of the whole from the first step on: a worker that lacks one has another state.
    """
    for place, ((param,), (kept,)) in enumerate(zip(whole.params, whole.kept, strict=True)):
        if bits_of(param) != bits_of(_joined([half.params[place] for half in halves])):
            return Difference("")
        for key, value in kept.items():
            if not _is_joined(value, [[one.get(key) for one in half.kept[place]] for half in halves], param.shape):
                return Difference(key)
    for place, ((first,), (kept,)) in enumerate(zip(whole.first_types, whole.kept, strict=True)):
        for half in halves:
            ones = [(first.keys(), one.keys()) for one in half.first_types[place]]
            ones += [(kept.keys(), one.keys()) for one in half.kept[place]]
            if other := sorted(key for keys, own in ones for key in keys ^ own):
                return Difference(other[0])
    return None


def types(kept: Mapping[str, Any]) -> dict[str, str]:
    """Types in which the state is handed on, by key."""
    return {key: _type_of(value) for key, value in kept.items() if value is not None}


def cloned(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter's state, without entries of None."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in kept.items()
        if value is not None
    }


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    kind = float if isinstance(value, float) else type(value)  # NumPy's float64 is a float
    return kind.__name__


def _joined(halves: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The whole tensor, from two halves that hold alternate parts. A part may be empty."""
    one, other = halves
    parts = [part for pair in zip(one, other, strict=False) for part in pair]
    return torch.cat([*parts, *one[len(other) :]])


def _is_joined(whole: Any, halves: Sequence[Sequence[Any]], shape: torch.Size) -> bool:
    """True if the state of the parts equals that of the whole: cut as the parameter is, or the same number."""
    parts = [one for half in halves for one in half]
    if isinstance(whole, torch.Tensor) and whole.shape == shape and whole.dim():
        if not all(isinstance(one, torch.Tensor) and one.dim() for one in parts):
            return False
        try:
            return bits_of(whole) == bits_of(_joined(halves))
        except RuntimeError:  # the state's parts do not have the shapes of the parameter's
            return False
    return all(bits_of(one) == bits_of(whole) for one in parts)
