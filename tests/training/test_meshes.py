"""Shard groups with real worker processes: the bits of one worker in every mesh, for every lost worker."""

from __future__ import annotations

import os
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.actors.reduction import gradient_exchange
from raysharded.actors.shards.restore import spec_of
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import newest_complete
from raysharded.driver.driver import Driver
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.cases import tried_each_time
from tests.training.harness import (
    Collector,
    Outcome,
    SmallTask,
    TwoBlocksTask,
    grouped,
    make_driver,
    make_job,
    make_limits,
    samples,
    train,
)
from tests.training.test_checkpoints import Wide
from tests.training.test_leaving import Seen, a_paced_job, drive

pytestmark = pytest.mark.procs
STEPS, MICROBATCHES = 3, 4
WIDE, SMALL, TWO_BLOCKS = Wide(), SmallTask(), TwoBlocksTask()
MESHES = [(1, 4), (2, 2), (3, 1), (4, 1), (3, 2), (2, 3)]


def num_data_bytes(path: Path) -> int:
    """Bytes of a safetensors file, without its header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


@cache
def undisturbed(**settings: Any) -> Outcome:
    """One worker's outcome."""
    return train(1, **{"microbatches": MICROBATCHES, **settings})


def small_undisturbed() -> Outcome:
    """One worker's outcome of two steps of `SmallTask`, with a checkpoint of each."""
    return undisturbed(task=SMALL, steps=2, save_every=1)


def in_groups(replicas: int, shards: int, **settings: Any) -> Outcome:
    return train(replicas * shards, shards=shards, **{"microbatches": MICROBATCHES, **settings})


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """2 groups of 2 in which a worker was killed; its replacement has come before the end. No bit has changed."""
    job = a_paced_job(tmp_path_factory.mktemp("replaced"))

    def act(driver: Driver, seen: Seen) -> None:
        os.kill(driver.state.facts[WorkerId(3)].pid, signal.SIGKILL)
        seen.wait(lambda s: 4 in s.memberships[-1] and s.step > s.of("generation")[-1]["step"])

    limits = make_limits(job, 4, min_workers=1, max_worker_losses=1, grouping=grouped(job, 2), join_wait_s=60.0)
    return drive(job, limits, act)[1]


def meshes_of(outcome: Outcome) -> list[str]:
    """The mesh of every generation."""
    return [fields["mesh"] for fields in outcome.of("generation")]


@pytest.mark.parametrize(("replicas", "shards"), tried_each_time([(2, 2)], MESHES))
def test_single_workers_and_whole_groups_may_be_lost_in_every_mesh_without_a_bit_changing(
    replicas: int, shards: int
) -> None:
    group = range((replicas - 1) * shards, replicas * shards) if replicas > 1 else range(1, 3)
    kills = [(0, 2, "backward"), *((worker, 3, "agree") for worker in group)]
    outcome = in_groups(replicas, shards, task=TWO_BLOCKS, steps=STEPS, kills=kills, least_shards=1)
    assert outcome.bits == undisturbed(task=TWO_BLOCKS, steps=STEPS).bits
    assert meshes_of(outcome)[0] == f"{replicas}x{shards}"
    if replicas > 1:  # the committed step is in the other groups
        assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])


@pytest.mark.long  # `test_sizes.py` trains groups in bfloat16, and `test_truth.py` counts what they send in it
@pytest.mark.parametrize(
    ("replicas", "shards", "reduce_dtype"),
    [(replicas, 2, dtype) for replicas in (2, 3) for dtype in ("float32", "bfloat16")],
)
def test_mixed_precision_in_groups(replicas: int, shards: int, reduce_dtype: Any) -> None:
    settings: dict[str, Any] = {
        "engine": rs.EngineConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype),
        "evaluation": rs.EvalConfig(data=samples(), every_steps=1, num_samples=7),
        "steps": 2,
    }
    assert in_groups(replicas, shards, kills=[(1, 2, "backward")], **settings).bits == in_groups(1, 1, **settings).bits


@pytest.mark.parametrize(
    ("replicas", "shards", "microbatches", "accumulation"),
    tried_each_time(
        [(2, 2, 5, "local")],
        [(*case, how) for case in ((2, 2, 5), (3, 2, 13), (3, 1, 2)) for how in ("sharded", "local")],
    ),
)
def test_groups_of_unequal_work_with_an_evaluation(
    replicas: int, shards: int, microbatches: int, accumulation: Any
) -> None:
    engine = rs.EngineConfig(accumulation=accumulation)
    evaluation = rs.EvalConfig(data=samples(), every_steps=2, num_samples=7)
    settings: dict[str, Any] = {"task": SMALL, "microbatches": microbatches, "steps": 2, "evaluation": evaluation}
    assert in_groups(replicas, shards, engine=engine, **settings).bits == in_groups(1, 1, **settings).bits


