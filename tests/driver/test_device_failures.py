"""Workers whose GPU fails: they leave, hold their memory until the others have formed, and the GPU is remembered."""

from __future__ import annotations

from typing import Any

from raysharded.driver.state.commands import (
    End,
    Form,
    Interrupt,
    KillWorker,
    Probe,
    SaveSnapshot,
    StartWorker,
    Train,
    calls_of,
)
from raysharded.driver.state.events import Ready, Recorded, RewindRequested
from raysharded.driver.state.state import Phase
from raysharded.errors import CollectiveAborted, DeviceFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromCheckpoint, FromMemory, FromStart, StopReason, WorkerInfo
from tests.driver.scripted import Run, of, training

LOST = CollectiveAborted("the store of the generation cannot be reached")
BROKEN = DeviceFailed("the GPU does not work in this process: CUDA error", "a line of the task")


def on_gpu(run: Run, worker: int, device: str) -> None:
    """This worker is ready, on this GPU of one machine."""
    facts = WorkerInfo(
        pid=worker, node="node", node_id=f"node{worker}", arithmetic={"cpu": "x"}, num_samples=100, device=device
    )
    run.hear(Ready(worker=WorkerId(worker), facts=facts))


def breaks(run: Run, *workers: int, step: int) -> None:
    """The GPUs of these members fail after this step, and the others are freed."""
    for worker in sorted(run.state.members, key=lambda member: member not in workers):
        if worker in workers:
            run.stopped(worker, StopReason.DEVICE, step, error=BROKEN)
        else:
            run.stopped(worker, StopReason.ABORTED, step)


def test_a_worker_whose_gpu_fails_is_replaced_and_its_process_stays_until_the_others_have_formed() -> None:
    run = training(3, 5)
    breaks(run, 1, step=5)
    spec = run.newest_form()
    assert set(spec.members) == {0, 2}
    assert isinstance(spec.source, FromMemory)
    assert spec.source.step == 5
    assert not run.all(KillWorker), "its memory may still be needed"
    run.formed()
    assert KillWorker(worker=WorkerId(1), at_once=False) in run.all(KillWorker)
    run.trained(6)
    assert [one.worker for one in run.all(StartWorker)][-1] == 3, "it is replaced"
    (leaving,) = run.records("worker_leaving")
    assert "CUDA error" in leaving["reason"]
    assert not run.records("worker_lost")
    assert not run.records("task_error"), "the task is not to blame"


def without_0_and_the_gpu_of_1(**limits: Any) -> Run:
    """A run of three after step 5: the worker 0 died, and the GPU of 1, which holds its mirror, failed."""
    run = training(3, 5, **limits)
    run.lost(0)
    breaks(run, 1, step=5)
    return run


def breaks_apart(run: Run) -> None:
    """The forming generation fails; its member reports what it held before."""
    (member,) = run.state.members
    held = run.state.holdings[member].held
    run.stopped(member, StopReason.ABORTED, 5, held=held)


def test_what_a_worker_with_a_dead_gpu_alone_holds_is_handed_over_by_it() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1)
    spec = run.newest_form()
    assert spec.members == (2,)
    assert spec.failed_devices == (1,)
    assert isinstance(spec.source, FromMemory)
    assert spec.source.step == 5
    called = {worker for worker, _, _ in calls_of(run.all(Form)[-1])}
    assert called == {1, 2}
    assert run.records("generation")[-1]["failed_devices"] == [1]
    run.stopped(1, StopReason.DEVICE, 5, held=[], error=BROKEN)
    assert run.state.phase is Phase.FORMING, "so it answers when it has handed over"
    run.formed()
    assert KillWorker(worker=WorkerId(1), at_once=False) in run.all(KillWorker)
    run.trained(6)
    assert [left["worker"] for left in run.records("worker_left")] == [1]


def test_too_few_workers_take_over_what_one_with_a_dead_gpu_holds_and_save_it() -> None:
    run = without_0_and_the_gpu_of_1()
    assert run.newest_form().failed_devices == (1,)
    assert run.records("generation")[-1]["only_saves"]
    run.formed()
    assert run.all(Train)[-1].rest, "they are fewer than the minimum"
    run.stopped(2, StopReason.BOUNDARY, 5)
    assert run.state.phase is Phase.GATHERING
    assert run.all(SaveSnapshot)[-1].members == (2,)
    run.ready(3)
    run.ready(4)
    assert set(run.newest_form().members) == {2, 3, 4}
    assert isinstance(run.newest_form().source, FromMemory)


def test_a_loss_of_the_one_that_hands_over_begins_the_generation_again() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1)
    run.lost(1)
    assert Interrupt(worker=WorkerId(2), generation=run.state.generation) in run.all(Interrupt)
    breaks_apart(run)
    assert run.newest_form().failed_devices == ()
    assert isinstance(run.newest_form().source, FromStart)


