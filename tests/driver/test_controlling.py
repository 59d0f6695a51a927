"""The driver's promises to people who pause, resume, resize and drain, one event after the other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from raysharded.driver.handlers.user_requests import ambiguity, drain_refusal, pause_refusal, resize_refusal
from raysharded.driver.startup import persisted_requests
from raysharded.driver.startup.adopted_workers import as_decided, resized
from raysharded.driver.state.commands import (
    Answer,
    CollectSave,
    Command,
    Form,
    KillWorker,
    Probe,
    Record,
    RequestBoundary,
    SaveSnapshot,
    StartWorker,
    Train,
)
from raysharded.driver.state.events import (
    CheckpointRequested,
    DrainRequested,
    PauseRequested,
    Ready,
    ResizeRequested,
    ResumeRequested,
    StopRequested,
)
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, StopReason
from tests.driver.scripted import Run, of, training
from tests.driver.test_leaving import stop_at_boundary, told


def paused(size: int = 3, step: int = 2, **limits: Any) -> Run:
    """A run that was paused, and stands still, after `step` and one more."""
    run = training(size, step=step, **limits)
    run.hear(PauseRequested())
    stop_at_boundary(run, step + 1)
    assert run.state.phase is Phase.PAUSED
    return run


def rest(run: Run) -> list[Command]:
    """All members form the generation, and stop at once."""
    commands = run.formed()
    assert of(commands, Train)[-1].rest
    held = {member: run.holding(member, run.state.step) for member in run.state.members}
    for member in run.state.members:
        commands += run.stopped(member, StopReason.BOUNDARY, run.state.step, held=held[member])
    return commands


# -- pause --


def test_a_pause_takes_effect_at_the_next_boundary_and_lasts_without_any_message() -> None:
    run = training(3, step=2)
    assert len(of(run.hear(PauseRequested()), RequestBoundary)) == 1
    assert run.records("paused") == []
    stop_at_boundary(run, 3)
    assert run.wait(10_000) == []
    assert (run.state.phase, run.state.step) == (Phase.PAUSED, 3)
    assert run.records("paused") == [{"step": 3, "workers": [0, 1, 2]}]


def test_a_paused_run_resumes_from_memory_with_the_next_step() -> None:
    run = paused()
    run.wait(100)
    (form,) = of(run.hear(ResumeRequested()), Form)
    assert isinstance(form.spec.source, FromMemory)
    assert form.spec.source.step == 3
    assert [train.rest for train in of(run.formed(), Train)] == [False]
    assert run.records("resume") == [{"step": 3, "seconds": 100.0}]
    assert run.state.idle_generations == 0


def test_what_is_requested_twice_is_recorded_once_and_what_changes_nothing_is_not() -> None:
    run = training(3, step=2)
    assert run.hear(ResumeRequested()) == []
    run.hear(PauseRequested())
    assert run.hear(PauseRequested()) == []
    stop_at_boundary(run, 3)
    assert run.hear(PauseRequested()) == []
    assert len(run.records("pause")) == 1


def test_a_pause_that_is_ended_before_the_boundary_only_forms_the_generation_anew() -> None:
    run = training(3, step=2)
    run.hear(PauseRequested())
    run.hear(ResumeRequested())
    stop_at_boundary(run, 3)
    assert run.state.phase is Phase.FORMING
    assert run.records("paused") == []


def test_a_pause_while_a_generation_forms_does_no_step() -> None:
    run = Run()
    run.ready(0, 1, 2)
    run.hear(PauseRequested())
    rest(run)
    assert (run.state.phase, run.state.step) == (Phase.PAUSED, 0)


def test_before_there_are_workers_a_paused_run_starts_them_and_waits() -> None:
    run = Run()
    run.hear(PauseRequested())
    run.wait(1000)
    run.ready(0, 1, 2)
    assert (run.state.phase, run.all(Form)) == (Phase.PAUSED, [])
    assert len(of(run.hear(ResumeRequested()), Form)) == 1


def test_after_the_last_step_it_is_too_late_for_a_pause() -> None:
    run = training(3, step=9)
    run.hear(PauseRequested())
    run.trained(10)
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 10)
    assert run.state.phase is Phase.CLOSING
    assert pause_refusal(run.state)
    run.hear(PauseRequested())
    assert len(run.records("pause_refused")) == 2
    assert run.state.pause is None


def test_a_loss_after_the_last_step_does_not_allow_a_pause() -> None:
    run = training(3, step=9, min_workers=2)
    run.trained(10)
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 10)
    run.lost(2)
    assert run.state.phase is Phase.FORMING
    run.hear(PauseRequested())
    assert len(run.records("pause_refused")) == 1


def test_a_pause_that_comes_in_the_last_step_is_refused_though_a_worker_is_lost_there() -> None:
    run = training(3, step=9, min_workers=2)
    run.hear(PauseRequested())
    run.trained(10)
    run.stopped(0, StopReason.FINISHED, 10)
    run.stopped(1, StopReason.FINISHED, 10)
    run.lost(2)
    run.formed()
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 10)
    assert len(run.records("pause_refused")) == 1
    run.all_saved(10)
    run.committed(10)
    assert run.state.phase is Phase.OVER


def test_a_loss_in_a_pause_is_made_good_without_a_step_and_its_recovery_is_counted_from_the_resumption() -> None:
    run = paused()
    run.wait(50)
    (form,) = of(run.lost(1), Form)
    assert set(form.spec.members) == {0, 2}
    assert form.spec.source.step == 3
    rest(run)
    assert run.state.phase is Phase.PAUSED
    assert of(run.lost(0), Form) == []  # fewer than the minimum
    run.wait(500)
    run.hear(ResumeRequested())
    run.ready(3)
    run.wait(3)
    run.formed()
    assert run.newest_form().source.step == 3
    run.trained(4)
    (recovery,) = run.records("recovery")
    assert recovery["lost"] == [1, 0]
    assert recovery["steps_redone"] == 0
    assert recovery["total_s"] < 10


def test_who_must_leave_in_a_pause_hands_its_state_over_and_goes() -> None:
    run = paused()
    told(run, 1)
    assert set(run.newest_form().members) == {0, 2}
    assert of(rest(run), KillWorker) == [KillWorker(worker=WorkerId(1), at_once=False)]
    assert run.state.phase is Phase.PAUSED
    assert (run.state.losses, run.state.preemptions) == (0, 1)


def test_a_checkpoint_that_is_requested_in_a_pause_is_written_of_the_step_that_is_held() -> None:
    run = paused()
    commands = run.hear(CheckpointRequested(request=7))
    assert of(commands, SaveSnapshot)[0].members == run.state.members
    assert of(commands, CollectSave)[0].step == 3
    run.all_saved(3)
    (answer,) = of(run.committed(3), Answer)
    assert (answer.requests, answer.step, answer.error) == ((7,), 3, "")
    (again,) = of(run.hear(CheckpointRequested(request=8)), Answer)
    assert (again.requests, again.step) == ((8,), 3)
    assert run.state.phase is Phase.PAUSED


def test_a_checkpoint_in_a_pause_that_failed_is_not_written_in_the_same_place_again() -> None:
    run = paused()
    run.hear(CheckpointRequested(request=7))
    assert "no space" in of(run.saved(0, 3, error="no space"), Answer)[0].error
    assert "resume the run first" in of(run.hear(CheckpointRequested(request=8)), Answer)[0].error
    run.hear(StopRequested(checkpoint_within_s=math.inf))  # it continues for one step more
    assert run.state.phase is Phase.FORMING
    assert run.state.pause is None


def test_a_worker_that_is_stopped_while_it_writes_a_checkpoint_in_a_pause_is_found() -> None:
    run = paused(min_workers=1, forming_patience_s=10.0)
    run.wait(100)
    assert run.all(Probe) == []  # nobody is waited for
    run.hear(CheckpointRequested(request=7))
    run.saved(1, 3)
    run.wait(100)
    assert run.records("stuck") == []  # they answer, and write
    run.mute = frozenset({0})
    run.wait(10)
    (stuck,) = run.records("stuck")
    assert (stuck["worker"], stuck["phase"]) == (0, "paused")
    assert run.records("checkpoint_failed")[0]["step"] == 3
    rest(run)
    assert run.state.phase is Phase.PAUSED
    assert set(run.state.members) == {1, 2}
    run.all_saved(3)  # its request is answered by those that are left
    (answer,) = of(run.committed(3), Answer)
    assert (answer.requests, answer.step, answer.error) == ((7,), 3, "")


def test_a_checkpoint_in_a_pause_is_waited_for_from_its_beginning() -> None:
    run = paused(min_workers=1, forming_patience_s=10.0)
    run.wait(100)
    run.hear(CheckpointRequested(request=7))
    run.mute = frozenset({0, 1, 2})
    run.wait(4.75)
    assert run.all(Probe) == []
    run.wait(0.25)
    assert {probe.worker for probe in run.all(Probe)} == {0, 1, 2}


def test_a_paused_run_that_ends_with_a_checkpoint_writes_what_it_holds() -> None:
    run = paused()
    run.hear(StopRequested(checkpoint_within_s=100.0))
    run.all_saved(3)
    run.committed(3)
    assert run.error is None
    assert run.state.phase is Phase.OVER
    assert len(run.records("stopped")) == 1


# -- resize --


def test_a_smaller_run_lets_workers_go_at_one_boundary_from_memory_and_counts_no_loss() -> None:
    run = training(4, step=2, min_workers=1)
    run.hear(ResizeRequested(workers=2))
    (entry,) = run.records("resize")
    assert (entry["workers"], entry["before"], len(entry["leaving"])) == (2, 4, 2)
    stop_at_boundary(run, 3)
    assert set(run.newest_form().members) == {0, 1, 2, 3}.difference(entry["leaving"])
    assert run.newest_form().source.step == 3
    assert {kill.worker for kill in of(run.formed(), KillWorker)} == set(entry["leaving"])
    assert of(run.trained(4), StartWorker) == []
    assert (run.state.losses, run.state.preemptions) == (0, 0)
    assert {fields["reason"] for fields in run.records("worker_left")} == {"resized to 2 workers"}
    assert run.records("worker_leaving") == run.records("worker_lost") == []


def test_a_larger_run_starts_workers_and_takes_them_in_at_a_boundary() -> None:
    run = training(4, step=2, min_workers=1)
    run.hear(ResizeRequested(workers=2))
    stop_at_boundary(run, 3)
    run.formed()
    run.hear(ResizeRequested(workers=3))
    assert len(of(run.trained(4), StartWorker)) == 1
    assert of(run.ready(4), RequestBoundary)


def test_who_was_to_go_stays_if_more_workers_are_requested_after_all() -> None:
    run = training(4, step=2, min_workers=1)
    run.hear(ResizeRequested(workers=2))
    run.hear(ResizeRequested(workers=4))
    stop_at_boundary(run, 3)
    assert set(run.newest_form().members) == {0, 1, 2, 3}
    assert run.all(KillWorker) == []


def test_workers_that_are_starting_and_spares_are_released_before_anybody_who_computes() -> None:
    run = Run(max_workers=4, spares=1, min_workers=1)
    run.ready(0, 1, 2)
    run.wait(3)
    run.formed()
    run.trained(1)
    commands = run.hear(ResizeRequested(workers=3))  # 3 and 4 are starting; one spare stays
    assert of(commands, KillWorker) == [KillWorker(worker=WorkerId(4))]
    assert of(commands, RequestBoundary) == []


@pytest.mark.parametrize("tensor", [1, 2])
def test_of_shard_groups_whole_ones_go(tensor: int) -> None:
    grouping = Grouping(shards=2, least_shards=2, num_microbatches=8, tensor=tensor)
    run = training(6, step=2, min_workers=2, grouping=grouping)
    mesh, members = run.state.mesh, run.state.members
    run.hear(ResizeRequested(workers=4))
    left = set(run.records("resize")[0]["leaving"])
    groups = [{members[rank] for rank in mesh.group(replica)} for replica in range(mesh.replicas)]
    assert left in groups


def test_a_number_of_workers_beyond_the_limits_is_refused_with_them() -> None:
    run = training(3, step=2)
    run.hear(ResizeRequested(workers=2))
    assert resize_refusal(run.state, 3) == ""
    for wanted in (1, 4):
        assert "2 to 3" in resize_refusal(run.state, wanted)
        run.hear(ResizeRequested(workers=wanted))
    assert len(run.records("resize_refused")) == 2
    assert run.state.limits.max_workers == 2


def test_a_paused_run_that_is_resized_lets_workers_go_without_a_step() -> None:
    run = paused(4, min_workers=1)
    run.hear(ResizeRequested(workers=2))
    rest(run)
    assert (run.state.phase, run.state.step, len(run.state.ready)) == (Phase.PAUSED, 3, 2)


# -- drain --


def test_a_drained_node_is_left_and_gets_no_new_workers_ever() -> None:
    run = training(3, step=2)
    run.hear(DrainRequested(node="node1", within_s=25.0))
    stop_at_boundary(run, 3)
    run.formed()
    run.wait(200)
    run.trained(4)
    assert [start.avoid for start in run.all(StartWorker)[3:]] == [("node1",)]
    assert run.records("drain") == [{"step": 2, "node": "node1", "nodes": ["node1"], "workers": [1], "within_s": 25.0}]
    assert set(run.state.members) == {0, 2}
    assert "its node is drained" in _refused_on(run, "node1")


def _refused_on(run: Run, node: str) -> str:
    worker = next(iter(run.state.starting))
    run.hear(Ready(worker=worker, facts=replace(next(iter(run.state.facts.values())), node_id=node, node=node)))
    return str(run.records("worker_refused")[-1]["reason"])


def test_a_needed_worker_on_a_drained_node_is_ended_when_its_time_is_over() -> None:
    run = training(2, step=2)
    run.hear(DrainRequested(node="node1", within_s=25.0))
    run.wait(20)
    assert run.state.phase is Phase.TRAINING
    assert KillWorker(worker=WorkerId(1)) in run.wait(6)
    assert (run.state.losses, run.state.preemptions) == (0, 1)


def test_a_node_without_workers_is_refused_with_those_that_have_some() -> None:
    run = training(2, step=2)
    reason = drain_refusal(run.state, "node7", 10.0)
    assert "node0" in reason
    assert "node1" in reason
    run.hear(DrainRequested(node="node7", within_s=10.0))
    assert run.records("drain_refused")[0]["reason"] == reason
    assert drain_refusal(run.state, "node1", math.nan)
    assert not drain_refusal(run.state, "node1", 0.0)


def test_a_host_name_of_several_nodes_means_none_of_them() -> None:
    run = training(3, step=2)
    facts = {worker: replace(facts, node="host") for worker, facts in run.state.facts.items()}
    state = replace(run.state, facts=facts)
    assert ambiguity(state, "host") == (
        "'host' means 3 nodes with workers of the run: node0, node1 and node2. Give the id of one"
    )
    assert not ambiguity(state, "node1")
    assert not ambiguity(run.state, "node1")


# -- later drivers --


def entries(*told: str | Record) -> list[dict[str, Any]]:
    return [{"kind": one} if isinstance(one, str) else {"kind": one.kind, **one.fields} for one in told]


def test_the_last_word_on_a_pause_counts() -> None:
    resting = Record(kind="generation", fields={"paused": True})
    assert persisted_requests.is_paused(entries("started", "generation", "pause", "step", "paused", resting, "started"))
    assert not persisted_requests.is_paused(entries("pause", "resume"))
    assert not persisted_requests.is_paused(entries("pause", "started", "generation")), "a driver began anew"
    assert not persisted_requests.is_paused(entries("pause", "stopped"))
    takes = Record(kind="taken_over", fields={"workers": [0, 1]})
    assert persisted_requests.is_paused(entries("generation", "pause", "started", takes, "worker_ready", "started"))
    assert not persisted_requests.is_paused(entries("generation", "pause", "started", "worker_ready", "started")), (
        "workers are new"
    )
    assert persisted_requests.is_paused(entries("generation", "pause", "started", "pause", "worker_ready", "started"))


def test_a_driver_that_takes_workers_over_keeps_to_the_pause_and_to_the_drain() -> None:
    run = training(3, step=2)
    drain = Record(kind="drain", fields={"nodes": ["node1"], "within_s": 20.0})
    takes = Record(kind="taken_over", fields={"workers": [0, 1, 2]})
    state = as_decided(run.state, entries("started", drain, "pause", "started"), 100.0)
    assert state.pause is not None
    assert {worker: departure.by for worker, departure in state.leaving.items()} == {1: 120.0}
    assert persisted_requests.drained(entries("started", drain, "started", takes, "generation")) == {"node1": 20.0}
    assert persisted_requests.drained(entries("started", drain, "started", "generation")) == {}, "no worker is the same"
    assert persisted_requests.drained(entries("started", "worker_ready", drain, "generation", "step", "started")) == {
        "node1": 20.0
    }


def test_a_number_of_workers_holds_until_the_run_is_configured_otherwise() -> None:
    state, scaling = training(4, min_workers=2).state, {"num_workers": [2, 4]}
    started = Record(kind="started", fields={"scaling": scaling})
    three = Record(kind="resize", fields={"workers": 3})
    after = resized(state, entries(started, three), scaling).limits
    assert (after.max_workers, after.most_workers) == (3, 4)
    assert resized(state, entries(started, three), {"num_workers": [2, 5]}) is state
    assert resized(state, entries(started, Record(kind="resize", fields={"workers": 1})), scaling) is state
