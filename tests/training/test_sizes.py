"""Training with real worker processes: every number and every bit of the state are the same at every size."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.task import Strategy
from tests.actors.optimizer.test_shard_optimizer import Signs
from tests.cases import tried_each_time
from tests.training.harness import WIDTH, Gpt, GptTask, Outcome, Tokens, TwoBlocksTask, samples, train
from tests.training.test_first_weights import ByModule

pytestmark = pytest.mark.procs
TWO_BLOCKS = TwoBlocksTask()


@cache
def reference(**settings: Any) -> Outcome:
    """One worker's outcome."""
    return train(1, **settings)


def two_blocks() -> Outcome:
    """One worker's outcome, of the task with two blocks."""
    return reference(task=TWO_BLOCKS)


def assert_same_bits_at(workers: Iterable[int], **settings: Any) -> Outcome:
    expected = train(1, **settings) if "evaluation" in settings else reference(**settings)  # lists have no hash
    assert all(math.isfinite(loss) for loss in expected.losses)
    assert expected.losses[-1] != expected.losses[0]
    for count in workers:
        assert train(count, **settings).bits == expected.bits, f"{count} workers"
    return expected


@pytest.mark.parametrize("workers", tried_each_time([4], [2, 3, 4, 5, 7]))
def test_losses_norms_metrics_and_state_are_the_same_at_every_size(workers: int) -> None:
    settings: dict[str, Any] = {"task": TWO_BLOCKS} if workers == 4 else {"task": TWO_BLOCKS, "microbatches": 8}
    outcome = train(workers, **settings)
    assert outcome.bits == reference(**settings).bits
    assert {fields["workers"] for kind, fields in outcome.entries if kind == "step"} == {workers}


@pytest.mark.long  # 5 do not divide by 4 in the test above
def test_microbatches_that_do_not_divide_by_the_workers() -> None:
    assert_same_bits_at([3], microbatches=5, steps=2)


@pytest.mark.long  # with a float64 model below, and with a loss in `test_unused_parameters.py`
@pytest.mark.parametrize("accumulation", ["sharded", "local"])
def test_fewer_microbatches_than_workers(accumulation: Any) -> None:
    assert_same_bits_at(
        [4 if accumulation == "local" else 3],
        microbatches=2,
        steps=2,
        engine=rs.EngineConfig(accumulation=accumulation),
    )


class Contrasting(GptTask):
    """Compares the samples of a microbatch with each other: it needs several different ones."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        if len(batch.unique(dim=0)) < 2:
            raise ValueError("nothing to compare")
        spread = model(batch[:, :-1]).std(0).mean()
        return rs.Loss(spread, len(batch))


@pytest.mark.parametrize("microbatches", tried_each_time([2], [2, 4]))
def test_a_loss_over_several_samples_at_sizes_that_do_not_divide(microbatches: int) -> None:
    evaluation = rs.EvalConfig(data=samples()[:8], every_steps=1, num_samples=8)
    assert_same_bits_at([3], task=Contrasting(), microbatches=microbatches, steps=2, evaluation=evaluation)


def test_local_sums_and_recomputed_activations_give_the_bits_of_neither() -> None:
    engine = rs.EngineConfig(accumulation="local", activation_checkpointing=True)
    assert train(3, task=TWO_BLOCKS, engine=engine).bits == two_blocks().bits


@pytest.mark.long  # with recomputed activations above
@pytest.mark.parametrize("workers", [1, 3])
def test_local_accumulation_gives_the_bits_of_sharded_accumulation(workers: int) -> None:
    assert train(workers, engine=rs.EngineConfig(accumulation="local")).bits == reference().bits


@pytest.mark.long  # with local sums above
@pytest.mark.parametrize("workers", [1, 3])
def test_recomputing_activations_changes_no_bit_and_draws_the_same_dropout(workers: int) -> None:
    assert train(workers, engine=rs.EngineConfig(activation_checkpointing=True)).bits == reference().bits


def test_keeping_gathered_parameters_and_reading_in_the_foreground_change_no_bit() -> None:
    engine = rs.EngineConfig(reshard_after_forward=False, prefetch=False, mirrors=False)
    assert train(2, task=TWO_BLOCKS, engine=engine).bits == two_blocks().bits


class FirstGathered(TwoBlocksTask):
    """The first block's weights stay gathered until the backward."""

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return "gradients" if name == "blocks.0" else None


