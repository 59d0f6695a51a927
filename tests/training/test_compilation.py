"""Compiled code with inputs of several lengths: the same bits at every size, or an end of the run by name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.compilation.compiled_blocks import Compilation
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.policy import Keep
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from tests.ray.leftovers import wait_until
from tests.training.harness import VOCABULARY, WIDTH, Collector, GptTask, make_driver, make_job, make_limits, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]
LENGTHS = (5, 8)


class Norms(nn.Module):
    """Norms and variances over the length: kernels for any length round otherwise than those for one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z: torch.Tensor = x + y / (1.0 + y.norm(dim=1, keepdim=True)) + y.var(dim=1, keepdim=True)
        return z


def of_spread(x: torch.Tensor) -> torch.Tensor:
    """As `Norms`, as a function that the program compiles."""
    y: torch.Tensor = x / (1.0 + x.norm(dim=1, keepdim=True)) + x.var(dim=1, keepdim=True)
    return y


class Model(nn.Module):
    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        """`behind`: computes with the output of each block."""
        super().__init__()
        self._behind = behind
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Norms()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._behind(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


class ManyLengths(GptTask):
    """Each microbatch is cut to the length that it contains."""

    def build_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return super().loss(model, batch[:, : LENGTHS[int(batch.sum()) % len(LENGTHS)] + 1])


class CompiledByHand(ManyLengths):
    """Its model has a function that the program compiles."""

    def __init__(self, made: Path | None = None) -> None:
        """`made`: a file for the graphs, which a quick compiler gets; None: torch's compiler."""
        self._made = made

    def build_model(self) -> nn.Module:
        backend: Any = "inductor" if self._made is None else partial(noting, self._made)
        return Model(torch.compile(of_spread, backend=backend))


class Saved(ManyLengths):
    """Its fifth step waits for a checkpoint."""

    def __init__(self, url: str) -> None:
        self._url = url

    def lr_scale(self, step: int) -> float:
        if step == 5:
            wait_until(lambda: bool(complete(self._url)), "a checkpoint is complete")
        return super().lr_scale(step)


def complete(url: str) -> list[int]:
    return [ref.step for ref in list_checkpoints(open_storage(url)) if ref.complete]


def one_compiler() -> None:
    """In a worker's process: one thread compiles, or else each starts processes for it, which import torch."""
    from torch._inductor import config

    config.compile_threads = 1


SETTINGS: dict[str, Any] = {"task": ManyLengths(), "microbatches": 4, "engine": rs.EngineConfig(compile=True)}


def noting(made: Path, graph: Any, inputs: Any, **options: Any) -> Any:
    """A quick compiler, which writes into a file for which lengths a graph is."""
    from torch._dynamo import lookup_backend

    traced = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]  # `inputs` are real
    sizes = [size for one in traced if isinstance(one, torch.Tensor) for size in one.shape]
    with made.open("a") as file:
        file.write("one length\n" if all(type(size) is int for size in sizes) else "any length\n")
    return lookup_backend("aot_eager")(graph, inputs, **options)


def each_by_itself(made: Path) -> None:
    """In a worker's process: a compiler that records the graphs that it is given."""
    usual, compiled = nn.Module.compile, partial(noting, made)
    type.__setattr__(nn.Module, "compile", lambda block: usual(block, backend=compiled))


def test_each_length_is_compiled_by_itself_and_by_a_later_worker_before_it_joins(tmp_path: Path) -> None:
    prepare = partial(each_by_itself, tmp_path / "made")

    def drive(steps: int) -> Collector:
        listener = Collector()
        job = make_job(str(tmp_path / "run"), steps=steps, **SETTINGS)
        first = {WorkerId(worker): prepare for worker in range(2)}
        driver = make_driver(job, make_limits(job, 1), listener, keep=Keep(last=9), prepare=first)
        driver.restore()
        driver.run()
        return listener

    def compiling(listener: Collector) -> list[bool]:
        return ["compile" in fields["seconds"] for kind, fields in listener.entries if kind == "step"]

    assert any(compiling(drive(2)))
    assert (tmp_path / "made").read_text().splitlines() == ["one length"] * len(LENGTHS)
    assert not any(compiling(drive(3)))
    assert (tmp_path / "made").read_text().splitlines() == ["one length"] * 2 * len(LENGTHS)


