"""Nodes that fail again and again get no new workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysharded.driver.state.commands import Command, KillWorker, StartWorker
from raysharded.driver.state.events import Ready
from raysharded.driver.state.node_health import NodeRecord, Nodes, avoided, failed, seen
from raysharded.errors import TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, StopReason, WorkerInfo
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver.scripted import Run, of


def two_nodes() -> Nodes:
    return seen(seen({}, "a", "host a"), "b", "host b")


def test_a_node_is_avoided_after_so_many_failures_and_its_last_reasons_are_kept() -> None:
    nodes, newly = two_nodes(), None
    for number in range(3):
        assert newly is None
        nodes, newly = failed(nodes, "a", f"reason {number}", died=False, limit=3)
    assert newly == NodeRecord(host="host a", failures=3, reasons=("reason 0", "reason 1", "reason 2"), avoided=True)
    assert avoided(nodes) == ("a",)
    nodes, newly = failed(nodes, "a", "again", died=False, limit=3)
    assert newly is None  # it is avoided already
    assert nodes["a"].reasons == ("reason 1", "reason 2", "again")


def test_the_only_node_that_is_left_is_never_avoided() -> None:
    nodes, newly = failed(seen({}, "a", "host"), "a", "no", died=False, limit=1)
    assert newly is None
    nodes, newly = failed(seen(nodes, "b", "host"), "a", "no", died=False, limit=1)
    assert newly is not None
    nodes, newly = failed(nodes, "b", "no", died=False, limit=1)
    assert newly is None
    assert avoided(nodes) == ("a",)


def test_a_nodes_death_is_one_failure_however_many_workers_it_had() -> None:
    nodes = two_nodes()
    for _ in range(4):
        nodes, newly = failed(nodes, "a", "the node died", died=True, limit=2)
        assert newly is None
    assert nodes["a"].failures == 1
    nodes, newly = failed(nodes, "b", "no", died=False, limit=1)
    assert newly is None  # a dead node is no alternative


def test_without_a_limit_or_without_a_place_nothing_is_avoided() -> None:
    nodes = two_nodes()
    for _ in range(9):
        nodes, newly = failed(nodes, "a", "no", died=False, limit=None)
        assert newly is None
    unknown, newly = failed(nodes, "", "no", died=False, limit=1)
    assert (unknown, newly) == (nodes, None)
    assert seen(nodes, "", "host") == nodes


# -- in the machine --


def ready(run: Run, worker: int, node: str) -> list[Command]:
    facts = WorkerInfo(pid=worker, node=f"host {node}", arithmetic={"cpu": "x"}, num_samples=100, node_id=node)
    return run.hear(Ready(worker=WorkerId(worker), facts=facts))


def lost(run: Run, worker: int, *, node: str = "", node_died: bool = False, error: Exception | None = None) -> None:
    run.hear(
        WorkerLost(worker=WorkerId(worker), reason="its process died", error=error, node_id=node, node_died=node_died)
    )


def on_two_nodes(**limits: Any) -> Run:
    """Workers 0 and 1 on node a, 2 and 3 on node b; they train, and two steps are done."""
    run = Run(max_workers=4, **limits)
    for worker, node in enumerate("aabb"):
        ready(run, worker, node)
    run.formed()
    run.trained(1, 2)
    return run


def test_workers_of_a_node_follow_each_other_and_mirrors_are_on_another() -> None:
    spec = on_two_nodes().newest_form()
    assert [member // 2 for member in spec.members] == [0, 0, 1, 1]
    assert (spec.nodes, spec.mesh.apart) == ((0, 0, 1, 1), 2)


def test_a_spare_that_stands_by_does_not_bring_a_shard_and_its_mirror_to_one_node() -> None:
    run = Run(max_workers=4, spares=2, min_workers=2)
    for worker, node in enumerate("aabbab"):
        ready(run, worker, node)
    run.formed()
    run.trained(1)
    lost(run, 0)
    for worker in (1, 2, 3):
        run.stopped(worker, StopReason.ABORTED, 1)
    spec = run.newest_form()
    assert set(spec.members) == {1, 2, 3, 4}
    assert (spec.nodes, spec.mesh.apart) == ((0, 0, 1, 1), 2)


def test_nodes_are_not_numbered_where_workers_have_nothing_to_add_for_each_other() -> None:
    for nodes in ("aaaa", "abcd", "aab"):
        run = Run(max_workers=len(nodes))
        for worker, node in enumerate(nodes):
            ready(run, worker, node)
        assert bool(run.newest_form().nodes) == (nodes == "aab")


def test_workers_that_die_on_one_node_again_and_again_are_replaced_elsewhere() -> None:
    run = on_two_nodes(max_node_failures=2, min_workers=1)
    lost(run, 0)
    assert not run.records("node_avoided")
    lost(run, 1)
    (entry,) = run.records("node_avoided")
    assert (entry["node"], entry["host"], entry["failures"], entry["step"]) == ("a", "host a", 2, 2)
    assert entry["reasons"] == ["its process died"] * 2
    for worker in (2, 3):
        run.stopped(worker, StopReason.ABORTED, 2)
    run.formed()
    asked = of(run.trained(3), StartWorker)
    assert [command.avoid for command in asked] == [("a",), ("a",)]


def test_a_whole_nodes_death_is_one_recovery_from_memory_and_one_failure() -> None:
    run = on_two_nodes(max_node_failures=2, min_workers=1)
    lost(run, 0, node="a", node_died=True)
    lost(run, 1, node="a", node_died=True)
    assert run.state.nodes["a"].failures == 1
    for worker in (2, 3):
        run.stopped(worker, StopReason.ABORTED, 2)
    assert isinstance(run.newest_form().source, FromMemory)
    run.formed()
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert (recovery["lost"], recovery["steps_redone"]) == ([0, 1], 0)


def test_workers_that_fail_to_start_count_against_their_node_but_not_a_bug_of_the_task() -> None:
    run = on_two_nodes(max_node_failures=1, min_workers=1)
    run.state = replace(run.state, starting={WorkerId(8): 0.0, WorkerId(9): 0.0})
    lost(run, 8, node="b", error=TaskError("a bug", ""))
    assert not run.records("node_avoided")
    lost(run, 9, node="b")
    assert [entry["node"] for entry in run.records("node_avoided")] == ["b"]


def test_a_worker_that_was_requested_before_its_node_was_avoided_is_sent_away() -> None:
    run = on_two_nodes(max_node_failures=1, min_workers=1)
    run.state = replace(run.state, starting={WorkerId(9): 0.0})
    lost(run, 0)
    commands = ready(run, 9, "a")
    assert [command.worker for command in of(commands, KillWorker)] == [9]
    assert WorkerId(9) not in run.state.ready
    assert [entry["worker"] for entry in run.records("worker_refused")] == [9]