def test_units_that_stay_gathered_until_backward_change_no_bit() -> None:
    assert train(2, task=FirstGathered()).bits == two_blocks().bits


class Whole(TwoBlocksTask):
    """Every worker has the first block and the last norm whole."""

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Gpt)
        return [*model.blocks, model.norm]

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return "replicate" if name in ("blocks.0", "norm") else None


LOCAL = {"engine": rs.EngineConfig(accumulation="local")}


@pytest.mark.parametrize(
    ("workers", "settings"),
    tried_each_time(
        [(3, LOCAL)],
        [(workers, settings) for workers in (1, 3) for settings in ({}, {"microbatches": 5}, LOCAL)],
    ),
)
def test_units_that_every_worker_has_whole_change_no_bit(workers: int, settings: dict[str, Any]) -> None:
    expected = {name: value for name, value in settings.items() if name != "engine"}  # which changes no bit
    outcome = train(workers, task=Whole(), kills=[(0, 2, "agree")], **settings)
    assert outcome.bits == reference(task=TWO_BLOCKS, **expected).bits


def test_units_that_every_worker_has_whole_are_trained_in_groups_too_and_in_bf16() -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", audit_every_steps=2)
    outcome = train(4, task=Whole(), engine=engine, shards=2, kills=[(2, 3, "backward")])
    assert outcome.of("generation")[0]["mesh"] == "2x2"
    assert [(fields["step"], fields["ok"]) for fields in outcome.of("audit")] == [(2, True)]
    assert outcome.bits == reference(task=TWO_BLOCKS, engine=rs.EngineConfig(param_dtype="bfloat16")).bits


@pytest.mark.long  # `test_fast.py` has the fast reduction
def test_units_that_every_worker_has_whole_are_trained_on_the_same_batch_with_fast_reduction() -> None:
    fast = train(2, task=Whole(), engine=rs.EngineConfig(reduction="fast"))
    assert fast.losses == pytest.approx(two_blocks().losses, rel=1e-4)


def test_a_killed_worker_changes_no_bit() -> None:
    outcome = train(3, task=TWO_BLOCKS, kills=[(1, 2, "backward")])
    assert outcome.bits == two_blocks().bits
    assert "recovery" in [kind for kind, _ in outcome.entries]


@pytest.mark.parametrize("reduce_dtype", tried_each_time(["float32"], ["float32", "bfloat16"]))
def test_mixed_precision(reduce_dtype: Any) -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype)
    mixed = assert_same_bits_at([2], task=TWO_BLOCKS, engine=engine)
    assert mixed.losses != two_blocks().losses
    assert mixed.losses == pytest.approx(two_blocks().losses, rel=0.1)


class Momentum(GptTask):
    """SGD, whose momentum appears with the first step."""

    max_grad_norm = None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.01)


class Counting(GptTask):
    """A custom optimizer that keeps Python numbers."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Signs(model.parameters(), lr=1e-3)


class TensorRate(GptTask):
    """AdamW with its learning rate in a tensor."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)


class FrozenBlock(GptTask):
    """One whole block, and one more parameter, are not trained."""

    def build_model(self) -> nn.Module:
        model = Gpt(2)
        model.blocks[0].requires_grad_(False)
        model.norm.bias.requires_grad_(False)
        return model


class OnlyBlocks(GptTask):
    """The root has no direct parameters."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.ModuleList([nn.Embedding(67, WIDTH), nn.Linear(WIDTH, 67)])[0], nn.Linear(WIDTH, 67))

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


class Double(GptTask):
    """A model in float64."""

    def build_model(self) -> nn.Module:
        return Gpt().double()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


KINDS = [Momentum, Counting, TensorRate, FrozenBlock, OnlyBlocks, ByModule, Double]


@pytest.mark.parametrize("task", tried_each_time([OnlyBlocks], KINDS))
def test_models_and_optimizers_of_many_kinds(task: Callable[[], rs.Task]) -> None:
    assert_same_bits_at([2], task=task(), microbatches=3, steps=2)


def test_a_float64_model_with_more_workers_than_microbatches_and_local_sums() -> None:
    assert_same_bits_at([3], task=Double(), microbatches=2, steps=2, engine=rs.EngineConfig(accumulation="local"))


class Shared(GptTask):
    """A model that contains one block twice."""

    def build_model(self) -> nn.Module:
        model = Gpt(2)
        model.blocks[1] = model.blocks[0]
        return model


def test_a_block_that_the_model_uses_twice() -> None:
    assert_same_bits_at([2], task=Shared(), microbatches=3, steps=2)


class Brief(nn.Module):
    """A block that compiles into few kernels: a norm, a matrix, dropout, and something to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(self.norm(x))))
        return y


