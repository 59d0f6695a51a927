"""What a writer of metrics is told of a run, as frozen values, and the writer's four methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """A driver goes on with the run."""

    run: str
    """The run's name."""
    url: str
    """The run's folder."""
    after_step: int
    """The step it goes on from: 0 at the run's first beginning. What was written of later steps no longer counts."""
    settings: Mapping[str, Any]
    """What the journal keeps of the configuration and of the versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """A step that is done. A step that is not newer than the one before it was undone and is done once more: it takes
    the place of what was said of it and of all steps after it."""

    step: int
    """From 1."""
    values: Mapping[str, float]
    """By name: `loss`, `gradient_norm`, `lr`, `workers`, `step_seconds`, `samples_per_second`; `tokens_per_second` if
    the data has sequences of one length; `seconds/<phase>` of one worker; the task's own as `metrics/<name>` and
    `evaluation/<name>`. What is not finite is so here."""
    at: float
    """Wall clock, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """Something that happened to the run: a worker lost, a recovery, a checkpoint, the end."""

    kind: str
    """Of the journal's entry: `worker_lost`, `recovery`, `checkpoint`, `rewind`, `finished`, ..."""
    step: int
    """The newest step then."""
    text: str
    """One line for people; parts may come from workers as they are."""
    fields: Mapping[str, Any]
    """Of the journal's entry. Not to be changed."""
    at: float
    """Wall clock, in seconds."""


class MetricsWriter(Protocol):
    """Takes a run's numbers somewhere. Each writer has a thread of its own in the driver's process, in which all of its
    methods are called, in the order of what happens.

    What it raises is logged once, and it is told nothing more; the run goes on. While it is slow, as many as
    `feed.LIMIT` entries are kept for it; those after that it never gets to know, and how many is logged.
    """

    def begin(self, beginning: Beginning) -> None:
        """A driver goes on with the run; first of all, and again in every later `fit()` of the same configuration."""

    def step(self, step: StepMetrics) -> None:
        """A step is done."""

    def event(self, event: RunEvent) -> None:
        """Something happened to the run."""

    def close(self) -> None:
        """Nothing more comes, whatever the end was; not called after one of the methods raised."""
