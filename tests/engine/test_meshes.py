"""Shard groups with real worker processes: the bits of one worker in every mesh, whoever is lost."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.actors import exchange
from raysharded.actors.restore import spec_of
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.keeping.catalog import newest_complete
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.cases import tried_each_time
from tests.engine.harness import Collector, GptTask, Outcome, Tokens, grouped, make_driver, make_job, make_limits, train
from tests.engine.test_checkpoints import Wide

pytestmark = pytest.mark.procs
STEPS = 6
WIDE = Wide()
MESHES = [(1, 4), (2, 2), (4, 1), (3, 2), (2, 3)]


def num_data_bytes(path: Path) -> int:
    """Of a safetensors file, without its header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


@cache
def undisturbed(**settings: Any) -> Outcome:
    """One worker's outcome."""
    return train(1, **settings)


def in_groups(replicas: int, shards: int, **settings: Any) -> Outcome:
    return train(replicas * shards, shards=shards, **settings)


@cache
def replaced() -> Outcome:
    """Of 2 groups of 2 in which a worker was lost; its replacement has come before the end."""
    until_it_is_back = Fault(worker=WorkerId(0), step=6, phase="forward", kind="wait", until=WorkerId(4))
    return in_groups(2, 2, steps=9, kills=[(3, 2, "backward")], faults=[until_it_is_back])


def meshes_of(outcome: Outcome) -> list[str]:
    """Of every generation."""
    return [fields["mesh"] for fields in outcome.of("generation")]


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_single_workers_and_whole_groups_may_be_lost_in_every_mesh_without_a_bit_changing(
    replicas: int, shards: int
) -> None:
    group = range((replicas - 1) * shards, replicas * shards) if replicas > 1 else range(1, 3)
    kills = [(0, 2, "backward"), *((worker, 4, "agree") for worker in group)]
    outcome = in_groups(replicas, shards, steps=STEPS, kills=kills, least_shards=1)
    assert outcome.bits == undisturbed(steps=STEPS).bits
    assert meshes_of(outcome)[0] == f"{replicas}x{shards}"
    if replicas > 1:  # what was committed is in the other groups
        assert all(fields["source"] == "memory" for fields in outcome.of("generation")[1:])


@pytest.mark.parametrize(
    ("replicas", "shards", "reduce_dtype"),
    tried_each_time(
        [(2, 2, "bfloat16"), (3, 2, "float32")],
        [(replicas, 2, dtype) for replicas in (2, 3) for dtype in ("float32", "bfloat16")],
    ),
)
def test_mixed_precision_in_groups(replicas: int, shards: int, reduce_dtype: Any) -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype)
    kills = [(1, 2, "backward")]
    assert in_groups(replicas, shards, engine=engine, kills=kills).bits == undisturbed(engine=engine).bits


@pytest.mark.parametrize(
    ("replicas", "shards", "microbatches", "accumulation"),
    tried_each_time(
        [(2, 2, 5, "sharded"), (2, 2, 5, "local"), (3, 2, 13, "local"), (3, 1, 2, "sharded")],
        [(*case, how) for case in ((2, 2, 5), (3, 2, 13), (3, 1, 2)) for how in ("sharded", "local")],
    ),
)
def test_groups_of_unequal_work(replicas: int, shards: int, microbatches: int, accumulation: Any) -> None:
    engine = rs.EngineConfig(accumulation=accumulation)
    outcome = in_groups(replicas, shards, microbatches=microbatches, engine=engine)
    assert outcome.bits == undisturbed(microbatches=microbatches).bits


