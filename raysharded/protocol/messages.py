"""What the driver and its workers say to each other: frozen values, no torch, no Ray.

Every message carries its generation; one of an older generation is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from raysharded.checkpoint.format.paths import save_prefix as checkpoint_prefix
from raysharded.config import BatchConfig, EngineConfig, EvalConfig, OnNonFinite
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, Held, Mesh, Rebuild, StateSpec
from raysharded.overrides import Decisions
from raysharded.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """The checkpoint whose weights a run begins with."""

    uri: str
    """As the user gave it; for messages."""
    url: str
    """The storage that has it."""
    prefix: str
    digest: str
    """The manifest's."""


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
    grace_s: float = 25.0
    """How long a worker that was told to leave by SIGTERM stays at most."""
    preemption_notices: tuple[Any, ...] = ()
    """As `FailureConfig.preemption_notices`."""
    on_non_finite: OnNonFinite = "stop"
    """What a step whose loss or gradient is not finite does."""
    faults: Any = None
    """A `raysharded.testing.FaultPlan`, or None."""
    initial_weights: InitialWeights | None = None
    """What the run begins with at its start; None: what the task draws."""

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due."""
        if step == self.max_steps:
            return self.save_at_end
        return self.save_every_steps is not None and step % self.save_every_steps == 0


def save_id(generation: GenerationId, driver: str = "") -> str:
    """Names the saves of one generation of one driver, which saves a step once at most.

    A driver that was followed by another may not know it yet, and count its generations on: its name keeps their
    workers apart.
    """
    return f"g{generation:06d}_{driver}" if driver else f"g{generation:06d}"


def save_prefix(step: int, generation: GenerationId, driver: str = "") -> str:
    """Where a generation writes its checkpoint of a step, below the run's folder; never used twice."""
    return checkpoint_prefix(step, save_id(generation, driver))


