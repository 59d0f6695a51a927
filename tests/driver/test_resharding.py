"""The driver's promises about the mesh that workers form, one event after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.driver.handlers.run_changes import asked_mesh
from raysharded.driver.membership.member_order import order_members
from raysharded.driver.state.commands import RequestBoundary
from raysharded.driver.state.events import ReshardRequested
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from raysharded.ids import WorkerId
from raysharded.layout import Held, Mesh
from raysharded.layout.placement.node_spread import count_splits
from raysharded.protocol.messages import FromStart, StopReason
from raysharded.testing.processes import ProcessLauncher
from tests.driver.scripted import LIMITS, Run, of, training
from tests.driver.test_leaving import told
from tests.training.harness import GptTask, Tokens


def groups_of(shards: int, least_shards: int = 1) -> Grouping:
    """For steps of one microbatch, of which one worker alone is as fast as many."""
    return Grouping(shards=shards, least_shards=least_shards, num_microbatches=1)


def do_and_form(run: Run, step: int) -> None:
    """All members do one more step, stop, and form the next generation. They keep no mirrors."""
    run.trained(step)
    mesh, members, generation = run.state.mesh, run.state.members, run.state.generation
    for rank, worker in enumerate(members):
        own = Held(
            worker=worker,
            step=step,
            medium="snapshot",
            world_size=mesh.shards,
            rank=mesh.shard_of(rank),
            layout_id=generation,
        )
        run.stopped(worker, StopReason.BOUNDARY, step, held=[own])
    run.formed()


def test_groups_may_be_requested_while_every_worker_must_leave() -> None:
    run = training(1, step=2, min_workers=1)
    told(run, 0)
    run.hear(ReshardRequested(grouping=groups_of(1)))
    run.wait(1)
    assert run.state.phase is Phase.TRAINING
    assert run.records("reshard") == [{"step": 2, "shard_group_size": 1}]


def test_who_requests_the_mesh_that_there_is_changes_nothing_later() -> None:
    run = training(2, step=2, min_workers=1, replacement_wait_s=20.0)
    run.hear(ReshardRequested(grouping=groups_of(2)))
    assert of(told(run, 1), RequestBoundary) == []  # a replacement is waited for


def test_a_run_whose_workers_each_hold_what_no_other_does_settles() -> None:
    run = Run(max_workers=5, mirrors=False)
    run.ready(*range(4))
    run.wait(3)
    run.formed()
    run.trained(1, 2)
    run.hear(ReshardRequested(grouping=groups_of(3, least_shards=3)))
    if run.state.boundary_requested:
        do_and_form(run, 3)
    run.ready(4)
    generations = []
    for step in range(run.state.step + 1, 12):
        if run.state.boundary_requested:
            do_and_form(run, step)
        else:
            run.trained(step)
        generations.append(run.state.generation)
    assert generations[-1] == generations[-6], "a boundary after every step"
    assert str(run.state.mesh) == "1x4"


ONE = {"num_workers": [1, 4], "shard_group_size": None, "tensor_parallel_degree": 1}


def test_what_was_requested_last_holds_until_the_run_is_configured_otherwise() -> None:
    started: dict[str, Any] = {"kind": "started", "scaling": ONE}
    other = {**ONE, "num_workers": [1, 5]}
    entries: list[dict[str, Any]] = [started]
    assert asked_mesh(entries, ONE) is None
    entries.append({"kind": "reshard", "shard_group_size": 2})
    entries.append({"kind": "reshard_refused", "shard_group_size": 2, "tensor_parallel_degree": 3})
    assert asked_mesh(entries, ONE) == (2, 1)
    assert asked_mesh([*entries, started, started], ONE) == (2, 1)
    assert asked_mesh([*entries, started], other) is None
    assert asked_mesh([*entries, {"kind": "started", "scaling": other}, started], ONE) is None
    entries.append({"kind": "reshard", "shard_group_size": None, "tensor_parallel_degree": 2})
    assert asked_mesh([*entries, started], ONE) == (None, 2)
    assert asked_mesh([{"kind": "started"}, *entries[1:]], ONE) is None, "before, nobody said how it was configured"


def test_a_mesh_in_which_the_run_failed_at_once_is_not_requested_again() -> None:
    def told(*kinds: str) -> list[dict[str, Any]]:
        return [{"kind": kind, **({"scaling": ONE} if kind == "started" else {})} for kind in kinds]

    pairs = {"kind": "reshard", "shard_group_size": 2}
    bad = {"kind": "reshard", "shard_group_size": None, "tensor_parallel_degree": 3}
    before = [*told("started", "generation", "step"), pairs, *told("step", "generation", "formed", "step"), bad]
    assert asked_mesh([*before, *told("step", "generation", "formed", "failed", "started")], ONE) == (2, 1)
    assert asked_mesh([*before, *told("failed", "started")], ONE) == (None, 3), "it has not been tried"
    assert asked_mesh([*before, *told("generation", "formed", "step", "failed", "started")], ONE) == (None, 3)
    assert asked_mesh([*told("started"), bad, *told("generation", "failed", "started")], ONE) is None


@pytest.mark.procs
@pytest.mark.slow
def test_a_later_driver_continues_with_the_mesh_that_was_requested(tmp_path: Path) -> None:
    def mesh_of(max_steps: int, most: int, *asked: int) -> list[str]:
        trainer = rs.ElasticTrainer(
            task=GptTask(),
            data=Tokens(),
            batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=5),
            scaling=rs.ScalingConfig(num_workers=(2, most)),
            run=rs.RunConfig(name="asked", storage_path=str(tmp_path), max_steps=max_steps),
        )
        meshes: list[str] = []

        def listen(kind: str, fields: dict[str, Any]) -> None:
            if kind == "generation":
                meshes.append(fields.get("mesh", "flat"))

        run = trainer.start_with(ProcessLauncher, listen)
        for size in asked:
            run.reshard(size)
        assert run.wait(120).steps == max_steps
        assert run.status().mesh == meshes[-1] or meshes[-1] == "flat"
        return meshes

    assert mesh_of(2, 2, 1)[-1] == "2x1"
    assert mesh_of(3, 2) == ["2x1"]
    assert mesh_of(4, 3)[-1] == "flat"


def test_the_first_groups_of_a_run_are_on_as_few_nodes_as_can_be() -> None:
    nodes = {WorkerId(worker): node for worker, node in enumerate("aaabbbbc")}
    limits = replace(LIMITS, max_workers=8)
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, Mesh(replicas=4, shards=2))
    assert sorted(order) == sorted(nodes)
    assert count_splits(order, nodes, 4) == 1


def test_who_is_in_no_whole_group_on_its_node_stands_by() -> None:
    run = training(4, step=2, min_workers=1, grouping=Grouping(shards=2, least_shards=2, num_microbatches=8))
    run.state = run.with_nodes({0: "a", 1: "a", 2: "b", 3: "b"})
    shard_of = {worker: run.state.mesh.shard_of(rank) for rank, worker in enumerate(run.state.members)}
    lost, left = next((worker, {0, 1} - {worker}) for worker in (0, 1) if shard_of[WorkerId(worker)] == 0)
    run.lost(lost)
    for worker in sorted(run.state.ready):
        own = Held(
            worker=worker,
            step=2,
            medium="snapshot",
            world_size=2,
            rank=shard_of[worker],
            layout_id=run.state.generation,
        )
        run.stopped(worker, StopReason.ABORTED, 2, held=[own])
    assert set(run.newest_form().members) == {2, 3}
    assert run.records("generation")[-1]["spares"] == sorted(left)
