"""Nodes that fail again and again get no new workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from hypothesis import given, strategies as st

from raysharded.driver.state.commands import Command, KillWorker, StartWorker
from raysharded.driver.state.events import Ready, Tick
from raysharded.driver.state.node_health import INCIDENT_S, NodeRecord, Nodes, avoided, back, failed, restored, seen
from raysharded.driver.workers import node_verdicts
from raysharded.errors import ConfigError, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, StopReason, WorkerInfo
from raysharded.protocol.worker_launcher import NodeBack, NodeLost, WorkerLost
from tests.driver.scripted import Run, of

Failed: TypeAlias = "tuple[Nodes, NodeRecord | None]"


def two_nodes() -> Nodes:
    return seen(seen({}, "a", "host a"), "b", "host b")


HOUR_S = 3600.0
LONG_S = 60.0
"""Longer than one incident."""


def fail(
    nodes: Nodes, node: str, at: float, *, died: bool = False, limit: int | None = 3, reason: str = "no"
) -> Failed:
    return failed(nodes, node, reason, at, died=died, limit=limit, window_s=HOUR_S)


def test_a_node_is_avoided_after_so_many_failures_and_its_last_reasons_are_kept() -> None:
    nodes, newly = two_nodes(), None
    for number in range(3):
        assert newly is None
        nodes, newly = fail(nodes, "a", number * LONG_S, reason=f"reason {number}")
    assert newly is not None
    assert (newly.host, newly.failures, newly.avoided) == ("host a", 3, True)
    assert newly.reasons == ("reason 0", "reason 1", "reason 2")
    assert avoided(nodes) == ("a",)
    nodes, newly = fail(nodes, "a", 3 * LONG_S, reason="again")
    assert newly is None  # it is avoided already
    assert nodes["a"].reasons == ("reason 1", "reason 2", "again")


def test_one_incident_on_a_node_counts_once_however_many_workers_it_hit() -> None:
    nodes = two_nodes()
    for number in range(8):  # stopped for a while: all of its workers are lost, and replacements fail there
        nodes, newly = fail(nodes, "a", 100.0 + number)
        assert newly is None
    assert (nodes["a"].failures, nodes["a"].reasons) == (1, ("no",))
    nodes, _ = fail(nodes, "a", 100.0 + INCIDENT_S)
    assert nodes["a"].failures == 2


def test_the_only_node_that_is_left_is_never_avoided() -> None:
    nodes, newly = fail(seen({}, "a", "host"), "a", 0.0, limit=1)
    assert newly is None
    nodes, newly = fail(seen(nodes, "b", "host"), "a", LONG_S, limit=1)
    assert newly is not None
    nodes, newly = fail(nodes, "b", 2 * LONG_S, limit=1)
    assert newly is None
    assert avoided(nodes) == ("a",)


def test_a_nodes_death_is_one_failure_however_many_workers_it_had() -> None:
    nodes = two_nodes()
    for _ in range(4):
        nodes, newly = fail(nodes, "a", 0.0, died=True, limit=2)
        assert newly is None
    assert nodes["a"].failures == 1
    nodes, newly = fail(nodes, "b", 0.0, limit=1)
    assert newly is None  # a dead node is no alternative


def test_without_a_limit_or_without_a_place_nothing_is_avoided() -> None:
    nodes = two_nodes()
    for number in range(9):
        nodes, newly = fail(nodes, "a", number * LONG_S, limit=None)
        assert newly is None
    unknown, newly = fail(nodes, "", 0.0, limit=1)
    assert (unknown, newly) == (nodes, None)
    assert seen(nodes, "", "host") == nodes


def restore(nodes: Nodes, at: float, limit: int = 2) -> tuple[Nodes, Mapping[str, str]]:
    return restored(nodes, at, limit=limit, window_s=HOUR_S)


def test_failures_count_for_the_window_and_an_avoided_node_is_then_used_again() -> None:
    nodes, _ = fail(two_nodes(), "a", 0.0, limit=2)
    nodes, newly = fail(nodes, "a", HOUR_S, limit=2)
    assert newly is None  # the first one counts no more
    nodes, newly = fail(nodes, "a", HOUR_S + LONG_S, limit=2)
    assert newly is not None
    assert restore(nodes, 2 * HOUR_S - 1.0) == (nodes, {})
    nodes, found = restore(nodes, 2 * HOUR_S)
    assert (avoided(nodes), list(found)) == ((), ["a"])
    nodes, newly = fail(nodes, "a", 2 * HOUR_S, limit=2)  # two within the window: again
    assert newly is not None


def test_when_the_last_other_node_dies_the_node_that_failed_longest_ago_is_used_again() -> None:
    nodes = seen(two_nodes(), "c", "host c")
    for at, node in enumerate("abab"):
        nodes, _ = fail(nodes, node, at * LONG_S, limit=2)
    assert avoided(nodes) == ("a", "b")
    nodes, _ = fail(nodes, "c", 4 * LONG_S, died=True)
    nodes, found = restore(nodes, 4 * LONG_S)
    assert (avoided(nodes), found) == (("b",), {"a": "no other node is left"})
    assert restore(nodes, 4 * LONG_S) == (nodes, {})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.0, 4 * HOUR_S), st.booleans()), max_size=60))
def test_a_node_is_left_for_workers_whatever_fails_as_long_as_one_lives(
    failures: list[tuple[str, float, bool]],
) -> None:
    nodes: Nodes = {}
    for name in "abcd":
        nodes = seen(nodes, name, name)
    for name, at, died in sorted(failures, key=lambda one: one[1]):
        nodes, _ = fail(nodes, name, at, died=died, limit=2)
        nodes, _ = restore(nodes, at)
        living = {node for node, record in nodes.items() if not record.dead}
        assert not living or living - set(avoided(nodes))
        nodes = back(nodes, name) if at % 2 < 1 else nodes
    nodes, _ = restore(nodes, 6 * HOUR_S)
    assert all(nodes[node].dead for node in avoided(nodes))  # a run of weeks has all that live, time and again


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
    run.at += LONG_S
    lost(run, 1)
    (entry,) = run.records("node_avoided")
    assert node_verdicts.text(run.state) == f"no worker is placed on host a (a): {entry['failures']} failures"
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


def test_after_a_failed_start_the_next_worker_is_placed_on_another_node_for_a_short_time() -> None:
    run = on_two_nodes(min_workers=1, spares=1)
    run.state = replace(run.state, starting={WorkerId(8): run.at})
    lost(run, 8, node="b", error=ConfigError("no GPU can be used"))
    assert [command.avoid for command in of(started(run), StartWorker)] == [("b",)]
    (waiting,) = run.state.starting
    run.at += 8.5
    assert not of(run.hear(Tick()), StartWorker)
    run.at += 0.5  # no other node has had a place for it
    assert of(run.hear(Tick()), StartWorker) == [StartWorker(worker=waiting)]
    assert not of(run.hear(Tick()), StartWorker)
    assert not run.records("node_avoided")


def test_nodes_of_failed_starts_are_all_avoided_unless_no_other_is_known() -> None:
    run = on_two_nodes(min_workers=1, spares=1)
    run.state = replace(run.state, starting={WorkerId(8): run.at}, nodes=seen(run.state.nodes, "c", "host c"))
    lost(run, 8, node="b")
    assert [command.avoid for command in of(started(run), StartWorker)] == [("b",)]
    lost(run, run.state.next_worker - 1, node="c")
    assert [command.avoid for command in of(started(run, 2.0), StartWorker)] == [("b", "c")]
    lost(run, run.state.next_worker - 1, node="a")
    assert [command.avoid for command in of(started(run, 4.0), StartWorker)] == [()]


def started(run: Run, after_s: float = 1.0) -> list[Command]:
    """Outcome of the tick at which the run may request workers again, after a step."""
    run.at += after_s
    return run.trained(run.state.step + 1)


def test_a_worker_that_was_requested_before_its_node_was_avoided_is_sent_away() -> None:
    run = on_two_nodes(max_node_failures=1, min_workers=1)
    run.state = replace(run.state, starting={WorkerId(9): 0.0})
    lost(run, 0)
    commands = ready(run, 9, "a")
    assert [command.worker for command in of(commands, KillWorker)] == [9]
    assert WorkerId(9) not in run.state.ready
    assert [entry["worker"] for entry in run.records("worker_refused")] == [9]


def test_a_node_that_was_cut_off_is_lost_and_back_and_both_are_on_record() -> None:
    run = on_two_nodes(max_node_failures=1, min_workers=1)
    for worker in (0, 1):  # the watchdog has found them first
        lost(run, worker, node="a")
    run.at += 5.0
    run.hear(NodeLost(node_id="a", host="host a", reason="it does not answer"))
    (entry,) = run.records("node_lost")
    assert entry == {"node": "a", "host": "host a", "step": 2, "reason": "it does not answer"}
    assert run.state.nodes["a"].failures == 1
    run.at += 20.0
    run.hear(NodeBack(node_id="a", host="host a"))
    (entry,) = run.records("node_back")
    assert entry == {"node": "a", "host": "host a", "step": 2, "after_s": 20.0}
    assert not run.state.nodes["a"].dead
    run.state = replace(run.state, starting={WorkerId(9): 0.0}, nodes=seen({}, "a", "host a"))
    ready(run, 9, "a")
    assert WorkerId(9) in run.state.ready


def test_workers_that_wait_for_a_place_may_have_a_node_that_is_used_again() -> None:
    run = on_two_nodes(max_node_failures=1, min_workers=1, node_failure_window_s=2.0)
    lost(run, 0, node="a")
    assert avoided(run.state.nodes) == ("a",)
    run.state = replace(run.state, starting={WorkerId(8): run.at, WorkerId(9): run.at})
    run.at += 1.75
    assert not of(run.hear(Tick()), StartWorker)
    run.at += 0.25
    assert of(run.hear(Tick()), StartWorker) == [StartWorker(worker=WorkerId(8)), StartWorker(worker=WorkerId(9))]
    assert [(entry["node"], entry["host"]) for entry in run.records("node_allowed")] == [("a", "host a")]
