"""The device is read at most twice in a step, and never between a forward and its backward."""

from __future__ import annotations

import ast
import math
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import raysharded
import raysharded as rs
from raysharded.actors.device import accelerator
from raysharded.actors.device.device_waits import on_device, on_host
from raysharded.actors.numerics.grad_norm import norm_from_words, square_sum_words
from raysharded.actors.step import forward_backward
from raysharded.actors.step.forward_backward import Results
from raysharded.actors.step.step import Step
from raysharded.task import Loss, TrainFunction
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.actors.device.host_accelerator import HostAccelerator
from tests.cases import tried_each_time
from tests.session.loops import Loop
from tests.training.harness import Gpt, GptTask, train


@pytest.fixture(scope="module")
def device() -> Iterator[HostAccelerator]:
    found = HostAccelerator()
    undo = accelerator.use(found)
    yield found
    undo()


def words_on(gradients: list[torch.Tensor], *, device: bool) -> tuple[list[int], bool]:
    """The words of a norm, as an accelerator or as a host adds them."""
    undo = accelerator.use(HostAccelerator()) if device else accelerator.use(type(accelerator.accelerator())())
    try:
        words, finite = square_sum_words(gradients)
    finally:
        undo()
    return words.tolist(), finite


@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
    spread=st.integers(0, 300),
    scale=st.integers(-160, 150),
)
@settings(deadline=None)
def test_a_device_adds_the_same_words_as_a_host(seed: int, sizes: list[int], spread: int, scale: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        torch.randn(size, generator=generator, dtype=torch.float64)
        * 10.0 ** (scale - torch.rand(size, generator=generator, dtype=torch.float64) * spread)
        for size in sizes
    ]
    assert words_on(gradients, device=True) == words_on(gradients, device=False)


@pytest.mark.parametrize("value", [0.0, 5e-324, 2.0**-538, 1.0, 1e154, math.inf, math.nan])
def test_extreme_values_give_the_same_words_on_a_device(value: float) -> None:
    gradients = [torch.tensor([value, 0.0, value / 3], dtype=torch.float64), torch.ones(3)]
    assert words_on(gradients, device=True) == words_on(gradients, device=False)


