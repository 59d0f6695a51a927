"""Runs inside of a placement group that captures children, as Ray Tune makes one for every trial."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raysharded as rs
from raysharded.errors import ClusterError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.ray.leftovers import NUM_SLOTS, assert_no_slot_is_leaked
from tests.ray.pacing import PATIENT_S
from tests.ray.test_hosted import no_host_stays as no_host_stays
from tests.ray.test_main_job import trainer, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_host_stays")]

OF_TRIAL = 3
"""Bundles of a group: one for the trial, two for its workers."""


class Heard(logging.Handler):
    """The messages of raysharded's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("raysharded").addHandler(self)
        logging.getLogger("raysharded.driver").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(folder: str, workers: int | tuple[int, int], group: str, faults: FaultPlan | None = None) -> dict[str, Any]:
    """The outcome of `fit()`, and the CPUs that were free at its steps: outside of groups, and in this one."""
    heard, free, in_group = Heard(), [], []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            now = ray.available_resources()
            free.append(now.get("CPU", 0.0))
            in_group.append(now.get(f"CPU_group_{group}", 0.0))

    made = trainer(Path(folder), workers, failure=rs.FailureConfig(hang_timeout_s=PATIENT_S))
    if faults is not None:
        made.faults = faults
    result = made.fit(listen)
    lost = [event.worker for event in result.report().summary.worker_events if event.what == "lost"]
    return {
        "fingerprint": result.fingerprint,
        "free": free,
        "in_group": in_group,
        "heard": heard.messages,
        "lost": lost,
    }


class Trial:
    """An actor that trains, as in Ray Tune."""

    def train(self, *arguments: Any) -> dict[str, Any]:
        return train(*arguments)

    def start(self, folder: str) -> list[str]:
        """The messages of `start()`."""
        heard = Heard()
        trainer(Path(folder), 1).start()
        return heard.messages


task = ray.remote(num_cpus=1)(train)
trial_class: Any = ray.remote(num_cpus=1)(Trial)


@pytest.fixture
def group() -> Iterator[PlacementGroup]:
    """A trial's bundles, of one CPU each."""
    made = placement_group([{"CPU": 1}] * OF_TRIAL)
    ray.get(made.ready())
    yield made
    remove_placement_group(made)
    assert_no_slot_is_leaked()


@pytest.fixture
def nothing_is_free_outside(group: PlacementGroup) -> Iterator[None]:
    """Another user of the cluster has all CPUs but those of the group."""
    made = placement_group([{"CPU": NUM_SLOTS - OF_TRIAL}])
    ray.get(made.ready())
    yield
    remove_placement_group(made)


def inside(group: PlacementGroup, *, captures: bool = True) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=captures)


@pytest.mark.usefixtures("nothing_is_free_outside")
def test_workers_of_a_trial_are_in_its_bundles_and_so_is_the_replacement_of_a_lost_one(
    group: PlacementGroup, tmp_path: Path
) -> None:
    kill = Fault(worker=WorkerId(0), step=3, phase="forward", kind="kill")
    faults = FaultPlan(faults=(kill,), folder=str(tmp_path))
    trial = trial_class.options(scheduling_strategy=inside(group)).remote()
    told = ray.get(trial.train.remote(str(tmp_path), 2, group.id.hex(), faults))
    ray.kill(trial)
    assert told["fingerprint"] == undisturbed().fingerprint
    assert told["lost"] == [0]
    assert max(told["free"]) == 0
    assert min(told["in_group"]) == 0, "both bundles were used"
    assert any("in the placement group of this process (3 bundles: 1 CPU" in message for message in told["heard"])


@pytest.mark.long
def test_the_workers_of_a_task_are_in_its_bundles_while_others_are_free(group: PlacementGroup, tmp_path: Path) -> None:
    started = task.options(scheduling_strategy=inside(group)).remote(str(tmp_path), (1, 4), group.id.hex())
    told = ray.get(started)
    assert told["fingerprint"] == undisturbed().fingerprint
    assert min(told["free"]) == NUM_SLOTS - OF_TRIAL, "the CPUs outside stay free"
    limit = "the run has at most 3 of 4 workers: its workers are in the placement group of this process"
    assert any(message.startswith(limit) for message in told["heard"])


@pytest.mark.parametrize("where", [pytest.param("no group", marks=pytest.mark.long), "a group that captures nothing"])
def test_without_a_group_that_captures_workers_are_anywhere(where: str, group: PlacementGroup, tmp_path: Path) -> None:
    options = {} if where == "no group" else {"scheduling_strategy": inside(group, captures=False)}
    told = ray.get(task.options(**options).remote(str(tmp_path), 2, group.id.hex()))
    assert told["fingerprint"] == undisturbed().fingerprint
    assert min(told["free"]) <= NUM_SLOTS - OF_TRIAL - 2
    assert min(told["in_group"]) >= OF_TRIAL - 1


def test_a_group_without_room_for_the_workers_is_refused_at_the_start(group: PlacementGroup, tmp_path: Path) -> None:
    trial = trial_class.options(scheduling_strategy=inside(group)).remote()
    with pytest.raises(
        ClusterError, match="captures its children, 3 bundles: 1 CPU, 1 CPU, 1 CPU: it is enough for 2"
    ) as no:
        ray.get(trial.train.remote(str(tmp_path), 3, group.id.hex()))
    ray.kill(trial)
    assert 'PlacementGroupFactory([the trial\'s bundle] + [{"CPU": 1}] * 3)' in str(no.value)
    assert not (tmp_path / "job" / "journal").exists()


def test_a_run_that_outlives_its_trial_does_not_take_the_group(group: PlacementGroup, tmp_path: Path) -> None:
    trial = trial_class.options(scheduling_strategy=inside(group)).remote()
    heard = ray.get(trial.start.remote(str(tmp_path)))
    assert any("run job is outside of the placement group of this process (3 bundles" in message for message in heard)
    ray.kill(trial)
    remove_placement_group(group)
    result = rs.attach(str(tmp_path / "job")).wait(240)
    assert result.fingerprint == undisturbed().fingerprint
