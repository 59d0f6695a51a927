"""What a check found, as frozen values and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from raysharded.preflight.requirements import Needs
from raysharded.quantities import duration

Status: TypeAlias = Literal["ok", "refused", "differs", "not tried"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    status: Status
    """refused: it ended with an error, which says the way out; differs: it ended with other numbers than it should."""
    found: str
    """In words."""
    advice: str = ""
    """What to do; empty if there is nothing, or if `found` says it."""
    took_s: float = 0.0
    user_traceback: str = ""
    """Where the task's own code raised, if it did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that was tried of a trainer, and what that took."""

    needs: Needs
    checks: tuple[Check, ...]
    untried: tuple[str, ...]
    """What the trainer has, and the check leaves out, in sentences."""
    remarks: tuple[str, ...]
    """What the workers say of the task's numbers: nothing is wrong with the bits, and perhaps with what was meant."""
    versions: Mapping[str, str]
    took_s: float

    @property
    def ok(self) -> bool:
        """True if everything was tried and holds."""
        return all(check.status == "ok" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
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
