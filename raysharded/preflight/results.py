"""A check's results, as frozen values and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from raysharded.display.quantities import duration
from raysharded.preflight.requirements import Needs

Status: TypeAlias = Literal["ok", "refused", "differs", "not tried"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one test."""

    name: str
    status: Status
    """refused: the test ended with an error, which states the remedy. differs: the test ended with wrong numbers."""
    found: str
    """A description."""
    advice: str = ""
    """The remedy; empty if there is none, or if `found` contains it."""
    took_s: float = 0.0
    user_traceback: str = ""
    """Traceback of the task's error, if it raised one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The results of all tests of a trainer, and their cost."""

    needs: Needs
    checks: tuple[Check, ...]
    untried: tuple[str, ...]
    """Features of the trainer that the check does not test, in sentences."""
    remarks: tuple[str, ...]
    """Warnings of the workers about the task's numbers: the bits are right, but the program may not do what is
    intended."""
    versions: Mapping[str, str]
    took_s: float

    @property
    def ok(self) -> bool:
        """True if all tests ran and passed."""
        return all(check.status == "ok" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The report as a dictionary for JSON."""
        return {
            "ok": self.ok,
            "needs": asdict(self.needs),
            "checks": [asdict(check) for check in self.checks],
            "untried": list(self.untried),
            "remarks": list(self.remarks),
            "versions": dict(self.versions),
            "took_s": self.took_s,
        }


_STATUS_WIDTH = len("not tried")


def lines_of_needs(needs: Needs) -> Iterator[str]:
    """The check's requirements as lines."""
    for line in needs.lines():
        yield _line("needs", line)


def line_of_check(check: Check) -> str:
    """The result of one test, and the remedy."""
    found = f"{check.found.rstrip('.')}. {check.advice}" if check.advice else check.found
    took = f" ({duration(check.took_s)})" if check.took_s else ""
    return _line(check.status, f"{check.name}{took}: {found}")


def lines_at_end(report: Report) -> Iterator[str]:
    """The remarks, the features not tested, and the verdict."""
    for remark in report.remarks:
        yield _line("remark", remark)
    for sentence in report.untried:
        yield _line("not tried", sentence)
    verdict = "all holds" if report.ok else "not everything holds"
    yield f"{verdict}, in {duration(report.took_s)}"


def _line(status: str, text: str) -> str:
    return f"{status:<{_STATUS_WIDTH}}  {text}"
