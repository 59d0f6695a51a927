"""Causes of the deaths of Ray's workers, which Ray itself mostly does not report."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import RunFailed
from tests.actors.process.kernels import kernel_tells_endings
from tests.ray.leftovers import wait_until
from tests.ray.pacing import PATIENT_S
from tests.training.harness import GptTask, samples

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS, MICROBATCHES = 8, 4


def leave() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: list[Callable[[], None]] = [leave, crash, killed]


def is_watched() -> bool:
    """Whether an agent has a pidfd of this process: it starts when the first worker of its node is ready."""
    own = f"Pid:\t{os.getpid()}\n"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::Agent"):
                for info in (process / "fdinfo").iterdir():
                    if own in info.read_text():
                        return True
    return False


class DiesInTurn(GptTask):
    """Workers that come to their sixth loss end in these ways, one in each."""

    def __init__(self, folder: Path, ways: list[Callable[[], None]]) -> None:
        self._folder, self._ways, self._calls = str(folder), ways, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        self._calls += 1
        if self._calls == 6:
            for number, way in enumerate(self._ways):
                with contextlib.suppress(FileExistsError):
                    Path(self._folder, f"way-{number}").touch(exist_ok=False)
                    wait_until(is_watched, "the watch of this node")
                    sys.stderr.write(f"words before death {number}\n")
                    way()
        return super().loss(model, batch)


def trainer(folder: Path, task: rs.Task, workers: int, **failure: object) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=task,
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, workers)),
        run=rs.RunConfig(
            name="deaths",
            storage_path=str(folder),
            max_steps=STEPS,
            failure=rs.FailureConfig(hang_timeout_s=PATIENT_S, **failure),  # type: ignore[arg-type]  # some of its fields
        ),
    )


def entries(result: rs.Run, kind: str) -> list[dict[str, object]]:
    return [dict(fields) for _, found, fields in result.entries(0) if found == kind]


def numbers_in(stderr: str) -> list[int]:
    """The numbers of the ways of dying that a worker wrote before it took them."""
    return [number for number in range(len(WAYS)) if f"words before death {number}" in stderr]


def test_each_death_reads_differently_and_has_the_last_words_of_its_worker(tmp_path: Path) -> None:
    run = trainer(tmp_path, DiesInTurn(tmp_path, WAYS), 3).start()
    run.wait(240)
    lost = {fields["worker"]: fields["reason"] for fields in entries(run, "worker_lost")}
    assert {entry["worker"] for entry in entries(run, "worker_died")} == lost.keys(), lost
    died = {numbers_in("\n".join(entry["stderr"]))[0]: entry for entry in entries(run, "worker_died")}  # type: ignore[arg-type]  # lines
    by_signal = "SIGKILL" if kernel_tells_endings() else ""  # it leaves no other sign
    endings = {number: (entry["status"], entry["signal"]) for number, entry in died.items()}
    assert endings == {0: (3, ""), 1: (None, "SIGSEGV"), 2: (None, by_signal)}
    for entry in died.values():
        assert str(entry["stderr_file"]).endswith(".err")
        assert entry["phase"] in ("forward", "prove")
    assert "Segmentation fault" in "\n".join(died[1]["stderr"])  # type: ignore[arg-type]  # lines


@pytest.mark.long
def test_a_task_that_always_ends_its_workers_ends_the_run_with_status_place_and_last_words(tmp_path: Path) -> None:
    run = trainer(tmp_path, DiesInTurn(tmp_path, [leave] * 9), 2, max_same_deaths=2).start()
    with pytest.raises(
        RunFailed, match=r"exited with status 3, in (forward|prove) of step \d: the run cannot get past"
    ) as raised:
        run.wait(240)
    assert "words before death" in str(raised.value)