def test_a_generation_that_breaks_apart_frees_the_one_that_hands_over_and_it_tries_again() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1)
    first = run.state.generation
    breaks_apart(run)
    assert Interrupt(worker=WorkerId(1), generation=first) in run.all(Interrupt)
    for _ in range(2):
        assert run.newest_form().failed_devices == (1,)
        breaks_apart(run)
    assert run.newest_form().failed_devices == (), "it may be that it cannot be reached"
    assert isinstance(run.newest_form().source, FromStart)


def test_a_generation_to_which_nothing_can_be_handed_over_ends_at_once() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1)
    for _ in range(3):
        forming = run.state.generation
        assert run.newest_form().failed_devices == (1,)
        run.stopped(1, StopReason.ABORTED, 5, held=[], error=LOST)
        assert Interrupt(worker=WorkerId(2), generation=forming) in run.all(Interrupt)
        breaks_apart(run)
        assert run.state.generation == forming + 1, "no time has passed"
    assert run.newest_form().failed_devices == ()
    assert isinstance(run.newest_form().source, FromStart)
    run.formed()
    run.trained(1)
    (recovery,) = run.records("recovery")
    assert "worker 1, whose GPU failed, could not hand over" in recovery["reasons"]


def test_a_late_end_of_a_hand_over_ends_no_other_generation() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1)
    run.says = run.state.generation
    breaks_apart(run)
    run.stopped(1, StopReason.ABORTED, 5, held=[], error=LOST)
    assert run.state.phase is Phase.FORMING
    run.says = None
    assert of(run.formed(), Train)


def test_a_rewind_forms_without_the_worker_whose_gpu_failed() -> None:
    run = training(3)
    for step in range(1, 6):
        run.trained(step, saves=step % 2 == 0)
        if step % 2 == 0:
            run.all_saved(step)
            run.committed(step)
    run.hear(RewindRequested(step=4))
    run.lost(0)
    breaks(run, 1, step=5)
    spec = run.newest_form()
    assert isinstance(spec.source, FromCheckpoint)
    assert spec.source.step == 4
    assert spec.members == (2,), "without 1 they are fewer than the minimum"
    assert spec.failed_devices == ()
    run.formed()
    run.hear(Recorded(generation=run.state.generation))
    run.stopped(2, StopReason.BOUNDARY, 4)
    run.ready(3)
    run.ready(4)
    assert set(run.newest_form().members) == {2, 3, 4}
    assert run.newest_form().source.step == 4


def test_workers_with_dead_gpus_wait_for_others_to_hand_over_to() -> None:
    run = training(2, 5)
    breaks(run, 0, 1, step=5)
    assert run.state.phase is Phase.GATHERING
    assert [kill.worker for kill in run.all(KillWorker)] == [0], "a new worker may need its GPU; 1 holds all"
    run.ready(2)
    run.ready(3)
    spec = run.newest_form()
    assert set(spec.members) == {2, 3}
    assert spec.failed_devices == (1,)
    assert isinstance(spec.source, FromMemory)
    assert spec.source.step == 5
    run.formed()
    assert [kill.worker for kill in run.all(KillWorker)] == [0, 1]


def test_workers_with_dead_gpus_wait_for_half_of_the_time_that_others_have_to_start() -> None:
    run = training(2, 5, start_timeout_s=100.0)
    breaks(run, 0, 1, step=5)
    run.wait(49.0)
    assert [kill.worker for kill in run.all(KillWorker)] == [0]
    run.wait(2.0)
    assert [kill.worker for kill in run.all(KillWorker)] == [0, 1], "the new ones may need its GPU"
    run.ready(2)
    run.ready(3)
    assert isinstance(run.newest_form().source, FromStart)


def test_new_workers_have_the_whole_time_once_the_gpus_are_free() -> None:
    run = training(2, 5, start_timeout_s=100.0)
    breaks(run, 0, 1, step=5)
    run.wait(51.0)
    assert [kill.worker for kill in run.all(KillWorker)] == [0, 1]
    run.wait(98.0)
    assert run.state.phase is Phase.GATHERING
    run.ready(2)
    run.ready(3)
    assert set(run.newest_form().members) == {2, 3}


def test_one_that_hands_over_and_does_not_answer_is_named_and_frees_the_members() -> None:
    run = without_0_and_the_gpu_of_1()
    run.ready(3)
    members = run.newest_form().members
    run.mute = frozenset({WorkerId(1)})
    waited = run.wait(12.0)
    assert {probe.worker for probe in of(waited, Probe)} == {*members, 1}
    assert [stuck["worker"] for stuck in run.records("stuck")] == [1]
    assert {freed.worker for freed in of(waited, Interrupt)} == {*members, 1}
    assert run.state.phase is Phase.STOPPING


