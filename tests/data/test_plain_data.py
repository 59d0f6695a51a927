"""Plain data as text: it comes back with its types and bits, or is refused by the way to it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from raysharded.data.access.repeat_check import differ
from raysharded.data.plain_data import plain, restored
from raysharded.errors import TaskError

WHOLE = [
    b"\x00\xff",
    np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    np.zeros((0, 2), np.float16),
    torch.tensor([[1.5, -0.0], [float("nan"), 2.0]], dtype=torch.bfloat16).t(),
    torch.empty(0, 3, dtype=torch.int64),
    {"buffer": [1, (2, b"3")], "generator": torch.Generator().manual_seed(3).get_state()},
    random.Random(4).getstate(),
]


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: type(value).__name__)
def test_bytes_arrays_and_tensors_come_back_where_they_are_allowed(value: Any) -> None:
    text = json.dumps(plain(value, "it", "", whole=True))
    assert not differ(restored(json.loads(text)), value)
    assert json.dumps(plain(restored(json.loads(text)), "it", "", whole=True)) == text


def test_dicts_come_back_in_their_order() -> None:
    """A stream may have one as a buffer, and take from its beginning."""
    value = {6: {"z": 1, "a": b"2"}, 12: [{"y": 1, "x": 2}]}
    assert repr(restored(json.loads(json.dumps(plain(value, "it", "", whole=True))))) == repr(value)


def test_what_is_not_plain_is_refused_by_the_way_to_it() -> None:
    for whole, value, named in (
        (True, {"a": [object()]}, r"object at it\.a\[0\]"),
        (False, [b""], r"bytes at it\[0\]"),
    ):
        with pytest.raises(TaskError, match=named + ": give other state"):
            plain(value, "it", "give other state", whole=whole)
