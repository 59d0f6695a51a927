"""Workers whose GPU fails: they leave, hold their memory until the others have formed, and the GPU is remembered."""

from __future__ import annotations

from raysharded.driver.state.commands import End, Form, KillWorker, StartWorker
from raysharded.driver.state.events import Ready
from raysharded.driver.state.state import Phase
from raysharded.errors import DeviceFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, StopReason, WorkerInfo
from tests.driver.scripted import Run, of, training

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


def test_what_workers_with_dead_gpus_alone_hold_makes_them_members_again() -> None:
    run = training(2, 5)
    breaks(run, 0, 1, step=5)
    spec = run.newest_form()
    assert set(spec.members) == {0, 1}
    assert set(spec.failed_devices) == {0, 1}, "only now they may end themselves"


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