@dataclass(frozen=True, kw_only=True, slots=True)
class FromMemory:
    """The state is in the workers' host memory."""

    step: int
    spec: StateSpec
    copies: tuple[Copy, ...]
    rebuilds: tuple[Rebuild, ...] = ()
    """What is to be computed from parity blocks first; then it is held as `copies` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCheckpoint:
    """The state is read from a committed checkpoint."""

    step: int
    prefix: str
    digest: str | None = None
    """Of its manifest, as the driver verified it; no other may be read."""
    url: str = ""
    """Of the storage that it is in, if that is not the run's own."""


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
    driver: str = ""
    """The name of the driver that formed it."""
    decisions: Decisions = field(default_factory=Decisions)
    """What its steps are computed with."""
    replicas: int = 1
    """Shard groups, each of which holds the whole state."""
    tensor: int = 1
    """The tensor parallel degree."""
    apart: int = 1
    """Of mirrors, as in `Mesh`."""
    nodes: tuple[int, ...] = ()
    """By rank a number of the node that it is on, where ranks are in order of their nodes; empty: they are not."""
    prepared: str = ""
    """The prefix of the rendezvous at which its members have prepared it beside training; empty: they have not."""
    attempt: int = 0
    """Of preparing: a later one takes the place of those before it, in whichever order they come."""
    numerics: str = ""
    """The rules that the run computes under, as `raysharded.numerics` writes them."""
    newcomers: tuple[WorkerId, ...] = ()
    """Members that have computed no step yet which others would have noticed: the first step is to be proven."""
    build_seed: int = 0
    """The seed of the run's constructors: the one that it began with."""

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def mesh(self) -> Mesh:
        shards = self.world_size // self.replicas
        return Mesh(replicas=self.replicas, shards=shards, tensor=self.tensor, apart=self.apart)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it is ready."""

    pid: int
    node: str
    """The host's name."""
    arithmetic: Mapping[str, str]
    """What its bits depend on: device model or CPU instruction set, library versions, threads; and under `numerics` the
    rules that it can compute under."""
    num_samples: int
    node_id: str = ""
    """Of the Ray node (hex); of plain processes the host's name."""
    started: int = 0
    """When its process started, in clock ticks since boot: with `pid` it names the process."""
    start_cpu_s: float = 0.0
    """What its process has computed until now, for imports above all: CPU seconds that others may have missed."""
    device: str = ""
    """Its GPU, by number and UUID, as nvidia-smi lists it; empty: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNotice:
    """A worker was told that it must leave."""

    number: int
    """Counts this worker's notices from 1."""
    reason: str
    left_s: float
    """How long it still has."""
    whole_node: bool
    """It is said of the worker's machine, not of its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """A number of a step that is NaN or infinite, as all workers agreed on it."""

    what: Literal["loss", "gradient"]
    loss: float
    microbatches: tuple[int, ...] = ()
    """Those that gave it; empty if each is finite and only their sum is not, or if that is not known."""

    def text(self) -> str:
        """For people."""
        what = f"the loss is {self.loss}" if self.what == "loss" else "the gradient is not finite"
        if not self.microbatches:
            return what
        name = "microbatch" if len(self.microbatches) == 1 else "microbatches"
        return f"{what} ({name} {', '.join(map(str, self.microbatches))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """What an audit, or the proof of a first step, found, the same on every worker."""

    step: int
    """The audited one, which was not applied."""
    what: str
    """gradient: a microbatch gave other numbers on another worker; sum: adding them up did; state: copies differ.
    The proof of a first step: gradient, or if that is the same, loss or metric."""
    culprits: tuple[WorkerId, ...]
    """To be removed: those that are wrong, or that may be."""
    workers: tuple[WorkerId, ...]
    """All whose results differ from another's, or from their own."""
    microbatches: tuple[int, ...] = ()
    by_proof: bool = False
    """The proof of a generation's first step found it, and no audit."""
    takes_back: bool = True
    """What was computed since the newest verified step may be wrong, too."""

    def fields(self) -> dict[str, Any]:
        """As the journal's entries have it."""
        return {
            "step": self.step,
            "what": self.what,
            "workers": list(self.workers),
            "culprits": list(self.culprits),
            "microbatches": list(self.microbatches),
        }

    def text(self) -> str:
        """For people."""
        of = f" of microbatches {', '.join(map(str, self.microbatches))}" if self.microbatches else ""
        names = f"worker {self.culprits[0]}" if len(self.culprits) == 1 else f"workers {list(self.culprits)}"
        by = "the proof of a first step" if self.by_proof else "the audit"
        return f"step {self.step}: {by} found another {self.what}{of} on {names} than on others"


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
    """A checkpoint of this step is being written."""
    save_asked: bool = False
    """It was begun because somebody asked for one."""
    save_late: bool = False
    """A checkpoint of this step was due and is left out: the one before is still being written."""
    skipped: NonFinite | None = None
    """Why its update was left out; the state is that of the step before."""
    audit_s: float | None = None
    """Seconds that its audit took, which found nothing; None if it was not audited."""

    def measured(self) -> dict[str, float]:
        """The step's finite numbers by name, as a checkpoint keeps them; those of the evaluation as `evaluation.*`."""
        evaluation = {f"evaluation.{name}": value for name, value in self.evaluation.items()}
        numbers = {**self.metrics, "loss": self.loss, **evaluation}
        return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}

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
        if self.skipped is not None:
            fields["skipped"] = True
        return fields


class StopReason(Enum):
    """Why a worker stopped training."""

    FINISHED = "finished"
    BOUNDARY = "boundary"
    ABORTED = "aborted"
    TASK_ERROR = "task_error"
    CORRUPT = "corrupt"
    """An audit, or the proof of a first step, found wrong numbers."""
    REFUSED = "refused"
    """Exact mode cannot be kept, or the state does not fit: trying again would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationReady:
    """A worker is ready to train in a generation; its share of the state is held twice."""

    generation: GenerationId
    step: int
    spec: StateSpec
    seconds: Mapping[str, float]
    bytes_received: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A worker has prepared the next generation beside training, or could not."""

    prefix: str
    """Of the rendezvous: which preparation it speaks of."""
    error: str = ""
    """Why it could not."""


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
    corruption: Corruption | None = None
    """What was found, if that is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Steps that were agreed on since the driver asked last."""

    generation: GenerationId
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReply:
    """Where a worker is right now."""

    generation: GenerationId
    step: int
    """The newest step that it applied."""
    phase: str
    phase_s: float
    """How long it has been in that phase."""
    waits: bool
    """It waits for others, in a collective; otherwise it computes, or is in the user's code."""
    stack: str
    """Of the thread that computes, the innermost call last."""
    where: str = ""
    """The innermost line of it that is neither raysharded's nor a library's."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds per step in which it does not wait for others: an average of the newest steps."""
    num_steps: int = 0
    """Of how many, in this generation."""


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
    unknown: bool = False
    """With an error: nothing failed; the worker never began it, or does not know of it any more."""
    seconds: float = 0.0
    """From its begin until it was durable."""
    retries: int = 0
    """How many of its operations on storage were tried again."""
