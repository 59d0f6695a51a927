"""Figures of the order of samples: blocks that nodes read by themselves, and how well an epoch is mixed."""

from __future__ import annotations

import pytest

from benchmarks import data_order
from benchmarks.data_order import bytes_over_used, quality


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("rest", [0.0, 0.5])
@pytest.mark.parametrize("windows", [2, 13, 16])
def test_nodes_without_a_shared_disk_share_the_ends_of_columns_and_what_is_left_behind_the_last_window(
    nodes: int, windows: int, rest: float
) -> None:
    blocks, read = bytes_over_used(nodes, windows + rest)
    least, most = (windows + ends + nodes * rest for ends in (0.75, 1))
    assert least < blocks * (windows + rest) <= most
    if not rest:
        assert (read < 1.1) == (windows == 16)


def test_one_node_reads_each_block_once() -> None:
    assert [bytes_over_used(1, windows)[0] for windows in (0.5, 2, 2.5)] == pytest.approx([1.0] * 3, abs=0.001)


def test_figures_of_a_permutation_are_those_of_a_permutation_and_shared_blocks_show_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_order, "PAIRS", 400)
    plain, blocks = quality(1, 32, 32), quality(8, 2048, 1)
    assert plain.deviation_of_step == pytest.approx(1, abs=0.1)
    assert plain.deviation_of_span == pytest.approx(1, abs=0.1)
    for found in (plain.neighbours, plain.next_step, plain.next_step_of_permutation):
        assert abs(found) < 0.1
    assert plain.different_blocks > 0.999
    assert blocks.different_blocks < 0.8
    assert blocks.next_step > 0.5
    assert abs(blocks.next_step_of_permutation) < 0.1
