"""Occurrences in a run: the events of the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysharded.driver.state.mesh_choice import Grouping
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.link_messages import LinkReport
from raysharded.protocol.messages import GenerationReady, Prepared, ProbeReply, Progress, Saved, Stopped, WorkerInfo
from raysharded.protocol.worker_launcher import LeaveNotice, NodeBack, NodeLost, WorkerLost

LEAVERS = -1
"""Request number of checkpoints that the driver itself requests for leaving workers that are still needed."""
NOBODY = 0
"""Request number of the checkpoint that the driver itself requests before it stops."""

ASKED = "asked"
"""Field `who` of the entry `rewind`, if a person requested it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker has started."""

    worker: WorkerId
    facts: WorkerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReply:
    """A worker answered a call."""

    worker: WorkerId
    message: GenerationReady | Prepared | Stopped | Progress | Saved | ProbeReply | LinkReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint was committed."""

    generation: GenerationId
    """Generation that wrote it."""
    step: int
    prefix: str
    digest: str
    """Digest of the manifest."""
    fingerprint: str
    retries: int = 0
    """Number of the driver's storage operations that were retried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitFailed:
    """A checkpoint could not be committed; training continues."""

    generation: GenerationId
    step: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overtaken:
    """A checkpoint will not be committed: a newer one was committed first."""

    generation: GenerationId
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadershipLost:
    """Another driver owns the run: this one can commit nothing any more."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprinted:
    """The final state's fingerprint is known, without a checkpoint."""

    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRequested:
    """A user requests a checkpoint of the next step, and an answer when it is committed."""

    request: int
    """Number returned in `Answer`: above NOBODY, and new for every request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """A user requests the end of the run, to be resumed later. A second request ends it at once."""

    checkpoint_within_s: float | None = None
    """End after one more checkpoint, or after this time without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardRequested:
    """A user requests other shard groups or tensor parallel groups, or none."""

    grouping: Grouping | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateRequested:
    """A user requests that every learning rate is the task's times a factor, from the next step boundary on."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureWeightsRequested:
    """A user requests other weights of the run's mixture, from the next step boundary on."""

    weights: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRequested:
    """A user requests that the run goes back to its checkpoint of a step, and continues from there."""

    step: int
    skip_data: bool = False
    """Skip the data that was read since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The decisions made when this generation was formed are durable in the journal."""

    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """Checkpoints in these folders were deleted."""

    prefixes: tuple[str, ...]
    parents: bool = False
    """Whether the run released its parent's checkpoints too, from which it was forked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseRequested:
    """A user requests that the workers stop at the next step boundary, with the state in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeRequested:
    """A user requests the end of a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRequested:
    """A user requests another number of workers."""

    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainRequested:
    """A user requests that all workers leave a node, and that none starts there."""

    node: str
    """Id of the node, the first eight or more characters of the id, or the host name."""
    within_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """An observation from outside, for the journal; it changes nothing."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Ready
    | WorkerLost
    | DeathExplained
    | LeaveNotice
    | NodeLost
    | NodeBack
    | WorkerReply
    | Committed
    | CommitFailed
    | Overtaken
    | LeadershipLost
    | Fingerprinted
    | CheckpointRequested
    | StopRequested
    | ReshardRequested
    | LearningRateRequested
    | MixtureWeightsRequested
    | RewindRequested
    | Recorded
    | Deleted
    | PauseRequested
    | ResumeRequested
    | ResizeRequested
    | DrainRequested
    | Annotation
    | Tick
)