class Counting(SmallTask):
    """In the workers, makes a file for every worker that adds up for others of its host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build_model(self) -> Any:
        terms = gradient_exchange.Exchange.terms

        def counted(own: gradient_exchange.Exchange, *arguments: Any) -> Any:
            if own.hosts:
                (self._folder / f"{own.shard} {own.hosts}").touch()
            return terms(own, *arguments)

        type.__setattr__(gradient_exchange.Exchange, "terms", counted)
        return super().build_model()


@pytest.mark.parametrize("accumulation", tried_each_time(["local"], ["sharded", "local"]))
def test_workers_of_one_node_add_first_what_they_have_and_no_bit_changes(tmp_path: Path, accumulation: Any) -> None:
    engine = rs.EngineConfig(accumulation=accumulation)
    settings: dict[str, Any] = {"steps": 2, "microbatches": 5}
    outcome = train(4, nodes="abab", task=Counting(tmp_path), engine=engine, kills=[(2, 2, "backward")], **settings)
    assert outcome.bits == undisturbed(task=SMALL, **settings).bits
    adding = {path.name for path in tmp_path.iterdir()}
    assert adding >= {f"{shard} ((0, 1), (2, 3))" for shard in range(4)}
    assert len(adding) == 7  # and the three that are left after the loss, of which one is alone on its node


@pytest.mark.long  # groups of unequal work have an evaluation, too
def test_evaluation_in_groups() -> None:
    evaluation = rs.EvalConfig(data=samples(), every_steps=2, num_samples=7)
    assert in_groups(2, 2, evaluation=evaluation, steps=2).bits == in_groups(1, 1, evaluation=evaluation, steps=2).bits


@pytest.mark.long  # `test_fast.py` has groups with a loss
def test_fast_reduction_in_groups_trains_on_the_same_batch() -> None:
    fast, alone = in_groups(2, 2, task=SMALL, engine=rs.EngineConfig(reduction="fast"), steps=2), small_undisturbed()
    assert fast.losses == pytest.approx(alone.losses, rel=1e-4)
    assert [numbers["digest"] for numbers in fast.numbers] == [numbers["digest"] for numbers in alone.numbers]


@pytest.mark.parametrize(("replicas", "shards"), tried_each_time([(2, 1)], of=[(2, 1), (2, 2), (3, 1)]))
def test_audits_in_groups_change_no_bit_and_find_who_computes_wrong_numbers(replicas: int, shards: int) -> None:
    engine = rs.EngineConfig(audit_every_steps=1)
    wrong = Fault(worker=WorkerId(1), step=2, phase="backward", kind="corrupt")
    outcome = in_groups(replicas, shards, task=SMALL, steps=2, engine=engine, faults=[wrong], least_shards=1)
    assert outcome.bits == small_undisturbed().bits
    (corruption,) = outcome.of("corruption")
    assert corruption["culprits"] == [1]


def test_after_a_loss_the_run_continues_in_the_fastest_mesh_gives_the_reason_and_goes_back(replaced: Seen) -> None:
    first, smaller, *_, last = replaced.of("generation")
    assert (first["mesh"], smaller["mesh"], last["mesh"]) == ("2x2", "1x2", "2x2")
    assert len(smaller["spares"]) == 1
    assert "1 of 3 workers stands by" in smaller["why"]
    assert "1x3" in smaller["why"]
    assert all(fields["source"] == "memory" for fields in (smaller, last))


def test_only_one_shard_is_sent_when_a_worker_of_a_group_is_replaced(replaced: Seen) -> None:
    *_, back = replaced.of("formed")
    (size,) = {fields["bytes"] for fields in small_undisturbed().of("checkpoint")}
    assert 0.45 * size < back["bytes_received"] < 1.1 * size  # one or two workers' halves


@pytest.mark.parametrize(
    ("before", "after"),
    tried_each_time(
        [((2, 2), (1, 3))],
        [((2, 2), (1, 3)), ((1, 3), (3, 1)), ((3, 2), (2, 1))],
    ),
)
def test_a_checkpoint_is_written_once_by_all_groups_and_continues_in_any_mesh(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def go_on(mesh: tuple[int, int], steps: int) -> tuple[Collector, str | None]:
        job = make_job(f"{tmp_path}/run", task=WIDE, microbatches=MICROBATCHES, steps=steps)
        limits = make_limits(job, mesh[0] * mesh[1], grouping=grouped(job, mesh[1]))
        listener = Collector()
        driver = make_driver(job, limits, listener)
        driver.restore()
        return listener, driver.run().result_fingerprint

    alone = undisturbed(task=WIDE, steps=2, save_every=1)
    _, fingerprint = go_on(before, 1)
    assert (alone.of("checkpoint")[0]["step"], alone.of("checkpoint")[0]["fingerprint"]) == (1, fingerprint)
    found = newest_complete(open_storage(f"{tmp_path}/run"))
    assert found.checkpoint is not None
    files = list(Path(f"{tmp_path}/run").rglob("*.safetensors"))
    assert len(files) == before[0] * before[1]  # each worker has written a part
    whole = spec_of(found.checkpoint).total_bytes
    assert sum(map(num_data_bytes, files)) == whole  # and nothing was written twice
    second, fingerprint = go_on(after, 2)
    assert fingerprint == alone.fingerprint
    (formed,) = [fields for kind, fields in second.entries if kind == "formed"]
    assert whole <= formed["bytes_read"] < 1.9 * whole  # whole chunks, for their digests; not once per replica
    shutil.rmtree(tmp_path / "run")


def test_without_a_last_checkpoint_the_fingerprint_counts_every_shard_once(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", task=SMALL, steps=2, microbatches=MICROBATCHES)
    limits = make_limits(job, 4, grouping=grouped(job, 2), save_at_end=False)
    state = make_driver(job, limits, Collector()).run()
    assert state.result_fingerprint == small_undisturbed().fingerprint


@pytest.mark.long  # `test_preparation.py` changes the mesh of a run, and `test_tensor_groups.py` its degree
def test_another_mesh_by_choice_costs_no_step_and_no_bit(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        for changes, size in enumerate((2, 1, None), 1):
            driver.reshard(grouped(job, size))
            seen.wait(lambda s: len(s.memberships) > changes and s.step > s.of("generation")[-1]["step"])  # noqa: B023 - it is called here

    _, seen = drive(job, make_limits(job, 4), act)
    assert [fields.get("mesh", "flat") for fields in seen.of("generation")] == ["flat", "2x2", "4x1", "flat"]
    seen.assert_no_step_is_computed_twice()
    assert [fields["shard_group_size"] for fields in seen.of("reshard")] == [2, 1, None]
