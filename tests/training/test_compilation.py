"""Compiled blocks with inputs of several lengths: the same bits at every size, or an end with a checkpoint."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Norms()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class ManyLengths(GptTask):
    """Each microbatch is cut to the length that it contains."""

    def build_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return super().loss(model, batch[:, : LENGTHS[int(batch.sum()) % len(LENGTHS)] + 1])


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


def each_by_itself(made: Path) -> None:
    """In a worker's process: a compiler that records the graphs that it is given."""
    from torch._dynamo import lookup_backend

    def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
        sizes = [size for one in inputs if isinstance(one, torch.Tensor) for size in one.shape]
        with made.open("a") as file:
            file.write("one length\n" if all(type(size) is int for size in sizes) else "any length\n")
        return lookup_backend("aot_eager")(graph, inputs, **options)

    usual = nn.Module.compile
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
    assert not any(compiling(drive(4)))
    assert (tmp_path / "made").read_text().splitlines() == ["one length"] * 2 * len(LENGTHS)


@pytest.mark.long
def test_many_lengths_give_the_same_bits_at_every_size_and_after_a_loss() -> None:
    alone = train(1, prepare=one_compiler, steps=2, **SETTINGS)
    assert alone.bits == train(3, prepare=one_compiler, steps=2, kills=[(1, 2, "backward")], **SETTINGS).bits


def test_more_shapes_than_the_limit_end_the_run_with_a_checkpoint_and_a_higher_one_changes_no_bit(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "run")
    prepare = partial(each_by_itself, tmp_path / "made")  # a compiler that needs little time

    def drive(limit: int) -> str | None:
        engine = rs.EngineConfig(compile=True, max_compiled_shapes=limit)
        job = make_job(url, steps=6, **(SETTINGS | {"engine": engine, "task": Saved(url)}))
        limits = make_limits(job, 1)
        driver = make_driver(job, limits, Collector(), keep=Keep(last=9), prepare={WorkerId(0): prepare})
        driver.restore()
        return driver.run().result_fingerprint

    with pytest.raises(
        InexactError, match=r"unit blocks\.0 came to 2 shapes .*max_compiled_shapes=1: the first was \[2, \d, 16\]"
    ):
        drive(1)
    assert complete(url)
    assert drive(4) == train(1, prepare=prepare, steps=6, **SETTINGS).fingerprint