class Counting(GptTask):
    """In the workers, has a file for every worker that adds up for others of its host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build_model(self) -> Any:
        terms = exchange.Exchange.terms

        def counted(own: exchange.Exchange, *arguments: Any) -> Any:
            if own.hosts:
                (self._folder / f"{own.shard} {own.hosts}").touch()
            return terms(own, *arguments)

        type.__setattr__(exchange.Exchange, "terms", counted)
        return super().build_model()


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
def test_workers_of_one_node_add_first_what_they_have_and_no_bit_changes(tmp_path: Path, accumulation: Any) -> None:
    engine = rs.EngineConfig(accumulation=accumulation)
    outcome = train(5, nodes="aabba", task=Counting(tmp_path), engine=engine, kills=[(2, 2, "backward")])
    assert outcome.bits == undisturbed().bits
    adding = {path.name for path in tmp_path.iterdir()}
    assert adding >= {f"{shard} ((0, 1, 2), (3, 4))" for shard in range(5)}
    assert len(adding) == 9  # and the four that are left after the loss


def test_evaluation_in_groups() -> None:
    evaluation = rs.EvalConfig(data=Tokens(), every_steps=2, num_samples=7)
    assert in_groups(2, 2, evaluation=evaluation, steps=4).bits == undisturbed(evaluation=evaluation, steps=4).bits


def test_fast_reduction_in_groups_trains_on_the_same_batch() -> None:
    fast = in_groups(2, 2, engine=rs.EngineConfig(reduction="fast"))
    assert fast.losses == pytest.approx(undisturbed().losses, rel=1e-4)
    assert [numbers["digest"] for numbers in fast.numbers] == [numbers["digest"] for numbers in undisturbed().numbers]


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (3, 1)])
def test_audits_in_groups_change_no_bit_and_find_who_computes_wrong_numbers(replicas: int, shards: int) -> None:
    engine = rs.EngineConfig(audit_every_steps=1)
    wrong = Fault(worker=WorkerId(1), step=3, phase="backward", kind="corrupt")
    outcome = in_groups(replicas, shards, steps=STEPS, microbatches=4, engine=engine, faults=[wrong], least_shards=1)
    assert outcome.bits == undisturbed(steps=STEPS, microbatches=4).bits
    (corruption,) = outcome.of("corruption")
    assert corruption["culprits"] == [1]


def test_after_a_loss_the_run_goes_on_in_the_fastest_mesh_says_why_and_goes_back() -> None:
    outcome = replaced()
    assert outcome.bits == undisturbed(steps=9).bits
    first, smaller, *_, last = outcome.of("generation")
    assert (first["mesh"], smaller["mesh"], last["mesh"]) == ("2x2", "1x2", "2x2")
    assert len(smaller["spares"]) == 1
    assert "1 of 3 workers stands by" in smaller["why"]
    assert "1x3" in smaller["why"]
    assert all(fields["source"] == "memory" for fields in (smaller, last))


def test_only_one_shard_is_sent_when_a_worker_of_a_group_is_replaced() -> None:
    outcome = replaced()
    *_, back = [fields for kind, fields in outcome.entries if kind == "formed"]
    flat = undisturbed(steps=3, save_every=1)
    (size,) = {fields["bytes"] for fields in flat.of("checkpoint")}
    assert 0.45 * size < back["bytes_received"] < 1.1 * size  # one or two workers' halves


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 3)), ((1, 3), (3, 1)), ((3, 2), (2, 1))])
def test_a_checkpoint_is_written_once_by_all_groups_and_goes_on_in_any_mesh(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def go_on(mesh: tuple[int, int], steps: int) -> tuple[Collector, str | None]:
        job = make_job(f"{tmp_path}/run", task=WIDE, steps=steps)
        limits = make_limits(job, mesh[0] * mesh[1], grouping=grouped(job, mesh[1]))
        listener = Collector()
        driver = make_driver(job, limits, listener)
        driver.resume()
        return listener, driver.run().result_fingerprint

    _, fingerprint = go_on(before, 3)
    assert fingerprint == undisturbed(task=WIDE, steps=3).fingerprint
    found = newest_complete(open_storage(f"{tmp_path}/run"))
    assert found.checkpoint is not None
    files = list(Path(f"{tmp_path}/run").rglob("*.safetensors"))
    assert len(files) == before[0] * before[1]  # each worker has written a part
    whole = spec_of(found.checkpoint).total_bytes
    assert sum(map(num_data_bytes, files)) == whole  # and nothing was written twice
    second, fingerprint = go_on(after, 5)
    assert fingerprint == undisturbed(task=WIDE, steps=5).fingerprint
    (formed,) = [fields for kind, fields in second.entries if kind == "formed"]
    assert whole <= formed["bytes_read"] < 1.9 * whole  # whole chunks, for their digests; not once per replica
    shutil.rmtree(tmp_path / "run")


def test_without_a_last_checkpoint_the_fingerprint_counts_every_shard_once(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", steps=3)
    limits = make_limits(job, 4, grouping=grouped(job, 2), save_at_end=False)
    state = make_driver(job, limits, Collector()).run()
    assert state.result_fingerprint == undisturbed(steps=3).fingerprint


def test_another_mesh_by_choice_costs_no_step_and_no_bit(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", steps=12)
    wanted = {2: grouped(job, 2), 5: grouped(job, 1), 8: None}

    class Asks(Collector):
        """Asks for another mesh as soon as some steps are done."""

        def __call__(self, kind: str, fields: dict[str, Any]) -> None:
            Collector.__call__(self, kind, fields)
            if kind == "step" and fields["step"] in wanted:
                driver.reshard(wanted.pop(fields["step"]))

    listener = Asks()
    driver = make_driver(job, make_limits(job, 4), listener)
    assert driver.run().result_fingerprint == undisturbed(steps=12).fingerprint
    assert [fields.get("mesh", "flat") for kind, fields in listener.entries if kind == "generation"] == [
        "flat",
        "2x2",
        "4x1",
        "flat",
    ]
    steps = [fields["step"] for kind, fields in listener.entries if kind == "step"]
    assert steps == list(range(1, 13))
    asked = [fields["shard_group_size"] for kind, fields in listener.entries if kind == "reshard"]
    assert asked == [2, 1, None]
