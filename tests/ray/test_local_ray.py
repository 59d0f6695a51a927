from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from raysharded.actors.process.os_processes import start_ticks
from raysharded.ray_backend import cluster
from raysharded.ray_backend.agents import OwnNode
from tests.paths import ROOT
from tests.ray.clusters import WITHIN_S, separate
from tests.ray.leftovers import processes_marked, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@ray.remote
def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_worker_of_a_ray_that_we_start_has_the_priority_of_who_started_it() -> None:
    assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)
    assert "RAY_worker_niceness" not in os.environ, "nor is it left to processes that have nothing to do with this Ray"


def test_rays_word_for_a_cluster_on_this_machine_names_none_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray is started, as without the word: with the priority of its starter, and ended with it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not cluster.find_cluster()
    monkeypatch.delenv("RAY_ADDRESS")
    assert not cluster.find_cluster("local")


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that does not end by itself, and when it was started."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        started = start_ticks(process.pid)
        assert started is not None
        yield process, started
        process.kill()


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_where_there_is_no_agent_the_driver_ends_a_process_itself(
    sleeper: tuple[subprocess.Popen[bytes], int], after_s: float
) -> None:
    process, started = sleeper
    os.kill(process.pid, signal.SIGSTOP)
    node = OwnNode()
    node.kill("", process.pid, started, after_s=after_s)
    node.close(30.0)
    assert process.wait(10) == -signal.SIGKILL


def test_a_process_that_was_started_since_is_left_alone(sleeper: tuple[subprocess.Popen[bytes], int]) -> None:
    process, started = sleeper
    node = OwnNode()
    node.kill("", process.pid, started - 1)
    node.kill("", process.pid, started - 1, after_s=0.1)
    node.close(30.0)
    assert process.poll() is None


SECRET = "canary-0123456789abcdef"


@dataclass(frozen=True)
class OwnRay:
    """Findings of `tests.ray.own_ray`, and the processes that are left of it."""

    found: dict[str, Any]
    left: list[str]


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> OwnRay:
    """One run on a Ray that it started, from a process whose standard streams are closed."""
    folder = tmp_path_factory.mktemp("own")
    with separate() as environment:
        marker = f"RAYSHARDED_TEST={environment['RAYSHARDED_TEST']}"
        environment |= {"RAYSHARDED_CHECKPOINT_KEY": SECRET, "OTHER_CANARY": "here", "PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-m", "tests.ray.own_ray", str(folder)]
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program]
        status = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=WITHIN_S, check=False, start_new_session=True
        ).returncode
        failed = folder / "failed"
        assert status == 0, failed.read_text() if failed.exists() else status
        assert not failed.exists(), failed.read_text()
        with contextlib.suppress(AssertionError):  # a test reports the processes that are left
            wait_until(lambda: not processes_marked(marker), "all processes gone", 60)
        return OwnRay(json.loads((folder / "found").read_text()), processes_marked(marker))


@pytest.mark.clusters
def test_a_stopped_worker_of_a_ray_that_we_start_is_ended_without_an_agent(own_ray: OwnRay) -> None:
    titles = own_ray.found["titles"]
    assert any(title.startswith("ray::Tenant") for title in titles)
    assert not [title for title in titles if title.startswith("ray::Agent")]


@pytest.mark.clusters
def test_all_ports_of_a_ray_that_we_start_are_on_the_loopback_interface(own_ray: OwnRay) -> None:
    addresses = own_ray.found["addresses"]
    assert len(addresses) > 4
    assert [one for one in addresses if "127.0.0.1" not in one] == []
    left_set = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in own_ray.found["mine"]
    assert not left_set, "nor is Ray's word for it left to processes that have nothing to do with this Ray"


@pytest.mark.clusters
def test_another_process_of_the_machine_reaches_a_ray_on_the_loopback_interface(own_ray: OwnRay) -> None:
    assert own_ray.found["gcs"].startswith("127.")
    assert "True" in own_ray.found["other"].splitlines(), own_ray.found["other"]  # Ray may log lines at its exit


@pytest.mark.clusters
def test_the_processes_of_a_ray_that_a_run_starts_do_not_have_the_key(own_ray: OwnRay) -> None:
    """The key that signs checkpoints is that of the run's driver alone."""
    found = own_ray.found
    assert {"gcs_server", "raylet"} <= set(found["environments"])
    for name in ("gcs_server", "raylet"):
        assert "OTHER_CANARY" in found["environments"][name], "environments are inherited"
    assert found["worker"]["OTHER_CANARY"] == "here"
    assert "RAYSHARDED_CHECKPOINT_KEY" not in found["worker"]
    assert [name for name, text in found["environments"].items() if SECRET in text] == []
    assert found["mine"]["RAYSHARDED_CHECKPOINT_KEY"] == SECRET, "this process signs"
    assert "does not reach the run's driver" in found["refused"]
    assert "CheckpointConfig(signing_key_file=...)" in found["refused"]
    assert not found["started"], "it was refused before a Ray was started"


@pytest.mark.clusters
def test_fit_needs_no_standard_streams_and_sigterm_then_a_hangup_of_all_ends_it_after_a_checkpoint(
    own_ray: OwnRay,
) -> None:
    """Ray has a handler of SIGTERM, too: that of `fit` comes after it."""
    assert own_ray.found["sigterm_stops"]
    assert [stop["checkpoint"] for stop in own_ray.found["stops"]] == [True], "hangups change nothing after SIGTERM"
    assert "checkpoint" in own_ray.found["kinds"]
    assert own_ray.found["stopped"].startswith("Stopped. Run 'job' was at step ")
    assert "the next fit() resumes from its checkpoint of step " in own_ray.found["stopped"]


@pytest.mark.clusters
def test_nothing_is_left_of_a_run_that_signals_ended(own_ray: OwnRay) -> None:
    assert own_ray.left == []
