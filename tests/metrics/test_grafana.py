"""The dashboard and the metrics: the same names, and a file that Grafana imports."""

from __future__ import annotations

import json
import re
from typing import Any

from raysharded.metrics import grafana_dashboard
from raysharded.metrics.ray_metrics import METRICS


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(grafana_dashboard())
    return loaded


def expressions(of: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in of["panels"] for target in panel["targets"]]


def exported() -> dict[str, str]:
    """Prometheus's name -> the name that Ray is given; `ray_` and the parts of a histogram are of Ray's exporter."""
    names: dict[str, str] = {}
    for name, shape in METRICS.items():
        parts = ("_bucket", "_sum", "_count") if shape.kind == "histogram" else ("",)
        names |= {f"ray_{name}{part}": name for part in parts}
    return names


def test_the_panels_show_every_metric_and_no_other() -> None:
    shown = {name for text in expressions(dashboard()) for name in re.findall(r"\bray_\w+", text)}
    names = exported()
    assert shown <= set(names), "Ray exports nothing by these names"
    assert {names[name] for name in shown} == set(METRICS), "each metric has a panel"


def test_panels_query_by_tags_that_the_metrics_have() -> None:
    for text in expressions(dashboard()):
        name = exported()[re.findall(r"\bray_\w+", text)[0]]
        asked = {tag.strip() for tags in re.findall(r"by \(([^)]*)\)", text) for tag in tags.split(",")}
        assert asked <= {"run", "le", *METRICS[name].tags}, text
        assert '{run=~"$run"}' in text


def test_counters_are_named_as_prometheus_names_them() -> None:
    assert {name for name in METRICS if name.endswith("_total")} == {
        name for name, shape in METRICS.items() if shape.kind == "counter"
    }


def test_it_has_what_grafana_needs_to_import_it() -> None:
    """As https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/ has it."""
    board = dashboard()
    assert isinstance(board["schemaVersion"], int)
    assert {"title", "uid", "time", "templating", "panels"} <= set(board)
    assert "id" not in board, "a number of one server"
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["run"]["query"]["query"] == "label_values(ray_raysharded_step, run)"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["run"]["datasource"] == source
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["datasource"] == source
        assert all(target["datasource"] == source and target["refId"] for target in panel["targets"])


def test_no_panels_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