class OneBlock(GptTask):
    def build_model(self) -> nn.Module:
        model = Gpt(layers=0)
        model.blocks.append(Brief())
        return model

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("blocks.0")]


def compile_with(backend: str, seen: Path) -> None:
    """In a worker's process: compile with this backend, and make a file when something was compiled."""
    from torch._dynamo import lookup_backend
    from torch._inductor import config

    def compiled(*arguments: Any) -> Any:
        seen.touch()
        return lookup_backend(backend)(*arguments)

    config.compile_threads = 1  # or else each worker starts processes for it, which import torch
    usual = nn.Module.compile
    type.__setattr__(nn.Module, "compile", lambda block: usual(block, backend=compiled))


@pytest.mark.slow
@pytest.mark.long  # `test_compilation.py` compiles at each landing
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks(backend: str, tmp_path: Path) -> None:
    prepare = partial(compile_with, backend, tmp_path / "seen")
    engine = rs.EngineConfig(compile=True)
    assert_same_bits_at([2], task=OneBlock(), microbatches=2, steps=2, engine=engine, prepare=prepare)
    assert (tmp_path / "seen").exists()


def test_evaluation_gives_the_same_numbers_and_disturbs_nothing() -> None:
    evaluation = rs.EvalConfig(data=samples()[:11], every_steps=2, num_samples=7)
    outcome = assert_same_bits_at([2], evaluation=evaluation)
    assert [bool(numbers.get("evaluation")) for numbers in outcome.numbers] == [False, True, False]
    assert outcome.numbers[1]["evaluation"].keys() == {"loss", "accuracy", "logit"}
    assert outcome.fingerprint == reference().fingerprint


class OneReader(Tokens):
    """A file that is sought and then read: a second thread at the same time would get other bytes."""

    busy = False

    def __getitem__(self, index: int) -> Any:
        assert not self.busy, "read by two threads at once"
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        return super().__getitem__(index)


def test_data_behind_training_and_evaluation_is_read_by_one_thread_at_a_time() -> None:
    data = OneReader()
    evaluation = rs.EvalConfig(data=data, every_steps=1, num_samples=16)
    assert train(1, data=data, evaluation=evaluation).fingerprint == reference().fingerprint


def test_the_schedule_sets_the_rate_that_is_reported() -> None:
    assert [numbers["lr"] for numbers in reference().numbers] == [1e-2 * GptTask().lr_scale(step) for step in (1, 2, 3)]


MODES = [(reduction, accumulation) for reduction in ("exact", "fast") for accumulation in ("sharded", "local")]


@pytest.mark.parametrize("workers", tried_each_time([1], [1, 2]))
@pytest.mark.parametrize(
    ("reduction", "accumulation"), tried_each_time([("exact", "sharded"), ("fast", "local")], MODES)
)
def test_a_step_shows_how_long_it_computed_and_how_long_it_reduced(
    workers: int, reduction: Any, accumulation: Any
) -> None:
    engine = rs.EngineConfig(reduction=reduction, accumulation=accumulation)
    for step in train(workers, engine=engine, microbatches=2, steps=1).of("step"):
        phases = {"data", "forward", "backward", "reduce", "norm", "agree", "apply", "snapshot", "mirror"}
        assert phases <= step["seconds"].keys()
        assert all(seconds >= 0 for seconds in step["seconds"].values())


@pytest.mark.long  # `test_fast.py` has each of them with a loss
def test_fast_reduction_trains_on_the_same_batches_with_nearly_the_same_numbers() -> None:
    for accumulation in ("sharded", "local"):
        fast = train(2, engine=rs.EngineConfig(reduction="fast", accumulation=accumulation))
        assert fast.losses == pytest.approx(reference().losses, rel=1e-4)
        assert [n["digest"] for n in fast.numbers] == [n["digest"] for n in reference().numbers]
