"""Nodes that die, nodes that fail again and again, and workers that do not end: on real Ray nodes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.ray.leftovers import processes_marked, wait_until
from tests.ray.node_scenarios import MICROBATCHES, STEPS
from tests.training.harness import train

pytestmark = [pytest.mark.ray, pytest.mark.clusters]
WITHIN_S = 600.0
"""More than any scenario takes on a busy machine: a hang."""


def happens(scenario: str, folder: Path) -> dict[str, Any]:
    """The findings of a scenario; nothing of it is left afterwards."""
    marker = f"RAYSHARDED_TEST={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ray.node_scenarios", scenario, str(folder)],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it then ends its nodes
        out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors[-3000:]
    wait_until(lambda: not processes_marked(marker), f"all processes gone: {processes_marked(marker)}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def undisturbed() -> str | None:
    """The fingerprint of the scenarios' run on one plain process."""
    return train(1, steps=STEPS, microbatches=MICROBATCHES).fingerprint


def test_the_death_of_a_node_with_half_of_the_workers_is_one_recovery_from_memory(tmp_path: Path) -> None:
    found = happens("death", tmp_path)
    (recovery,) = found["recoveries"]
    assert sorted(recovery["lost"]) == found["lost"]
    assert len(found["lost"]) == 2
    assert recovery["source"] == "memory"
    assert all("its raylet" in reason for reason in recovery["reasons"])
    assert found["noticed_s"] < 5.0  # Ray's own health checks take 15 s and more
    assert found["joined"] == 2
    assert found["ok"]
    assert found["fingerprint"] == undisturbed()


@pytest.mark.long
def test_each_shard_group_is_on_a_node_and_the_death_of_one_is_recovered_from_the_other(tmp_path: Path) -> None:
    found = happens("groups", tmp_path)
    first, *_, last = found["formed"]
    assert (first["mesh"], last["mesh"]) == ("2x2", "2x2")
    for formed in (first, last):
        one, other = set(formed["nodes"][:2]), set(formed["nodes"][2:])
        assert len(one) == len(other) == 1
        assert one != other
    assert "1x2" in [formed["mesh"] for formed in found["formed"]]
    (recovery,) = found["recoveries"]
    assert recovery["source"] == "memory"
    assert found["ok"]
    assert found["fingerprint"] == undisturbed()


@pytest.mark.long
def test_a_node_whose_workers_are_killed_again_and_again_gets_no_new_ones_as_reported(
    tmp_path: Path,
) -> None:
    found = happens("avoidance", tmp_path)
    (avoided,) = found["avoided"]
    assert (avoided["node"], avoided["failures"]) == (found["second"], 2)
    assert "its process died" in avoided["reasons"][-1]
    assert found["later"]
    assert found["second"] not in found["later"]
    assert len(found["recoveries"]) == 2
    assert found["ok"]
    assert found["fingerprint"] == undisturbed()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings on a launcher without a driver, in one cluster."""
    return happens("launched", tmp_path_factory.mktemp("launched"))


@pytest.mark.long
def test_a_worker_waits_when_only_avoided_nodes_have_slots_and_the_shortage_gives_the_reason(
    launched: dict[str, Any],
) -> None:
    found = launched["only_avoided"]
    assert found["happened"] == []
    assert found["shortage"].endswith(
        f"No worker is placed on {found['node'][:8]}: drained by request, or failed too often or just now."
    )
    assert found["on_other"]


def test_a_stopped_worker_is_ended_by_its_nodes_agent_at_once_and_the_driver_does_not_wait(
    launched: dict[str, Any],
) -> None:
    found = launched["stopped"]
    assert found["started"] > 0
    assert len(found["node_id"]) == 56  # hex
    assert found["killed_s"] < 1.0  # Ray alone takes 5 s
    assert found["call_s"] < 0.5


def test_a_worker_that_is_starting_is_no_shortage_also_on_a_full_node(launched: dict[str, Any]) -> None:
    assert launched["stopped"]["shortage"] == ""
    needed, wanted = launched["one_starts"]
    assert needed == ""
    assert wanted == "Each worker needs 1 CPU (the cluster has 1, 0 free)."


def test_of_a_worker_that_never_became_ready_it_is_known_where_it_was(launched: dict[str, Any]) -> None:
    assert launched["failed_starts"]["found"] == [["WorkerLost", True], ["Reply", True]]
