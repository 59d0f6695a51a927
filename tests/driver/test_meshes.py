"""The choice of a mesh: the fastest that fits, with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from raysharded.driver.meshes import Grouping, choose_mesh, is_better, predicted
from raysharded.layout import Mesh

GROUPINGS = st.builds(
    Grouping,
    shards=st.integers(1, 8),
    least_shards=st.integers(1, 8),
    num_microbatches=st.integers(1, 64),
    least_workers=st.integers(1, 8),
)


def grouping(shards: int, least_shards: int | None = None, num_microbatches: int = 64) -> Grouping:
    return Grouping(shards=shards, least_shards=least_shards or shards, num_microbatches=num_microbatches)


@given(GROUPINGS, st.integers(1, 40))
def test_no_mesh_with_so_many_groups_is_faster(given_grouping: Grouping, num_workers: int) -> None:
    chosen = choose_mesh(given_grouping, num_workers).mesh
    assert chosen.shards >= min(given_grouping.least_shards, num_workers)
    assert min(given_grouping.least_workers, num_workers) <= chosen.world_size <= num_workers
    for shards in range(min(given_grouping.least_shards, num_workers), num_workers + 1):
        mesh = Mesh(replicas=num_workers // shards, shards=shards)
        if mesh.world_size >= min(given_grouping.least_workers, num_workers):
            assert predicted(given_grouping, chosen) <= predicted(given_grouping, mesh)


@given(GROUPINGS, st.integers(1, 40), st.integers(0, 40))
def test_a_run_does_not_change_its_mesh_for_one_that_it_has(
    given_grouping: Grouping, num_workers: int, needed: int
) -> None:
    chosen = choose_mesh(given_grouping, num_workers, needed).mesh
    assert min(needed, num_workers) <= chosen.world_size <= num_workers
    assert not is_better(given_grouping, num_workers, chosen, needed)


@pytest.mark.parametrize(
    ("num_workers", "mesh"), [(4, "1x4"), (8, "2x4"), (16, "4x4"), (9, "2x4"), (7, "1x7"), (3, "1x3")]
)
def test_groups_of_the_size_asked_for_where_workers_are_enough_for_them(num_workers: int, mesh: str) -> None:
    assert str(choose_mesh(grouping(4), num_workers).mesh) == mesh


def test_groups_are_formed_anew_in_a_smaller_size_if_the_state_fits_that() -> None:
    choice = choose_mesh(grouping(4, least_shards=2), 6)
    assert str(choice.mesh) == "2x3"
    assert "groups of 4 were asked for" in choice.reason


def test_the_reason_names_the_next_best_and_who_stands_by() -> None:
    reason = choose_mesh(grouping(4), 9).reason
    assert reason.startswith("2x4 (replicas x shards) takes about")
    assert "the next best" in reason
    assert "1 of 9 workers stands by" in reason


def test_without_groups_all_workers_are_one() -> None:
    assert choose_mesh(None, 7).mesh == Mesh(shards=7)
    assert choose_mesh(None, 7).reason == ""
    assert is_better(None, 7, Mesh(shards=6))
