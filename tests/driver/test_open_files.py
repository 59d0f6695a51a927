"""Workers that may open too few files to connect to all others: the driver plans generations that connect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysharded.driver.handlers.user_requests import resize_refusal
from raysharded.driver.state.events import Ready
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from raysharded.ids import WorkerId
from raysharded.protocol import descriptors
from raysharded.protocol.messages import FromMemory, StopReason, WorkerInfo
from tests.driver.scripted import Run

FOR_TWO = 30
"""Open files that connect two workers, and not three."""


def with_files(*files: int | None, min_workers: int = 1) -> Run:
    """A run of as many workers, with these open files left, that has done a step."""
    run = Run(min_workers=min_workers, max_workers=len(files), max_steps=100)
    for worker, left in enumerate(files):
        ready(run, worker, left)
    run.formed()
    run.trained(1)
    return run


def ready(run: Run, worker: int, left: int | None) -> None:
    facts = WorkerInfo(
        pid=worker,
        node=f"node{worker}",
        arithmetic={"cpu": "x"},
        num_samples=100,
        node_id=f"node{worker}",
        open_files=left,
    )
    run.hear(Ready(worker=WorkerId(worker), facts=facts))


def test_so_many_files_connect_two_workers() -> None:
    assert descriptors.most_members(FOR_TWO) == 2


def test_workers_that_connect_too_few_stand_by_if_the_others_are_more() -> None:
    run = with_files(None, FOR_TWO, 1000, 1000)
    assert run.newest_form().members == (0, 2, 3)
    why = run.records("generation")[-1]["why"]
    assert "worker 1 may open 30 files more, which connect 2 workers: raise the limit" in str(why)


def test_where_most_connect_two_the_run_has_two_and_all_that_were_requested_stay() -> None:
    run = with_files(FOR_TWO, FOR_TWO, FOR_TWO, 1000)
    assert len(run.newest_form().members) == 2
    assert run.state.ready == {0, 1, 2, 3}
    assert run.state.limits.max_workers == 4
    run.wait(5.0)
    assert (run.state.phase, run.state.boundary_requested) == (Phase.TRAINING, False)


def test_when_the_worker_that_connects_too_few_is_lost_and_replaced_the_run_has_all_again() -> None:
    run = with_files(FOR_TWO, FOR_TWO, 1000)
    assert len(run.newest_form().members) == 2
    for worker in (0, 1):
        run.lost(worker)
    run.formed()
    run.trained(2)  # replacements start when it is done
    assert len(run.state.starting) == 2
    for worker in sorted(run.state.starting):
        ready(run, worker, 1000)
    run.trained(3)
    assert run.state.boundary_requested
    for worker in run.state.members:
        run.stopped(worker, StopReason.BOUNDARY, 3, held=run.holding(worker, 3))
    assert len(run.newest_form().members) == 3
    assert "open" not in str(run.records("generation")[-1].get("why"))


def test_a_worker_that_connects_too_few_and_alone_holds_the_state_stays_and_the_generation_is_small() -> None:
    run = with_files(None, None, None, None)
    facts = {**run.state.facts, WorkerId(1): replace(run.state.facts[WorkerId(1)], open_files=FOR_TWO)}
    run.state = replace(run.state, facts=facts)
    run.lost(3)
    for worker in (0, 1, 2):  # shard 1 is with worker 1 alone
        held = [one for one in run.holding(worker, 1) if worker == 1 or one.rank != 1]
        run.stopped(worker, StopReason.ABORTED, 1, held=held)
    spec = run.newest_form()
    assert isinstance(spec.source, FromMemory)
    assert spec.members == (0, 1)


def test_the_minimum_stays_so_that_the_worker_itself_reports_what_it_lacks() -> None:
    run = with_files(FOR_TWO, FOR_TWO, FOR_TWO, min_workers=3)
    assert len(run.newest_form().members) == 3


@pytest.mark.parametrize(("wanted", "refused"), [(2, False), (3, True)])
def test_a_resize_to_more_than_the_members_connect_is_refused(wanted: int, refused: bool) -> None:
    run = with_files(FOR_TWO, FOR_TWO, FOR_TWO)
    said = resize_refusal(run.state, wanted)
    assert ("which connect 2 workers" in said) is refused


@pytest.mark.parametrize(
    ("members", "later", "at_work"),
    [((30, 30), (1000,) * 4, 2), ((34, 34, 34), (30, *(1000,) * 5), 3), ((None, None), (1000,) * 2, 4)],
    ids=["members that connect two", "a worker that connects two stands by", "all connect"],
)
@pytest.mark.parametrize("grouping", [None, Grouping(shards=None, least_shards=1, num_microbatches=8)])
def test_workers_that_join_cost_no_state_and_boundaries_end(
    grouping: Grouping | None, members: tuple[int | None, ...], later: tuple[int, ...], at_work: int
) -> None:
    run = Run(min_workers=1, max_workers=len(members) + len(later), max_steps=100, grouping=grouping)
    for worker, left in enumerate(members):
        ready(run, worker, left)
    run.wait(3.0)
    run.formed()
    run.trained(1)
    for worker, left in enumerate(later, len(members)):
        ready(run, worker, left)
    boundaries = 0
    for step in range(2, 10):
        run.trained(step)
        if run.state.boundary_requested:
            boundaries += 1
            held = {member: run.holding(member, step) for member in run.state.members}
            for member in run.state.members:
                run.stopped(member, StopReason.BOUNDARY, step, held=held[member])
            assert (run.newest_form().source.step, type(run.newest_form().source)) == (step, FromMemory)
            run.formed()
    assert len(run.state.members) == at_work
    assert boundaries <= 2
