"""What happens to a run, and what the driver does about it: the two vocabularies of the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysharded.driver.messages import Facts, Formed, GenerationSpec, Progress, Saved, Stopped
from raysharded.ids import GenerationId, WorkerId

# -- events --


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker has started."""

    worker: WorkerId
    facts: Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A worker is gone, or never became ready."""

    worker: WorkerId
    reason: str
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A worker answered a call."""

    worker: WorkerId
    message: Formed | Stopped | Progress | Saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint became real."""

    step: int
    prefix: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitFailed:
    """A checkpoint could not be committed; training goes on."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprinted:
    """The final state's fingerprint is known, without a checkpoint."""

    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """Somebody wants the run to end now, to be resumed later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


Event = Ready | Lost | Said | Committed | CommitFailed | Fingerprinted | StopRequested | Tick

# -- commands --


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorker:
    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class KillWorker:
    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Have every member form the generation."""

    spec: GenerationSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    generation: GenerationId
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt:
    """Free a worker from its collectives; its running call then returns what it holds."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class AskReport:
    """Have an idle member of a generation that failed say what it holds."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBoundary:
    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    worker: WorkerId
    generation: GenerationId
    after_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectSave:
    generation: GenerationId
    step: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFingerprint:
    """Have every member sum up its part of the state."""

    generation: GenerationId
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SumFingerprint:
    """Put the members' parts of the fingerprint together."""

    parts: tuple[Saved, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitSave:
    """Write the manifest of a checkpoint whose parts are all there."""

    generation: GenerationId
    step: int
    parts: tuple[Saved, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Write an entry to the journal."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = False
    """Flush to storage now, not with the next batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The run is over; `error` says why if it failed."""

    error: BaseException | None = None


Command = (
    StartWorker
    | KillWorker
    | Form
    | Train
    | Interrupt
    | AskReport
    | RequestBoundary
    | Poll
    | CollectSave
    | AskFingerprint
    | SumFingerprint
    | CommitSave
    | Record
    | End
)
