"""An error of the task is recorded with its worker and node, and its retry is dealt to other workers."""

from __future__ import annotations

import pytest

from raysharded.driver.state.mesh_choice import Grouping
from raysharded.errors import TaskError
from raysharded.protocol.messages import StopReason
from tests.driver.scripted import Run, training

ABORTED, RAISED = StopReason.ABORTED, StopReason.TASK_ERROR
NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def raises(run: Run, worker: int, step: int) -> None:
    """A member raises in the step after `step`; the others are freed."""
    run.stopped(worker, RAISED, step, error=TaskError("no memory", "its traceback"))
    for other in run.state.members:
        if other != worker:
            run.stopped(other, ABORTED, step)


def test_an_error_that_passes_at_its_retry_is_on_record_with_traceback_worker_and_node() -> None:
    run = training(3, step=2)
    raises(run, 1, 2)
    run.formed()
    run.trained(3)
    (entry,) = run.records("task_error")
    assert (entry["worker"], entry["node"], entry["step"], entry["phase"]) == (1, "node1", 3, "backward")
    assert (entry["error"], entry["traceback"]) == ("TaskError: no memory", "its traceback")
    assert (entry["attempt"], entry["retried"], entry["workers"]) == (1, True, [1])
    (recovery,) = run.records("recovery")
    assert recovery["reasons"] == ["worker 1: no memory"]
    raises(run, 1, 3)  # of another step: counted anew
    assert [(entry["step"], entry["attempt"]) for entry in run.records("task_error")] == [(3, 1), (4, 1)]


@pytest.mark.parametrize(("failed", "acting"), [(0, 3), (1, 3), (2, 1), (3, 1)])
def test_the_retry_gives_the_microbatches_to_a_worker_on_another_node(failed: int, acting: int) -> None:
    run = training(4, step=2)
    run.state = run.with_nodes(NODES)
    raises(run, failed, 2)
    spec = run.newest_form()
    rank, other = spec.members.index(failed), spec.members.index(acting)
    assert spec.shift[0] == 3
    assert (other + spec.shift[1]) % 4 == rank
    run.formed()
    run.trained(3)
    run.lost(3)
    for worker in (0, 1, 2):
        run.stopped(worker, ABORTED, 3)
    assert run.newest_form().shift == (0, 0)


def test_a_further_retry_goes_to_a_further_worker() -> None:
    run = training(4, step=2, task_error_retries=3, save_at_end=False)
    run.state = run.with_nodes(NODES)
    shifts = []
    for _ in range(3):
        raises(run, 0, 2)
        shifts.append(run.newest_form().shift[1])
        run.formed()
    assert sorted(shifts) == [1, 2, 3]
    assert shifts[-1] == 3  # worker 1, on the same node
    raises(run, 0, 2)
    assert str(run.error).startswith("no memory\n(Raised in worker 0 on a, then in worker 0 on a,")


def test_the_final_error_names_both_workers_and_their_nodes() -> None:
    run = training(2, step=2, save_at_end=False)
    raises(run, 0, 2)
    run.formed()
    raises(run, 1, 2)
    assert isinstance(run.error, TaskError)
    assert run.error.user_traceback == "its traceback"
    assert str(run.error) == (
        "no memory\n(Raised in worker 0 on node0, then in worker 1 on node1. It comes on several nodes: look for it in "
        "the task or its data.)"
    )
    assert [entry["retried"] for entry in run.records("task_error")] == [True, False]


def test_of_groups_on_two_nodes_each_computes_what_the_other_did() -> None:
    run = training(4, step=2, grouping=Grouping(shards=2, least_shards=1, num_microbatches=8))
    run.state = run.with_nodes(NODES)
    raises(run, 0, 2)
    spec = run.newest_form()
    assert (spec.replicas, spec.shift) == (2, (3, 2))


def test_without_exact_sums_the_retry_stays_where_it_was_as_another_order_would_give_other_bits() -> None:
    run = training(2, step=2, exact=False)
    raises(run, 0, 2)
    assert run.newest_form().shift == (0, 0)
