"""A step whose task raised is retried with other workers for its microbatches: the same bits, and a journal entry."""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import TaskError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, SmallTask, samples, train

pytestmark = pytest.mark.procs
STEPS, MICROBATCHES = 3, 8


class Fails(SmallTask):
    """Raises MemoryError in step 2, at one microbatch: once, or on every worker that computes it."""

    def __init__(self, folder: Path, *, always: bool) -> None:
        self._folder, self._always, self._calls = str(folder), always, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        self._calls += 1
        found = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
        failed = Path(self._folder, "failed")
        with contextlib.suppress(FileExistsError):
            if self._calls == 5:  # in step 2: step 1 and its proof take three
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
def undisturbed() -> Outcome:
    return train(1, task=SmallTask(), steps=STEPS, microbatches=MICROBATCHES, data=samples())


def pids(folder: Path, name: str) -> set[int]:
    return {int(found.name.removeprefix(f"{name}-")) for found in folder.glob(f"{name}-*")}


IN_GROUPS: dict[str, object] = {"shards": 2}
SETTINGS: list[dict[str, object]] = [{}, IN_GROUPS, {"engine": rs.EngineConfig(accumulation="local")}]


@pytest.mark.parametrize("settings", tried_each_time([IN_GROUPS], SETTINGS))
def test_the_retry_runs_on_another_worker_with_the_same_bits_and_the_error_is_on_record(
    settings: dict[str, object], tmp_path: Path
) -> None:
    task = Fails(tmp_path, always=False)
    outcome = train(4, task=task, steps=STEPS, microbatches=MICROBATCHES, data=samples(), retries=1, **settings)  # type: ignore[arg-type]
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
    assert outcome.bits == undisturbed().bits


def test_an_error_that_comes_on_every_worker_ends_the_run_and_names_both(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Raised in worker \d on \S+, then in worker \d on ") as raised:
        train(3, task=Fails(tmp_path, always=True), steps=STEPS, microbatches=MICROBATCHES, data=samples(), retries=1)
    assert "no room for 2 GB" in raised.value.user_traceback
    assert len(pids(tmp_path, "again")) == 1
    assert pids(tmp_path, "again").isdisjoint(pids(tmp_path, "first"))
