"""The needs of a check and the parts that it leaves out: reported before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import raysharded as rs
from raysharded.actors.device import accelerator
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.preflight.requirements import Needs, needs_of, require_room, shape_of
from raysharded.preflight.small_run import Small
from raysharded.testing import Fault, FaultPlan
from tests.actors.device.host_accelerator import HostAccelerator
from tests.preflight.tasks import trainer_of
from tests.training.harness import GptTask, Tokens
from tests.training.llama import LlamaTask

BATCH = rs.BatchConfig(global_batch_size=8, microbatch_size=2)
NEEDS = Needs(
    parameters=7,
    units=1,
    steps=3,
    microbatches=4,
    microbatch_size=2,
    samples=24,
    data_bytes=0,
    host_bytes=900,
    available_bytes=1000,
)


def small(trainer: rs.ElasticTrainer, **given: object) -> Small:
    fields: dict[str, object] = {"folder": "/nowhere", "steps": 3, "device": None, "timeout_s": 60.0, **given}
    return Small(spec=trainer.spec(), **fields)  # type: ignore[arg-type]  # each has its type


def test_memory_is_what_the_planner_gives_for_each_worker_with_its_first_weights() -> None:
    shape = shape_of(GptTask(), Tokens(), BATCH, rs.EngineConfig(), False)
    assert (shape.parameters, shape.units, shape.unknown) == (4387, 2, "")
    assert shape.alone_bytes > shape.worker_bytes > 3 * 4 * 4387  # parameters and two moments, and more
    found = needs_of(shape, BATCH, steps=3, data_bytes=1 << 30, threads=1)
    without = needs_of(shape, BATCH, steps=3, data_bytes=0, threads=1)
    assert found.host_bytes - without.host_bytes == 5 << 30  # here, in two workers, and where each reads its data


def test_a_loss_that_inspects_values_leaves_activations_out_with_a_notice() -> None:
    class Looks(GptTask):
        def loss(self, model: object, batch: object) -> rs.Loss:
            raise ValueError("3 is a value")

    shape = shape_of(Looks(), Tokens(), BATCH, rs.EngineConfig(), False)
    assert shape.parameters == 4387
    assert shape.unknown == "activations are not counted: Looks.loss raised ValueError: 3 is a value"


@pytest.mark.parametrize(
    ("changes", "free", "words"),
    [
        ({"host_bytes": 901}, None, "needs up to 901 B of memory"),
        ({}, (5000,), "needs 2 GPUs, one for each worker, and finds 1. Try the trainer on CPUs: --device cpu"),
        ({"device_bytes": 4600}, (9000, 5000), "needs 4.5 KiB of each of 2 GPUs, and 4.9 KiB is free"),
        (
            {"estimate_s": 61.0},
            None,
            "would compute for about 1 min 1 s, and has 1 min 0 s. Give settings of a smaller",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_way_out(
    changes: dict[str, float], free: tuple[int, ...] | None, words: str
) -> None:
    require_room(NEEDS, None, timeout_s=60.0)
    require_room(replace(NEEDS, device_bytes=4500), (5000, 9000), timeout_s=60.0)
    with pytest.raises(ConfigError) as raised:
        require_room(replace(NEEDS, **changes), free, timeout_s=60.0)  # type: ignore[arg-type]  # numbers, all of them
    assert words in str(raised.value)


def test_the_trainer_is_made_small_and_writes_and_reads_nowhere_else(tmp_path: Path) -> None:
    own = trainer_of(GptTask(), "s3://bucket", accumulation="local", param_dtype="bfloat16", prove_first_step=False)
    failure = rs.FailureConfig(preemption_notices=("aws",), on_non_finite="rewind")
    own.run = replace(own.run, failure=failure, checkpoint=rs.CheckpointConfig(every_steps=100))
    kill = Fault(worker=WorkerId(1), step=1, phase="backward")
    made = small(own).made(2, audited=True, faults=FaultPlan(faults=(kill,), folder="/nowhere"))
    assert (made.batch, made.run.storage_path) == (replace(own.batch, global_batch_size=8), "/nowhere/runs")
    assert (made.run.failure.preemption_notices, made.run.failure.on_non_finite) == ((), "stop")
    assert (made.run.failure.max_worker_losses, made.scaling.num_workers, made.scaling.use_gpu) == (1, 2, False)
    engine = made.engine
    assert (engine.accumulation, engine.param_dtype, engine.audit_every_steps) == ("local", "bfloat16", 1)
    assert engine.prove_first_step
    assert made.evaluation is not None
    assert (made.evaluation.every_steps, made.evaluation.num_samples) == (3, 4)
    assert (own.batch.num_microbatches, own.run.storage_path, own.faults) == (16, "s3://bucket", None)


@pytest.mark.parametrize(("samples", "own", "microbatches"), [(301, 1, 2), (301, 3, 3), (301, 64, 4), (3, 64, 1)])
def test_a_step_has_two_to_four_microbatches_where_the_data_have(samples: int, own: int, microbatches: int) -> None:
    trainer = trainer_of(GptTask(), "runs", data=Tokens(samples))
    trainer.batch = rs.BatchConfig(global_batch_size=2 * own, microbatch_size=2)
    assert small(trainer).batch == rs.BatchConfig(global_batch_size=2 * microbatches, microbatch_size=2)


def _on_gpus(trainer: rs.ElasticTrainer) -> None:
    trainer.scaling = rs.ScalingConfig(num_workers=4, use_gpu=True, shard_group_size=2)


def _in_fast_mode(trainer: rs.ElasticTrainer) -> None:
    trainer.engine = rs.EngineConfig(reduction="fast")


def _cut(trainer: rs.ElasticTrainer) -> None:
    trainer.task, trainer.scaling = LlamaTask(), rs.ScalingConfig(num_workers=4, tensor_parallel_degree=2)


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (
            _on_gpus,
            ["the arithmetic of GPUs: the check computes on CPUs", "shard groups of 2: the check has one of all"],
        ),
        (_in_fast_mode, ["reduction='fast', whose bits depend on the workers: the check's is 'exact'"]),
        (_cut, ["tensor parallelism of degree 2: the check cuts no module"]),
    ],
)
def test_what_is_left_out_is_reported(change: Callable[[rs.ElasticTrainer], None], sentences: list[str]) -> None:
    trainer = trainer_of(GptTask(), "runs")
    change(trainer)
    told = list(small(trainer, device="cpu").untried())
    assert all(any(line.startswith(sentence) for line in told) for sentence in sentences), told
    made = small(trainer, device="cpu").made(2)
    assert (made.engine.reduction, made.scaling.tensor_parallel_degree, made.scaling.use_gpu) == ("exact", 1, False)


def test_a_check_on_gpus_where_there_are_none_ends_at_once_with_the_way_out() -> None:
    trainer = trainer_of(GptTask(), "runs")
    _on_gpus(trainer)
    undo = accelerator.use(Hidden())
    try:
        with pytest.raises(ConfigError, match=r"can use no GPU here: CUDA_VISIBLE_DEVICES='' hides .*--device cpu"):
            trainer.check()
    finally:
        undo()


class Hidden(HostAccelerator):
    """GPUs that the environment hides."""

    def why_unusable(self) -> str:
        return "CUDA_VISIBLE_DEVICES='' hides all GPUs"
