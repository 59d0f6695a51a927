from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import raysharded as rs
from raysharded.actors.device import accelerator
from raysharded.actors.shards import device_state
from raysharded.actors.shards.async_copy import AsyncHostCopy
from tests import patches
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.cases import tried_each_time
from tests.training.harness import SEQUENCE, Outcome, SmallTask, samples, train

CPU = torch.device("cpu")
_TOO_LATE_S = 5.0
"""Steps take a hundredth of it."""


class LateFiller:
    """Copies only when the training thread waits for it: an earlier reader gets nothing, and if that thread changes the
    source before, the copy shows it."""

    def __init__(self, device: torch.device) -> None:
        pass

    def begin(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> LateCopy:
        for view in into:
            view.view(-1).view(torch.uint8).fill_(0xAB)
        return LateCopy(into, sources)


class LateCopy:
    def __init__(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(into, sources, strict=True))
        self._lock, self._asked = threading.Lock(), threading.Event()

    def wait(self) -> None:
        if threading.current_thread().name.startswith("compute"):
            self._asked.set()
        self._asked.wait(_TOO_LATE_S)
        with self._lock, torch.no_grad():
            for view, source in self._pairs:
                view.copy_(source)
            self._pairs = []


def copy_late() -> None:
    """In a worker's process: use the late filler."""
    patches.replace(device_state, "AsyncHostCopy", LateFiller)


def test_a_copy_is_of_what_was_there_when_it_was_begun_and_is_there_after_waiting() -> None:
    sources = [torch.arange(1000.0), torch.ones(3, 5, dtype=torch.bfloat16, requires_grad=True), torch.tensor(7)]
    into = [torch.zeros_like(source) for source in sources]
    filling = AsyncHostCopy(CPU).begin(into, [source.detach() for source in sources])
    filling.wait()
    filling.wait()
    assert all(torch.equal(view, source) for view, source in zip(into, sources, strict=True))
    assert not any(view.requires_grad for view in into)


class Operations(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_device_copies_any_number_of_tensors_in_one_operation_and_records_one_event() -> None:
    """The training thread launches them: it launches nothing else meanwhile."""
    device = DoubleAccelerator()
    calls: Counter[str] = Counter()
    device.on_call = lambda call: calls.update([call])
    undo = accelerator.use(device)
    try:
        sources = [torch.full((3,), float(number)) for number in range(300)]
        into = [torch.zeros(3) for _ in sources]
        with Operations() as operations:
            AsyncHostCopy(CPU).begin(into, sources).wait()
    finally:
        undo()
    assert operations.counts == {"aten._foreach_copy_.default": 1}
    assert calls["record"] == 1
    assert all(torch.equal(view, source) for view, source in zip(into, sources, strict=True))


def test_a_worker_may_have_nothing_to_copy() -> None:
    AsyncHostCopy(CPU).begin([], []).wait()


def test_an_error_of_a_copy_is_raised_in_every_waiter() -> None:
    filling = AsyncHostCopy(CPU).begin([torch.zeros(3)], [torch.zeros(4)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            filling.wait()


SETTINGS: dict[str, Any] = {
    "steps": 4,
    "microbatches": 3,
    "save_every": 2,
    "task": SmallTask(),
    "data": samples(),
}
ENGINES = {
    "mirrors": rs.EngineConfig(),
    "no mirrors": rs.EngineConfig(mirrors=False),
    "parity": rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1))),
    "audited": rs.EngineConfig(audit_every_steps=2),
    "audited, no mirrors": rs.EngineConfig(audit_every_steps=2, mirrors=False),
}


@cache
def alone() -> Outcome:
    """One worker's outcome."""
    return train(1, **SETTINGS)


@pytest.mark.parametrize("kept", tried_each_time(["audited, no mirrors"], ENGINES))
def test_a_run_does_not_depend_on_when_its_snapshots_are_copied(kept: str) -> None:
    late, usual = train(3, engine=ENGINES[kept], prepare=copy_late, **SETTINGS), alone()
    assert late.bits == usual.bits
    assert saved(late) == saved(usual)


def saved(outcome: Outcome) -> dict[int, str]:
    """Step -> fingerprint, of both checkpoints."""
    found = {entry["step"]: entry["fingerprint"] for entry in outcome.of("checkpoint")}
    assert list(found) == [2, 4]
    return found


REDUNDANT = [None, rs.Redundancy(parity=(2, 1))]


class OneRow(rs.Task):
    """A model of one row and an optimizer without state: most workers hold nothing."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(SEQUENCE + 1, 1, bias=False)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-5)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = model(batch.float()).square().mean()
        return squares


def test_workers_that_hold_nothing_take_part() -> None:
    settings: dict[str, Any] = {"task": OneRow(), "data": samples(), "microbatches": 3, "steps": 2}
    assert train(3, **settings).bits == train(1, **settings).bits


@pytest.mark.parametrize("redundancy", tried_each_time(REDUNDANT[:1], REDUNDANT), ids=["mirrors", "parity"])
def test_what_is_left_after_a_loss_does_not_depend_on_when_snapshots_are_copied(
    redundancy: rs.Redundancy | None,
) -> None:
    engine = rs.EngineConfig(redundancy=redundancy)
    late = train(4, engine=engine, kills=[(1, 2, "agree"), (3, 3, "apply")], prepare=copy_late, **SETTINGS)
    assert late.bits == alone().bits
