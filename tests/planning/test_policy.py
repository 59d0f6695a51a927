"""A run whose workers' memory is known: refused where no mesh fits, and otherwise in a mesh that fits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import Setting, worker_memory
from raysharded.planning.plans import setting_of_task
from raysharded.planning.search import cluster_of, with_plan
from raysharded.run.group_planner import GroupPlanner
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.training.harness import GptTask, Tokens, samples, train

MICROBATCHES = 4
BATCH = rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5)
TWO_GROUPS = Mesh(replicas=2, shards=2)


@cache
def setting() -> Setting:
    """The measured setting of the run without checkpoints; the model is traced once."""
    return setting_of_task(GptTask(), Tokens(), BATCH, rs.EngineConfig(), on_gpu=False, checkpoints=False)


def between(needs_less: Mesh, needs_more: Mesh) -> int:
    """Memory in which only the first fits."""
    less, more = (worker_memory(setting(), mesh).device for mesh in (needs_less, needs_more))
    assert less < more
    return int((less + more) / 2 / 0.9)


def trainer(folder: Path, num_workers: Any, memory: int | None, shards: int | None = 2) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=samples(),
        batch=BATCH,
        scaling=rs.ScalingConfig(num_workers=num_workers, shard_group_size=shards, memory_per_worker=memory),
        run=rs.RunConfig(
            name="planned",
            storage_path=str(folder),
            max_steps=3,
            checkpoint=rs.CheckpointConfig(every_s=None),  # whose snapshot `setting` does not count
        ),
    )


def test_tables_have_every_mesh_of_the_runs_workers() -> None:
    scaling = rs.ScalingConfig(
        num_workers=(2, 4), shard_group_size=2, memory_per_worker=between(Mesh(shards=4), TWO_GROUPS)
    )
    plain = GroupPlanner(trainer(Path(), (2, 4), None).spec()).grouping(scaling)
    assert plain is not None
    grouping = with_plan(plain, setting(), scaling)
    assert [len(row) for row in grouping.step_s] == [len(row) for row in grouping.fits] == [4, 2, 1, 1]
    assert grouping.fits[3][0]
    assert sum(map(sum, grouping.fits)) == 1  # 1x4 alone
    assert cluster_of(scaling, TWO_GROUPS).workers_per_node == 2


@pytest.mark.parametrize("shards", [None, 2])
def test_a_run_that_fits_nowhere_is_refused_with_the_numbers_and_the_nearest_that_does(
    tmp_path: Path, shards: int | None
) -> None:
    refused = trainer(tmp_path, 4, between(Mesh(shards=6), Mesh(shards=4)), shards)
    message = r"memory_per_worker=\d+\), .* KiB: no layout of 4 workers fits: 1x4 needs .* KiB per worker of .* KiB"
    with pytest.raises(ConfigError, match=message + r".*; the nearest that fits is 1x[56], [56] workers\."):
        refused.start_with(ProcessLauncher).wait(60)


def test_memory_is_given_in_bytes() -> None:
    with pytest.raises(ConfigError, match=r"memory_per_worker='80GiB': give a whole number of bytes"):
        rs.ScalingConfig(num_workers=2, memory_per_worker="80GiB")  # type: ignore[arg-type]


@pytest.mark.procs
@pytest.mark.slow
def test_a_run_is_in_a_mesh_that_fits_and_after_a_loss_the_journal_reports_that_none_does(tmp_path: Path) -> None:
    planned = trainer(tmp_path, (2, 4), between(Mesh(shards=4), TWO_GROUPS))
    fault = Fault(worker=WorkerId(1), step=2, phase="backward")
    planned.faults = FaultPlan(faults=(fault,), folder=str(tmp_path))
    entries: list[dict[str, Any]] = []
    run = planned.start_with(ProcessLauncher, lambda kind, fields: entries.append({"kind": kind, **fields}))
    result = run.wait(120)
    assert planned.faults.fired(fault)
    assert result.fingerprint == train(1, microbatches=MICROBATCHES, steps=3).fingerprint
    first, second, *_ = [entry for entry in entries if entry["kind"] == "generation"]
    assert first["mesh"] == "1x4"
    assert "as planned" in first["why"]
    assert len(second["members"]) < 4
    assert "does not fit the workers' memory, and no other mesh does" in second["why"]
