"""Losses that parity survives, and its computations, against a model that handles one stripe at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import (
    ALIGNMENT,
    Held,
    Mesh,
    Parity,
    StateSpec,
    TensorSpec,
    block_bytes,
    part_range,
    recoverable,
    shard_map,
    spread_out,
    survives,
)
from raysharded.layout.parity import Rebuild, plan_rebuild, rebuildable
from raysharded.layout.placement.node_spread import most_together
from tests.cases import examples

SPEC = StateSpec(tensors=(TensorSpec(name="w", dtype="uint8", shape=(128, 4), tensor_dim=0),))
PARITIES = st.builds(lambda k, m: Parity(k=k, m=m), st.integers(1, 6), st.integers(1, 3))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Parity, int]:
    """A parity, and a number of workers that it protects."""
    tensor = draw(st.sampled_from([1, 1, 2, 3]))
    parity = replace(draw(PARITIES), tensor=tensor, apart=draw(st.integers(1, 9)) if tensor == 1 else 1)
    return parity, parity.tensor * draw(st.integers(parity.width, parity.width + 7 // parity.tensor))


def stripes(parity: Parity, world: int) -> list[list[tuple[int, int]]]:
    """By stripe its (rank, number) blocks, from the ranks' side."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for rank in range(world):
        for part in range(parity.k):
            found[parity.stripe_of(rank, part, world)].append((rank, part))
        for block in range(parity.m):
            found[parity.stripe_kept(rank, block, world)].append((rank, parity.k + block))
    return found


@given(worlds())
def test_each_stripe_has_its_blocks_on_as_many_ranks(case: tuple[Parity, int]) -> None:
    parity, world = case
    for stripe, blocks in enumerate(stripes(parity, world)):
        assert sorted(number for _, number in blocks) == list(range(parity.width))
        assert len({rank for rank, _ in blocks}) == parity.width
        assert all(parity.rank_in(stripe, number, world) == rank for rank, number in blocks)


@given(worlds(), st.data())
def test_any_m_tensor_parallel_groups_may_be_lost_whole(case: tuple[Parity, int], data: st.DataObject) -> None:
    parity, world = case
    mesh = Mesh(shards=world, tensor=parity.tensor)
    assert parity.protects(mesh)
    lost = data.draw(st.sets(st.integers(0, mesh.data.shards - 1), max_size=parity.m))
    assert survives(parity, world, {rank for rank in range(world) if mesh.data_rank_of(rank) not in lost})


@given(worlds(), st.data())
def test_any_m_losses_are_survived(case: tuple[Parity, int], data: st.DataObject) -> None:
    parity, world = case
    lost = data.draw(st.sets(st.integers(0, world - 1), max_size=parity.m))
    assert survives(parity, world, set(range(world)) - lost)


@given(worlds())
def test_no_more_losses_than_m_in_one_stripe_are_survived(case: tuple[Parity, int]) -> None:
    parity, world = case
    ranks = [parity.rank_in(3, number, world) for number in range(parity.m + 1)]
    assert not survives(parity, world, set(range(world)).difference(ranks))


@given(worlds(), st.data())
def test_what_can_be_computed_is_what_each_stripe_allows(case: tuple[Parity, int], data: st.DataObject) -> None:
    parity, world = case
    ranks = st.sets(st.integers(0, world - 1))
    held, kept = data.draw(ranks), data.draw(ranks)
    possible = set(range(world)) - held
    for blocks in stripes(parity, world):
        there = [number for rank, number in blocks if rank in (held if number < parity.k else kept)]
        if len(there) < parity.k:
            possible -= {rank for rank, number in blocks if number < parity.k}
    assert rebuildable(parity, world, held, kept) == possible


