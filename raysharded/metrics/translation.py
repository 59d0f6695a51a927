"""Journal entries translated to the values that metrics writers receive. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysharded.display.plain_text import masked, one_line, printable
from raysharded.journal.entry_text import incident_text
from raysharded.metrics_writer import Beginning, RunEvent, StepMetrics
from raysharded.overrides import WEIGHTS
from raysharded.report.history.step_table import step_record

_NO_SETTINGS = frozenset(
    {"driver", "run", "skips", "learning_rate", WEIGHTS, "resumed_after_step", "source", "after", "because"}
)
"""Fields of the entry `started` about the driver; the others are the configuration and the versions."""


@dataclass
class Translator:
    """Translates one driver's entries, in their order."""

    url: str
    samples_per_step: int
    tokens_per_step: int | None = None
    """Tokens of one step; None if samples have no common number of tokens."""
    step: int = 0
    """The newest step."""

    def beginning(self, fields: Mapping[str, Any]) -> Beginning:
        """The beginning from the entry `started`."""
        self.step = int(fields["resumed_after_step"])
        settings = {name: value for name, value in fields.items() if name not in _NO_SETTINGS}
        return Beginning(run=str(fields["run"]), url=masked(self.url), after_step=self.step, settings=settings)

    def of_step(self, fields: Mapping[str, Any], at: float) -> StepMetrics:
        """The metrics of an entry `step`."""
        record = step_record(fields, at)
        self.step, seconds = record.step, record.total_s
        values: dict[str, float] = {
            "loss": record.loss,
            "gradient_norm": record.gradient_norm,
            "lr": record.lr,
            "workers": record.workers,
            "step_seconds": seconds,
        }
        if seconds > 0:
            values["samples_per_second"] = self.samples_per_step / seconds
            if self.tokens_per_step is not None:
                values["tokens_per_second"] = self.tokens_per_step / seconds
        for group, numbers in (
            ("seconds", record.seconds),
            ("metrics", record.metrics),
            ("evaluation", record.evaluation),
            ("gpu", fields.get("gpu", {})),
        ):
            values |= {f"{group}/{one_line(name)}": number for name, number in numbers.items()}
        return StepMetrics(step=record.step, values=values, at=at)

    def event(self, kind: str, fields: Mapping[str, Any], at: float) -> RunEvent | None:
        """The event of any other entry; None if it is not for people."""
        text = incident_text(kind, fields)
        if text is None:
            return None
        return RunEvent(kind=kind, step=self.step, text=printable(masked(text)), fields=fields, at=at)
