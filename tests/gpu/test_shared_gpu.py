"""Several workers on one GPU, with collectives through the host: bits, losses of workers, races, waits and memory."""

from __future__ import annotations

import os
import time
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.actors.device.cuda import SETTINGS, Cuda
from raysharded.actors.step.forward_backward import Computer
from tests.forked import in_a_fork
from tests.gpu.shared_gpu import is_first, megabytes, needs, on_measured_gpu, on_sanitized_gpu, on_shared_gpu
from tests.training.harness import VOCABULARY, Gpt, GptTask, Outcome, train

pytestmark = needs(1)
ENGINES = {
    "eager": rs.EngineConfig(),
    "compiled": rs.EngineConfig(compile=True),
    "bfloat16": rs.EngineConfig(param_dtype="bfloat16", activation_checkpointing=True),
}


@cache
def on_one_worker(engine: str) -> Outcome:
    return train(1, use_gpu=True, prepare=on_shared_gpu, engine=ENGINES[engine], steps=4)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_number_of_workers_gives_the_same_bits(engine: str, workers: int) -> None:
    found = train(workers, use_gpu=True, prepare=on_shared_gpu, engine=ENGINES[engine], steps=4)
    assert found.bits == on_one_worker(engine).bits


@pytest.mark.parametrize(
    ("engine", "workers", "phase"),
    [("eager", 2, "backward"), ("eager", 3, "apply"), ("eager", 4, "snapshot"), ("compiled", 3, "backward")],
)
def test_a_killed_worker_changes_no_bit(engine: str, workers: int, phase: str) -> None:
    kills = [(1, 3, phase)]
    found = train(workers, use_gpu=True, prepare=on_shared_gpu, engine=ENGINES[engine], steps=4, kills=kills)
    assert found.bits == on_one_worker(engine).bits
    assert len(found.of("worker_lost")) == 1


class AssertsOnce(GptTask):
    """A kernel's assertion fails once, in the first process whose loss is computed so many times."""

    def __init__(self, marker: Path, call: int) -> None:
        self._marker, self._left = marker, call

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        found = super().loss(model, batch)
        self._left -= 1
        if self._left == 0 and is_first(self._marker):
            torch._assert_async(torch.zeros((), device=batch.device))
        return found


@pytest.mark.parametrize("call", [pytest.param(1, id="first step"), pytest.param(9, id="a later step")])
@pytest.mark.usefixtures("gpu_itself")
def test_a_failed_assertion_of_a_kernel_costs_its_worker_and_changes_no_bit(call: int, tmp_path: Path) -> None:
    marker = tmp_path / "failed"
    task = AssertsOnce(marker, call)
    found = train(3, use_gpu=True, prepare=on_shared_gpu, task=task, steps=4, losses=4)
    assert marker.exists()
    assert found.bits == on_one_worker("eager").bits
    (leaving,) = found.of("worker_leaving")
    assert "CUDA error" in leaving["reason"]


@pytest.mark.usefixtures("gpu_itself")
def test_the_sanitizer_finds_no_race_in_two_steps(tmp_path: Path) -> None:
    notes = tmp_path / "threads"
    train(2, use_gpu=True, prepare=partial(on_sanitized_gpu, notes), steps=2, microbatches=4)
    watched = {line.split()[0] for line in notes.read_text().splitlines()}
    assert len(watched) == 2, "it watched both workers"


