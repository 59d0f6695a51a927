"""Stories of the laboratory with the real parts: what came of each fault, and the bits after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.driver.gcs_loss import DECIDE_AFTER_S
from raysharded.protocol.worker_launcher import GCS_LIMIT_SETTING
from tests.lab import stories
from tests.lab.machines import why_not
from tests.lab.ray_machines import RayMachines
from tests.lab.stories import DRIVER, SLOTS
from tests.lab.training import LabRun, undisturbed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.clusters,
    pytest.mark.skipif(bool(why_not()), reason=f"no laboratory: {why_not()}"),
]

NOTICED_S = 10.0
RAYS_LIMIT_S = 60.0
SHORT_LIMIT_S = 25.0
"""A limit of Ray's that a test can wait for."""


@contextmanager
def training(folder: Path, *, how: str = "fit", limit_s: float | None = None) -> Iterator[tuple[RayMachines, LabRun]]:
    """A run that trains on two workers, each on a separate machine, with its driver on a third."""
    settings = {} if limit_s is None else {GCS_LIMIT_SETTING: str(int(limit_s))}
    with RayMachines(SLOTS, redis=how == "fit", settings=settings) as cluster:
        run = LabRun(cluster, DRIVER, folder, how=how, workers=(1, 2))
        run.wait_until_trained(2)
        yield cluster, run


def last_checkpoint(run: LabRun) -> tuple[int, str]:
    """(step, fingerprint) of the newest checkpoint, as the journal has it."""
    entry = run.of("checkpoint")[-1]
    return int(entry["step"]), str(entry["fingerprint"])


def assert_each_step_was_done_once(run: LabRun) -> None:
    steps = [fields["step"] for fields in run.of("step")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_gcs_that_is_back_costs_nothing_and_one_that_is_not_ends_the_run_with_its_newest_step(tmp_path: Path) -> None:
    with training(tmp_path / "run", limit_s=SHORT_LIMIT_S) as (cluster, run):
        formed = len(run.of("generation"))  # 2 where the second worker started late
        back = stories.gcs_back(cluster, run)
        assert back.noticed_s is not None
        assert back.noticed_s <= NOTICED_S
        assert (back.again, back.lost, back.equal) == (0, (), True)
        assert len(run.of("generation")) == formed  # the same workers
        assert "GCS has not answered for" in back.said
        assert "GCS answers again" in back.said
        lost = stories.gcs_lost(cluster, run)
        assert lost.equal
        assert lost.noticed_s is not None
        assert lost.noticed_s <= NOTICED_S
        assert run.ended is not None
        assert run.ended.startswith("ClusterError: the GCS of the Ray cluster has not answered for")
        assert GCS_LIMIT_SETTING in run.ended
        assert_each_step_was_done_once(run)
        step, fingerprint = last_checkpoint(run)
        assert step == run.step()  # nothing that memory held is lost
        assert fingerprint == undisturbed(step)


@pytest.mark.long
def test_links_and_machines_fail_and_heal_under_one_run_then_the_head_node_is_lost(tmp_path: Path) -> None:
    with training(tmp_path / "run") as (cluster, run):
        rows = {story.__name__: story(cluster, run) for story in stories.GOES_ON}
        assert [name for name, row in rows.items() if not row.equal] == []
        for name in ("slow_link", "narrow_link", "gcs_hangs", "gcs_back"):
            assert (rows[name].again, rows[name].lost) == (0, ()), rows[name].text()
        for name in ("one_way", "broken_link"):  # the step in which it began, and one whose mirrors were on their way
            assert rows[name].again <= 1, rows[name].text()
            assert rows[name].lost == (), rows[name].text()
        for name in ("cut_off", "frozen", "power_off"):
            row = rows[name]
            assert row.again <= 1, row.text()
            assert len(row.lost) == 1, row.text()
            assert row.noticed_s is not None
            assert row.noticed_s <= 2 * NOTICED_S, row.text()
        began = time.monotonic()
        lost = stories.head_lost(cluster, run)
        assert lost.equal
        assert lost.noticed_s is not None
        assert lost.noticed_s <= NOTICED_S
        assert run.first("checkpoint", began) - began <= 2 * NOTICED_S + DECIDE_AFTER_S
        assert time.monotonic() - began < RAYS_LIMIT_S
        assert str(run.ended).startswith("ClusterError: the GCS of the Ray cluster")
        step, fingerprint = last_checkpoint(run)
        assert step == run.step()
        assert fingerprint == undisturbed(step)


@pytest.mark.long
def test_workers_that_lost_driver_and_head_node_write_their_newest_step_before_ray_ends_them(tmp_path: Path) -> None:
    with training(tmp_path / "run", how="start") as (cluster, run):
        began = time.monotonic()
        row = stories.driver_lost(cluster, run)
        assert row.equal
        assert time.monotonic() - began < RAYS_LIMIT_S
        (checkpoint,) = list_checkpoints(open_storage(f"{run.folder}/lab"))
        assert checkpoint.state == "committed"
        assert checkpoint.step > run.step()
