"""Digests of bits: those of their definition in whole numbers, for any block; one flipped bit shows."""

from __future__ import annotations

import pytest
import torch

from raysharded.actors.numerics.bit_digest import flip_bit, tensor_digest
from raysharded.actors.numerics.norm_blocks import DIGEST_BLOCK

_WORD = 1 << 64


def _by_definition(words: list[int]) -> int:
    total = 0
    for place, word in enumerate(words, start=1):
        weight = place * 0x9E3779B97F4A7C15 % _WORD
        signed = weight - _WORD if weight >= _WORD // 2 else weight
        total += word * ((signed ^ signed >> 29) * 0xBF58476D1CE4E5B9 | 1)
    return (total + _WORD // 2) % _WORD - _WORD // 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64])
def test_digests_are_those_of_the_definition_for_any_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = (torch.arange(1000) % 251 - (dtype is torch.int8) * 125).to(dtype)
    for block in (1, 7, 1000, 1 << 15):
        monkeypatch.setitem(DIGEST_BLOCK, False, block)
        assert int(tensor_digest(tensor)) == _by_definition([int(each) for each in tensor])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_count_by_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-3, 3, 70_000).to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = int(tensor_digest(tensor))
    assert before == _by_definition([int(each) for each in tensor.view(integers)])
    flip_bit(tensor)
    assert int(tensor_digest(tensor)) != before
    flip_bit(tensor)
    assert int(tensor_digest(tensor)) == before


def test_signs_of_zero_and_bits_of_a_nan_show() -> None:
    assert int(tensor_digest(torch.tensor([0.0]))) != int(tensor_digest(torch.tensor([-0.0])))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert int(tensor_digest(nans[:1])) != int(tensor_digest(nans[1:]))
    assert int(tensor_digest(torch.tensor([]))) == 0
