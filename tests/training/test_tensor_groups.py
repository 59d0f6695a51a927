"""Tensor parallel groups with real worker processes: the bits do not depend on their number, nor on the lost worker."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.actors.shards.restore import spec_of
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import newest_complete
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.cases import tried_each_time
from tests.training.harness import Collector, Outcome, grouped, make_driver, make_job, make_limits, samples, train
from tests.training.llama import LlamaTask, WideLlama
from tests.training.test_checkpoints import WAIT_S
from tests.training.test_leaving import Seen
from tests.training.test_meshes import meshes_of, num_data_bytes

pytestmark = pytest.mark.procs
STEPS, MICROBATCHES = 2, 4
TWO_BLOCKS, ONE_BLOCK = LlamaTask(), LlamaTask(layers=1)


@cache
def one_group(degree: int = 2, **settings: Any) -> Outcome:
    """The outcome of a single tensor parallel group, of one worker for degree 1."""
    return in_groups(degree, degree, **settings)


def in_groups(workers: int, degree: int = 2, **settings: Any) -> Outcome:
    return train(
        workers, tensor=degree, **{"task": ONE_BLOCK, "microbatches": MICROBATCHES, "steps": STEPS, **settings}
    )


@pytest.mark.long  # the tests below have groups of which some are lost
@pytest.mark.parametrize(
    ("workers", "degree", "shards", "mesh"),
    [(6, 2, None, "1x3x2"), (4, 2, 2, "2x1x2"), (8, 2, 4, "2x2x2"), (6, 3, None, "1x2x3")],
)
def test_the_bits_are_those_of_one_tensor_parallel_group(
    workers: int, degree: int, shards: int | None, mesh: str
) -> None:
    outcome = in_groups(workers, degree, shards=shards, task=TWO_BLOCKS)
    assert outcome.bits == one_group(degree, task=TWO_BLOCKS).bits
    assert meshes_of(outcome) == [mesh]


@pytest.mark.long  # `test_task_numbers.py` has recorded microbatches at several sizes
def test_the_recorded_microbatches_are_those_of_one_tensor_parallel_group() -> None:
    alone, two = (in_groups(workers, records_microbatches=True) for workers in (2, 4))
    assert two.bits == alone.bits
    for numbers, plain in zip(alone.numbers, one_group().numbers, strict=True):
        assert len(numbers["microbatches"]) == MICROBATCHES
        assert math.fsum(loss for loss, _ in numbers["microbatches"]) / plain["weight"] == plain["loss"]


def test_cutting_the_model_changes_nothing_but_rounding() -> None:
    whole, cut = one_group(1), one_group()
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)
    assert cut.losses[0] == pytest.approx(whole.losses[0], rel=1e-7)
    for name in ("digest", "reads", "weight"):
        assert [numbers[name] for numbers in cut.numbers] == [numbers[name] for numbers in whole.numbers]


@pytest.mark.long  # below a group is lost whole, one worker after the other
@pytest.mark.parametrize("phase", ["backward", "apply"])
def test_a_worker_of_a_group_may_be_lost_at_any_moment(phase: str) -> None:
    outcome = in_groups(4, kills=[(3, 1, phase)])
    assert outcome.bits == one_group().bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])
    assert meshes_of(outcome)[1] == "1x1x2"


@pytest.mark.long  # `test_meshes.py` loses such a group without tensor parallelism
def test_a_whole_group_may_be_lost_where_others_hold_the_same() -> None:
    outcome = in_groups(4, shards=2, kills=[(2, 2, "backward"), (3, 2, "backward")])
    assert outcome.bits == one_group().bits
    first, *others = outcome.of("generation")
    assert first["members"] == [0, 1, 2, 3]  # two groups, of which the second is lost
    assert all(fields["source"] == "memory" for fields in others)


def test_mirrors_are_in_another_group_so_that_one_may_be_lost_whole() -> None:
    outcome = in_groups(4, kills=[(2, 2, "backward"), (3, 2, "backward")])
    assert outcome.bits == one_group().bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])
    assert (meshes_of(outcome)[0], meshes_of(outcome)[-1]) == ("1x2x2", "1x1x2")


@pytest.mark.long  # `test_parity_on_nodes.py` has parity in a run, and the test above losses in these groups
def test_parity_blocks_give_back_what_was_lost() -> None:
    engine = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))
    outcome = in_groups(6, engine=engine, kills=[(3, 2, "backward")])
    assert outcome.bits == one_group().bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])


@pytest.mark.long  # `test_meshes.py` has the same without tensor parallelism
@pytest.mark.parametrize(("accumulation", "reduce_dtype"), [("sharded", "bfloat16"), ("local", "float32")])
def test_mixed_precision(accumulation: Any, reduce_dtype: Any) -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype, accumulation=accumulation)
    assert in_groups(4, engine=engine).bits == one_group(engine=engine).bits


@pytest.mark.long  # each of them is tried without tensor parallelism
def test_groups_of_unequal_work_recomputed_activations_and_evaluation() -> None:
    settings: dict[str, Any] = {
        "microbatches": 3,
        "engine": rs.EngineConfig(
            param_dtype="bfloat16", reduce_dtype="bfloat16", activation_checkpointing=True, accumulation="local"
        ),
        "evaluation": rs.EvalConfig(data=samples(), every_steps=2, num_samples=3),
    }
    assert in_groups(4, **settings).bits == in_groups(2, **settings).bits


class Replicating(LlamaTask):
    """The blocks are cut; the embedding is whole on every worker."""

    def parallelize(self, model: Any, mesh: Any) -> Any:
        plan = dict(super().parallelize(model, mesh))
        return {name: style for name, style in plan.items() if name not in ("tokens", "head")}

    def wrap(self, model: Any) -> Any:
        return [*model.blocks, model.tokens]

    def strategy(self, name: str, module: Any) -> Any:
        return "replicate" if name == "tokens" else None


@pytest.mark.long  # `test_sizes.py` has such units, without tensor parallelism
def test_a_unit_may_be_replicated_beside_those_that_are_cut() -> None:
    task = Replicating()
    assert in_groups(4, task=task).bits == one_group(task=task).bits


@pytest.mark.long
def test_audits_change_no_bit_and_find_who_computes_wrong_numbers() -> None:
    engine = rs.EngineConfig(audit_every_steps=1)
    wrong = Fault(worker=WorkerId(3), step=2, phase="backward", kind="corrupt")
    outcome = in_groups(4, microbatches=2, engine=engine, faults=[wrong])
    assert outcome.bits == one_group(microbatches=2).bits
    (corruption,) = outcome.of("corruption")
    assert corruption["culprits"] == [3]


@cache
def of_wide_llama() -> list[float]:
    """One worker's losses."""
    return train(1, task=WideLlama(), microbatches=MICROBATCHES, steps=2).losses


