"""The dashboard that shows what `RayMetrics` sets."""

from __future__ import annotations

from importlib.resources import files


def grafana_dashboard() -> str:
    """The dashboard as JSON, for Grafana's "import dashboard": it asks for nothing, and has variables for the
    Prometheus data source and for the runs to show."""
    return (files("raysharded.metrics") / "grafana.json").read_text(encoding="utf-8")
