"""A run's numbers as Ray metrics, which each node exports for Prometheus; with a Grafana dashboard and alerts."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from raysharded.metrics_writer import Beginning, RunEvent, StepMetrics

_log = logging.getLogger("raysharded.metrics")
_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0]


@dataclass(frozen=True, slots=True)
class Shape:
    """A metric: its kind, its tags besides `run`, and its description."""

    kind: Literal["gauge", "counter", "histogram"]
    says: str
    tags: tuple[str, ...] = ()


METRICS = {
    "raysharded_step": Shape("gauge", "The newest step"),
    "raysharded_loss": Shape("gauge", "The newest step's loss"),
    "raysharded_gradient_norm": Shape("gauge", "The newest step's gradient norm, before clipping"),
    "raysharded_lr": Shape("gauge", "The newest step's learning rate"),
    "raysharded_workers": Shape("gauge", "Workers that did the newest step"),
    "raysharded_samples_per_second": Shape("gauge", "Samples per second of the newest step"),
    "raysharded_tokens_per_second": Shape("gauge", "Tokens per second of the newest step"),
    "raysharded_metric": Shape("gauge", "The task's own metrics of the newest step", ("name",)),
    "raysharded_evaluation": Shape("gauge", "The newest evaluation", ("name",)),
    "raysharded_phase_seconds": Shape("gauge", "Seconds of the newest step, by phase, of one worker", ("phase",)),
    "raysharded_gpu_bytes": Shape("gauge", "Memory of one worker's GPU, by use", ("name",)),
    "raysharded_gpu_utilization": Shape("gauge", "Share of time in which one worker's GPU computes, from 0 to 1"),
    "raysharded_gpu_temperature_c": Shape("gauge", "Temperature of one worker's GPU, in degrees Celsius"),
    "raysharded_step_seconds": Shape("histogram", "Seconds that steps took"),
    "raysharded_recovery_seconds": Shape("histogram", "Seconds from a loss to the first step without it"),
    "raysharded_checkpoint_step": Shape("gauge", "The step of the newest committed checkpoint"),
    "raysharded_checkpoint_timestamp_seconds": Shape("gauge", "When it was committed, in seconds since 1970"),
    "raysharded_checkpoints_failing": Shape("gauge", "Checkpoints in a row that could not be written"),
    "raysharded_storage_failing_seconds": Shape(
        "gauge", "Seconds for which storage has taken no journal entries; or 0"
    ),
    "raysharded_gcs_lost": Shape("gauge", "1 while the cluster's GCS does not answer; or 0"),
    "raysharded_links_broken": Shape("gauge", "Pairs of workers that do not reach each other; or 0"),
    "raysharded_nodes_avoided": Shape("gauge", "Nodes that get no workers, as they failed too often; or 0"),
    "raysharded_state": Shape("gauge", "1 for the state that the run is in, 0 for the others", ("state",)),
    "raysharded_steps_total": Shape("counter", "Steps done, those that were done again included"),
    "raysharded_recoveries_total": Shape("counter", "Losses that the run went on after"),
    "raysharded_steps_redone_total": Shape("counter", "Steps that were done again after losses"),
    "raysharded_events_total": Shape("counter", "What happened to the run, by kind of journal entry", ("kind",)),
}
"""Metrics by the name passed to Ray; Ray exports each with the prefix `ray_`."""
STATES = ("starting", "training", "paused", "finished", "stopped", "failed")
"""States of a run, as tags of `raysharded_state`."""
_PLAIN = ("loss", "gradient_norm", "lr", "workers", "samples_per_second", "tokens_per_second")
_GROUPS = {
    "metrics": ("raysharded_metric", "name"),
    "evaluation": ("raysharded_evaluation", "name"),
    "seconds": ("raysharded_phase_seconds", "phase"),
}


class RayMetrics:
    """Sets Ray's metrics of the names in METRICS, each with the tag `run`, from the driver's process.

    Ray exports them from the driver's node if it was installed as `ray[default]`. Ray's core alone does not export
    them; a warning is then logged. `grafana_dashboard()` shows them. As usual in Prometheus, a gauge holds the last
    value.
    """

    def __init__(self) -> None:
        self._run = self._state = ""
        self._failing = 0
        """Checkpoints in a row that could not be written."""
        self._broken: frozenset[tuple[int, int]] = frozenset()
        self._avoided: frozenset[str] = frozenset()
        self._dead: frozenset[str] = frozenset()
        self._metrics: dict[str, Any] = {}  # of Ray's three classes

    def begin(self, beginning: Beginning) -> None:
        self._run = beginning.run
        if importlib.util.find_spec("prometheus_client") is None:
            _log.warning("RayMetrics: this Ray exports no metrics. Run `pip install 'ray[default]'`.")
        self._metrics = self._metrics or {name: _made(name, shape) for name, shape in METRICS.items()}
        self._set("raysharded_step", beginning.after_step)
        self._set("raysharded_storage_failing_seconds", 0)
        self._set("raysharded_gcs_lost", 0)
        self._dead = frozenset()
        self._set_apart(frozenset(), frozenset())
        self._set_failing(0)
        self._set_state("starting")

    def step(self, step: StepMetrics) -> None:
        self._set("raysharded_step", step.step)
        self._set_state("training")
        self._count("raysharded_steps_total", 1)
        for name, value in step.values.items():
            group, _, rest = name.partition("/")
            if name == "step_seconds":
                self._observe("raysharded_step_seconds", value)
            elif name in _PLAIN:
                self._set(f"raysharded_{name}", value)
            elif group == "gpu" and rest.endswith("_bytes"):
                self._set("raysharded_gpu_bytes", value, name=rest.removesuffix("_bytes"))
            elif group == "gpu" and f"raysharded_gpu_{rest}" in METRICS:
                self._set(f"raysharded_gpu_{rest}", value)
            elif group in _GROUPS:
                metric, tag = _GROUPS[group]
                self._set(metric, value, **{tag: rest})

    def event(self, event: RunEvent) -> None:
        self._count("raysharded_events_total", 1, kind=event.kind)
        match event.kind:
            case "recovery":
                self._count("raysharded_recoveries_total", 1)
                self._count("raysharded_steps_redone_total", event.fields["steps_redone"])
                self._observe("raysharded_recovery_seconds", event.fields["total_s"])
            case "checkpoint":
                self._set("raysharded_checkpoint_step", event.fields["step"])
                self._set("raysharded_checkpoint_timestamp_seconds", event.at)
                self._set_failing(0)
            case "checkpoint_failed":
                self._set_failing(self._failing + 1)
            case "storage_failing":
                self._set("raysharded_storage_failing_seconds", event.fields["for_s"])
            case "storage_back":
                self._set("raysharded_storage_failing_seconds", 0)
            case "gcs_lost" | "gcs_back":
                self._set("raysharded_gcs_lost", event.kind == "gcs_lost")
            case "links_broken":
                self._set_apart(self._broken | _pairs(event), self._avoided)
            case "links_mended":
                self._set_apart(self._broken - _pairs(event), self._avoided)
            case "worker_lost" | "worker_left":
                left = frozenset(pair for pair in self._broken if event.fields["worker"] not in pair)
                self._set_apart(left, self._avoided)
            case "node_avoided":
                self._set_apart(self._broken, self._avoided | {event.fields["node"]})
            case "node_allowed":
                self._set_apart(self._broken, self._avoided - {event.fields["node"]})
            case "node_lost":
                self._dead |= {event.fields["node"]}
                self._set_apart(self._broken, self._avoided)
            case "node_back":
                self._dead -= {event.fields["node"]}
                self._set_apart(self._broken, self._avoided)
            case "paused" | "finished" | "stopped" | "failed":
                self._set_state(event.kind)

    def close(self) -> None:
        """Nothing to do: Ray exports the newest values until the driver's process ends."""

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            for one in STATES:
                self._set("raysharded_state", one == state, state=one)

    def _set_apart(self, broken: frozenset[tuple[int, int]], avoided: frozenset[str]) -> None:
        self._broken, self._avoided = broken, avoided
        self._set("raysharded_links_broken", len(broken))
        self._set("raysharded_nodes_avoided", len(avoided - self._dead))

    def _set_failing(self, checkpoints: int) -> None:
        self._failing = checkpoints
        self._set("raysharded_checkpoints_failing", checkpoints)

    def _set(self, name: str, value: float, /, **tags: str) -> None:
        self._metrics[name].set(value, tags={"run": self._run, **tags})

    def _count(self, name: str, more: float, /, **tags: str) -> None:
        if more > 0:  # Ray rejects an increment of 0
            self._metrics[name].inc(more, tags={"run": self._run, **tags})

    def _observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value, tags={"run": self._run})


def _pairs(event: RunEvent) -> frozenset[tuple[int, int]]:
    return frozenset((one, other) for one, other in event.fields["pairs"])


def _made(name: str, shape: Shape) -> Any:
    from ray.util import metrics

    tags = ("run", *shape.tags)
    match shape.kind:
        case "gauge":
            return metrics.Gauge(name, description=shape.says, tag_keys=tags)
        case "counter":
            return metrics.Counter(name, description=shape.says, tag_keys=tags)
        case "histogram":
            return metrics.Histogram(name, description=shape.says, boundaries=_BUCKETS_S, tag_keys=tags)


def alert_rules() -> str:
    """Alerting rules for the metrics of `RayMetrics` as YAML, a file of Prometheus's `rule_files`."""
    return (files("raysharded.metrics") / "alerts.yaml").read_text(encoding="utf-8")


def grafana_dashboard() -> str:
    """The dashboard as JSON, for Grafana's "import dashboard". It needs no input, and has variables for the Prometheus
    data source and for the runs."""
    return (files("raysharded.metrics") / "grafana.json").read_text(encoding="utf-8")
