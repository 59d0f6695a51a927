"""Tensor parallel groups with real worker processes: the bits do not depend on their number, nor on who is lost."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.actors.restore import spec_of
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.keeping.catalog import newest_complete
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.engine.harness import Collector, Outcome, Tokens, grouped, make_driver, make_job, make_limits, train
from tests.engine.llama import LlamaTask, WideLlama
from tests.engine.test_meshes import meshes_of, num_data_bytes

pytestmark = pytest.mark.procs
STEPS = 6


@cache
def one_group(degree: int = 2, **settings: Any) -> Outcome:
    """The outcome of a single tensor parallel group, of one worker for degree 1."""
    return train(degree, tensor=degree, task=LlamaTask(), **settings)


def in_groups(workers: int, degree: int = 2, **settings: Any) -> Outcome:
    return train(workers, tensor=degree, task=LlamaTask(), **settings)


@pytest.mark.parametrize(
    ("workers", "degree", "shards", "mesh"),
    [(6, 2, None, "1x3x2"), (4, 2, 2, "2x1x2"), (8, 2, 4, "2x2x2"), (6, 3, None, "1x2x3")],
)
def test_the_bits_are_those_of_one_tensor_parallel_group(
    workers: int, degree: int, shards: int | None, mesh: str
) -> None:
    outcome = in_groups(workers, degree, shards=shards)
    assert outcome.bits == one_group(degree).bits
    assert meshes_of(outcome) == [mesh]


def test_cutting_the_model_changes_nothing_but_rounding() -> None:
    whole, cut = one_group(1), one_group(2)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)
    assert cut.losses[0] == pytest.approx(whole.losses[0], rel=1e-7)
    for name in ("digest", "reads", "weight"):
        assert [numbers[name] for numbers in cut.numbers] == [numbers[name] for numbers in whole.numbers]


@pytest.mark.parametrize("phase", ["backward", "apply"])
def test_a_worker_of_a_group_may_be_lost_at_any_moment(phase: str) -> None:
    outcome = in_groups(4, steps=STEPS, kills=[(3, 3, phase)])
    assert outcome.bits == one_group(steps=STEPS).bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])
    assert meshes_of(outcome)[1] == "1x1x2"


def test_a_whole_group_may_be_lost_where_others_hold_the_same() -> None:
    outcome = in_groups(4, shards=2, steps=STEPS, kills=[(2, 3, "backward"), (3, 3, "backward")])
    assert outcome.bits == one_group(steps=STEPS).bits
    first, *others = outcome.of("generation")
    assert first["members"] == [0, 1, 2, 3]  # two groups, of which the second is lost
    assert all(fields["source"] == "memory" for fields in others)


def test_mirrors_are_in_another_group_so_that_one_may_be_lost_whole() -> None:
    outcome = in_groups(6, steps=STEPS, kills=[(2, 3, "backward"), (3, 3, "backward")])
    assert outcome.bits == one_group(steps=STEPS).bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])


def test_parity_blocks_give_back_what_was_lost() -> None:
    engine = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))
    outcome = in_groups(6, steps=4, engine=engine, kills=[(3, 3, "backward")])
    assert outcome.bits == one_group(steps=4).bits
    assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])


@pytest.mark.parametrize(("accumulation", "reduce_dtype"), [("sharded", "bfloat16"), ("local", "float32")])
def test_mixed_precision(accumulation: Any, reduce_dtype: Any) -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype, accumulation=accumulation)
    assert in_groups(4, engine=engine).bits == one_group(engine=engine).bits


def test_groups_of_unequal_work_recomputed_activations_and_evaluation() -> None:
    settings: dict[str, Any] = {
        "microbatches": 5,
        "engine": rs.EngineConfig(activation_checkpointing=True),
        "evaluation": rs.EvalConfig(data=Tokens(), every_steps=2, num_samples=7),
    }
    assert in_groups(4, **settings).bits == one_group(**settings).bits


class Replicating(LlamaTask):
    """The blocks are cut; the embedding is whole on every worker."""

    def parallelize(self, model: Any, mesh: Any) -> Any:
        plan = dict(super().parallelize(model, mesh))
        return {name: style for name, style in plan.items() if name not in ("tokens", "head")}

    def wrap(self, model: Any) -> Any:
        return [*model.blocks, model.tokens]

    def strategy(self, name: str, module: Any) -> Any:
        return "replicate" if name == "tokens" else None


def test_a_unit_may_be_replicated_beside_those_that_are_cut() -> None:
    assert train(4, tensor=2, task=Replicating()).bits == train(2, tensor=2, task=Replicating()).bits


def test_audits_change_no_bit_and_find_who_computes_wrong_numbers() -> None:
    engine = rs.EngineConfig(audit_every_steps=1)
    wrong = Fault(worker=WorkerId(3), step=3, phase="backward", kind="corrupt")
    outcome = in_groups(6, steps=STEPS, microbatches=4, engine=engine, faults=[wrong])
    assert outcome.bits == one_group(steps=STEPS, microbatches=4).bits
    (corruption,) = outcome.of("corruption")
    assert corruption["culprits"] == [3]


@pytest.mark.parametrize(("before", "after"), [((4, 2), (1, 1)), ((3, 1), (4, 2)), ((4, 2), (3, 3))])
def test_a_checkpoint_is_written_once_and_goes_on_with_any_degree(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def go_on(workers: int, degree: int, steps: int) -> Collector:
        job = make_job(f"{tmp_path}/run", task=WideLlama(), steps=steps)
        listener = Collector()
        driver = make_driver(job, make_limits(job, workers, grouping=grouped(job, None, None, degree)), listener)
        driver.resume()
        driver.run()
        return listener

    go_on(*before, 3)
    found = newest_complete(open_storage(f"{tmp_path}/run"))
    assert found.checkpoint is not None
    whole = spec_of(found.checkpoint).total_bytes
    files = list(Path(f"{tmp_path}/run").rglob("*.safetensors"))
    assert sum(map(num_data_bytes, files)) == whole  # nothing was written twice
    second = go_on(*after, 5)
    (formed,) = [fields for kind, fields in second.entries if kind == "formed"]
    assert whole <= formed["bytes_read"] < 1.9 * whole  # whole chunks, for their digests
    usual = train(1, task=WideLlama(), steps=5).losses
    assert [second.numbers[step]["loss"] for step in (4, 5)] == pytest.approx(usual[3:], rel=1e-4)


class Still(LlamaTask):
    """Trains without changing a weight, so that the state's fingerprint must stay what it is."""

    def build_optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.0)


