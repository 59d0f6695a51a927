"""Runs on GPUs where a cluster has none, different ones, or only their names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import raysharded as rs
from raysharded.errors import ClusterError
from raysharded.ray_backend import capacity
from raysharded.ray_backend.capacity import different_gpus_text, gpu_models
from tests.ray.clusters import run_script

H100 = {"accelerator_type:H100": 0.001}
NODES = [
    {"Alive": True, "NodeManagerHostname": "b", "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}},
    {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0}},
    {"Alive": True, "NodeManagerHostname": "c", "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0}},
    {"Alive": True, "NodeManagerHostname": "head", "Resources": {"CPU": 8.0, "accelerator_type:T4": 1.0}},
    {"Alive": False, "NodeManagerHostname": "gone", "Resources": {"GPU": 8.0, "accelerator_type:V100": 1.0}},
]


def test_a_cluster_of_different_gpus_is_described_with_the_choice() -> None:
    assert different_gpus_text(gpu_models(NODES[:4])) == (
        "the cluster has different GPUs: A100 on a and c; H100 on b. All workers of a run need the same model for the "
        "same bits: those on another one than the first worker's are refused. Choose one with "
        "ScalingConfig(resources_per_worker={'accelerator_type:A100': 0.001})."
    )


@pytest.mark.parametrize(
    ("scaling", "exact", "is_warned"),
    [
        (rs.ScalingConfig(num_workers=2, use_gpu=True), True, True),
        (rs.ScalingConfig(num_workers=2, use_gpu=True), False, False),
        (rs.ScalingConfig(num_workers=2), True, False),
        (rs.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=H100), True, False),
    ],
)
def test_different_gpus_are_a_warning_unless_one_model_is_chosen(
    scaling: rs.ScalingConfig,
    exact: bool,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: NODES)
    with caplog.at_level(logging.WARNING):
        capacity.warn_of_different_gpus(scaling, exact=exact)
    assert bool(caplog.records) == is_warned


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    with pytest.raises(ClusterError, match=r"has 0 GPU: enough for 0. No GPU can be used here: .*(CUDA|driver)"):
        capacity.refuse_the_impossible(rs.ScalingConfig(num_workers=1, use_gpu=True))


ONLY_BY_NAME = """
import json, os, sys
import ray
import raysharded as rs
from tests.training.harness import GptTask, Tokens

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
trainer = rs.ElasticTrainer(
    task=GptTask(),
    data=Tokens(),
    batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
    scaling=rs.ScalingConfig(num_workers=1, use_gpu=True),
    run=rs.RunConfig(name="gpus", storage_path=sys.argv[1], max_steps=1),
)


@ray.remote(num_cpus=0, num_gpus=1)
class Assigned:
    def gpus(self):
        from raysharded.actors.process.environment import assigned_gpus

        return [*assigned_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")]


not_set = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
actors = [Assigned.options(runtime_env=not_set).remote() for _ in range(2)]
assigned = sorted(ray.get([actor.gpus.remote() for actor in actors]))
for actor in actors:
    ray.kill(actor)
try:
    trainer.fit(progress=False)
except Exception as error:
    print(json.dumps({"kind": type(error).__name__, "text": str(error), "assigned": assigned}))
"""


@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_worker_on_ray_that_can_use_no_gpu_ends_the_run_with_its_own_sentence(
    own_cluster: dict[str, str], tmp_path: Path
) -> None:
    """Ray counts GPUs that torch cannot use, as with a torch for CPUs on a machine with GPUs.

    Each process has its own GPU by Ray's word, also where Ray leaves CUDA_VISIBLE_DEVICES as it is.
    """
    found = run_script(ONLY_BY_NAME, str(tmp_path), environment=own_cluster)
    assert found["assigned"] == [["0", "unset"], ["1", "unset"]]
    assert found["kind"] == "ConfigError"
    assert found["text"].startswith("ScalingConfig(use_gpu=True): torch ")
    assert "built without CUDA" in found["text"]
