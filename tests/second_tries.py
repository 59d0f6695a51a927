"""Retries: allowed for tests with separate processes, and listed at the end of a run, with every result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.paths import ROOT

CLOCK = ROOT / "build" / "clock.jsonl"
"""File of the retries, for `.ci/clock.py table`."""


_MAY_BE_TRIED_AGAIN = ("slow", "procs", "ray", "alone", "s3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest's hook: where a number of retries is given, they are for these tests alone."""
    if config.getoption("max_suite_reruns", None) is not None:
        for item in items:
            if any(item.get_closest_marker(name) for name in _MAY_BE_TRIED_AGAIN):
                item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """pytest's hook: xdist calls it in each of its workers, too; only the process that collects all results writes."""
    tries = list(terminalreporter.stats.get("rerun", ()))
    if not tries or hasattr(config, "workerinput"):
        return
    terminalreporter.section("second tries")
    for report in tries:
        terminalreporter.write_line(f"{report.duration:8.1f} s  {report.nodeid}  {_error(report)}")
    if CLOCK.parent.is_dir():
        with CLOCK.open("a") as file:
            for report in tries:
                line = {"second_try": report.nodeid, "seconds": round(report.duration, 1), "error": _error(report)}
                file.write(json.dumps(line) + "\n")


def _error(report: pytest.TestReport) -> str:
    """The first line of a test's error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).partition("\n")[0][:200]