def test_another_degree_by_choice_keeps_the_state_and_costs_no_step(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", task=Still(), steps=12, save_every=1)
    wanted = {2: (None, 1), 5: (2, 2), 8: (None, 4)}

    class Asks(Collector):
        """Asks for another layout as soon as some steps are done."""

        def __call__(self, kind: str, fields: dict[str, Any]) -> None:
            Collector.__call__(self, kind, fields)
            if kind == "step" and fields["step"] in wanted:
                shards, degree = wanted.pop(fields["step"])
                driver.reshard(grouped(job, shards, None, degree))

    listener = Asks()
    driver = make_driver(job, make_limits(job, 4, grouping=grouped(job, None, None, 2)), listener)
    state = driver.run()
    generations = [fields for kind, fields in listener.entries if kind == "generation"]
    assert [fields.get("mesh", "1x4") for fields in generations] == ["1x2x2", "1x4", "2x1x2", "1x1x4"]
    assert all(fields["source"] == "memory" for fields in generations[1:])
    assert [fields["step"] for kind, fields in listener.entries if kind == "step"] == list(range(1, 13))
    found = {fields["fingerprint"] for kind, fields in listener.entries if kind == "checkpoint"}
    assert found == {train(1, task=Still(), steps=1).fingerprint} == {state.result_fingerprint}
