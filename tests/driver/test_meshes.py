"""The choice of a mesh: the fastest that fits, with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from raysharded.driver.state.mesh_choice import Grouping, choose_mesh, is_better, predicted
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
def test_groups_of_the_size_requested_where_workers_are_enough_for_them(num_workers: int, mesh: str) -> None:
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


def planned(shards: int, step_s: dict[str, float], lacking: tuple[str, ...] = (), least_workers: int = 1) -> Grouping:
    """A grouping of up to 4 workers; meshes that `step_s` leaves out take 9 s."""
    meshes = [[Mesh(replicas=r, shards=s) for r in range(1, 4 // s + 1)] for s in range(1, 5)]
    return Grouping(
        shards=shards,
        least_shards=1,
        num_microbatches=8,
        least_workers=least_workers,
        step_s=tuple(tuple(step_s.get(str(mesh), 9.0) for mesh in row) for row in meshes),
        fits=tuple(tuple(str(mesh) not in lacking for mesh in row) for row in meshes),
    )


def test_the_shortest_planned_step_wins_and_among_equals_the_size_requested() -> None:
    assert str(choose_mesh(planned(2, {"1x4": 1.0, "2x2": 2.0}), 4).mesh) == "1x4"
    choice = choose_mesh(planned(2, {"1x4": 1.0, "2x2": 1.01, "4x1": 1.0}), 4)
    assert str(choice.mesh) == "2x2"
    assert choice.reason.startswith("2x2 (replicas x shards) takes about 1.01 s a step, as planned; the next best")


def test_a_mesh_that_does_not_fit_is_not_chosen_while_another_does() -> None:
    choice = choose_mesh(planned(2, {"2x2": 1.0, "1x4": 2.0}, lacking=("2x2", "4x1")), 4)
    assert str(choice.mesh) == "1x4"
    assert choice.reason.endswith("2x2 does not fit the workers' memory")


def test_where_nothing_fits_the_reason_names_it() -> None:
    choice = choose_mesh(planned(2, {}, lacking=("1x1", "2x1", "1x2")), 2)
    assert choice.mesh.world_size == 2
    assert choice.reason.endswith(f"{choice.mesh} does not fit the workers' memory, and no other mesh does")


def test_workers_join_to_make_a_mesh_that_fits_though_it_is_slower() -> None:
    given_grouping = planned(2, {"1x2": 1.0, "1x3": 2.0}, lacking=("1x1", "2x1", "3x1", "4x1", "1x2"))
    assert is_better(given_grouping, 3, Mesh(shards=2))
    assert not is_better(given_grouping, 2, Mesh(shards=3))


@given(
    st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_a_planned_run_settles_in_the_mesh_that_it_takes(
    step_s: list[float], fit: list[bool], shards: int, num_workers: int
) -> None:
    names = ("1x1", "2x1", "3x1", "4x1", "1x2", "2x2", "1x3", "1x4")
    lacking = tuple(name for name, fits_it in zip(names, fit, strict=True) if not fits_it)
    given_grouping = planned(shards, dict(zip(names, step_s, strict=True)), lacking)
    chosen = choose_mesh(given_grouping, num_workers).mesh
    assert not is_better(given_grouping, num_workers, chosen)
    possible = [f"{num_workers // each}x{each}" for each in range(1, num_workers + 1)]
    assert str(chosen) not in lacking or set(possible) <= set(lacking)
