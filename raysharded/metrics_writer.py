"""The values that a metrics writer receives about a run, frozen, and the writer's four methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """A driver starts or resumes the run."""

    run: str
    """The run's name."""
    url: str
    """The run's folder."""
    after_step: int
    """The step from which the driver continues: 0 at the run's first start. Earlier records of later steps are no
    longer valid."""
    settings: Mapping[str, Any]
    """The configuration and the versions, as recorded in the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """A finished step. A step that is not newer than the previous one was undone and computed again: it replaces the
    records of that step and of all later ones."""

    step: int
    """The step's number, from 1."""
    values: Mapping[str, float]
    """Values by name: `loss`, `gradient_norm`, `lr`, `workers`, `step_seconds`, `samples_per_second`.
    `tokens_per_second` if all sequences of the data have one length; `seconds/<phase>` of one worker. The task's
    metrics as `metrics/<name>` and `evaluation/<name>`. The use of one worker's GPU as `gpu/<name>`. Non-finite values
    are included."""
    at: float
    """Wall clock, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """Something that happened to the run: a worker lost, a recovery, a checkpoint, the end."""

    kind: str
    """Kind of the journal entry: `worker_lost`, `recovery`, `checkpoint`, `rewind`, `finished`, ..."""
    step: int
    """The newest step at that time."""
    text: str
    """One line for people; parts may come from workers unchanged."""
    fields: Mapping[str, Any]
    """Fields of the journal entry; read only."""
    at: float
    """Wall clock, in seconds."""


class MetricsWriter(Protocol):
    """Destination of a run's metrics. Each writer has its own thread in the driver's process; all of its methods are
    called in that thread, in the order of events.

    If a method raises, the error is logged once and the writer receives nothing more; the run continues. Up to
    `feed.LIMIT` entries are queued for a slow writer; later ones are dropped, and their number is logged.
    """

    def begin(self, beginning: Beginning) -> None:
        """A driver starts or resumes the run; the first call, repeated in every later `fit()` of this configuration."""

    def step(self, step: StepMetrics) -> None:
        """A step is finished."""

    def event(self, event: RunEvent) -> None:
        """Something happened to the run."""

    def close(self) -> None:
        """Nothing more follows, however the run ended; not called after another method raised."""