@given(worlds(), st.data())
def test_every_part_of_a_lost_buffer_is_computed_once_from_k_blocks_that_are_there(
    case: tuple[Parity, int], data: st.DataObject
) -> None:
    parity, world = case
    lost = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=parity.m))
    left = {rank: WorkerId(100 + rank) for rank in range(world) if rank not in lost}
    plan = plan_rebuild(parity, 7, world, left, left)
    assert isinstance(plan, Rebuild)
    assert {rank for rank, _ in plan.lost} == lost
    counts = [sum(at == worker for _, at in plan.lost) for worker in left.values()]
    assert max(counts) <= -(-len(lost) // len(left))  # nobody computes two while another computes none
    repairs = list(plan.repairs())
    assert sorted((one.rank, one.part) for one in repairs) == [(r, p) for r in sorted(lost) for p in range(parity.k)]
    for repair in repairs:
        stripe = parity.stripe_of(repair.rank, repair.part, world)
        assert len({block.number for block in repair.blocks}) == parity.k
        for block in repair.blocks:
            assert block.rank == parity.rank_in(stripe, block.number, world)
            assert left[block.rank] == block.holder
            assert block.number != repair.part


def test_nothing_lost_or_too_much_is_nothing_to_compute() -> None:
    parity, everybody = Parity(k=2, m=1), {rank: WorkerId(rank) for rank in range(4)}
    assert plan_rebuild(parity, 1, 4, everybody, everybody) is None
    neighbours = {rank: WorkerId(rank) for rank in (2, 3)}
    assert plan_rebuild(parity, 1, 4, neighbours, neighbours) is None


@given(worlds(), st.integers(0, 300))
def test_the_parts_of_a_buffer_tile_it_in_blocks(case: tuple[Parity, int], rows: int) -> None:
    parity, world = case
    spec = StateSpec(tensors=(TensorSpec(name="w", dtype="float32", shape=(rows, 3)),))
    length = block_bytes(spec, world, parity, parity.tensor)
    assert length % ALIGNMENT == 0
    for rank in range(world):
        size = shard_map(spec, world, rank, parity.tensor).size_bytes
        ranges = [part_range(size, part, length) for part in range(parity.k)]
        assert [byte for start, stop in ranges for byte in range(start, stop)] == list(range(size))
        assert all(stop - start <= length for start, stop in ranges)


def reports(parity: Parity, world: int, step: int, *, layout: int = 5) -> list[Held]:
    return [
        Held(
            worker=WorkerId(rank),
            step=step,
            medium=medium,
            world_size=world,
            rank=rank,
            layout_id=layout,
            tensor=parity.tensor,
            parity=parity if medium == "parity" else None,
        )
        for rank in range(world)
        for medium in ("snapshot", "parity")
    ]


@settings(max_examples=examples(20, of=40))
@given(worlds(), st.data())
def test_the_newest_step_that_parity_gives_back_is_found(case: tuple[Parity, int], data: st.DataObject) -> None:
    parity, world = case
    lost = data.draw(st.sets(st.integers(0, world - 1), max_size=parity.m))
    held = [one for one in reports(parity, world, 4) + reports(parity, world, 3) if one.worker not in lost]
    found = recoverable(SPEC, held)
    assert found is not None
    assert found.step == 4
    whole = recoverable(SPEC, [one for one in held if one.medium == "snapshot"])
    assert bool(found.rebuilds) == (whole is None)  # only what is needed
    seen = [[holder for holder in copy.holders if holder is not None] for copy in found.copies]
    assert all(len(set(holders)) == len(holders) for holders in seen)
    for rebuild in found.rebuilds:
        for rank, worker in rebuild.lost:
            assert any(c.layout_id == 5 and c.medium == "mirror" and c.holders[rank] == worker for c in found.copies)
    assert recoverable(SPEC, held, rebuilding=False) == whole


def test_a_step_whose_parity_is_not_complete_is_not_found() -> None:
    parity, world = Parity(k=4, m=1), 5
    newest = [one for one in reports(parity, world, 4) if one.medium == "snapshot"]
    held = [one for one in newest + reports(parity, world, 3) if one.worker != 2]
    found = recoverable(SPEC, held)
    assert found is not None
    assert found.step == 3


def test_what_was_rebuilt_counts_when_another_worker_is_lost() -> None:
    parity, world = Parity(k=4, m=1), 6
    held = [one for one in reports(parity, world, 4) if one.worker not in (1, 2)]
    assert recoverable(SPEC, held) is None
    rebuilt = Held(worker=WorkerId(4), step=4, medium="mirror", world_size=world, rank=1, layout_id=5)
    found = recoverable(SPEC, [*held, rebuilt])
    assert found is not None
    (rebuild,) = found.rebuilds
    assert [rank for rank, _ in rebuild.lost] == [2]
    assert rebuild.holders[1] == WorkerId(4)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_stripes_are_spread_over_nodes(nodes: int, each: int, window: int, random: object) -> None:
    where = {WorkerId(number): f"n{number % nodes}" for number in range(nodes * each)}
    order = list(where)
    random.shuffle(order)  # type: ignore[attr-defined] # a random.Random
    spread = spread_out(order, where, window)
    assert sorted(spread) == sorted(order)
    assert most_together(spread, where, window) <= -(-window // nodes)
    assert spread_out(spread, where, window) == spread


def test_a_node_may_die_when_its_workers_are_apart() -> None:
    parity = Parity(k=4, m=2)
    where = {WorkerId(number): f"n{number // 4}" for number in range(12)}
    order = spread_out(list(where), where, parity.width)
    for node in set(where.values()):
        assert survives(parity, 12, [rank for rank, worker in enumerate(order) if where[worker] != node])
    assert not survives(parity, 12, range(4, 12))  # as they came


def test_parity_is_for_one_replica_of_enough_workers() -> None:
    parity = Parity(k=4, m=1)
    assert [shards for shards in range(1, 8) if parity.protects(Mesh(shards=shards))] == [5, 6, 7]
    assert not parity.protects(Mesh(replicas=2, shards=5))
    assert not parity.protects(Mesh(shards=8, tensor=2))
    with pytest.raises(ConfigError, match=r"Parity\(k=0, m=1\)"):
        Parity(k=0, m=1)


def test_two_at_once_of_any_six() -> None:
    parity = Parity(k=4, m=2)
    for lost in combinations(range(6), 2):
        assert survives(parity, 6, set(range(6)).difference(lost))


@given(st.integers(1, 60), st.integers(1, 70))
def test_each_rank_has_a_place_and_neighbouring_places_are_a_nodes_size_apart(world: int, apart: int) -> None:
    parity = Parity(k=1, m=1, apart=apart)
    places = [parity.place_of(rank, world) for rank in range(world)]
    assert sorted(places) == list(range(world))
    assert [parity.rank_at(place, world) for place in places] == list(range(world))
    ranks = [parity.rank_at(place, world) for place in range(world)]
    steps = [later - earlier for earlier, later in pairwise(ranks)]
    assert sum(step != apart for step in steps) == max(0, min(apart, world) - 1), "only between columns"
