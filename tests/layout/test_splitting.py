"""Bytes divided between senders: each once, nearly as wanted, at few places."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from raysharded.layout import ALIGNMENT
from raysharded.layout.reshard.split import MIN_PIECE_BYTES, Stripes, split
from tests.cases import examples

SIZES = st.sampled_from([1, 12, 4096, MIN_PIECE_BYTES, 2 * MIN_PIECE_BYTES + 12, 10**6 + 3])


@settings(max_examples=examples(50, of=150), deadline=None)
@given(st.data())
def test_every_byte_is_in_one_part_and_every_share_nearly_as_wanted(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 4))
    stripe = st.tuples(st.integers(0, 10**6).map(lambda n: 4 * n), SIZES, st.integers(1, 9))
    groups = data.draw(st.lists(st.lists(stripe, min_size=1, max_size=4), min_size=1, max_size=4))
    shares = []
    for group in groups:
        total = sum(nbytes * count for _, nbytes, count in group)
        cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=width - 1, max_size=width - 1)))
        shares.append(np.diff([0, *cuts, total]).tolist())
    rows = [(number, *one) for number, group in enumerate(groups) for one in group]
    of_group, start, nbytes, count = np.array(rows, np.int64).T
    parts = split(Stripes(start=start, nbytes=nbytes, count=count), np.array(shares, np.int64))

    for number in range(len(rows)):
        for tensor in range(count[number]):
            mine = (parts.stripe == number) & (parts.first <= tensor) & (tensor < parts.behind)
            ends = np.sort(np.concatenate([parts.start[mine], parts.start[mine] + parts.nbytes[mine]]))
            assert ends[0] == start[number]
            assert ends[-1] == start[number] + nbytes[number]
            assert (ends[1:-1:2] == ends[2:-1:2]).all()  # one ends where the next begins
            assert (ends[1:-1] % ALIGNMENT == 0).all()
            assert (ends[1:-1] >= ends[0] + MIN_PIECE_BYTES).all()
            assert (ends[1:-1] <= ends[-1] - MIN_PIECE_BYTES).all()
    got = np.zeros((len(groups), width), np.int64)
    np.add.at(got, (of_group[parts.stripe], parts.option), (parts.behind - parts.first) * parts.nbytes)
    assert np.abs(got - np.array(shares)).max() <= 2 * MIN_PIECE_BYTES
    assert len(parts.stripe) <= len(rows) + 3 * (width - 1) * len(groups)
