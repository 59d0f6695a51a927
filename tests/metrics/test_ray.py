"""Ray's export for Prometheus of the metrics of `RayMetrics`: the names, kinds and tags that the dashboard queries."""

from __future__ import annotations

import logging
import math
import re
import time
import urllib.request

import pytest

from raysharded.metrics import Beginning, RayMetrics, RunEvent, StepMetrics, grafana_dashboard
from raysharded.metrics.ray_metrics import METRICS, STATES

WAIT_S = 240.0
VALUES = {
    "loss": 0.5,
    "gradient_norm": 1.0,
    "lr": 0.1,
    "workers": 2.0,
    "step_seconds": 0.3,
    "samples_per_second": 16.0,
    "tokens_per_second": 128.0,
    "seconds/forward": 0.2,
    "metrics/accuracy": 0.75,
    "evaluation/loss": 1.5,
    "gpu/used_bytes": 7e9,
    "gpu/utilization": 0.75,
    "gpu/temperature_c": 60.0,
}


def tell(metrics: RayMetrics) -> None:
    """Two steps and one of each event that counts, so that every metric is set."""
    metrics.begin(Beginning(run="gpt", url="runs/gpt", after_step=0, settings={}))
    metrics.step(StepMetrics(step=1, values={**VALUES, "loss": math.nan}, at=1.0))
    metrics.step(StepMetrics(step=2, values=VALUES, at=2.0))
    recovery = {"steps_redone": 1, "total_s": 0.7}
    metrics.event(RunEvent(kind="recovery", step=2, text="recovered", fields=recovery, at=3.0))
    metrics.event(RunEvent(kind="recovery", step=2, text="recovered", fields={**recovery, "steps_redone": 0}, at=4.0))
    metrics.event(RunEvent(kind="checkpoint", step=2, text="committed", fields={"step": 2}, at=5.0))
    for step in (3, 4):
        metrics.event(RunEvent(kind="checkpoint_failed", step=step, text="full", fields={"step": step}, at=6.0))
    metrics.event(RunEvent(kind="storage_failing", step=4, text="full", fields={"for_s": 42.0}, at=7.0))
    for kind, pairs in (("links_broken", [[0, 2], [1, 2], [0, 3]]), ("links_mended", [[0, 3]])):
        metrics.event(RunEvent(kind=kind, step=4, text="links", fields={"pairs": pairs}, at=7.0))
    metrics.event(RunEvent(kind="worker_leaving", step=4, text="leaves", fields={"worker": 0}, at=7.0))  # still there
    metrics.event(RunEvent(kind="worker_lost", step=4, text="lost", fields={"worker": 1}, at=7.0))
    avoided = [("node_avoided", node) for node in "abcd"]
    for kind, node in (*avoided, ("node_allowed", "a"), ("node_lost", "c"), ("node_lost", "d"), ("node_back", "d")):
        metrics.event(RunEvent(kind=kind, step=4, text="node", fields={"node": node}, at=7.0))
    metrics.event(RunEvent(kind="paused", step=4, text="paused", fields={"step": 4}, at=8.0))
    metrics.close()


def test_rays_metrics_take_all_that_a_run_reports() -> None:
    metrics = RayMetrics()
    tell(metrics)
    tell(metrics)  # a later fit()


def test_a_ray_that_exports_nothing_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    tell(RayMetrics())
    assert "pip install 'ray[default]'" in caplog.text


@pytest.mark.ray
@pytest.mark.clusters
def test_ray_exports_every_metric_by_the_name_that_the_dashboard_requests() -> None:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, logging_level=logging.ERROR)
    try:
        tell(RayMetrics())
        (node,) = ray.nodes()
        text = exported(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
    finally:
        ray.shutdown()
    lines = [line for line in text.splitlines() if "raysharded_" in line]
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    assert {name: kinds.get(f"ray_{name}") for name in METRICS} == {name: shape.kind for name, shape in METRICS.items()}
    samples = {line.split("{")[0] for line in lines if not line.startswith("#")}
    assert set(re.findall(r"\bray_raysharded_\w+", grafana_dashboard())) <= samples
    assert all('run="gpt"' in line for line in lines if not line.startswith("#"))
    assert value(lines, "ray_raysharded_step") == 2
    assert value(lines, "ray_raysharded_steps_total") == 2
    assert value(lines, "ray_raysharded_recoveries_total") == 2
    assert value(lines, "ray_raysharded_loss") == 0.5
    assert value(lines, "ray_raysharded_metric", 'name="accuracy"') == 0.75
    assert value(lines, "ray_raysharded_gpu_bytes", 'name="used"') == 7e9
    assert value(lines, "ray_raysharded_gpu_utilization") == 0.75
    assert value(lines, "ray_raysharded_checkpoint_timestamp_seconds") == 5
    assert value(lines, "ray_raysharded_checkpoints_failing") == 2
    assert value(lines, "ray_raysharded_storage_failing_seconds") == 42
    assert value(lines, "ray_raysharded_links_broken") == 1  # one is whole again, and one was a lost worker's
    assert value(lines, "ray_raysharded_nodes_avoided") == 2
    states = {state: value(lines, "ray_raysharded_state", f'state="{state}"') for state in STATES}
    assert states == {**dict.fromkeys(STATES, 0), "paused": 1}


def value(lines: list[str], name: str, tag: str = "") -> float:
    (line,) = (line for line in lines if line.startswith(f"{name}{{") and tag in line)
    return float(line.rsplit(" ", 1)[1])


def exported(url: str) -> str:
    """The output of the node's exporter when it has every metric, or after WAIT_S."""
    deadline, text = time.monotonic() + WAIT_S, ""
    while time.monotonic() < deadline and not all(f"\nray_{name}" in text for name in METRICS):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            pass
        time.sleep(0.5)
    return text
