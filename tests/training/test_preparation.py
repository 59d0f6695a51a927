"""The next generation is connected and built in the background: the same bits, and no harm if that fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

import raysharded as rs
from raysharded.actors import preparation
from raysharded.actors.comm.torch_groups import ConnectedGroup
from raysharded.actors.model.build import Wrapped, wrap
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.ids import WorkerId
from tests import patches
from tests.training.harness import (
    Collector,
    Gpt,
    GptTask,
    Outcome,
    SmallTask,
    grouped,
    make_driver,
    make_job,
    make_limits,
    train,
)
from tests.training.test_same_objects import GruTask

STEPS, MICROBATCHES = 12, 4
BUILDING_S = 0.15


class DrawingTask(GptTask):
    """Its constructor disturbs the state of its process: torch's generator, and the default dtype. It notes its calls.

    A buffer that is not part of the state is computed meanwhile, and is used in forward.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def build_model(self) -> nn.Module:
        if self._folder is not None:
            with (self._folder / f"builds of {os.getpid()}").open("a") as calls:
                calls.write(f"{threading.current_thread().name}\n")
        model = Gpt()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1)
        torch.randn(100)
        torch.set_default_dtype(torch.float32)
        model.register_buffer("ramp", torch.linspace(1.0, 2.0, model.ramp.numel()) ** 1.5, persistent=False)
        return model

    def lr_scale(self, step: int) -> float:
        time.sleep(BUILDING_S)  # so that the next group is prepared before the last step
        return super().lr_scale(step)


def wrap_slowly() -> None:
    """In a worker's process: what is prepared in the background takes a while."""

    def slowly(*args: Any) -> Wrapped:
        time.sleep(BUILDING_S)
        return wrap(*args)

    patches.replace(preparation, "wrap", slowly)


def fail_beside() -> None:
    """In a worker's process: nothing can be prepared in the background."""

    def fail(*_: Any) -> Wrapped:
        raise MemoryError("no room for a second one")

    patches.replace(preparation, "wrap", fail)


def die_beside(folder: Path) -> None:
    """In a worker's process: the first worker that prepares in the background is killed."""

    def die(*args: Any) -> Wrapped:
        try:
            (folder / "died").touch(exist_ok=False)
        except FileExistsError:
            return wrap(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    patches.replace(preparation, "wrap", die)


class Slowly:
    """Tokens that take a while to read, so that a step does."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return self._data[index]


@cache
def undisturbed(*, draws: bool) -> Outcome:
    """One worker's outcome, of the task that draws, or of one that does not."""
    return train(1, task=DrawingTask() if draws else SmallTask(), microbatches=MICROBATCHES, steps=STEPS)


class Run(Collector):
    """A run of some workers that are to form other groups after some of its steps."""

    def __init__(
        self,
        folder: Path,
        task: rs.Task,
        groups: dict[int, int | None],
        losses: int = 0,
        prepare: Callable[[], None] = wrap_slowly,
        workers: int = 3,
    ) -> None:
        """`prepare`: called first in each worker's process."""
        Collector.__init__(self)
        self.job = make_job(str(folder / "run"), task=task, microbatches=MICROBATCHES, steps=STEPS)
        self.wanted: dict[int, Grouping | None] = {step: grouped(self.job, size) for step, size in groups.items()}
        self.driver = make_driver(
            self.job,
            make_limits(
                self.job,
                workers,
                min_workers=1,
                prepare_within_s=20.0,
                max_worker_losses=losses,
                grouping=None,
            ),
            self,
            prepare={WorkerId(worker): prepare for worker in range(workers + losses)},
        )
        self.fingerprint = self.driver.run().result_fingerprint

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        Collector.__call__(self, kind, fields)
        if kind == "step" and fields["step"] in self.wanted:
            self.driver.reshard(self.wanted.pop(fields["step"]))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(fields) for found, fields in self.entries if found == kind]

    def assert_same_as_undisturbed(self, *, draws: bool = False) -> None:
        alone = undisturbed(draws=draws)
        assert repr([self.numbers[step] for step in range(1, STEPS + 1)]) == repr(list(alone.numbers))
        assert self.fingerprint == alone.fingerprint


