"""Export of a run's metrics: to TensorBoard, to Ray's metrics and Grafana, or to a custom writer.

`RunConfig(metrics=[...])` takes any object with the four methods of `MetricsWriter`. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Beginning": "raysharded.metrics_writer",
    "MetricsWriter": "raysharded.metrics_writer",
    "RunEvent": "raysharded.metrics_writer",
    "StepMetrics": "raysharded.metrics_writer",
    "TensorBoard": "raysharded.metrics.tensorboard",
    "RayMetrics": "raysharded.metrics.ray_metrics",
    "alert_rules": "raysharded.metrics.ray_metrics",
    "grafana_dashboard": "raysharded.metrics.ray_metrics",
}

if TYPE_CHECKING:
    from raysharded.metrics.ray_metrics import (
        RayMetrics as RayMetrics,
        alert_rules as alert_rules,
        grafana_dashboard as grafana_dashboard,
    )
    from raysharded.metrics.tensorboard import TensorBoard as TensorBoard
    from raysharded.metrics_writer import (
        Beginning as Beginning,
        MetricsWriter as MetricsWriter,
        RunEvent as RunEvent,
        StepMetrics as StepMetrics,
    )

__all__ = [
    "Beginning",
    "MetricsWriter",
    "RayMetrics",
    "RunEvent",
    "StepMetrics",
    "TensorBoard",
    "alert_rules",
    "grafana_dashboard",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raysharded.metrics' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
