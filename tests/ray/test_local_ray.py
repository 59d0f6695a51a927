from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raysharded.actors.process.os_processes import start_ticks
from raysharded.ray_backend import cluster
from raysharded.ray_backend.agents import OwnNode
from tests.ray.clusters import run_script

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


STOPPED = """
import json, os, signal, sys
from pathlib import Path
import raysharded as rs
from raysharded.actors.process.os_processes import start_ticks
from raysharded.testing.ray_nodes import descendants
from tests.ray.leftovers import wait_until
from tests.ray.test_main_job import trainer

folder = Path(sys.argv[1])
run = trainer(folder, (1, 2), failure=rs.FailureConfig(hang_timeout_s=3.0)).start_local()
wait_until(lambda: run.status().step >= 3 and len(run.status().workers) == 2, "step 3")
status = run.status()
victim = status.pids[status.workers[1]]
os.kill(victim, signal.SIGSTOP)
wait_until(lambda: start_ticks(victim) is None, "the end of the stopped worker")
titles = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[0].decode() for pid in descendants(os.getpid())]
run.wait()
print(json.dumps(titles))
"""


@pytest.mark.clusters
def test_a_stopped_worker_of_a_ray_that_we_start_is_ended_without_an_agent(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    titles = run_script(STOPPED, str(tmp_path), environment=own_cluster)
    assert any(title.startswith("ray::Tenant") for title in titles)
    assert not [title for title in titles if title.startswith("ray::Agent")]


PORTS = """
import json, os, subprocess
import ray
from raysharded.ray_backend.cluster import start_local
from tests.actors.comm.strangers import children

start_local(1)
ray.get(ray.remote(lambda: os.getpid()).remote())  # a worker is there
ours = {f"pid={pid}," for pid in children([os.getpid()])}
lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
addresses = [line.split()[3] for line in lines if any(pid in line for pid in ours)]
print(json.dumps({"addresses": addresses, "told": "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in os.environ}))
"""


@pytest.mark.clusters
def test_all_ports_of_a_ray_that_we_start_are_on_the_loopback_interface(own_cluster: dict[str, str]) -> None:
    found = run_script(PORTS, environment=own_cluster)
    assert len(found["addresses"]) > 4
    assert [one for one in found["addresses"] if "127.0.0.1" not in one] == []
    assert not found["told"], "nor is Ray's word for it left to processes that have nothing to do with this Ray"


def test_another_process_of_the_machine_reaches_a_ray_on_the_loopback_interface() -> None:
    held = "import ray; from raysharded.ray_backend.cluster import start_local; start_local(1); "
    held += "print(ray.get_runtime_context().gcs_address, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        address = own.stdout.readline().split()[-1]
        assert address.startswith("127.")
        found = "from raysharded.ray_backend.cluster import find_cluster; print(find_cluster())"
        environment = {**os.environ, "RAY_ADDRESS": address}
        other = subprocess.run(
            [sys.executable, "-c", found], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert other.stdout.split()[-1:] == ["True"], other.stderr
        own.stdin.close()
