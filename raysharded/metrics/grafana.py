"""The Grafana dashboard for the metrics of `RayMetrics`."""

from __future__ import annotations

from importlib.resources import files


def grafana_dashboard() -> str:
    """The dashboard as JSON, for Grafana's "import dashboard". It needs no input, and has variables for the Prometheus
    data source and for the runs."""
    return (files("raysharded.metrics") / "grafana.json").read_text(encoding="utf-8")
