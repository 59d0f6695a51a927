"""The gradient's 2-norm, with the same bits however the gradient is cut along its first dimension.

A row is whole on one worker. Its squares are folded, half onto half, by element-wise additions, whose order no kernel
chooses. The results are cut into digits of 40 bits on one fixed grid of powers of two. This is the indexed summation of
Demmel and Nguyen (Parallel Reproducible Summation, IEEE Trans. Computers 64(7), 2015). A digit is a function of its
element alone, and sums of digits are integers, so their order does not matter. The norm is read from the two highest
digits in use anywhere. Of every element this leaves out at most 2**-40 of the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import on_host
from raysharded.actors.numerics.norm_blocks import BLOCK, SMALL, num_folds, row_length

_DIGIT_BITS = 40
_LOWEST = -1080  # below the smallest float64 subnormal, 2**-1074
_NUM_DIGITS = 1 + (1024 - _LOWEST) // _DIGIT_BITS
_WORD_BITS = 32
NORM_WORDS = 2 * _NUM_DIGITS
"""Number of integers: a digit's sum is sent as its low 32 bits and the rest, so sums over workers do not overflow."""


def square_sum_words(gradients: Iterable[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """(words, finite): int64 [NORM_WORDS] of the sum of squares of local gradients, to be added over all workers.

    Digits lower than the second below a block's own highest are left out: `norm_from_words` never reads them.
    """
    digits = [0] * _NUM_DIGITS
    on_device: dict[torch.device, _DeviceDigits] = {}
    for block in _gathered(_folded_squares(gradients)):
        if accelerator().has(block.device):
            on_device.setdefault(block.device, _DeviceDigits(block.device)).add(block)
        elif not _add_block(digits, block):
            return torch.zeros(NORM_WORDS, dtype=torch.int64), False
    for sums in on_device.values():
        if not sums.add_to(digits):
            return torch.zeros(NORM_WORDS, dtype=torch.int64), False
    low = [digit & ((1 << _WORD_BITS) - 1) for digit in digits]
    high = [digit >> _WORD_BITS for digit in digits]
    return torch.tensor(low + high, dtype=torch.int64), True


def _folded_squares(gradients: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Folded squares, float64 [rows, n], at most a block each; use one before taking the next.

    The numbers do not depend on which worker has which rows.
    """
    room = torch.empty(0, dtype=torch.float64)
    for gradient in gradients:
        length = row_length(math.prod(gradient.shape[1:]))
        for block in gradient.detach().reshape(-1).split(_block_size(gradient) // length * length):
            if room.device != block.device or room.numel() < block.numel():
                room = torch.empty(block.numel(), dtype=torch.float64, device=block.device)
            squares = room[: block.numel()].copy_(block)
            yield _fold(squares.mul_(squares).view(-1, length))


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """Fold [n, length] in place to [n, length / 2**k], of which each element is the sum of 2**k elements."""
    for _ in range(num_folds(rows.shape[1])):
        half = rows.shape[1] // 2
        rows = rows[:, :half].add_(rows[:, half:])
    return rows


def _gathered(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join small tensors into fewer ones with the same elements, as each tensor costs some calls."""
    small: list[torch.Tensor] = []
    size = 0
    for part in parts:
        least = _block_size(part) // SMALL
        if part.numel() >= least:
            yield part
            continue
        small.append(part.clone(memory_format=torch.contiguous_format).view(-1))
        size += part.numel()
        if size >= least:
            yield _joined(small)
            size = 0
    if size:
        yield _joined(small)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tensors and empty the list."""
    values = torch.cat(parts)
    parts.clear()
    return values


def _block_size(values: torch.Tensor) -> int:
    """Elements in a block: so few that a digit's sum over a block stays below 2**63."""
    return BLOCK[accelerator().has(values.device)]


def _add_block(digits: list[int], values: torch.Tensor) -> bool:
    """Add non-negative values; False if one is not finite."""
    largest = values.max().item()
    if not math.isfinite(largest):
        return False
    if largest == 0.0:
        return True
    highest = (math.frexp(largest)[1] - 1 - _LOWEST) // _DIGIT_BITS
    rest = _scaled(values, -(_LOWEST + highest * _DIGIT_BITS))
    whole = rest.to(torch.int64)
    digits[highest] += int(whole.sum().item())
    if highest > 0:
        rest = rest.sub_(whole).mul_(2.0**_DIGIT_BITS)
        digits[highest - 1] += int(rest.to(torch.int64).sum().item())
    return True


class _DeviceDigits:
    """Digits of blocks of one device, added there: the same sums as `_add_block`, and one read for all blocks."""

    def __init__(self, device: torch.device) -> None:
        self._place = torch.arange(_NUM_DIGITS, dtype=torch.int64, device=device)
        self._low, self._high = torch.zeros_like(self._place), torch.zeros_like(self._place)
        """Low 32 bits of each block's digits, added; and the rest, added."""
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    def add(self, values: torch.Tensor) -> None:
        """Add non-negative values."""
        largest = values.max()
        self._is_finite &= largest.isfinite()
        highest = (torch.frexp(largest)[1].to(torch.int64) - 1 - _LOWEST) // _DIGIT_BITS
        rest = self._scaled(values, -(_LOWEST + highest * _DIGIT_BITS))
        whole = rest.to(torch.int64)
        self._add(highest, whole.sum())
        rest = rest.sub_(whole).mul_(2.0**_DIGIT_BITS)
        self._add(highest - 1, rest.to(torch.int64).sum())

    def _add(self, place: torch.Tensor, total: torch.Tensor) -> None:
        here = self._place == place  # none for the digit below the lowest
        self._low += here * (total & ((1 << _WORD_BITS) - 1))
        self._high += here * (total >> _WORD_BITS)

    @staticmethod
    def _scaled(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        """As `_scaled`: powers of two are made of their bits, so that they are exact on every device."""
        half = exponent // 2
        powers = [((part + 1023) << 52).view(torch.float64) for part in (half, exponent - half)]
        return (values * powers[0]).mul_(powers[1])

    def add_to(self, digits: list[int]) -> bool:
        """Add the sums to the digits; False if a value was not finite. Reads the device once."""
        *sums, is_finite = on_host(torch.cat([self._low, self._high, self._is_finite.view(1).long()])).tolist()
        if is_finite:
            for place in range(_NUM_DIGITS):
                digits[place] += sums[place] + (sums[_NUM_DIGITS + place] << _WORD_BITS)
        return bool(is_finite)


def _scaled(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Compute values * 2**exponent, also where no float64 holds 2**exponent itself."""
    if abs(exponent) < 1000:
        return values * 2.0**exponent
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def norm_from_words(words: Sequence[int]) -> float:
    """The 2-norm from the words added over all workers."""
    digits = [words[i] + (words[_NUM_DIGITS + i] << _WORD_BITS) for i in range(_NUM_DIGITS)]
    used = [index for index, value in enumerate(digits) if value]
    if not used:
        return 0.0
    top = used[-1]
    total = (digits[top] << _DIGIT_BITS) + (digits[top - 1] if top else 0)
    exponent = _LOWEST + (top - 1) * _DIGIT_BITS
    if exponent % 2:
        total, exponent = total * 2, exponent - 1
    return math.ldexp(math.sqrt(total), exponent // 2)
