"""Anomalies of numbers in the journal: skipped steps, skipped data, audits, wrong results. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raysharded.journal.records import ArithmeticChange, Audits, Corruption, Rewind, SkippedStep, Span
from raysharded.overrides import Skips, skipped_before, skips_of

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """All anomalies so far."""

    skips: Skips = ()
    skipped_steps: tuple[SkippedStep, ...] = ()
    rewinds: tuple[Rewind, ...] = ()
    audits: Audits = field(default_factory=Audits)
    corruptions: tuple[Corruption, ...] = ()
    arithmetic_changes: tuple[ArithmeticChange, ...] = ()

    def with_entry(self, entry: Entry, at: float) -> Numbers:
        """The anomalies after one more entry; unchanged if its kind does not concern numbers."""
        match entry["kind"]:
            case "started":
                return replace(self, skips=skips_of(entry["skips"])) if "skips" in entry else self
            case "step_skipped":
                skipped = SkippedStep(
                    step=int(entry["step"]),
                    what=str(entry["what"]),
                    microbatches=tuple(int(index) for index in entry["microbatches"]),
                )
                others = tuple(other for other in self.skipped_steps if other.step != skipped.step)
                return replace(self, skipped_steps=(*others, skipped))
            case "rewind":
                rewind = Rewind(
                    step=int(entry["step"]),
                    to_step=int(entry["to_step"]),
                    samples=int(entry["skip_samples"]),
                    reason=str(entry["reason"]),
                    at=at,
                    asked=entry.get("who") == "asked",
                )
                return replace(self, skips=skips_of(entry["skips"]), rewinds=(*self.rewinds, rewind))
            case "audit":
                seconds = self.audits.seconds + float(entry["seconds"])
                audits = Audits(count=self.audits.count + 1, seconds=seconds, newest=int(entry["step"]))
                return replace(self, audits=audits)
            case "arithmetic":
                change = arithmetic_change(entry, at)
                return replace(self, arithmetic_changes=(*self.arithmetic_changes, change))
            case "corruption":
                found = _corruption(entry, at, int(entry["verified_step"]))
                return replace(self, corruptions=(*self.corruptions, found))
            case "proof_failed":  # only this step is computed again
                found = _corruption(entry, at, int(entry["step"]) - 1)
                return replace(self, corruptions=(*self.corruptions, found))
        return self

    def taken_back(self, step: int) -> Numbers:
        """The anomalies after the results after `step` were discarded in favour of others."""
        changes = (replace(change, from_step=min(change.from_step, step + 1)) for change in self.arithmetic_changes)
        skipped_steps = tuple(skipped for skipped in self.skipped_steps if skipped.step <= step)
        return replace(self, skipped_steps=skipped_steps, arithmetic_changes=tuple(changes))


def by_skips(span: Span, skips: Skips) -> list[Span]:
    """The span's steps, split where the run had skipped data."""
    cuts = sorted({after for after, _ in skips if span.first_step <= after < span.last_step})
    firsts, lasts = [span.first_step, *(cut + 1 for cut in cuts)], [*cuts, span.last_step]
    return [
        replace(span, first_step=first, last_step=last, skipped=skipped_before(skips, first))
        for first, last in zip(firsts, lasts, strict=True)
    ]


def arithmetic_change(entry: Entry, at: float) -> ArithmeticChange:
    changes = {str(name): (str(before), str(after)) for name, (before, after) in entry["changes"].items()}
    return ArithmeticChange(from_step=int(entry["from_step"]), changes=changes, at=at)


def _corruption(entry: Entry, at: float, from_step: int) -> Corruption:
    return Corruption(
        step=int(entry["step"]),
        what=str(entry["what"]),
        workers=tuple(int(worker) for worker in entry["workers"]),
        culprits=tuple(int(worker) for worker in entry["culprits"]),
        microbatches=tuple(int(index) for index in entry["microbatches"]),
        verified_step=from_step,
        at=at,
    )
