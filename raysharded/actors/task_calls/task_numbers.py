"""Numbers that a task returns: which values count, their description in errors, and their conversion to tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch

TENSORS: dict[int, Callable[[float], torch.Tensor]] = {
    1: torch.as_tensor,
    **dict.fromkeys((2, 3), partial(torch.as_tensor, dtype=torch.float64)),
}
"""By the number of the rule `numbers`: the conversion of a weight, loss or metric that is no tensor. Number 1 takes
torch's default dtype, which is float32 unless it was changed."""
HALF = frozenset((torch.bfloat16, torch.float16))
"""Dtypes too coarse to add up in."""


def half_precision(name: str, dtypes: Mapping[str, torch.dtype]) -> str:
    """Remark on numbers in half precision. `name`: the method that returned them. `dtypes`: description -> dtype."""
    dtype = next(iter(dtypes.values()))
    bits = round(1 - math.log2(torch.finfo(dtype).eps))
    return (
        f"{name} gave {' and '.join(dtypes)} in {str(dtype).removeprefix('torch.')}: sums are rounded to steps of "
        f"2^-{bits} of their value, or more, and what is reported has these steps, too. Take `.float()` of what is "
        "summed, before it is (`logits.float()`)."
    )


def number_of(value: Any) -> float | torch.Tensor | None:
    """A one-element tensor as it is, without reading it; another one-element value as a float; None for the rest."""
    if isinstance(value, torch.Tensor):
        return value if value.numel() == 1 else None
    if isinstance(value, np.ndarray):
        return number_of(value.item()) if value.size == 1 else None
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError):
        return None


def kind_of(value: Any) -> str:
    """Description of a value, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
