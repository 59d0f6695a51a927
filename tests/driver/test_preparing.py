"""The driver's promises about preparing a planned change, one event after the other."""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.state.commands import Command, Interrupt, Prepare, RequestBoundary
from raysharded.driver.state.events import ReshardRequested, WorkerReply
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Prepared, StopReason
from tests.driver.scripted import Run, of, training
from tests.driver.test_leaving import told
from tests.driver.test_resharding import groups_of

WITHIN_S = 20.0


def prepares(size: int = 2, **limits: object) -> Run:
    """A run of workers 0, 1, ... after two steps, that prepares its changes."""
    return training(size, step=2, min_workers=1, prepare_within_s=WITHIN_S, **limits)


def prepared(run: Run, *workers: int, error: str = "", prefix: str = "") -> list[Command]:
    """These members (or all) of the newest preparation report the result."""
    spec = run.all(Prepare)[-1].spec
    commands: list[Command] = []
    for worker in workers or spec.members:
        message = Prepared(prefix=prefix or spec.prefix, error=error)
        commands += run.hear(WorkerReply(worker=WorkerId(worker), message=message))
    return commands


def stop_at_boundary(run: Run, step: int) -> None:
    run.trained(step)
    for worker in run.state.members:
        run.stopped(worker, StopReason.BOUNDARY, step)


def test_a_reshard_is_requested_when_all_have_prepared_it_and_keeps_the_order_that_they_prepared() -> None:
    run = prepares(3)
    run.hear(ReshardRequested(grouping=groups_of(1)))
    (prepare,) = run.all(Prepare)
    assert (prepare.spec.generation, prepare.spec.replicas) == (2, 3)
    assert set(prepare.spec.members) == {0, 1, 2}
    run.trained(3)
    assert of(prepared(run, 0, 1), RequestBoundary) == []
    assert len(of(prepared(run, 2), RequestBoundary)) == 1
    stop_at_boundary(run, 4)
    form = run.newest_form()
    assert (form.prepared, form.members) == (prepare.spec.prefix, prepare.spec.members)
    assert form.prefix != form.prepared
    assert run.records("preparation_failed") == []
    assert "prepared_s" in run.records("generation")[-1]


def test_a_joiner_prepares_with_the_members() -> None:
    run = Run(max_workers=3, min_workers=1, prepare_within_s=WITHIN_S)
    run.ready(0, 1)
    run.wait(3)
    run.formed()
    run.trained(1)
    assert run.all(Prepare) == []
    assert of(run.ready(2), RequestBoundary) == []
    assert set(run.all(Prepare)[-1].spec.members) == {0, 1, 2}
    assert len(of(prepared(run), RequestBoundary)) == 1
    stop_at_boundary(run, 2)
    assert run.newest_form().prepared == run.all(Prepare)[-1].spec.prefix


def test_who_cannot_prepare_holds_nothing_up_and_is_in_the_journal() -> None:
    run = prepares()
    run.hear(ReshardRequested(grouping=groups_of(1)))
    assert len(of(prepared(run, 1, error="MemoryError: no"), RequestBoundary)) == 1
    prepared(run, 0)
    stop_at_boundary(run, 3)
    assert run.newest_form().prepared == ""
    (failed,) = run.records("preparation_failed")
    assert failed["reason"] == "worker 1: MemoryError: no"


def test_who_does_not_answer_is_not_waited_for_longer_than_the_limit() -> None:
    run = prepares()
    run.hear(ReshardRequested(grouping=groups_of(1)))
    prepared(run, 0)
    commands: list[Command] = []
    for step in range(3, 13):
        commands += run.wait(WITHIN_S / 9)
        commands += run.trained(step) if step < 10 else []
    assert len(of(commands, RequestBoundary)) == 1
    assert len(run.all(Prepare)) == 1
    assert "no answer of 1 within 20" in run.records("preparation_failed")[0]["reason"]