def race() -> None:
    """In a separate process: two streams write one tensor, without a wait, under the sanitizer."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    with CUDASanitizerDispatchMode():
        values = torch.zeros(3, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            values.add_(1)


@pytest.mark.usefixtures("gpu_itself")
def test_the_sanitizer_finds_a_race() -> None:
    with pytest.raises(Exception, match="race"):
        in_a_fork(race)


class Unwaiting(GptTask):
    """From the beginning of a loss to the end of its backward, torch raises where the host waits for the GPU."""

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        return super().loss(model, batch)


class Waiting(Unwaiting):
    """Reads its loss between its forward and its backward."""

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        found = super().loss(model, batch)
        assert isinstance(found, rs.Loss)
        found.total.item()
        return found


def until_backward_has_ended() -> None:
    """In a worker's process: as `on_shared_gpu`, and end the mode that `Unwaiting` begins."""
    on_shared_gpu()
    backward = Computer.backward

    def ended(*given: Any, **named: Any) -> None:
        try:
            backward(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(Computer, "backward", ended)  # noqa: B010 - in this process alone


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("gpu_itself")
def test_nothing_waits_for_the_gpu_between_a_forward_and_its_backward(workers: int) -> None:
    found = train(workers, use_gpu=True, prepare=until_backward_has_ended, task=Unwaiting(), steps=4)
    assert found.bits == on_one_worker("eager").bits


@pytest.mark.usefixtures("gpu_itself")
def test_a_wait_between_a_forward_and_its_backward_would_be_seen() -> None:
    with pytest.raises(Exception, match="synchroniz"):
        train(1, use_gpu=True, prepare=until_backward_has_ended, task=Waiting(), steps=2)


def noting_waits(file: Path) -> None:
    """In a worker's process: as `on_shared_gpu`, and write a line for each call in which the host waits for the GPU."""
    on_shared_gpu()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            with file.open("a", encoding="utf-8") as notes:
                notes.write("wait\n")

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")


@pytest.mark.usefixtures("gpu_itself")
def test_the_host_waits_for_the_gpu_at_most_twice_in_a_step(tmp_path: Path) -> None:
    """Between two steps in which buffers and hooks are compared, as they are at intervals."""
    waits = []
    for steps in (5, 7):
        file = tmp_path / f"{steps}"
        file.touch()
        train(1, use_gpu=True, prepare=partial(noting_waits, file), steps=steps)
        waits.append(len(file.read_text().splitlines()))
    assert waits[1] - waits[0] <= 2 * (7 - 5), waits


class Wide(Gpt):
    """Some 50 MB of state, in few tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(VOCABULARY, (4 << 20) // VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        mixed: torch.Tensor = logits + self.wide(logits).mean(-1, keepdim=True)
        return mixed


class WideTask(GptTask):
    """Trains `Wide`."""

    def build_model(self) -> torch.nn.Module:
        return Wide()


def test_memory_after_a_reshard_is_that_of_a_run_without_one(record_property: Any) -> None:
    settings: dict[str, Any] = {"use_gpu": True, "prepare": on_measured_gpu, "task": WideTask(), "steps": 6}
    calm = train(3, **settings).of("step")[-1]["gpu"]
    steps = train(3, kills=[(2, 3, "backward")], **settings).of("step")
    record_property("before", megabytes(steps[0]["gpu"]))
    record_property("after", megabytes(steps[-1]["gpu"]))
    record_property("without a reshard", megabytes(calm))
    spare = 64 << 20
    for name in ("tensor_bytes", "reserved_bytes", "host_bytes"):
        assert steps[-1]["gpu"][name] <= 1.25 * calm[name] + spare, name


GIGABYTE = 1 << 30


def pinned_seconds(settings: dict[str, str]) -> float:
    """In a separate process: the seconds to make and to touch a gigabyte of page-locked memory."""
    os.environ.update(settings)
    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    torch.empty(GIGABYTE, dtype=torch.uint8, pin_memory=True).fill_(1)
    return time.perf_counter() - began


def seconds_in_large_pages() -> float:
    """In a separate process: as `pinned_seconds`, for the memory of a worker's buffers. It is page-locked."""
    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    memory = Cuda().pinned(GIGABYTE)
    took_s = time.perf_counter() - began
    assert memory.is_pinned()
    values = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    memory[: 1 << 20].copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert memory[: 1 << 20].all()
    return took_s


@pytest.mark.usefixtures("gpu_itself")
def test_page_locked_memory_is_made_as_fast_as_without_the_settings(record_property: Any) -> None:
    """The figures count: settings that cost more than twice the time of torch's own are wrong."""
    own = {"PYTORCH_ALLOC_CONF": SETTINGS["PYTORCH_ALLOC_CONF"]}
    plain, ours = in_a_fork(pinned_seconds, {}), in_a_fork(pinned_seconds, own)
    large = in_a_fork(seconds_in_large_pages)
    record_property("1 GB", f"{large:.2f} s, by torch {ours:.2f} s, with torch's own settings {plain:.2f} s")
    assert ours < 2 * plain + 0.2
    assert large < 2 * plain + 0.2
