"""The machine where workers that come to a run have to prove its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysharded.driver.state.commands import DeleteCheckpoints, End, Form, KillWorker
from raysharded.driver.state.events import WorkerReply
from raysharded.errors import InexactError, RunFailed
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Corruption, FromMemory, FromStart, Stopped, StopReason
from tests.driver.scripted import Run, of, training
from tests.driver.simulated_workers import SPEC

BOUNDARY, ABORTED = StopReason.BOUNDARY, StopReason.ABORTED


def proving(size: int, step: int = 0, **limits: Any) -> Run:
    return training(size, step, **{"proves_first_step": True, "min_workers": 1, **limits})


def joined(size: int, step: int, *joiners: int, **limits: Any) -> Run:
    """Workers 0, 1, ... have done `step` steps, and others have joined since: their generation has just formed."""
    run = Run(max_workers=size + len(joiners), proves_first_step=True, min_workers=1, **limits)
    run.ready(*range(size))
    run.wait(3)
    run.formed()
    run.trained(*range(1, step + 1))
    run.ready(*joiners)
    run.wait(3)
    for member in run.state.members:
        run.stopped(member, BOUNDARY, step)
    assert set(run.newest_form().members) == {*range(size), *joiners}
    run.formed()
    return run


def failed(run: Run, *culprits: int, takes_back: bool = False) -> None:
    """The proof finds that these compute wrong numbers; all members report it."""
    step = run.state.step + 1
    corruption = Corruption(
        step=step,
        what="gradient",
        culprits=tuple(map(WorkerId, culprits)),
        workers=run.state.members,
        microbatches=(1,),
        by_proof=True,
        takes_back=takes_back,
    )
    for member in run.state.members:
        stopped = Stopped(
            generation=run.state.generation,
            reason=StopReason.CORRUPT,
            step=step - 1,
            phase="prove",
            stopped_at=run.at,
            held=tuple(run.holding(member, step - 1)),
            specs={step - 1: SPEC},
            corruption=corruption,
        )
        run.hear(WorkerReply(worker=member, message=stopped))


# -- workers that have to --


def test_all_workers_prove_the_first_step_of_a_run_and_nobody_after_a_loss() -> None:
    run = proving(3)
    assert run.newest_form().newcomers == (0, 1, 2)
    run.trained(1, 2)
    run.lost(1)
    for member in (0, 2):
        run.stopped(member, ABORTED, 2)
    assert run.newest_form().members == (0, 2)
    assert run.newest_form().newcomers == ()


def test_a_joiner_has_to_and_again_until_a_step_of_its_generation_is_done() -> None:
    run = joined(2, 3, 2, 3)
    assert run.newest_form().newcomers == (2, 3)
    run.lost(3)
    for member in (0, 1, 2):
        run.stopped(member, ABORTED, 3)
    assert run.newest_form().newcomers == (2,)
    run.formed()
    run.trained(4)
    run.lost(0)
    for member in (1, 2):
        run.stopped(member, ABORTED, 4)
    assert run.newest_form().newcomers == ()


def test_nobody_has_to_where_it_is_not_requested() -> None:
    run = proving(2, 1, proves_first_step=False)
    assert run.newest_form().newcomers == ()
    assert run.state.proven == frozenset()


def test_a_driver_that_resumes_from_a_checkpoint_has_all_workers_prove_its_first_step() -> None:
    run = Run(proves_first_step=True, min_workers=1, resumed={"step": 4, "reached": 4})
    run.ready(0, 1, 2)
    assert run.newest_form().newcomers == (0, 1, 2)


# -- the consequences --


def test_at_the_start_of_a_run_all_that_differ_are_named_with_their_nodes_and_gpus_and_the_run_ends() -> None:
    run = proving(2)
    facts = {worker: replace(one, device=f"GPU {worker} GPU-aa{worker}") for worker, one in run.state.facts.items()}
    run.state = replace(run.state, facts=facts)
    failed(run, 0, 1)
    assert isinstance(run.error, InexactError)
    text = str(run.error)
    assert "worker 0 on node0 (GPU 0 GPU-aa0) and worker 1 on node1 (GPU 1 GPU-aa1)" in text
    assert "microbatch 1" in text
    assert "computation is not reproducible" in text
    assert "by comparison" not in text
    (entry,) = run.records("proof_failed")
    assert (entry["workers"], entry["nodes"]) == ([0, 1], ["node0 (GPU 0 GPU-aa0)", "node1 (GPU 1 GPU-aa1)"])
    assert len(run.all(Form)) == 1


def test_at_the_start_one_whom_all_others_contradict_is_suspected() -> None:
    run = proving(3)
    failed(run, 1)
    assert "by comparison it is worker 1 on node1." in str(run.error)


def test_a_joiner_is_removed_counted_and_the_others_continue_at_once_from_memory() -> None:
    run = joined(2, 3, 2, replacement_wait_s=100.0, max_node_failures=1, max_worker_losses=1)
    failed(run, 2)
    assert of(run.commands, KillWorker) == [KillWorker(worker=WorkerId(2))]
    spec = run.newest_form()
    assert (spec.members, spec.newcomers, spec.source.step) == ((0, 1), (), 3)
    assert isinstance(spec.source, FromMemory)
    assert run.records("corruption") == []
    assert run.all(DeleteCheckpoints) == []
    (lost,) = run.records("worker_lost")
    assert (lost["worker"], "computed wrong numbers" in lost["reason"]) == (2, True)
    (avoided,) = run.records("node_avoided")
    assert avoided["node"] == "node2"
    run.formed()
    run.trained(4)
    (recovery,) = run.records("recovery")
    assert (recovery["lost"], recovery["steps_redone"]) == ([2], 0)


def test_joiners_that_fail_in_one_step_after_each_other_do_not_end_the_run_before_their_budget_does() -> None:
    run = joined(2, 3, 2, max_worker_losses=2, replacement_wait_s=0.0, save_at_end=False)
    failed(run, 2)
    for joiner in (3, 4):
        assert run.all(End) == []
        run.formed()
        run.trained(run.state.step + 1)
        run.ready(joiner)
        run.wait(3)
        for member in run.state.members:
            run.stopped(member, BOUNDARY, run.state.step)
        run.formed()
        failed(run, joiner)
    assert isinstance(run.error, RunFailed)
    assert "3 workers were lost, more than FailureConfig.max_worker_losses=2" in str(run.error)


def test_one_that_has_proven_itself_is_removed_without_taking_anything_back_and_the_second_time_the_run_ends() -> None:
    run = joined(3, 3, 3)
    failed(run, 1)
    assert run.all(End) == []
    assert run.newest_form().newcomers == (3,)
    assert run.newest_form().source.step == 3
    run.formed()
    failed(run, 2)
    assert isinstance(run.error, InexactError)
    assert "again after it was computed anew because of: step 4: the proof of a first step found" in str(run.error)


def test_where_steps_are_audited_such_a_worker_is_removed_as_by_an_audit() -> None:
    run = joined(3, 3, 3)
    failed(run, 1, takes_back=True)
    (entry,) = run.records("corruption")
    assert (entry["culprits"], entry["verified_step"]) == ([1], 0)
    assert isinstance(run.newest_form().source, FromStart)
    assert run.records("proof_failed") == []


def test_newcomers_alone_are_replaced_once_and_the_second_time_the_run_ends() -> None:
    run = proving(1, 3, max_worker_losses=None)
    run.lost(0)
    run.ready(1)
    run.wait(3)
    assert run.newest_form().newcomers == (1,)
    run.formed()
    failed(run, 1)
    assert run.all(End) == []
    run.ready(2)
    run.wait(3)
    run.formed()
    failed(run, 2)
    assert isinstance(run.error, InexactError)
    assert "worker 2 on node2 did not get the same gradient twice" in str(run.error)
