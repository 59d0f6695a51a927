"""The alerting rules: they query metrics that Ray exports, by their tags, and the page has a row for each."""

from __future__ import annotations

import re
from typing import Any

import yaml

from raysharded.metrics import alert_rules
from raysharded.metrics.ray_metrics import METRICS, STATES
from tests.metrics.test_grafana import exported
from tests.paths import DOCS


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(alert_rules())["groups"]
    return list(group["rules"])


def test_rules_query_metrics_and_tags_that_are_exported() -> None:
    assert len(rules()) > 5
    for rule in rules():
        names = [exported()[name] for name in re.findall(r"\bray_\w+", rule["expr"])]
        assert names, rule["expr"]
        asked = set(re.findall(r"(\w+)=~?\"", rule["expr"]))
        assert asked <= {"run", *(tag for name in names for tag in METRICS[name].tags)}, rule["expr"]
        states = {one for value in re.findall(r'state=~?"([\w|]+)"', rule["expr"]) for one in value.split("|")}
        assert states <= set(STATES), rule["expr"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_every_rule_has_a_severity_a_summary_with_the_run_and_a_row_on_the_page() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = re.findall(r"`(Raysharded\w+)`", page)
    assert sorted(named) == sorted(rule["alert"] for rule in rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
