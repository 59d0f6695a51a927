"""The gradient's norm: the same bits however the gradient is cut, and close to the exact value."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.grad_norm import NORM_WORDS, norm_from_words, square_sum_words


def norm(*gradients: torch.Tensor) -> float:
    digits, finite = square_sum_words(gradients)
    assert finite
    return norm_from_words(digits.tolist())


def exact_norm(gradient: torch.Tensor) -> float:
    return math.sqrt(math.fsum(value * value for value in gradient.double().flatten().tolist()))


def draw(seed: int, size: int, spread: int) -> torch.Tensor:
    """Normal values with exponents up to `spread` decades apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10.0 ** (-torch.rand(size, generator=generator) * spread)


@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 3000),
    spread=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    data=st.data(),
)
def test_any_cut_over_any_workers_gives_the_same_bits(
    seed: int, size: int, spread: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    gradient = draw(seed, size, spread).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    parts = [gradient[a:b] for a, b in pairwise([0, *cuts, size])]
    workers = data.draw(st.integers(1, 5))
    total = torch.zeros(NORM_WORDS, dtype=torch.int64)
    for rank in range(workers):
        digits, finite = square_sum_words(reversed(parts[rank::workers]))
        assert finite
        total += digits
    assert norm_from_words(total.tolist()) == norm(gradient)


@pytest.mark.parametrize("row", [(2,), (3,), (6, 4), (96,), (256,), (5000,), (4096, 6), (1, 1, 1), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_may_be_anywhere_and_are_folded_alike(row: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = 37
    gradient = draw(5, rows * math.prod(row), spread=3).reshape(rows, *row).to(dtype)
    before = gradient.clone()
    whole = norm(gradient)
    lost = gradient.numel() * 2.0**-40
    assert whole == pytest.approx(exact_norm(gradient), rel=lost + 2.0**-50)
    for cuts in ((0, 0, 1, 36, 37), (0, 13, 13, 26, 37), (0, 30, 37)):
        parts = [gradient[a:b] for a, b in pairwise(cuts)]
        assert norm(*reversed(parts)) == whole
        assert norm(*(part.clone() for part in parts)) == whole
    assert torch.equal(gradient, before)


@given(seed=st.integers(0, 1 << 30), size=st.integers(1, 3000), scale=st.integers(-150, 150))
def test_the_norm_is_close_to_the_exact_value(seed: int, size: int, scale: int) -> None:
    gradient = draw(seed, size, spread=1).double() * 10.0**scale
    exact = exact_norm(gradient)
    lost = (
        size * 2.0**-40 * (gradient.abs().max().item() / exact) ** 2
    )  # of each square, the part below the digits kept
    assert norm(gradient) == pytest.approx(exact, rel=lost / 2 + 2.0**-52)


def test_the_norm_of_an_ordinary_gradient_is_good_to_eleven_digits() -> None:
    gradient = draw(11, 50_000, spread=0)
    assert norm(gradient) == pytest.approx(exact_norm(gradient), rel=1e-11)


def test_one_large_value_hides_small_ones_no_more_than_promised() -> None:
    gradient = torch.full((100_000,), 2.0**-24, dtype=torch.float64)
    gradient[7] = 1.0
    assert norm(gradient) == pytest.approx(exact_norm(gradient), rel=100_000 * 2.0**-40)


def test_more_than_a_block_of_elements() -> None:
    gradient = draw(3, 200_001, spread=2)
    assert norm(gradient) == norm(gradient[:1], gradient[1:65_537], gradient[65_537:].clone())


@pytest.mark.parametrize("gradients", [[], [torch.zeros(0)], [torch.zeros(5), -torch.zeros(2, 3)]])
def test_nothing_and_zeros_have_the_norm_zero(gradients: list[torch.Tensor]) -> None:
    assert norm(*gradients) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_found(bad: float) -> None:
    gradient = torch.zeros(70_000)
    gradient[69_999] = bad
    _, finite = square_sum_words([torch.ones(3), gradient])
    assert not finite


@pytest.mark.parametrize("exponent", [-149, -140, -126, -60, 0, 100, 127])
def test_float32_of_every_size_including_denormals(exponent: int) -> None:
    assert norm(torch.tensor([math.ldexp(1.0, exponent)])) == math.ldexp(1.0, exponent)


@pytest.mark.parametrize("exponent", [-537, -530, -520, -512, -500, 500, 508, 511])
def test_float64_whose_squares_are_denormal_or_huge(exponent: int) -> None:
    value = math.ldexp(1.0, exponent)
    assert norm(torch.tensor([value, 0.0], dtype=torch.float64)) == value


@pytest.mark.parametrize("exponent", range(-537, 512, 37))
def test_the_digits_that_are_kept_hold_forty_bits(exponent: int) -> None:
    value = math.ldexp(1.0 + 2.0**-23 + 2.0**-20, exponent)
    assert norm(torch.tensor([value], dtype=torch.float64)) == pytest.approx(
        value, rel=2.0**-38 if exponent > -500 else 1.0
    )
