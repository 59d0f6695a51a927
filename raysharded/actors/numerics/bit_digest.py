"""Digests of tensors' bits, computed on the tensors' device: one flipped bit, -0.0 or a NaN shows.

A digest is the sum modulo 2^64 of the elements' bits, each times an odd number for its place (a multilinear hash). A
change of one element always changes the digest. Any other accidental change escapes with a probability of about 2^-64.
The digest does not protect against adversaries.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import torch

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.numerics.norm_blocks import DIGEST_BLOCK

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_PRIME = 1_000_003
_WORD = 1 << 64
_COMPARED = 1 << 12
"""Number of a buffer's elements that are compared; up to twice as many may be."""


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor as a 0-dimensional int64 on the tensor's device, without a synchronization."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_INTEGERS[flat.element_size()]) if flat.dtype.is_floating_point else flat
    size = DIGEST_BLOCK[accelerator().has(flat.device)]
    places = torch.arange(1, min(size, len(bits)) + 1, dtype=torch.int64, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), size):
        block = bits[start : start + size]
        weights = places[: len(block)] + start
        weights *= _STEP  # wraps around, as it should
        weights ^= weights >> 29
        weights *= _MIX
        weights |= 1
        weights *= block.to(torch.int64)
        total += weights.sum()
    return total


def combined(digests: Iterable[int]) -> int:
    """One digest of many in order, as a non-zero signed 64-bit integer."""
    word = 1
    for digest in digests:
        word = (word * _PRIME + digest) % _WORD
    word = word or 1
    return word - _WORD if word >= _WORD // 2 else word


def bits_of(value: float) -> int:
    """Bits of a number. All NaNs count as one: those of a metric may come from any division by 0."""
    return int(struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))[0])


def some_of(buffer: torch.Tensor) -> torch.Tensor:
    """Some elements of a buffer as a 1-D tensor; copies no others, even if the buffer is expanded."""
    buffer, step = buffer.detach(), max(1, buffer.numel() // _COMPARED)
    if buffer.is_contiguous() or not buffer.dim():
        some = buffer.reshape(-1)[::step]
    else:
        places = torch.arange(0, buffer.numel(), step, device=buffer.device)
        some = buffer[torch.unravel_index(places, buffer.shape)]
    return some.resolve_conj().resolve_neg()


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the exponent of a floating-point tensor's first element, in place: a fault for tests."""
    flat = tensor.detach().view(-1)
    mantissa = {2: 7 if flat.dtype == torch.bfloat16 else 10, 4: 23, 8: 52}[flat.element_size()]
    flat.view(_INTEGERS[flat.element_size()])[:1] ^= 1 << mantissa
