"""Nodes that go with notice and nodes that come, on real Ray clusters of several nodes.

Each test has a separate cluster in a separate process, for this process is in another one.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray.clusters import run_script
from tests.ray.leftovers import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.clusters]

DRAINED = """
import sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.ray.driving import hurry
from tests.ray.test_leaving import trainer, journal

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
entries = journal()
run = trainer(sys.argv[1], (2, 4), (2, 3), (12, 5)).start_local(entries)
entries.wait(lambda: len(run.status().workers) == 4 and run.status().step >= 3)
draining = nodes[1].node_id
deadline_ms = time.time_ns() // 1_000_000 + 60_000
accepted, why = ray._private.worker.global_worker.gcs_client.drain_node(draining, 2, "taken away", deadline_ms)
assert accepted, why
entries.wait(lambda: len(entries.of("worker_left")) == 2)
cluster.add_node(num_cpus=2)
entries.wait(lambda: len(run.status().workers) == 4)
hurry(Path(sys.argv[1]))
result = run.wait()
entries.tell(result, draining)
ray.shutdown()
cluster.shutdown()
"""

ALL_DRAINED = """
import sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.ray.driving import hurry
from tests.ray.test_leaving import LONGER, NOTICE_S, trainer, journal

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
entries = journal()
run = trainer(sys.argv[1], (1, 2), steps=LONGER).start_local(entries)
entries.wait(lambda: len(run.status().workers) == 2 and run.status().step >= 3)
drain = ray._private.worker.global_worker.gcs_client.drain_node
deadline_ms = time.time_ns() // 1_000_000 + 1000 * NOTICE_S
for node in nodes:
    accepted, why = drain(node.node_id, 2, "taken away", deadline_ms)
    assert accepted, why
entries.wait(lambda: len(entries.of("worker_lost")) == 2)
in_time = time.time_ns() // 1_000_000 < deadline_ms
for node in nodes:
    cluster.remove_node(node)
cluster.add_node(num_cpus=2)
hurry(Path(sys.argv[1]))
result = run.wait()
entries.tell(result, "", in_time=in_time)
ray.shutdown()
cluster.shutdown()
"""

SCALED = """
import sys
from pathlib import Path
import ray
from tests.ray.driving import hurry
from tests.ray.test_leaving import trainer, journal

ray.init(address=sys.argv[2], log_to_driver=False)
entries = journal()
run = trainer(sys.argv[1], (1, 2), (8, 1)).start_local(entries)
entries.wait(lambda: len(run.status().workers) == 2)
hurry(Path(sys.argv[1]))
result = run.wait()
entries.tell(result, "")
"""


class Journal:
    """The journal of a run of the scripts above, and waits for its entries."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.entries.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for entry, fields in self.entries if entry == kind]

    def wait(self, condition: Any) -> None:
        wait_until(condition, f"{[(kind, f) for kind, f in self.entries if kind != 'step'][-12:]}", 120)

    def tell(self, result: Any, draining: str, **more: Any) -> None:
        """Print the outcome, for the test that began the script."""
        kinds = ("generation", "worker_leaving", "worker_left", "worker_lost", "worker_ready", "recovery", "checkpoint")
        said = {kind: self.of(kind) for kind in kinds}
        steps = [fields["step"] for fields in self.of("step")]
        sys.stdout.write(
            json.dumps({**said, "steps": steps, "fingerprint": result.fingerprint, "node": draining, **more}) + "\n"
        )


def journal() -> Journal:
    return Journal()


def trainer(folder: str, workers: tuple[int, int], *moments: tuple[int, int], steps: int | None = None) -> Any:
    """A trainer of these workers; `moments`: see `waiting`."""
    import raysharded as rs
    from tests.ray.driving import PacedTokens
    from tests.ray.pacing import PATIENT_S, waiting
    from tests.training.harness import GptTask

    patient = rs.FailureConfig(hang_timeout_s=PATIENT_S)
    made = rs.ElasticTrainer(
        task=GptTask(),
        data=PacedTokens(Path(folder)),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(name="job", storage_path=folder, max_steps=steps or STEPS, failure=patient),
        engine=rs.EngineConfig(prefetch=False),
    )
    made.faults = waiting(Path(folder), *moments)
    return made


