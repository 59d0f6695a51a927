"""A check as people read it: a line for each thing, as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from raysharded.obs.units import duration
from raysharded.preflight.needs import Needs
from raysharded.preflight.results import Check, Report

_STATUS_WIDTH = len("not tried")


def lines_of_needs(needs: Needs) -> Iterator[str]:
    """What will be taken."""
    for line in needs.lines():
        yield _line("needs", line)


def line_of_check(check: Check) -> str:
    """What came of one check, and what to do."""
    found = f"{check.found.rstrip('.')}. {check.advice}" if check.advice else check.found
    took = f" ({duration(check.took_s)})" if check.took_s else ""
    return _line(check.status, f"{check.name}{took}: {found}")


def lines_at_end(report: Report) -> Iterator[str]:
    """What was left out, what the workers said, and the verdict."""
    for remark in report.remarks:
        yield _line("remark", remark)
    for sentence in report.untried:
        yield _line("not tried", sentence)
    verdict = "all holds" if report.ok else "not all holds"
    yield f"{verdict}, in {duration(report.took_s)}"


def _line(status: str, text: str) -> str:
    return f"{status:<{_STATUS_WIDTH}}  {text}"
