"""Errors of a device: those of a dead context, those of one call, and those of the task."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raysharded.actors.device import accelerator
from raysharded.actors.device.device_errors import device_error_in, drain, failure_of, require_device, warm_up
from raysharded.actors.process import environment
from raysharded.actors.process.stop_reason import Ends, ending_of
from raysharded.actors.task_calls.task_errors import naming
from raysharded.errors import CollectiveAborted, DeviceFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import StopReason
from tests.actors.device.communicator_double import DoubleAccelerator

CPU = torch.device("cpu")
TEXT = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


class Dying(DoubleAccelerator):
    """A device whose context may be dead: then each call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dead = False
        self.reported: tuple[str, ...] = ()
        self.on_call = self._fail

    def complaints(self, device: torch.device) -> tuple[str, ...]:
        return self.reported

    def _fail(self, call: str) -> None:
        if self.is_dead:
            raise torch.AcceleratorError(TEXT)


@pytest.fixture
def device() -> Iterator[Dying]:
    found = Dying()
    undo = accelerator.use(found)
    yield found
    undo()


def raised_in_the_task(error: BaseException) -> BaseException:
    """The error as the boundary to the task's code raises it."""

    def loss() -> None:
        try:
            raise error
        except RuntimeError as cause:
            raise ValueError("wrapped by the task") from cause

    try:
        with naming("Task.loss in step 3", "loss"):
            loss()
    except (TaskError, DeviceFailed) as found:
        return found
    raise AssertionError("the boundary raises it")


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dead_context_is_a_reason_that_blames_neither_the_task_nor_the_peers(
    device: Dying, wrapped: bool, interrupted: bool
) -> None:
    device.is_dead = True
    error: BaseException = torch.AcceleratorError(TEXT)
    found = ending_of(raised_in_the_task(error) if wrapped else error, interrupted=interrupted, device=CPU)
    assert found.reason is StopReason.DEVICE
    assert isinstance(found.error, DeviceFailed)
    assert "CUDA error: device-side assert triggered" in str(found.error)
    assert "CUDA_LAUNCH_BLOCKING" not in str(found.error)


def test_a_communicator_that_fails_because_the_context_is_dead_is_the_devices_failure(device: Dying) -> None:
    device.is_dead = True
    error = CollectiveAborted("forming g1 of 2 workers")
    error.__cause__ = RuntimeError(TEXT)
    assert ending_of(error, interrupted=False, device=CPU).reason is StopReason.DEVICE


def test_an_error_of_one_call_is_the_tasks_where_the_device_still_works(device: Dying) -> None:
    found = ending_of(raised_in_the_task(torch.AcceleratorError(TEXT)), interrupted=False, device=CPU)
    assert found.reason is StopReason.TASK_ERROR
    assert isinstance(found.error, TaskError)
    assert "Task.loss in step 3" in str(found.error)
    assert "wrapped by the task" in found.error.user_traceback