@pytest.mark.long
def test_many_lengths_give_the_same_bits_at_every_size_and_after_a_loss() -> None:
    alone = train(1, prepare=one_compiler, steps=2, **SETTINGS)
    assert alone.bits == train(3, prepare=one_compiler, steps=2, kills=[(1, 2, "backward")], **SETTINGS).bits


@pytest.mark.long
def test_more_shapes_than_the_limit_end_the_run_with_a_checkpoint_and_a_higher_one_changes_no_bit(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "run")
    prepare = partial(each_by_itself, tmp_path / "made")  # a compiler that needs little time

    def drive(limit: int) -> str | None:
        engine = rs.EngineConfig(compile=True, max_compiled_shapes=limit)
        job = make_job(url, steps=5, **(SETTINGS | {"engine": engine, "task": Saved(url)}))
        limits = make_limits(job, 1)
        driver = make_driver(job, limits, Collector(), keep=Keep(last=9), prepare={WorkerId(0): prepare})
        driver.restore()
        return driver.run().result_fingerprint

    with pytest.raises(
        InexactError, match=r"unit blocks\.0 came to 2 shapes .*max_compiled_shapes=1: the first was \[2, \d, 16\]"
    ):
        drive(1)
    assert complete(url)
    assert drive(4) == train(1, prepare=prepare, steps=5, **SETTINGS).fingerprint


class Scaled(CompiledByHand):
    """Its loss calls a compiled function with 34 numbers."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        torch._dynamo.config.suppress_errors = True  # as some programs have it
        scaled = torch.compile(torch.mul, backend="eager")
        for number in range(2, 36):
            scaled(torch.ones(3), number)
        return super().loss(model, batch)


def test_each_length_of_code_that_the_program_compiles_is_compiled_by_itself_and_too_many_variants_end_the_run(
    tmp_path: Path,
) -> None:
    """The end has a checkpoint, and its error names the code."""
    engine, url = rs.EngineConfig(max_compiled_shapes=1), str(tmp_path / "run")
    job = make_job(url, steps=6, microbatches=4, task=Scaled(tmp_path / "made"), engine=engine)
    driver = make_driver(job, make_limits(job, 1), Collector(), keep=Keep(last=9))
    driver.restore()
    with pytest.raises(
        InexactError, match=r"test_compilation\.py:\d+: compiled code came to more than 32 variants .* raise"
    ):
        driver.run()
    assert complete(url)
    made = (tmp_path / "made").read_text().splitlines()
    assert len(made) >= len(LENGTHS)
    assert set(made) == {"one length"}


@pytest.mark.long
def test_code_that_the_program_compiles_gives_the_same_bits_at_every_size_and_after_a_loss() -> None:
    settings: dict[str, Any] = {"task": CompiledByHand(), "microbatches": 4, "steps": 2, "prepare": one_compiler}
    assert train(1, **settings).bits == train(3, kills=[(1, 2, "backward")], **settings).bits


@pytest.mark.parametrize(
    ("engine", "number", "each"),
    [
        (rs.EngineConfig(), 1, False),
        (rs.EngineConfig(), 2, False),
        (rs.EngineConfig(), 3, True),
        (rs.EngineConfig(compile=True), 2, True),
        (rs.EngineConfig(compile=True), 3, True),
    ],
)
def test_the_runs_rule_decides_whether_shapes_of_such_code_are_separate(
    engine: rs.EngineConfig, number: int, each: bool
) -> None:
    from torch._dynamo import config as dynamo
    from torch._dynamo.callback import callback_handler

    found: list[bool] = []

    def settle() -> None:
        compilation = Compilation(engine, torch.device("cpu"))
        compilation.settle(number)
        found.append(not dynamo.automatic_dynamic_shapes)
        if each:
            callback_handler.remove_start_callback(compilation._begin)
            callback_handler.remove_end_callback(compilation._end)

    thread = threading.Thread(target=settle)  # torch keeps these settings per thread
    thread.start()
    thread.join()
    assert found == [each]