@pytest.mark.procs
def test_what_is_prepared_in_the_background_changes_no_bit_and_calls_no_code_of_the_task(tmp_path: Path) -> None:
    run = Run(tmp_path, DrawingTask(tmp_path), {2: 1, 6: None}, workers=2)
    assert run.of("preparation_failed") == []
    assert ["prepared_s" in fields for fields in run.of("generation")] == [False, True, True]
    assert all(fields["prepared_s"] >= BUILDING_S for fields in run.of("generation")[1:])
    assert [fields["source"] for fields in run.of("generation")[1:]] == ["memory", "memory"]
    assert [fields["step"] for fields in run.of("step")] == list(range(1, STEPS + 1))
    run.assert_same_as_undisturbed(draws=True)
    builds = [calls.read_text().splitlines() for calls in tmp_path.glob("builds of *")]
    assert [len(threads) for threads in builds] == [3, 3]  # at the start, for the run, and for the first weights
    assert all(threads[1:] == ["compute_0"] * 2 for threads in builds)


@pytest.mark.procs
@pytest.mark.long  # `test_same_objects.py` has the same model, in one process
def test_scalars_and_weights_that_a_module_lists_are_prepared_while_the_model_computes_with_others(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, GruTask(), {2: 1, 6: None})
    assert run.of("preparation_failed") == []
    assert ["prepared_s" in fields for fields in run.of("generation")] == [False, True, True]
    alone = train(1, task=GruTask(), microbatches=MICROBATCHES, steps=STEPS)
    assert repr([run.numbers[step] for step in range(1, STEPS + 1)]) == repr(list(alone.numbers))
    assert run.fingerprint == alone.fingerprint


@pytest.mark.procs
def test_a_preparation_that_fails_is_in_the_journal_and_the_change_is_made_without_it(tmp_path: Path) -> None:
    run = Run(tmp_path, SmallTask(), {2: 1}, prepare=fail_beside, workers=2)
    (failed,) = run.of("preparation_failed")
    assert "no room for a second one" in failed["reason"]
    assert ["prepared_s" in fields for fields in run.of("generation")] == [False, False]
    assert [fields["step"] for fields in run.of("step")] == list(range(1, STEPS + 1))
    run.assert_same_as_undisturbed()


@pytest.mark.procs
def test_a_worker_that_dies_while_it_prepares_costs_no_more_than_any_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, SmallTask(), {2: 1}, losses=1, prepare=partial(die_beside, tmp_path), workers=2)
    assert (tmp_path / "died").exists()
    assert len(run.of("worker_lost")) == 1
    assert "prepared_s" not in run.of("generation")[1]
    assert {fields["source"] for fields in run.of("generation")[1:]} == {"memory"}
    run.assert_same_as_undisturbed()


def test_a_group_that_was_made_beside_another_becomes_the_default_one_of_torch() -> None:
    def gloo(name: str) -> tuple[Any, Any]:
        store = PrefixStore(name, HashStore())
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, 0, 1, options), store

    first_store = HashStore()
    dist.init_process_group("gloo", store=first_store, rank=0, world_size=1)
    try:
        backend, store = gloo("next")
        made = ConnectedGroup(backend, "next", store, 0, 1, torch.device("cpu"))
        mesh = made.mesh("data")
        assert mesh.get_group() is made.group
        with pytest.raises(RuntimeError, match="not closed"):
            made.make_default()
        dist.destroy_process_group()
        made.make_default()
        assert dist.group.WORLD is made.group
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert mesh.get_group() is made.group
        values = torch.ones(3)
        dist.all_reduce(values)
        assert values.tolist() == [1.0, 1.0, 1.0]
        assert dist.get_process_group_ranks(dist.new_group([0])) == [0]
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
