"""The gradient's 2-norm, with the same bits however the gradient is cut.

Squares are cut into digits of 24 bits on one fixed grid of powers of two, as in the indexed summation of Demmel and
Nguyen (Parallel Reproducible Summation, IEEE Trans. Computers 64(7), 2015); a digit is a function of its element
alone, and sums of digits are integers, so their order does not matter. The norm is read from the three highest
digits that are in use anywhere: a relative precision of at least 2**-48 of the largest square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

DIGIT_BITS = 24
_LOWEST = -1080  # below the smallest float64 subnormal, 2**-1074
NUM_DIGITS = 1 + (1024 - _LOWEST) // DIGIT_BITS
_KEPT = 3
_BLOCK_CPU = 1 << 16  # elements: stays in the cache; sums of digits stay below 2**53, so float64 adds them exactly
_BLOCK_CUDA = 1 << 24  # elements: few synchronisations


def _digit_of(exponent: int) -> int:
    """The digit that holds the bit 2**exponent."""
    return (exponent - _LOWEST) // DIGIT_BITS


def square_sum_digits(gradients: Iterable[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """(digits, finite): int64 [NUM_DIGITS] of the sum of squares of local gradients, to be added over all workers.

    Digits lower than the third below a block's own highest are left out: `norm_from_digits` never reads them.
    """
    digits = torch.zeros(NUM_DIGITS, dtype=torch.int64)
    for gradient in gradients:
        size = _BLOCK_CUDA if gradient.is_cuda else _BLOCK_CPU
        for block in gradient.detach().reshape(-1).split(size):
            if not _add_block(digits, block):
                return digits, False
    return digits, True


def _add_block(digits: torch.Tensor, block: torch.Tensor) -> bool:
    if block.numel() == 0:
        return True
    rest = block.double()
    rest = rest * rest
    largest = rest.max().item()
    if not math.isfinite(largest):
        return False
    if largest == 0.0:
        return True
    highest = _digit_of(math.frexp(largest)[1] - 1)
    for digit in range(highest, max(-1, highest - _KEPT), -1):
        shift = _LOWEST + digit * DIGIT_BITS
        high = _scaled(rest, -shift).trunc_()
        digits[digit] += int(high.sum().item())
        if digit > highest - _KEPT + 1:
            rest = rest - _scaled(high, shift)
    return True


def _scaled(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """values * 2**exponent, also where 2**exponent itself is no float64."""
    if abs(exponent) < 1000:
        return values * 2.0**exponent
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def norm_from_digits(digits: list[int]) -> float:
    """The 2-norm from the digits added over all workers."""
    used = [digit for digit, value in enumerate(digits) if value]
    if not used:
        return 0.0
    top = used[-1]
    total = sum(
        digits[digit] << (DIGIT_BITS * (digit - top + _KEPT - 1)) for digit in range(max(0, top - _KEPT + 1), top + 1)
    )
    exponent = _LOWEST + (top - _KEPT + 1) * DIGIT_BITS
    if exponent % 2:
        total, exponent = total * 2, exponent - 1
    return math.ldexp(math.sqrt(total), exponent // 2)
