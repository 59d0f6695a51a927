"""The driver's whole state, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raysharded.driver.messages import Facts, Saved, Stopped
from raysharded.ids import GenerationId, WorkerId

_BEFORE_THE_FIRST = GenerationId(0)
_FIRST_WORKER = WorkerId(0)


class Phase(Enum):
    """What the run is doing."""

    GATHERING = "waiting for workers"
    FORMING = "forming a generation"
    TRAINING = "training"
    STOPPING = "stopping"
    CLOSING = "writing the last checkpoint"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the machine needs of the configuration. Times are seconds."""

    min_workers: int
    max_workers: int
    max_steps: int
    exact: bool
    mirrors: bool
    save_at_end: bool
    start_timeout_s: float
    replacement_wait_s: float
    max_worker_losses: int | None
    task_error_retries: int
    progress_timeout_s: float
    stop_timeout_s: float = 20.0
    """How long an interrupted worker may take to answer before it is given up."""
    form_timeout_s: float = 120.0
    """How long forming a generation may take."""
    join_wait_s: float = 2.0
    """How long ready workers wait for others that are still starting, to join in one go."""
    save_timeout_s: float = 1800.0
    max_start_failures: int = 3
    """Workers in a row that may fail to start while there are too few."""
    start_backoff_s: float = 1.0
    """How long to wait after a worker failed to start; twice as long after every further one in a row."""
    max_start_backoff_s: float = 60.0
    max_idle_generations: int = 5
    """Generations in a row that may end without a step and without a loss."""
    max_losses_without_step: int = 64
    """Workers that may be lost in a row without a step between: more is not bad luck, but something that kills them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed:
    """The newest committed checkpoint."""

    step: int
    prefix: str
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A checkpoint that workers are writing."""

    generation: GenerationId
    step: int
    members: tuple[WorkerId, ...]
    since: float
    parts: Mapping[WorkerId, Saved] = field(default_factory=dict)
    committing: bool = False
    """All parts are there, and are being put together."""
    fingerprint_only: bool = False
    """Nothing is written: the run ends without a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A loss (or failed collective) from its first sign until the step it broke is done again."""

    found_at: float
    lost: tuple[WorkerId, ...]
    reasons: tuple[str, ...]
    workers_before: int
    step_before: int
    """The newest step that was reported before."""
    stopped_at: float | None = None
    formed_at: float | None = None
    source: str = ""
    resume_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything the driver knows. Changed by `machine.step` alone."""

    limits: Limits
    phase: Phase = Phase.GATHERING
    since: float = 0.0
    """When this phase began, or last made progress."""
    generation: GenerationId = _BEFORE_THE_FIRST
    members: tuple[WorkerId, ...] = ()
    """Of the current generation, by rank."""
    ready: frozenset[WorkerId] = frozenset()
    starting: Mapping[WorkerId, float] = field(default_factory=dict)
    """Worker -> when it was asked for."""
    last_ready_at: float = 0.0
    next_worker: WorkerId = _FIRST_WORKER
    awaited: frozenset[WorkerId] = frozenset()
    """Members whose answer the phase waits for."""
    stops: Mapping[WorkerId, Stopped] = field(default_factory=dict)
    """What members said when they stopped, of this generation."""
    holdings: Mapping[WorkerId, Stopped] = field(default_factory=dict)
    """The newest report of every live worker about what it holds."""
    step: int = 0
    """The newest step that was reported."""
    generation_start_step: int = 0
    facts: Mapping[WorkerId, Facts] = field(default_factory=dict)
    arithmetic: Mapping[str, str] | None = None
    boundary_requested: bool = False
    checkpoint: Checkpointed | None = None
    """The newest that is committed and not known to be damaged."""
    older_checkpoints: tuple[Checkpointed, ...] = ()
    """Those before it, oldest first."""
    saves: Mapping[int, Saving] = field(default_factory=dict)
    """Step -> the checkpoint being written of it."""
    incident: Incident | None = None
    losses: int = 0
    losses_without_step: int = 0
    start_failures: int = 0
    """In a row."""
    start_after: float = 0.0
    """No worker is asked for before."""
    task_errors: int = 0
    """At or before the failing step, since it was last done."""
    failing_step: int = 0
    """The step that the task last failed in."""
    idle_generations: int = 0
    num_samples: int | None = None
    rendezvous: Any = None
    """(host, port, key prefix of this driver)"""
    result_fingerprint: str | None = None
    stop_requested: bool = False
