"""Waits for the device: known to hang detection, and left on abort."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from raysharded.actors.device import accelerator
from raysharded.actors.device.device_waits import copy_on_host, leave_when, numbers_of, on_host
from raysharded.actors.numerics.bit_digest import tensor_digest
from raysharded.actors.numerics.grad_norm import NORM_WORDS, square_sum_words
from raysharded.actors.step.step import Steps
from raysharded.actors.telemetry.stack_probe import look_at
from raysharded.errors import CollectiveAborted
from tests.actors.device.host_accelerator import HostAccelerator


@pytest.fixture
def device() -> Iterator[HostAccelerator]:
    """An accelerator in the place of CUDA."""
    found = HostAccelerator()
    undo = accelerator.use(found)
    yield found
    leave_when(None)
    undo()


def test_a_host_tensor_is_read_without_a_copy() -> None:
    values = torch.arange(3)
    assert on_host(values) is values


def test_values_of_a_device_are_copied_to_pinned_memory(device: HostAccelerator) -> None:
    values = torch.arange(6, dtype=torch.float64).view(2, 3)
    read = on_host(values)
    assert torch.equal(read, values)
    assert read.data_ptr() != values.data_ptr()
    assert device.pinned_bytes == [6 * 8]


def test_values_that_are_kept_leave_pinned_memory(device: HostAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[weakref.ref[torch.UntypedStorage]] = []
    allocate = device.pinned

    def noted(size_bytes: int) -> torch.Tensor:
        found = allocate(size_bytes)
        pinned.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(device, "pinned", noted)
    values = torch.arange(6, dtype=torch.float64).view(2, 3).T
    kept = copy_on_host(values)
    assert kept.is_contiguous()
    assert torch.equal(kept, values)
    assert [ref() for ref in pinned] == [None]


def test_numbers_of_several_tensors_are_one_read(device: HostAccelerator) -> None:
    assert numbers_of([torch.tensor(3), torch.tensor(-1), torch.tensor(7)]) == [3, -1, 7]
    assert numbers_of([]) == []
    assert len(device.pinned_bytes) == 1


def test_integers_among_floats_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        numbers_of([torch.tensor(2**53 + 1), torch.tensor(1.0)])
    assert numbers_of([torch.tensor(2**53 + 1), torch.tensor(True)]) == [2**53 + 1, 1]


def test_values_that_an_abort_let_the_device_reach_are_not_read(device: HostAccelerator) -> None:
    leave_when(lambda: True)
    with pytest.raises(CollectiveAborted, match="while the device finished"):
        on_host(torch.ones(3))


def test_a_digest_of_shards_leaves_on_abort(device: HostAccelerator) -> None:
    values = {"a": torch.arange(5.0), "b": torch.ones(2)}
    steps = cast(Steps, SimpleNamespace(parts=SimpleNamespace(optimizer=SimpleNamespace(written=values))))
    words = [tensor_digest(value).item() for value in values.values()]
    assert Steps.digest(steps, "parameters") == hash(tuple(words))
    device.reached.clear()
    leave_when(lambda: True)
    with pytest.raises(CollectiveAborted):
        Steps.digest(steps, "parameters")


def test_a_norm_that_waits_for_the_device_counts_as_a_wait_for_others(device: HostAccelerator) -> None:
    device.reached.clear()
    found: list[tuple[torch.Tensor, bool]] = []
    thread = threading.Thread(target=lambda: found.append(square_sum_words([torch.ones(10)])))
    thread.start()
    try:
        pause = threading.Event()
        while not (seen := look_at(thread.ident)).waits:
            assert thread.is_alive(), seen.stack
            pause.wait(0.01)
    finally:
        device.reached.set()
        thread.join()
    assert found[0][0].shape == (NORM_WORDS,)


def test_an_abort_leaves_a_wait_for_a_device_that_never_finishes(device: HostAccelerator) -> None:
    device.reached.clear()
    aborted, errors = threading.Event(), list[BaseException]()

    def read() -> None:
        leave_when(aborted.is_set)
        try:
            on_host(torch.ones(3))
        except CollectiveAborted as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    aborted.set()
    thread.join()
    assert "had not finished" in str(errors[0])
