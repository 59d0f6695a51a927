"""The driver's decisions with tensor parallelism: groups, standby workers, and the cost of a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import raysharded as rs
from raysharded.driver.membership.member_order import distance_of_mirrors, order_members
from raysharded.driver.replay import event_text
from raysharded.driver.replay.rerun import load
from raysharded.driver.state.commands import Form, RequestBoundary
from raysharded.driver.state.events import ReshardRequested
from raysharded.driver.state.mesh_choice import Grouping, choose_mesh, is_better, possible_mesh
from raysharded.driver.state.state import Checkpointed
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import Mesh, Parity, mirror_of
from raysharded.layout.placement.node_spread import most_together
from raysharded.protocol.messages import FromCheckpoint, FromMemory, FromStart, StopReason
from raysharded.protocol.session import parts_to_write
from tests.driver.recorded import recorded
from tests.driver.scripted import LIMITS, Run, of, training
from tests.driver.simulated_workers import SPEC
from tests.driver.test_leaving import told

MICROBATCHES = 8


def in_pairs(shards: int | None = None, tensor: int = 2) -> Grouping:
    return Grouping(shards=shards, tensor=tensor, least_shards=1, num_microbatches=MICROBATCHES)


def lose(run: Run, *lost: int) -> None:
    """These are lost; all others stop and report their shards of the newest step."""
    step = run.state.step
    others = [worker for worker in run.state.members if worker not in lost]
    held = {worker: run.holding(worker, step) for worker in others}
    for worker in lost:
        run.lost(worker)
    for worker in others:
        run.stopped(worker, StopReason.ABORTED, step, held=held[worker])


# -- the mesh --


@pytest.mark.parametrize(
    ("shards", "tensor", "num_workers", "mesh"),
    [
        (None, 2, 4, "1x2x2"),
        (None, 2, 5, "1x2x2"),
        (None, 4, 11, "1x2x4"),
        (4, 2, 8, "2x2x2"),
        (4, 2, 11, "2x2x2"),
        (4, 4, 12, "3x1x4"),
        (4, 2, 3, "1x1x2"),
    ],
)
def test_only_whole_tensor_parallel_groups_are_at_work(
    shards: int | None, tensor: int, num_workers: int, mesh: str
) -> None:
    choice = choose_mesh(in_pairs(shards, tensor), num_workers)
    assert str(choice.mesh) == mesh
    idle = num_workers - choice.mesh.world_size
    assert (f"{idle} of {num_workers} workers stand" in choice.reason) == (idle > 0)


@given(
    st.builds(
        Grouping,
        shards=st.none() | st.integers(1, 8),
        least_shards=st.integers(1, 8),
        num_microbatches=st.integers(1, 64),
        least_workers=st.integers(1, 8),
        tensor=st.integers(1, 5),
    ),
    st.integers(5, 40),
    st.integers(0, 40),
)
def test_a_run_settles_in_a_mesh_of_the_degree_requested(grouping: Grouping, num_workers: int, needed: int) -> None:
    tensor = grouping.tensor
    chosen = choose_mesh(grouping, num_workers, needed).mesh
    assert chosen.tensor == tensor
    assert chosen.world_size >= min(needed, num_workers // tensor * tensor)
    assert not is_better(grouping, num_workers, chosen, needed)
    possible = possible_mesh(grouping, num_workers, needed)
    assert possible in (None, chosen)
    assert (possible is None) == (min(needed, num_workers) > num_workers // tensor * tensor)


def test_a_mesh_of_the_degree_requested_is_better_than_any_other() -> None:
    assert is_better(in_pairs(), 4, Mesh(shards=4))
    assert not is_better(in_pairs(), 5, Mesh(shards=4, tensor=2, apart=2))
    assert is_better(in_pairs(), 6, Mesh(shards=4, tensor=2, apart=2))
    assert not is_better(in_pairs(), 5, Mesh(shards=5), needed=5), "each of them holds what no other does"


# -- placement --


@given(st.lists(st.sampled_from("abcd"), min_size=4, max_size=24), st.integers(1, 4), st.integers(1, 3))
def test_the_first_tensor_parallel_groups_are_on_one_node(where: list[str], tensor: int, replicas: int) -> None:
    count = len(where) // (tensor * replicas) * tensor * replicas
    nodes = {WorkerId(worker): node for worker, node in enumerate(where[:count])}
    if not nodes:
        return
    mesh = Mesh(replicas=replicas, shards=count // replicas, tensor=tensor)
    order = order_members(FromStart(), frozenset(nodes), LIMITS, nodes, mesh)
    assert sorted(order) == sorted(nodes)
    assert num_whole(order, nodes, tensor) == sum(there // tensor for there in Counter(nodes.values()).values())


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(2, 3))
def test_a_shard_and_its_mirror_are_on_different_nodes(groups_on: list[int], tensor: int) -> None:
    where = [node for node, groups in zip("abcd", groups_on, strict=False) for _ in range(groups * tensor)]
    nodes = {WorkerId(worker): node for worker, node in enumerate(where)}
    mesh = Mesh(shards=len(where), tensor=tensor)
    mesh = replace(mesh, apart=distance_of_mirrors(mesh, nodes))
    order = order_members(FromStart(), frozenset(nodes), LIMITS, nodes, mesh)
    at_home = sum(
        nodes[order[shard]] == nodes[order[mirror_of(shard, mesh.shards, mesh.apart)]] for shard in range(len(order))
    )
    assert num_whole(order, nodes, tensor) == sum(groups_on)
    assert at_home == max(0, 2 * max(groups_on) * tensor - len(where)), "as few as there can be"


def num_whole(order: Sequence[WorkerId], nodes: dict[WorkerId, str], tensor: int) -> int:
    groups = [order[first : first + tensor] for first in range(0, len(order), tensor)]
    return sum(len({nodes[worker] for worker in group}) == 1 for group in groups)


def test_the_groups_that_share_a_stripe_are_on_different_nodes() -> None:
    nodes = {WorkerId(number): f"n{number // 4}" for number in range(16)}
    limits = replace(LIMITS, parity=Parity(k=3, m=1))
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, Mesh(shards=16, tensor=2))
    assert num_whole(order, nodes, 2) == 8
    assert most_together(order, nodes, 4) == 2


def test_who_is_in_no_whole_tensor_parallel_group_on_its_node_stands_by() -> None:
    run = training(6, step=2, min_workers=2, grouping=in_pairs())
    assert str(run.state.mesh) == "1x3x2"
    run.state = run.with_nodes({worker: "abc"[worker // 2] for worker in range(6)})
    lose(run, 2)
    assert set(run.newest_form().members) == {0, 1, 4, 5}
    assert run.records("generation")[-1]["spares"] == [3]


# -- a loss --


def test_a_lost_workers_partners_take_other_places_and_nothing_is_lost() -> None:
    run = training(6, step=3, min_workers=2, grouping=in_pairs())
    assert (run.newest_form().tensor, run.newest_form().apart) == (2, 2)
    lose(run, 0)
    form = run.newest_form()
    assert isinstance(form.source, FromMemory)
    assert (form.source.step, str(form.mesh)) == (3, "1x2x2")
    assert run.records("generation")[-1]["mesh"] == "1x2x2"
    assert "1 of 5 workers stands by" in run.records("generation")[-1]["why"]


def test_the_partners_of_the_only_group_wait_for_another_worker() -> None:
    run = training(2, step=3, min_workers=2, grouping=in_pairs())
    lose(run, 0)
    assert len(run.all(Form)) == 1
    run.ready(2)
    run.wait(3)
    assert isinstance(run.newest_form().source, FromMemory)
    assert (run.newest_form().source.step, set(run.newest_form().members)) == (3, {1, 2})


def test_what_only_more_workers_hold_than_can_be_at_work_is_computed_again() -> None:
    checkpoint = Checkpointed(step=0, prefix="p", digest="d")
    run = Run(max_workers=3, mirrors=False, checkpoint=checkpoint)
    run.ready(*range(3))
    run.formed()
    run.trained(1, 2)
    run.hear(ReshardRequested(grouping=in_pairs()))
    assert not run.state.boundary_requested, "nothing is given up for another degree"
    for worker in run.state.members:
        own = run.holding(worker, 2)[:1]
        run.stopped(worker, StopReason.ABORTED, 2, held=own)
    assert isinstance(run.newest_form().source, FromCheckpoint)
    assert str(run.newest_form().mesh) == "1x1x2"
    why = run.records("generation")[-1]["why"]
    assert "step 2 is held by more workers than tensor parallel groups of 2 can have" in why


@pytest.mark.parametrize("lost", [(), (0,), (5,), (0, 2)])
def test_as_many_stand_by_as_the_mirrors_allow(lost: tuple[int, ...]) -> None:
    """Three workers of seven in a ring can stand by, if no two are neighbours; the second and fourth of five in a
    row."""
    run = training(7 if not lost else 6, step=2, min_workers=3)
    run.state = replace(run.state, limits=replace(run.state.limits, grouping=in_pairs(tensor=3)))
    if lost:
        lose(run, *lost)
    else:
        held = {worker: run.holding(worker, 2) for worker in run.state.members}
        for worker in run.state.members:
            run.stopped(worker, StopReason.BOUNDARY, 2, held=held[worker])
    form = run.newest_form()
    assert (form.source.step, isinstance(form.source, FromMemory)) == (2, True)
    assert form.world_size == (6 if not lost else 3)


def test_others_stand_by_in_place_of_who_must_leave_if_more_can() -> None:
    """Only the second and the fourth of the five that are left of a ring can both stand by, not the one between."""
    run = training(6, step=2, min_workers=3)
    ring = run.state.members
    run.state = replace(run.state, limits=replace(run.state.limits, grouping=in_pairs(tensor=3)))
    told(run, ring[3])
    lose(run, ring[0])
    form = run.newest_form()
    assert (set(form.members), form.source.step) == ({ring[1], ring[3], ring[5]}, 2)


def test_who_must_leave_stays_if_too_many_of_the_others_are_needed() -> None:
    run = training(4, step=2, min_workers=2, grouping=in_pairs())
    leaver, *others = run.state.members
    assert of(told(run, leaver), RequestBoundary)
    run.trained(3)
    keeper = next(worker for worker in others if run.holding(worker, 3)[1].rank == 0)
    held = {worker: run.holding(worker, 3) for worker in run.state.members}
    for worker in run.state.members:  # but for the leaver's, no mirror has arrived
        of_step = held[worker] if worker == keeper else held[worker][:1]
        run.stopped(worker, StopReason.BOUNDARY, 3, held=of_step)
    form = run.newest_form()
    assert (set(form.members), form.source.step) == ({leaver, *others}, 3)
    assert isinstance(form.source, FromMemory)


# -- another degree by choice --


def test_another_degree_is_formed_at_the_next_boundary_and_costs_no_step() -> None:
    run = training(4, step=2, min_workers=2)
    heard = run.hear(ReshardRequested(grouping=in_pairs()))
    assert of(heard, RequestBoundary)
    assert run.records("reshard") == [{"step": 2, "shard_group_size": None, "tensor_parallel_degree": 2}]
    stop_at_boundary(run, 3)
    assert (str(run.newest_form().mesh), run.newest_form().source.step) == ("1x2x2", 3)
    run.formed()
    run.hear(ReshardRequested(grouping=None))
    assert run.records("reshard")[-1] == {"step": 3, "shard_group_size": None, "tensor_parallel_degree": 1}
    stop_at_boundary(run, 4)
    assert (str(run.newest_form().mesh), run.newest_form().source.step) == ("1x4", 4)


def stop_at_boundary(run: Run, step: int) -> None:
    run.trained(step)
    held = {worker: run.holding(worker, step) for worker in run.state.members}
    for worker in run.state.members:
        run.stopped(worker, StopReason.BOUNDARY, step, held=held[worker])


@pytest.mark.parametrize(
    ("degree", "reason"), [(3, "needs 3 workers, and the run may go on with 2"), (4, "These are possible: 1, 2, 3, 6")]
)
def test_a_degree_that_cannot_be_is_refused_and_changes_nothing(degree: int, reason: str) -> None:
    run = training(4, step=2, min_workers=2 if degree == 3 else 4)
    heard = run.hear(ReshardRequested(grouping=in_pairs(tensor=degree)))
    assert not of(heard, RequestBoundary)
    assert run.state.limits.grouping is None
    (refused,) = run.records("reshard_refused")
    assert reason in refused["reason"]


def test_memory_that_cannot_be_cut_in_the_degree_of_a_new_driver_is_not_resumed_from() -> None:
    checkpoint = Checkpointed(step=1, prefix="p", digest="d")
    run = training(4, step=2, min_workers=4, checkpoint=checkpoint)
    run.state = replace(run.state, limits=replace(run.state.limits, grouping=in_pairs(tensor=4)))
    held = {worker: run.holding(worker, 2) for worker in run.state.members}
    for worker in run.state.members:
        run.stopped(worker, StopReason.ABORTED, 2, held=held[worker])
    assert isinstance(run.newest_form().source, FromCheckpoint)
    assert "step 2 is passed over: A tensor parallel degree of 4" in run.records("generation")[-1]["why"]


def test_it_can_be_replayed(tmp_path: Path) -> None:
    run = training(5, step=2, min_workers=2)
    run.hear(ReshardRequested(grouping=in_pairs(2)))
    stop_at_boundary(run, 3)
    (found,) = load(str(recorded(tmp_path, run)))
    assert not found.differences
    told = "\n".join(found.lines())
    assert "groups of 2 workers are asked for, tensor parallel degree 2" in told
    assert ", 2x1x2" in told
    assert event_text.of_event(ReshardRequested(grouping=in_pairs())) == (
        "no shard groups are wanted, tensor parallel degree 2"
    )


# -- the last checkpoint --


def test_every_buffer_is_written_once_by_workers_without_a_driver() -> None:
    run = training(6, step=3, min_workers=2, grouping=in_pairs())
    members = run.state.members
    lose(run, members[0])
    source = run.newest_form().source
    assert isinstance(source, FromMemory)
    parts = parts_to_write(source)
    assert [part.rank for part in parts] == list(range(6))
    assert parts[0].medium == "mirror"
    assert source.spec == SPEC


# -- settings of a user --


def test_a_trainer_declares_the_groups_it_wants() -> None:
    scaling = rs.ScalingConfig(num_workers=(2, 9), tensor_parallel_degree=2)
    assert (scaling.shard_group_size, scaling.tensor_parallel_degree) == (None, 2)
    with pytest.raises(ConfigError, match="needs 4 workers, and num_workers=\\(2, 9\\) allows 2"):
        replace(scaling, tensor_parallel_degree=4)