def test_many_blocks_do_not_overflow(device: HostAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digits have 40 bits and more each."""
    gradient = torch.full((1 << 18,), 0.999, dtype=torch.float64)
    monkeypatch.setattr("raysharded.actors.numerics.grad_norm.BLOCK", {True: 1 << 10, False: 1 << 10})
    words, finite = square_sum_words([gradient] * 8)
    assert finite
    assert norm_from_words(words.tolist()) == pytest.approx(0.999 * math.sqrt(8 << 18), rel=1e-11)


@pytest.mark.parametrize("number", [1, 300])
def test_a_norm_reads_the_device_once_for_any_number_of_tensors(device: HostAccelerator, number: int) -> None:
    device.pinned_bytes.clear()
    square_sum_words([torch.randn(5000) for _ in range(number)])
    assert len(device.pinned_bytes) == 1


CPU = torch.device("cpu")


class OnMeta(HostAccelerator):
    """Tensors without contents count as the device's."""

    def has(self, device: torch.device) -> bool:
        return device.type == "meta"


@pytest.fixture
def on_meta() -> Iterator[None]:
    undo = accelerator.use(OnMeta())
    yield
    undo()


class Copies(TorchDispatchMode):
    """Copies between kinds of devices: those to a device for which the host waits, those to the host for which not.

    "meta" stands for the device. A copy from there gives zeros.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) == "aten._to_copy.default" and args[0].device.type == "meta" and kwargs.get("device") == CPU:
            if kwargs.get("non_blocking"):
                self.found.append(f"{func} to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        if "copy" in str(func) and isinstance(result, torch.Tensor):
            devices = {one.device.type for one in (*args, result) if isinstance(one, torch.Tensor)}
            if len(devices) > 1 and not kwargs.get("non_blocking"):
                self.found.append(str(func))
        if "_local_scalar_dense" in str(func) and args[0].device.type == "meta":
            self.found.append(str(func))
        return result


@pytest.mark.usefixtures("on_meta")
def test_a_number_of_the_device_beside_a_loss_on_the_host_is_copied_before_it_is_read() -> None:
    results = Results("Task.loss")
    with Copies() as copies:
        results.add(0, Loss(torch.tensor(1.0), 2, {"a": (torch.empty((), device="meta"), 1.0)}))
    assert copies.found == []
    assert results.by_microbatch() == {0: [1.0, 2.0, 0.0, 1.0]}


@pytest.mark.usefixtures("on_meta")
def test_results_on_the_device_are_read_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_backward, "on_host", lambda values: torch.zeros(values.shape, dtype=values.dtype))
    results = Results("Task.loss")
    for number in (1, 2):
        results.add(number, Loss(torch.empty((), device="meta"), 2))
        assert results.by_microbatch() == {index: [0.0, 0.0] for index in range(1, number + 1)}


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(("source", "target"), [("meta", "cpu"), ("cpu", "meta")])
def test_the_host_waits_for_copies_of_a_batch_to_itself_alone(source: str, target: str) -> None:
    with Copies() as copies:
        found = on_device(torch.zeros(3, device=source), torch.device(target))
    assert (found.device.type, copies.found) == (target, [])


@pytest.mark.usefixtures("on_meta")
def test_a_microbatchs_results_are_noted_without_a_wait_for_its_forward() -> None:
    results, loss = Results("Task.loss"), Loss(torch.empty((), device="meta"), 4096, {"a": (1.0, torch.tensor(2.0))})
    with Copies() as copies:
        results.note_names(loss)
        results.add(0, loss)
    assert copies.found == []


class Counting(DoubleAccelerator):
    """Writes a line for each call, for each read of the device, and for each step that is committed, into a file of its
    process. Batches take page-locked memory, too."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file = Path(folder) / str(os.getpid())
        self.on_call = self.note

    def pinned(self, size_bytes: int) -> torch.Tensor:
        if sys._getframe(1).f_code is on_host.__code__:
            self.note("read")
        if threading.current_thread().name.startswith("pages"):
            self.note("region")
        return super().pinned(size_bytes)

    def note(self, call: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{call}\n")


def counting(folder: str) -> None:
    """In a worker's process: count the reads."""
    device, commit = Counting(folder), Step.commit

    def noted(step: Step) -> None:
        device.note("commit")
        commit(step)

    setattr(Step, "commit", noted)  # noqa: B010 - a function for another
    accelerator.use(device)


class Deeper(GptTask):
    """The tests' GPT with three times the layers."""

    def build_model(self) -> torch.nn.Module:
        return Gpt(layers=3)


RUNS: dict[str, tuple[int, int, rs.Task]] = {
    "2 microbatches": (2, 1, GptTask()),
    "16 microbatches": (16, 1, GptTask()),
    "a deeper model": (2, 1, Deeper()),
    "a deeper model with 8 microbatches": (8, 1, Deeper()),
    "2 workers": (4, 2, GptTask()),
    "a loop of a user": (2, 2, TrainFunction(Loop())),
}
"""Name -> microbatches, workers, and task."""


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(["a deeper model with 8 microbatches", "a loop of a user"], RUNS))
def test_a_step_reads_the_device_at_most_twice(tmp_path: Path, name: str) -> None:
    """Between the fourth step and the eighth, in which buffers and hooks are compared."""
    microbatches, workers, task = RUNS[name]
    prepare = partial(counting, str(tmp_path))
    train(workers, use_gpu=True, task=task, steps=7, microbatches=microbatches, prepare=prepare)
    logs = [file.read_text().split() for file in tmp_path.iterdir()]
    assert len(logs) == workers
    for calls in logs:
        ends = [index for index, call in enumerate(calls) if call == "commit"]
        assert len(ends) == 7
        assert [calls[one:other].count("read") for one, other in pairwise(ends[4:])] == [2, 2]
        assert calls.count("region") == 1, "the memory of a worker's buffers is allocated beside its start"


ACTORS = Path(raysharded.__file__).parent / "actors"
FOLDERS = ("step", "reduction", "numerics", "optimizer", "shards")
"""Packages whose code runs in a step, or between two of them."""
READS = {"item", "cpu", "tolist", "numpy", "nonzero"}
"""Methods of a tensor that wait for its device. `float`, `int` and `bool` of one do, too: no syntax shows it."""
HOST = "host memory: an array, a group's sum, or a buffer"
POLLED = "read by `on_host`, which polls"
NUMBER = "a number or a tensor of the host: it was not computed on a device"
BUILT = "once, while a generation is built, on tensors that no collective has made"
REQUESTED = "at the user's request, behind a step: its collectives have been read"
WITH_READS = {
    "numerics/column_sums: ByMicrobatch.read": HOST,
    "numerics/column_sums: OnGrid._read_wide": HOST,
    "numerics/column_sums: OnGrid.read": HOST,
    "numerics/column_sums: _digest_of": HOST,
    "numerics/exact_sums: Grid._add": HOST,
    "numerics/grad_norm: _DeviceDigits.add_to": POLLED,
    "numerics/grad_norm: _add_block": "of a gradient in host memory: those of a device go to `_DeviceDigits`",
    "numerics/step_consensus: agree": HOST,
    "numerics/step_consensus: microbatch_losses": HOST,
    "numerics/summation_tree: tree_sums": HOST,
    "optimizer/kept_state: KeptState.load": BUILT,
    "optimizer/registered_state: _gathered": HOST,
    "optimizer/inner_optimizers: bits_of": BUILT,
    "shards/block_gather: _Piece.__init__": HOST,
    "shards/device_state: DeviceState.carry": BUILT,
    "shards/initial_weights: read_into": HOST,
    "shards/parity: _Round._encode": HOST,
    "shards/pinned_arena: PinnedArena._tensor": HOST,
    "shards/rebuild: _Rebuilding._needed": HOST,
    "shards/restore: _from_lowest": HOST,
    "shards/restore: _read": HOST,
    "shards/restore: _share": HOST,
    "shards/saver: Saver._written": HOST,
    "shards/saver: _pieces": HOST,
    "shards/saver: fingerprint_of": HOST,
    "shards/transfer: _parts": HOST,
    "shards/transfer: exchange": HOST,
    "shards/transfer: kept_buffers": HOST,
    "shards/whole_tensors: _sizes": HOST,
    "shards/whole_tensors: gather_tensors": HOST,
    "shards/whole_tensors: whole_weights": REQUESTED,
    "step/collation: Collator.training_batch": HOST,
    "step/evaluation: _digests": HOST,
    "step/forward_backward: Results._tensor_of": NUMBER,
    "step/forward_backward: Results.by_microbatch": HOST,
    "step/forward_backward: Results.values": POLLED,
    "step/gradient: StepGradient.compute": HOST,
    "step/proofs/attribute_proof: AttributeProof._total": HOST,
    "step/proofs/evaluation_proof: EvaluationProof._exchanged": HOST,
    "step/proofs/first_step_proof: Proof._exchange": HOST,
    "step/meetings: Meetings._begin.sums": HOST,
    "step/update: StepUpdate._not_finite": HOST,
    "step/update: located": HOST,
}
"""Function with such a call -> the reason that no step waits there for a device, or that the wait is known as one."""


def functions_with_reads() -> Iterator[str]:
    """Each function of `FOLDERS` with such a call, as module and qualified name."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, (*path, child.name))
                continue
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in READS:
                yield path
            yield from walk(child, path)

    for folder in FOLDERS:
        for file in sorted((ACTORS / folder).rglob("*.py")):
            module = file.relative_to(ACTORS).with_suffix("").as_posix()
            for path in walk(ast.parse(file.read_text()), ()):
                yield f"{module}: {'.'.join(path)}"


def test_every_call_that_may_read_the_device_has_a_reason() -> None:
    assert set(functions_with_reads()) == WITH_READS.keys(), "read through `on_host`, or give the reason here"
