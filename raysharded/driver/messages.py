"""What the driver and its workers say to each other: frozen values, no torch, no Ray.

Every message carries its generation; one of an older generation is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raysharded.checkpoint.paths import save_prefix as checkpoint_prefix
from raysharded.config import BatchConfig, EngineConfig, EvalConfig
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, Held, StateSpec
from raysharded.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a run is started with."""

    run_name: str
    run_url: str
    """The run's own folder on its storage."""
    task: Task
    data: Any
    batch: BatchConfig
    engine: EngineConfig
    evaluation: EvalConfig | None
    max_steps: int
    save_every_steps: int | None
    save_at_end: bool
    use_gpu: bool
    num_threads: int
    collective_timeout_s: float
    faults: Any = None
    """A `raysharded.testing.FaultPlan`, or None."""

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due."""
        if step == self.max_steps:
            return self.save_at_end
        return self.save_every_steps is not None and step % self.save_every_steps == 0


def save_id(generation: GenerationId) -> str:
    """Names the saves of one generation; a generation saves a step once at most."""
    return f"g{generation:06d}"


def save_prefix(step: int, generation: GenerationId) -> str:
    """Where a generation writes its checkpoint of a step, below the run's folder; never used twice."""
    return checkpoint_prefix(step, save_id(generation))


@dataclass(frozen=True, kw_only=True, slots=True)
class FromMemory:
    """The state is in the workers' host memory."""

    step: int
    spec: StateSpec
    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCheckpoint:
    """The state is read from a committed checkpoint."""

    step: int
    prefix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FromStart:
    """The state is drawn from the run's seed."""

    step: int = 0


Source = FromMemory | FromCheckpoint | FromStart


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSpec:
    """One membership: who, in which order, where they meet, and where their state comes from."""

    generation: GenerationId
    members: tuple[WorkerId, ...]
    """By rank."""
    source: Source
    host: str
    port: int
    prefix: str
    """Of the rendezvous store's keys; names the driver too, so that no other driver's keys are met."""

    @property
    def world_size(self) -> int:
        return len(self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a worker says of itself when it is ready."""

    pid: int
    node: str
    arithmetic: Mapping[str, str]
    """What its bits depend on: device model or CPU instruction set, library versions, threads."""
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step as all its workers agreed on it."""

    generation: GenerationId
    step: int
    world_size: int
    loss: float
    weight: float
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    gradient_norm: float
    lr: float
    read_digest: tuple[int, int]
    num_reads: int
    seconds: Mapping[str, float]
    """Phase -> seconds, of the reporting worker."""
    finished_at: float
    """Wall clock of the worker when Apply was done."""
    save_started: bool = False

    def fields(self) -> dict[str, object]:
        """The step as the journal keeps it."""
        fields: dict[str, object] = {
            "generation": self.generation,
            "step": self.step,
            "workers": self.world_size,
            "loss": self.loss,
            "weight": self.weight,
            "gradient_norm": self.gradient_norm,
            "lr": self.lr,
            "digest": [f"{word:016x}" for word in self.read_digest],
            "reads": self.num_reads,
            "seconds": dict(self.seconds),
        }
        if self.metrics:
            fields["metrics"] = dict(self.metrics)
        if self.evaluation:
            fields["evaluation"] = dict(self.evaluation)
        return fields


class StopReason(Enum):
    """Why a worker stopped training."""

    FINISHED = "finished"
    BOUNDARY = "boundary"
    ABORTED = "aborted"
    TASK_ERROR = "task_error"
    REFUSED = "refused"
    """Exact mode cannot be kept, or the state does not fit: trying again would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A worker is ready to train in a generation; its share of the state is held twice."""

    generation: GenerationId
    step: int
    spec: StateSpec
    seconds: Mapping[str, float]
    bytes_received: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A worker stopped forming or training, and holds this."""

    generation: GenerationId
    reason: StopReason
    step: int
    """The newest step that this worker applied."""
    phase: str
    stopped_at: float
    """Wall clock of the worker."""
    held: tuple[Held, ...] = ()
    specs: Mapping[int, StateSpec] = field(default_factory=dict)
    """Step -> the state's spec at that step."""
    reports: tuple[StepReport, ...] = ()
    """The newest steps' reports, in case the driver did not get them."""
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Steps that were agreed on since the driver asked last."""

    generation: GenerationId
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A worker's part of a checkpoint is on storage, or could not be written."""

    generation: GenerationId
    step: int
    files: tuple[Any, ...] = ()
    """`raysharded.checkpoint.FileRecord` of each file."""
    fingerprint: Any = None
    """This worker's part of the state's fingerprint: uint64 [tensors, 2]."""
    spec: StateSpec | None = None
    error: str | None = None