@pytest.mark.parametrize(
    ("before", "after"),
    tried_each_time(
        [((2, 2), (3, 3))],
        [((4, 2), (1, 1)), ((3, 1), (4, 2)), ((4, 2), (3, 3)), ((2, 2), (3, 3))],
    ),
)
def test_a_checkpoint_is_written_once_and_continues_with_any_degree(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def go_on(workers: int, degree: int, steps: int) -> Collector:
        job = make_job(f"{tmp_path}/run", task=WideLlama(), microbatches=MICROBATCHES, steps=steps)
        listener = Collector()
        driver = make_driver(job, make_limits(job, workers, grouping=grouped(job, None, None, degree)), listener)
        driver.restore()
        driver.run()
        return listener

    go_on(*before, 1)
    found = newest_complete(open_storage(f"{tmp_path}/run"))
    assert found.checkpoint is not None
    whole = spec_of(found.checkpoint).total_bytes
    files = list(Path(f"{tmp_path}/run").rglob("*.safetensors"))
    assert sum(map(num_data_bytes, files)) == whole  # nothing was written twice
    second = go_on(*after, 2)
    (formed,) = [fields for kind, fields in second.entries if kind == "formed"]
    assert whole <= formed["bytes_read"] < 1.9 * whole  # whole chunks, for their digests
    assert second.numbers[2]["loss"] == pytest.approx(of_wide_llama()[1], rel=1e-4)


class Still(LlamaTask):
    """Trains slowly and without changing a weight, so that the state's fingerprint must stay what it is."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def build_optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.0)

    def lr_scale(self, step: int) -> float:
        time.sleep(0.4)
        return super().lr_scale(step)


@pytest.mark.parametrize(
    ("workers", "changes", "meshes"),
    tried_each_time(
        [(2, [(None, 1), (None, 2)], ["1x1x2", "1x2", "1x1x2"])],
        [
            (2, [(None, 1), (None, 2)], ["1x1x2", "1x2", "1x1x2"]),
            (4, [(None, 1), (2, 2)], ["1x2x2", "1x4", "2x1x2"]),
        ],
    ),
)
def test_another_degree_by_choice_keeps_the_state_and_costs_no_step(
    tmp_path: Path, workers: int, changes: list[tuple[int | None, int]], meshes: list[str]
) -> None:
    seen = Seen()
    job = make_job(f"{tmp_path}/run", task=Still(), microbatches=MICROBATCHES, steps=1000, save_every=1)
    driver = make_driver(job, make_limits(job, workers, grouping=grouped(job, None, None, 2)), seen)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        try:
            for shards, degree in changes:
                seen.wait(lambda s: s.memberships and s.step > s.of("generation")[-1]["step"])
                asked = len(seen.memberships)
                driver.reshard(grouped(job, shards, None, degree))
                seen.wait(lambda s: len(s.memberships) > asked)  # noqa: B023 - it is called here
            seen.wait(lambda s: s.step > s.of("generation")[-1]["step"])  # the last checkpoint is of a later step
        finally:
            driver.stop(checkpoint_within_s=WAIT_S)
        running.result(WAIT_S)
    assert [fields.get("mesh", f"1x{workers}") for fields in seen.of("generation")] == meshes
    seen.assert_no_step_is_computed_twice()
    found = {fields["fingerprint"] for fields in seen.of("checkpoint")}
    assert seen.of("checkpoint")[-1]["step"] > seen.of("generation")[-1]["step"]
    assert found == {in_groups(1, 1, task=Still(), steps=1).fingerprint}
