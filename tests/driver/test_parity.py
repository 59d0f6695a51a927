"""The driver's decisions with parity: the needed workers, the source of the state, and the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raysharded.driver.membership.member_order import (
    distance_of_mirrors,
    distance_of_stripes,
    number_nodes,
    order_members,
)
from raysharded.driver.membership.state_source import needs
from raysharded.driver.replay.rerun import load
from raysharded.ids import WorkerId
from raysharded.layout import Held, Mesh, Parity, spread_out, survives
from raysharded.protocol.messages import FromMemory, FromStart, StopReason
from tests.driver.recorded import recorded
from tests.driver.scripted import LIMITS, Run

PARITY = Parity(k=4, m=1)


def run_of(workers: int) -> Run:
    """A run with parity that has just trained step 3 with so many workers."""
    run = Run(min_workers=1, max_workers=workers, parity=PARITY)
    run.ready(*range(workers))
    run.formed()
    run.trained(1, 2, 3)
    return run


def holding(run: Run, worker: int, step: int) -> list[Held]:
    rank, world = run.state.members.index(WorkerId(worker)), len(run.state.members)
    layout = run.state.generation

    def of(medium: str, parity: Parity | None = None) -> Held:
        return Held(
            worker=WorkerId(worker),
            step=step,
            medium=medium,  # type: ignore[arg-type]  # literals
            world_size=world,
            rank=rank,
            layout_id=layout,
            parity=parity,
        )

    return [of("snapshot"), of("parity", PARITY)]


def lose(run: Run, *lost: int) -> None:
    """These are lost; all others stop and report their shards of step 3."""
    for worker in lost:
        run.lost(worker)
    for worker in [each for each in run.state.members if each not in lost]:
        run.stopped(worker, StopReason.ABORTED, 3, held=holding(run, worker, 3))


def test_a_lost_shard_is_computed_by_a_member_of_the_next_generation() -> None:
    run = run_of(6)
    lose(run, 2)
    form = run.newest_form()
    assert isinstance(form.source, FromMemory)
    assert form.source.step == 3
    (rebuild,) = form.source.rebuilds
    assert [rank for rank, _ in rebuild.lost] == [2]
    assert {holder for holder in (*rebuild.holders, *rebuild.keepers) if holder is not None} <= set(form.members)
    assert [entry["redundancy"] for entry in run.records("generation")] == ["parity (4, 1)"] * 2


def test_with_fewer_workers_than_it_needs_the_journal_has_the_shortage() -> None:
    run = run_of(5)
    lose(run, 2)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.records("generation")[-1]["redundancy"] == "mirrors: parity (4, 1) needs 5 workers"


def test_more_losses_than_parity_gives_back_go_to_the_start_or_a_checkpoint() -> None:
    run = run_of(6)
    lose(run, 2, 4)
    assert isinstance(run.newest_form().source, FromStart)


def test_losses_without_a_stripe_in_common_do_not_add_up() -> None:
    run = run_of(12)
    lose(run, 1, 7)
    source = run.newest_form().source
    assert isinstance(source, FromMemory)
    assert [rank for rank, _ in source.rebuilds[0].lost] == [1, 7]


@pytest.mark.parametrize(("silent", "needed"), [((0,), False), ((0, 4), True), ((0, 6), False)])
def test_who_can_be_computed_back_is_not_needed(silent: tuple[int, ...], needed: bool) -> None:
    assert needs(run_of(12).state, [WorkerId(worker) for worker in silent]) is needed


def test_the_workers_of_a_stripe_are_on_different_nodes() -> None:
    nodes = {WorkerId(number): f"n{number // 2}" for number in range(10)}
    limits = Run(max_workers=10, parity=PARITY).state.limits
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, Mesh(shards=10))
    for node in set(nodes.values()):
        assert survives(PARITY, 10, [rank for rank, worker in enumerate(order) if nodes[worker] != node])
    mirrored = order_members(FromStart(), frozenset(nodes), LIMITS, nodes, Mesh(shards=3))
    assert len(mirrored) == 3


def test_it_can_be_replayed(tmp_path: Path) -> None:
    run = run_of(6)
    lose(run, 2)
    (found,) = load(str(recorded(tmp_path, run)))
    assert not found.differences
    assert "form generation 2 of workers 0, 1, 3, " in found.moments[-1].decided()


def nodes_of(*sizes: int) -> dict[WorkerId, str]:
    """Workers on nodes of these sizes, in a mixed order of ids."""
    names = [f"n{node}" for place in range(max(sizes)) for node, size in enumerate(sizes) if place < size]
    return {WorkerId(number): name for number, name in enumerate(names)}


@pytest.mark.parametrize(
    "sizes", [(8,) * 8, (8,) * 7 + (7,), (7,) + (8,) * 7, (2,) * 5, (4, 4)], ids=["64", "63", "63, first", "10", "8"]
)
def test_gradients_are_added_inside_nodes_with_parity_and_a_node_may_die(sizes: tuple[int, ...]) -> None:
    nodes, workers = nodes_of(*sizes), sum(sizes)
    parity = PARITY if len(sizes) >= PARITY.width else Parity(k=4, m=4)
    limits = Run(max_workers=workers, parity=parity).state.limits
    mesh = Mesh(shards=workers)
    mesh = replace(mesh, apart=distance_of_mirrors(mesh, nodes))
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, mesh)
    assert number_nodes(order, nodes, mesh) != (), "a node's workers have consecutive ranks"
    apart = distance_of_stripes(mesh, order, nodes, parity)
    assert apart == max(sizes)
    of_layout = replace(parity, apart=apart)
    for node in set(nodes.values()):
        assert survives(of_layout, workers, [rank for rank, worker in enumerate(order) if nodes[worker] != node])
    near = spread_out(sorted(nodes), nodes, parity.width)
    assert number_nodes(near, nodes, mesh) == (), "as the workers of a stripe are neighbours"


def test_stripes_have_neighbouring_ranks_where_nodes_of_unequal_sizes_would_hold_two_of_a_stripe() -> None:
    nodes = nodes_of(6, 1, 1, 1, 1)
    limits = Run(max_workers=10, parity=PARITY).state.limits
    mesh = Mesh(shards=10)
    mesh = replace(mesh, apart=distance_of_mirrors(mesh, nodes))
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, mesh)
    distance = distance_of_stripes(mesh, order, nodes, PARITY)
    assert (distance == 1) == (number_nodes(order, nodes, mesh) == ())


def test_the_plan_of_a_generation_has_the_distance_of_its_stripes() -> None:
    """The members learn it, and what they hold is judged by it."""
    run = Run(min_workers=1, max_workers=10, parity=PARITY)
    run.ready(*range(10), nodes=nodes_of(2, 2, 2, 2, 2))
    spec = run.newest_form()
    assert spec.apart == 2
    assert spec.nodes == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    run.formed()
    run.trained(1, 2, 3)
    on_node = [worker for rank, worker in enumerate(run.state.members) if rank in (4, 5)]
    assert not needs(run.state, on_node)
    assert needs(run.state, [worker for rank, worker in enumerate(run.state.members) if rank in (0, 2)])
