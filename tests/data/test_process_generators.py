"""The process's three generators: each is seeded by itself, from all of the number."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from raysharded.data.access import generators
from raysharded.ids import derive_seed


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = generators.states()
    yield
    generators.restore(before)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()


@pytest.mark.parametrize("number", [0, 5, 1 << 40, (1 << 40) + 5])
def test_each_generator_has_a_seed_of_its_own(number: int) -> None:
    generators.seed(number)
    numpy = derive_seed(number, "numpy")
    assert draws() == (
        random.Random(derive_seed(number, "random")).random(),
        np.random.RandomState(np.array([numpy & 0xFFFFFFFF, numpy >> 32], dtype=np.uint32)).random(),
        torch.rand(
            (), dtype=torch.float64, generator=torch.Generator().manual_seed(derive_seed(number, "torch"))
        ).item(),
    )


def test_torch_may_be_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand((), dtype=torch.float64).item()
    torch.manual_seed(1)
    generators.seed(5, with_torch=False)
    assert draws()[2] == expected