def test_a_worker_with_little_time_left_is_not_kept_by_preparing() -> None:
    run = prepares(3, replacement_wait_s=0.0)
    told(run, 1, within_s=4.0)
    assert len(run.all(Prepare)) == 1
    assert len(of(run.wait(1.5), RequestBoundary)) == 1


def test_a_loss_discards_what_was_prepared() -> None:
    run = prepares(3)
    run.hear(ReshardRequested(grouping=groups_of(1)))
    prepared(run)
    commands = run.lost(2)
    assert len(of(commands, Interrupt)) == 2
    assert run.state.phase is Phase.STOPPING
    for worker in (0, 1):
        run.stopped(worker, StopReason.ABORTED, 2)
    assert run.newest_form().prepared == ""


def test_a_worker_that_joins_meanwhile_is_prepared_for_anew() -> None:
    run = Run(max_workers=4, min_workers=1, prepare_within_s=WITHIN_S)
    run.ready(0, 1)
    run.wait(3)
    run.formed()
    run.trained(1)
    run.ready(2)
    run.wait(3)
    run.ready(3)
    first, second = (command.spec for command in run.all(Prepare))
    assert (set(first.members), set(second.members)) == ({0, 1, 2}, {0, 1, 2, 3})
    assert of(prepared(run, *first.members, prefix=first.prefix), RequestBoundary) == []
    assert len(of(prepared(run), RequestBoundary)) == 1


def test_a_joiner_that_is_lost_meanwhile_leaves_nothing_to_be_changed() -> None:
    run = Run(max_workers=3, min_workers=1, prepare_within_s=WITHIN_S)
    run.ready(0, 1)
    run.wait(3)
    run.formed()
    run.trained(1)
    run.ready(2)
    run.lost(2)
    assert of(run.trained(2), RequestBoundary) == []
    assert of(prepared(run), RequestBoundary) == []
    assert run.state.preparation is None


def test_a_run_that_does_not_prepare_requests_at_once() -> None:
    run = training(2, step=2, min_workers=1)
    assert len(of(run.hear(ReshardRequested(grouping=groups_of(1))), RequestBoundary)) == 1
    assert run.all(Prepare) == []


def test_a_notice_that_comes_while_something_is_prepared_leaves_no_more_time_than_its_own() -> None:
    run = prepares(3, replacement_wait_s=0.0)
    run.hear(ReshardRequested(grouping=groups_of(1)))
    told(run, 1, within_s=4.0)
    assert len(of(run.wait(1.5), RequestBoundary)) == 1


def test_a_notice_that_becomes_shorter_shortens_the_preparation() -> None:
    run = prepares(3, replacement_wait_s=0.0)
    told(run, 1, within_s=60.0)
    told(run, 1, within_s=4.0)
    assert len(of(run.wait(1.5), RequestBoundary)) == 1


def test_a_worker_that_comes_and_goes_does_not_keep_another_from_joining() -> None:
    run = Run(max_workers=4, min_workers=1, prepare_within_s=WITHIN_S)
    run.ready(0, 1)
    run.wait(3)
    run.formed()
    run.trained(1)
    run.ready(2)
    asked: list[Command] = []
    for number in range(3, 20):
        asked += run.trained(number - 1) if number < 10 else []  # a replacement is requested
        asked += [*run.wait(3.5), *run.ready(number), *run.wait(0.5), *run.lost(number)]
        asked += run.trained(number - 1)
    assert len(of(asked, RequestBoundary)) == 1, "the others never have three seconds to prepare in"


def test_a_preparation_that_is_not_wanted_any_more_is_not_reported_as_failed_for_want_of_an_answer() -> None:
    run = prepares(2)
    run.hear(ReshardRequested(grouping=groups_of(1)))
    pair = Grouping(shards=None, tensor=2, least_shards=1, num_microbatches=8)
    run.state = replace(run.state, limits=replace(run.state.limits, min_workers=2))
    assert len(of(run.hear(ReshardRequested(grouping=pair)), RequestBoundary)) == 1
    (failed,) = run.records("preparation_failed")
    assert failed["reason"] == "other workers, or another mesh, are wanted by now"