def test_a_worker_with_a_dead_gpu_is_waited_for_as_long_as_others_could_take_over() -> None:
    run = without_0_and_the_gpu_of_1(min_workers=1, replacement_wait_s=100.0, start_timeout_s=100.0)
    run.wait(99.0)
    assert not run.all(KillWorker)
    run.wait(2.0)
    assert run.newest_form().members == (2,)
    assert run.newest_form().failed_devices == (1,)


def test_the_gpu_of_a_worker_that_died_is_one_for_a_new_worker_to_hand_over_to() -> None:
    run = training(2, 5, min_workers=1)
    run.lost(0)
    breaks(run, 1, step=5)
    assert not run.all(KillWorker)
    run.ready(2)
    assert run.state.phase is Phase.GATHERING, "another one is about to start"
    run.ready(3)
    assert set(run.newest_form().members) == {2, 3}
    assert run.newest_form().failed_devices == (1,)


def test_a_worker_alone_with_a_dead_gpu_does_not_keep_it_from_its_successor() -> None:
    run = training(1, 5, min_workers=1)
    breaks(run, 0, step=5)
    assert [kill.worker for kill in run.all(KillWorker)] == [0]
    run.ready(1)
    assert isinstance(run.newest_form().source, FromStart)


def test_a_failure_that_the_driver_does_not_know_is_not_confirmed() -> None:
    run = training(2, 5)
    run.stopped(0, StopReason.ABORTED, 5)
    run.stopped(1, StopReason.TASK_ERROR, 5)
    assert run.newest_form().failed_devices == ()


def test_a_gpu_that_failed_twice_gets_no_worker_and_another_one_does() -> None:
    run = training(3, 5)
    for number, worker in enumerate((1, 3)):
        run.state = run.with_devices({worker: "GPU 7 GPU-bad"})
        breaks(run, worker, step=5 + number)
        run.formed()
        run.trained(6 + number)
        on_gpu(run, 3 + number, "GPU 7 GPU-bad")
        if number == 0:
            assert 3 in run.state.ready, "the first failure may be the task's"
            for member in run.state.members:
                run.stopped(member, StopReason.BOUNDARY, 6)
            assert 3 in run.newest_form().members
            run.formed()
    assert 4 not in run.state.ready
    (refused,) = run.records("worker_refused")
    assert refused["reason"].startswith("GPU 7 GPU-bad failed 2 times in this run")
    assert 4 not in [one.worker for one in run.all(KillWorker)], "its process keeps the GPU from the next worker"
    assert not run.records("start_failed")
    assert "node4" not in run.state.nodes, "the node's other GPUs work"
    newest = of(run.commands, StartWorker)[-1].worker
    assert newest == 5, "another is requested at once: the scheduler can only give it another GPU"
    on_gpu(run, newest, "GPU 6 GPU-good")
    assert newest in run.state.ready


def one_fails_after_another(run: Run, devices: list[str]) -> None:
    """In each generation of three workers one fails in the step 6, on the next of these GPUs; it is replaced."""
    for number, device in enumerate(devices):
        worker = max(run.state.members)
        run.state = run.with_devices({worker: device})
        breaks(run, worker, step=5)
        if run.state.phase is Phase.OVER:
            return
        run.formed()
        run.trained(5)
        on_gpu(run, 3 + number, f"GPU of worker {3 + number}")
        for member in run.state.members:
            run.stopped(member, StopReason.BOUNDARY, 5)
        run.formed()


def test_a_step_that_fails_on_one_gpu_after_another_is_the_tasks_error() -> None:
    run = training(3, 5, save_at_end=False)
    one_fails_after_another(run, ["GPU A", "GPU B", "GPU C"])
    assert [entry["attempt"] for entry in run.records("task_error")] == [1, 2]
    assert run.records("task_error")[0]["traceback"] == "a line of the task"
    (end,) = run.all(End)
    assert isinstance(end.error, TaskError)
    assert "step 6 fails on one GPU after another (GPU A and GPU B)" in str(end.error)
    assert end.error.user_traceback == "a line of the task"


def test_gpus_that_fail_in_one_generation_or_in_different_steps_are_not_the_tasks_error() -> None:
    run = training(3, 5)
    run.state = run.with_devices({0: "GPU A", 1: "GPU B"})
    breaks(run, 0, 1, step=5)
    run = training(3, 5)
    for step, worker in ((5, 1), (6, 2)):
        breaks(run, worker, step=step)
        run.formed()
        run.trained(step + 1)
    assert not run.records("task_error")


def test_a_second_report_of_the_same_failure_counts_once() -> None:
    run = training(3, 5)
    breaks(run, 1, step=5)
    assert run.state.phase is Phase.FORMING
    forms = len(run.all(Form))
    run.stopped(1, StopReason.DEVICE, 5, held=[], error=BROKEN)
    assert len(run.all(Form)) == forms
    assert len(run.records("worker_leaving")) == 1