def test_a_lack_of_memory_is_no_failure_of_the_device() -> None:
    assert device_error_in(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == ""


def test_a_device_that_never_finishes_fails_where_it_must_finish(device: Dying) -> None:
    device.reached.clear()
    assert failure_of(CPU, 0.01, must_finish=False) == ""
    assert "more than 0.01 s" in failure_of(CPU, 0.01)


def test_a_device_is_required_before_a_generation_is_formed(device: Dying) -> None:
    require_device(CPU)
    device.is_dead = True
    with pytest.raises(DeviceFailed, match="does not work in this process: CUDA error"):
        require_device(CPU)


def test_a_device_whose_earlier_work_never_ends_is_the_reason_of_the_failure(
    device: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its current stream is free: the aborted work is on another one. No second try finds it."""
    release = threading.Event()
    monkeypatch.setattr(device, "drain", lambda _: release.wait())
    monkeypatch.setattr("raysharded.actors.device.device_errors.drain", lambda where: drain(where, 0.01))
    with pytest.raises(DeviceFailed, match="earlier work takes more than") as raised:
        require_device(CPU)
    release.set()
    found = ending_of(raised.value, interrupted=True, device=CPU)
    assert found.reason is StopReason.DEVICE
    assert "earlier work" in str(found.error)


def test_a_device_that_fails_as_it_is_drained_is_described_with_its_error(
    device: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.device) -> None:
        device.is_dead = True
        raise torch.AcceleratorError(TEXT)

    monkeypatch.setattr(device, "drain", fail)
    with pytest.raises(DeviceFailed, match="does not work in this process: CUDA error: device-side assert triggered"):
        require_device(CPU)


def test_a_device_that_fails_as_it_gives_memory_back_is_found_where_it_is_required(device: Dying) -> None:
    def fail(call: str) -> None:
        device.is_dead = device.is_dead or call == "release_freed_memory"
        device._fail(call)

    device.on_call = fail
    environment.free_memory(CPU, twice=False)
    assert device.is_dead
    with pytest.raises(DeviceFailed, match="CUDA error"):
        require_device(CPU)


def test_a_device_whose_memory_others_have_works(device: Dying) -> None:
    def fail(_: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    device.on_call = fail
    assert failure_of(CPU) == ""


def test_a_dead_context_frees_no_memory_that_it_used(device: Dying) -> None:
    """Not even that of frames which the error has left, and of buffers that were being filled."""
    ends = Ends(WorkerId(3))

    def copy() -> weakref.ref[torch.Tensor]:
        values = torch.zeros(3)
        used = weakref.ref(values)
        try:
            device.is_dead = True
            device.record(None)
        except RuntimeError as error:
            ends.of(error, CPU, interrupted=False)
        return used

    used = copy()
    assert ends.device_failure is not None
    buffer = torch.zeros(3)
    filled = weakref.ref(buffer)
    ends.keep_if_failed(None, [buffer])
    del buffer
    gc.collect()
    assert used() is not None
    assert filled() is not None


def test_a_device_that_works_keeps_nothing(device: Dying) -> None:
    ends, buffer = Ends(WorkerId(3)), torch.zeros(3)
    freed = weakref.ref(buffer)
    ends.keep_if_failed(buffer)
    del buffer
    assert freed() is None


def test_the_failure_of_a_device_carries_the_tasks_traceback(device: Dying) -> None:
    device.is_dead = True
    found = ending_of(raised_in_the_task(torch.AcceleratorError(TEXT)), interrupted=False, device=CPU)
    assert isinstance(found.error, DeviceFailed)
    assert "in loss" in found.error.user_traceback
    copied = pickle.loads(pickle.dumps(found.error))
    assert (str(copied), copied.user_traceback) == (str(found.error), found.error.user_traceback)


def test_memory_is_given_back_only_after_the_device_has_done_all_work(device: Dying) -> None:
    calls: list[str] = []
    device.on_call = calls.append
    device.reached.clear()
    freeing = threading.Thread(target=lambda: environment.free_memory(CPU, twice=False))
    freeing.start()
    while "drain" not in calls:
        assert freeing.is_alive()
    assert "release_freed_memory" not in calls
    device.reached.set()
    freeing.join()
    assert calls == ["drain", "release_freed_memory"]


def test_memory_of_a_device_that_never_finishes_is_not_given_back(
    device: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    device.on_call = calls.append
    device.reached.clear()
    assert not drain(CPU, 0.01)
    monkeypatch.setattr(environment, "drain", lambda _: drain(CPU, 0.01))
    environment.free_memory(CPU, twice=False)
    device.reached.set()
    assert "release_freed_memory" not in calls


def test_a_failed_device_is_described_with_what_its_driver_reported(device: Dying) -> None:
    device.is_dead, device.reported = True, ("Xid 94 (an uncorrectable memory error, contained)", "lower clocks")
    sentence = "It reported Xid 94 (an uncorrectable memory error, contained); lower clocks"
    found = ending_of(torch.AcceleratorError(TEXT), interrupted=False, device=CPU)
    assert found.reason is StopReason.DEVICE
    assert str(found.error).endswith(f"device-side assert triggered. {sentence}")
    with pytest.raises(DeviceFailed, match=r"It reported Xid 94"):
        require_device(CPU)


class Products(TorchDispatchMode):
    """Notes the operations that are computed, and their dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = set[tuple[str, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.add((str(func), result.dtype))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_is_warmed_up_with_products_of_the_dtype_and_their_backward(device: Dying, dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    with Products() as products:
        warm_up(CPU, dtype)
    names = {name for name, found in products.found if found == dtype}
    assert any("mm" in name for name in names)
    assert any("gelu_backward" in name for name in names)
    assert torch.equal(torch.get_rng_state(), before)
    device.is_dead = True
    warm_up(CPU, dtype)  # forming finds it


def test_a_host_is_not_warmed_up() -> None:
    with Products() as products:
        warm_up(CPU, torch.float32)
    assert not products.found
