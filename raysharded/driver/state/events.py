"""What happens to a run: the events that the state machine is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysharded.driver.state.mesh_choice import Grouping
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import GenerationReady, Prepared, ProbeReply, Progress, Saved, Stopped, WorkerInfo
from raysharded.protocol.worker_launcher import LeaveNotice, WorkerLost

LEAVERS = -1
"""The request for a checkpoint that the driver itself makes for workers that must leave and cannot be spared."""
NOBODY = 0
"""The request for a checkpoint that the driver itself makes before it stops."""

ASKED = "asked"
"""Who had the run go back, if it was a person: the field `who` of the entry `rewind`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker has started."""

    worker: WorkerId
    facts: WorkerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReply:
    """A worker answered a call."""

    worker: WorkerId
    message: GenerationReady | Prepared | Stopped | Progress | Saved | ProbeReply


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint became real."""

    generation: GenerationId
    """Which wrote it."""
    step: int
    prefix: str
    digest: str
    """Of its manifest."""
    fingerprint: str
    retries: int = 0
    """How many of the driver's operations on storage were tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitFailed:
    """A checkpoint could not be committed; training goes on."""

    generation: GenerationId
    step: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overtaken:
    """A checkpoint will not become real: a newer one was committed before it."""

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
    """Somebody wants a checkpoint of the next step, and to know when it is committed."""

    request: int
    """Told back in `Answer`; above NOBODY, and new for every request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """Somebody wants the run to end now, to be resumed later. Said again, it ends at once."""

    checkpoint_within_s: float | None = None
    """End after one more checkpoint, or after so long without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardRequested:
    """Somebody wants the workers to form other shard groups or tensor parallel groups, or none."""

    grouping: Grouping | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateRequested:
    """Somebody wants every learning rate to be the task's times a factor, from the next step boundary on."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRequested:
    """Somebody wants the run to go back to its checkpoint of a step, and on from there."""

    step: int
    skip_data: bool = False
    """Pass over the data that was read since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What was decided when this generation was formed is in the journal, for good."""

    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """Checkpoints in these folders are there no more."""

    prefixes: tuple[str, ...]
    parents: bool = False
    """Nor are those of the run that this one was forked from: it lets go of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseRequested:
    """Somebody wants the workers to stop at the next step boundary, and to keep the state in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeRequested:
    """Somebody wants the run to go on after a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRequested:
    """Somebody wants the run to have so many workers."""

    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainRequested:
    """Somebody wants all workers to leave a node, and none to start there."""

    node: str
    """Its id, the first eight or more characters of it, or its host's name."""
    within_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """Something that somebody else knows, for the journal; it changes nothing."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Ready
    | WorkerLost
    | LeaveNotice
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
