"""Reading in this process: its draws, and the samples that are equal."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysharded.data.access.reader import Draws
from raysharded.data.access.repeat_check import differ
from raysharded.data.access.sample_reader import DatasetReader
from tests.data.samples import Drawing, Large


def test_what_this_process_draws_is_not_disturbed_by_what_is_read_in_it() -> None:
    reader = DatasetReader(Drawing(with_torch=True), draws=Draws(refuses=True, puts_back=True))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    np.random.standard_normal()  # of which one is left over
    drawn = []
    for reads in (False, True):
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        if reads:
            reader.read_samples([1, 2], "now", 0)
            reader.check([3])
        drawn.append((torch.rand(1).item(), np.random.standard_normal(2).tolist(), random.random()))
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    assert drawn[0] == drawn[1]


class Retrying(Large):
    """Draws now and then from a global generator, as a client of a network does before a retry."""

    def __init__(self) -> None:
        super().__init__(3)
        self.reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if self.reads % 3 == 0:
            random.random()
        return super().__getitem__(index)


def test_a_draw_that_does_not_show_in_a_sample_is_no_alarm() -> None:
    reader = DatasetReader(Retrying(), draws=Draws(refuses=True, puts_back=True))
    for step in range(5):
        reads = reader.read_samples([1, 2, 3, 4], "now", step)
        assert [sample["number"] for sample in reads.samples] == reads.ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (np.array([1.0, float("nan")]), np.array([1.0, float("nan")]), False),
        (np.array([0.0]), np.array([-0.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16(), False),
        (torch.ones(2), torch.ones(2).double(), True),
        ({"a": (1, [2.0])}, {"a": (1, [2.0])}, False),
        ({"a": (1, [2.0])}, {"a": (1, [2.5])}, True),
        ({"a": 1}, {"b": 1}, True),
        ((1, 2), (1, 2, 3), True),
        (float("nan"), float("nan"), False),
        (1, True, True),
        (np.array([["a", None]], dtype=object), np.array([["a", None]], dtype=object), False),
        (Path("a"), Path("b"), True),
        (object(), object(), False),
        (threading.Lock(), threading.Lock(), False),
        ({1, 2, 3}, {3, 2, 1}, False),
    ],
)
def test_two_samples_differ_if_a_bit_does_and_what_has_no_form_does_not(one: Any, other: Any, expected: bool) -> None:
    assert differ(one, other) is expected
