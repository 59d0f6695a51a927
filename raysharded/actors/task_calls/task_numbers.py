"""Numbers that a task gives: what counts as one, what it is called when it is none, and the tensor that it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch

TENSORS: dict[int, Callable[[float], torch.Tensor]] = {
    1: torch.as_tensor,
    2: partial(torch.as_tensor, dtype=torch.float64),
}
"""By the number of the rule `numbers`: a weight, loss or metric that is no tensor, as one. The first takes torch's
default dtype, which is float32 unless somebody set another one."""
HALF = frozenset((torch.bfloat16, torch.float16))
"""Dtypes too coarse to add up in."""


def half_precision(name: str, dtypes: Mapping[str, torch.dtype]) -> str:
    """What is said of numbers that came in half precision. `name`: what gave them; `dtypes`: by what they are."""
    dtype = next(iter(dtypes.values()))
    bits = round(1 - math.log2(torch.finfo(dtype).eps))
    return (
        f"{name} gave {' and '.join(dtypes)} in {str(dtype).removeprefix('torch.')}: sums are rounded to steps of "
        f"2^-{bits} of their value, or more, and what is reported has these steps, too. Take `.float()` of what is "
        "summed, before it is (`logits.float()`)."
    )


def number_of(value: Any) -> float | torch.Tensor | None:
    """A tensor of one element as it is, without a look at it; anything else of one element as a float; None for what
    is no number."""
    if isinstance(value, torch.Tensor):
        return value if value.numel() == 1 else None
    if isinstance(value, np.ndarray):
        return number_of(value.item()) if value.size == 1 else None
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError):
        return None


def kind_of(value: Any) -> str:
    """What a value is, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
