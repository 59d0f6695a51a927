"""Any k blocks of an erasure code give the data, to the bit."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.actors.shards import erasure
from raysharded.actors.shards.erasure import erasure_code
from raysharded.errors import ConfigError
from raysharded.layout import Parity


def check(parity: Parity, lost: list[int], size: int) -> None:
    """Lose these blocks, and compute those of them that are data."""
    code = erasure_code(parity)
    data = list(np.random.default_rng([parity.k, size]).integers(0, 256, (parity.k, size), dtype=np.uint8))
    blocks = dict(enumerate([*data, *np.empty((parity.m, size), np.uint8)]))
    code.encode(data, [blocks[parity.k + j] for j in range(parity.m)])
    there = {number: block for number, block in blocks.items() if number not in lost}
    given_back = dict(list(there.items())[: parity.k])
    for number in lost:
        if number < parity.k:
            out = np.empty(size, np.uint8)
            code.decode(given_back, number, out)
            assert np.array_equal(out, data[number])


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 40), st.data())
def test_any_m_lost_blocks_are_computed_back(k: int, m: int, size: int, data: st.DataObject) -> None:
    if m > 1:
        pytest.importorskip("zfec", reason="raysharded[parity]")
    lost = data.draw(st.lists(st.integers(0, k + m - 1), min_size=1, max_size=m, unique=True))
    check(Parity(k=k, m=m), lost, size)


@pytest.mark.parametrize(("k", "lost"), [(4, [0, 3]), (4, [1, 5]), (4, [2, 4]), (40, [7, 39]), (200, [0, 150])])
def test_two_lost_blocks_of_few_and_of_many(k: int, lost: list[int]) -> None:
    pytest.importorskip("zfec", reason="raysharded[parity]")
    check(Parity(k=k, m=2), lost, erasure._CHUNK + 1000 if k == 4 else 100)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfec", None)
    with pytest.raises(ConfigError, match=r'parity=\(4, 2\)\) needs .* pip install "raysharded\[parity\]"'):
        erasure_code(Parity(k=4, m=2))
    check(Parity(k=4, m=1), [2], 10)  # needs nothing
