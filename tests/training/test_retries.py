"""A step whose task raised is retried with other workers for its microbatches: the same bits, and a journal entry."""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import TaskError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, SmallTask, train

pytestmark = pytest.mark.procs
STEPS = 3


class Fails(SmallTask):
    """Raises MemoryError in step 2, at one microbatch: once, or on every worker that computes it."""

    def __init__(self, folder: Path, *, always: bool) -> None:
        self._folder, self._always, self._calls = str(folder), always, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        self._calls += 1
        found = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
        failed = Path(self._folder, "failed")
        with contextlib.suppress(FileExistsError):
            if self._calls == 5:  # the second in step 2, of two microbatches each: step 1 and its proof take three
                with failed.open("x") as file:
                    file.write(found)
                Path(self._folder, f"first-{os.getpid()}").touch()
                raise MemoryError("no room for 2 GB")
        with contextlib.suppress(FileNotFoundError):
            if failed.read_text() == found:
                Path(self._folder, f"again-{os.getpid()}").touch()
                if self._always:
                    raise MemoryError("no room for 2 GB")
        return super().loss(model, batch)


@cache
def undisturbed(microbatches: int) -> Outcome:
    return train(1, task=SmallTask(), steps=STEPS, microbatches=microbatches)


def retried(workers: int, task: Fails, **settings: Any) -> Outcome:
    """The outcome with two microbatches for each worker, of which a step may be retried once."""
    return train(workers, task=task, steps=STEPS, microbatches=2 * workers, retries=1, **settings)


def pids(folder: Path, name: str) -> set[int]:
    return {int(found.name.removeprefix(f"{name}-")) for found in folder.glob(f"{name}-*")}


IN_GROUPS: dict[str, Any] = {"shards": 2}
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {}),
    (4, IN_GROUPS),
    (4, {"engine": rs.EngineConfig(accumulation="local")}),
]


@pytest.mark.parametrize(("workers", "settings"), tried_each_time([(2, {})], SETTINGS))
def test_the_retry_runs_on_another_worker_with_the_same_bits_and_the_error_is_on_record(
    workers: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    outcome = retried(workers, Fails(tmp_path, always=False), **settings)
    first, again = pids(tmp_path, "first"), pids(tmp_path, "again")
    assert len(first) == 1
    assert again
    assert first.isdisjoint(again)
    (entry,) = outcome.of("task_error")
    assert (entry["step"], entry["phase"], entry["attempt"], entry["retried"]) == (2, "forward", 1, True)
    assert "raised MemoryError: no room for 2 GB" in entry["error"]
    assert 'raise MemoryError("no room for 2 GB")' in entry["traceback"]
    (recovery,) = outcome.of("recovery")
    assert "no room for 2 GB" in recovery["reasons"][0]
    assert outcome.bits == undisturbed(2 * workers).bits


def test_an_error_that_comes_on_every_worker_ends_the_run_and_names_both(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Raised in worker \d on \S+, then in worker \d on ") as raised:
        retried(2, Fails(tmp_path, always=True))
    assert "no room for 2 GB" in raised.value.user_traceback
    assert len(pids(tmp_path, "again")) == 1
    assert pids(tmp_path, "again").isdisjoint(pids(tmp_path, "first"))
