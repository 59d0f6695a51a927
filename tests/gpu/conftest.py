"""A table of all tests that need a GPU: the result, the time, and a figure or the reason for which one was skipped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.shared_gpu import REHEARSES

_FOLDER = "tests/gpu/"


@pytest.fixture
def gpu_itself() -> None:
    """For a test that calls CUDA directly: no double can take its place."""
    if REHEARSES:
        pytest.skip("a rehearsal has no CUDA")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """pytest's hook."""
    rows = [
        (report.nodeid.removeprefix(_FOLDER), outcome, f"{report.duration:.1f} s", said(report))
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        if report.nodeid.startswith(_FOLDER) and (report.when == "call" or outcome != "passed")
    ]
    if rows:
        terminalreporter.section("tests that need a GPU")
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for *cells, last in sorted(rows):
            padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            terminalreporter.write_line(f"{padded}  {last}".rstrip())


def said(report: Any) -> str:
    """The figures that a test recorded, or the reason for which it was skipped."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "; ".join(f"{name}: {value}" for name, value in report.user_properties)
