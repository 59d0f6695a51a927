"""What a check found. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from raysharded.preflight.needs import Needs

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