STEPS = 18
LONGER = 40
MICROBATCHES = 4
NOTICE_S = 10


def undisturbed(steps: int = STEPS) -> str | None:
    from tests.training.harness import train

    return train(1, steps=steps, microbatches=MICROBATCHES).fingerprint


def test_the_workers_of_a_drained_node_leave_together_and_no_step_is_computed_again(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    found = run_script(DRAINED, str(tmp_path), environment=own_cluster, quiet=True)
    there = {ready["worker"] for ready in found["worker_ready"] if ready["node_id"] == found["node"]}
    assert len(there) == 2
    assert {leaving["worker"] for leaving in found["worker_leaving"]} == there
    assert all(45 < leaving["notice_s"] <= 60 for leaving in found["worker_leaving"])
    assert all("is being drained" in leaving["reason"] for leaving in found["worker_leaving"])
    sizes = [len(generation["members"]) for generation in found["generation"]]
    grown = sizes.index(4)  # the first two may be ready so much sooner that they begin
    assert sizes[grown + 1] == 2  # mirrors are kept on other nodes: both go at one boundary
    assert sizes[-1] == 4
    assert found["steps"] == list(range(1, STEPS + 1))
    assert (found["worker_lost"], found["recovery"]) == ([], [])
    assert found["fingerprint"] == undisturbed()


@pytest.mark.long
def test_if_all_nodes_are_drained_at_once_the_last_checkpoint_is_one_that_is_written_just_in_time(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    found = run_script(ALL_DRAINED, str(tmp_path), environment=own_cluster)
    assert found["in_time"]
    reasons = [entry["reason"].partition(":")[0] for entry in found["worker_lost"]]
    last = int(reasons[0].removeprefix("left after the checkpoint of step "))
    assert reasons == [f"left after the checkpoint of step {last}"] * 2
    told_at = found["worker_leaving"][0]["step"]
    first, second, *_ = [entry["step"] for entry in found["checkpoint"]]
    assert told_at < first < second == last
    (recovery,) = found["recovery"]
    assert (recovery["source"], recovery["resumed_after_step"]) == ("checkpoint", last)
    assert last - told_at > 2 * recovery["steps_redone"]  # it trained on for most of the notice
    assert [len(generation["members"]) for generation in found["generation"]][-1] == 2
    assert found["fingerprint"] == undisturbed(LONGER)


def autoscaled(address: str) -> dict[str, Any]:
    """The configuration of a cluster whose nodes are Ray's own fake ones; the head has a slot for one worker."""
    kinds = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "small": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    return {
        "cluster_name": "fake",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "cluster_synced_files": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "upscaling_speed": 1.0,
    }


def test_nodes_that_the_autoscaler_adds_are_used_up_to_the_maximum_without_losing_a_step(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"  # as Ray sees this machine; it does not take 127.0.0.1
    (tmp_path / "cluster.json").write_text(json.dumps(autoscaled(address)))
    command = str(Path(sys.executable).with_name("ray"))
    arguments = ["--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    environment = own_cluster | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    started = subprocess.run(
        [command, "start", *arguments, f"--autoscaling-config={tmp_path / 'cluster.json'}"],
        env=environment,
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr[-4000:]
    found = run_script(SCALED, str(tmp_path), address, environment=environment, quiet=True)
    assert [len(generation["members"]) for generation in found["generation"]] in ([1, 2], [2])  # it may come in time
    assert len({ready["node_id"] for ready in found["worker_ready"]}) == 2
    assert found["steps"] == list(range(1, STEPS + 1))
    assert found["worker_lost"] == []
    assert found["fingerprint"] == undisturbed()
