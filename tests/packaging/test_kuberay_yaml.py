"""docs/kuberay.yaml is a RayJob that KubeRay's schema accepts, fits cluster.yaml, and gives a run the time to leave."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import raysharded as rs
from tests.paths import DOCS, ROOT

_DRAINED = """
import os, subprocess, sys, time
import ray
from ray.cluster_utils import Cluster
from raysharded.ray_backend.ray_launcher import _draining_nodes  # what a run's driver asks

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
worker = ray.remote(num_cpus=1)(type("Worker", (), {"is_there": lambda self: True})).remote()
assert ray.get(worker.is_there.remote(), timeout=60)  # a node with nobody on it would end at once
hook = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "RAY_ADDRESS": cluster.address})
end, draining = time.monotonic() + 60, {}
while not draining and hook.poll() is None and time.monotonic() < end:
    time.sleep(0.1)
    draining = _draining_nodes()
print(draining[ray.get_runtime_context().get_node_id()] - time.time())
hook.kill()
hook.wait()
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCS / "kuberay.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    """KubeRay's schema, in which an unknown name is an error, as `kubectl apply --validate=strict` takes it."""
    loaded = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text(encoding="utf-8"))
    _close(loaded)
    return Draft202012Validator(loaded)


def _close(node: Any) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict) and "type" in node:
            node["additionalProperties"] = False
        for inner in node.values():
            _close(inner)
    elif isinstance(node, list):
        for inner in node:
            _close(inner)


def test_kuberays_schema_accepts_it(job: dict[str, Any], schema: Draft202012Validator) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert [error.message for error in schema.iter_errors(job)] == []


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (("spec",), "entryPoint", "python train.py"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0), "minReplicas", "two"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers", 0), "lifeCycle", {}),
    ],
)
def test_kuberays_schema_refuses_what_is_misspelled(
    path: tuple[str | int, ...], name: str, value: object, job: dict[str, Any], schema: Draft202012Validator
) -> None:
    wrong = copy.deepcopy(job)
    inner: Any = wrong
    for key in path:
        inner = inner[key]
    inner[name] = value
    assert not schema.is_valid(wrong)


def test_it_is_of_the_same_ray_as_cluster_yaml_and_keeps_the_driver_off_spot(job: dict[str, Any]) -> None:
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]["rayClusterSpec"]
    assert f"rayproject/ray:{spec['rayVersion']}-" in cluster["docker"]["image"]
    assert spec["enableInTreeAutoscaling"] is True
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["template"]["spec"]["nodeSelector"] != workers["template"]["spec"]["nodeSelector"]
    assert 1 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["image"] == head["template"]["spec"]["containers"][0]["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_pods_have_the_time_to_leave(job: dict[str, Any]) -> None:
    spec = job["spec"]["rayClusterSpec"]
    head, worker = (group["template"]["spec"] for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]))
    assert head["terminationGracePeriodSeconds"] > rs.CheckpointConfig().grace_s
    assert worker["terminationGracePeriodSeconds"] > 40
    (stop_wait_s,) = (one["value"] for one in head["containers"][0]["env"] if one["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
    assert rs.CheckpointConfig().grace_s < int(stop_wait_s) < head["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("statuses", "calls", "status"),
    [
        pytest.param((0,), 1, 0, id="finished"),
        pytest.param((75, 75, 0), 3, 0, id="resumed until it is finished"),
        pytest.param((75,) * 9, 4, 75, id="in vain"),
        pytest.param((1,), 1, 1, id="an error that a retry does not help"),
        pytest.param((75, 3), 2, 0, id="stopped by a person"),
    ],
)
def test_the_job_resumes_a_run_only_where_that_may_help(
    statuses: tuple[int, ...], calls: int, status: int, job: dict[str, Any], tmp_path: Path
) -> None:
    for name, lines in {
        "raysharded": [
            'echo "$*" >> calls',
            "set -- $(cat statuses)",
            "exit $(echo $* | cut -d' ' -f$(wc -l < calls))",
        ],
        "sleep": [],
    }.items():
        file = tmp_path / name
        file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        file.chmod(0o755)
    (tmp_path / "statuses").write_text(" ".join(map(str, statuses)))
    ran = subprocess.run(
        ["sh", "-c", job["spec"]["entrypoint"]],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=30,
        check=False,
    )
    assert ran.returncode == status
    assert (tmp_path / "calls").read_text().splitlines() == ["run /home/ray/train.py"] * calls


@pytest.mark.ray
@pytest.mark.clusters
def test_the_workers_hook_drains_its_own_node(job: dict[str, Any]) -> None:
    (worker,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    python, _, script = worker["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python"
    ran = subprocess.run(
        [sys.executable, "-c", _DRAINED, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert 20 < float(ran.stdout.split()[-1]) <= 40
