"""Messages between the driver and its workers: frozen values, no torch, no Ray.

Every message carries its generation; a message of an older generation is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from raysharded.checkpoint.format.paths import save_prefix as checkpoint_prefix
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, Held, Mesh, Rebuild, StateSpec
from raysharded.overrides import Decisions

REGISTERED_STATE = "registered"
"""Key in a checkpoint's metadata of the state that a session has registered, as text."""


def save_id(generation: GenerationId, driver: str = "") -> str:
    """Identifier of the saves of one generation of one driver, which saves a step at most once.

    A driver may count generations on, unaware that another one follows it. Its name keeps their workers apart.
    """
    return f"g{generation:06d}_{driver}" if driver else f"g{generation:06d}"


def save_prefix(step: int, generation: GenerationId, driver: str = "") -> str:
    """Folder of a generation's checkpoint of a step, below the run's folder; never used twice."""
    return checkpoint_prefix(step, save_id(generation, driver))


@dataclass(frozen=True, kw_only=True, slots=True)
class FromMemory:
    """The state is in the workers' host memory."""

    step: int
    spec: StateSpec
    copies: tuple[Copy, ...]
    rebuilds: tuple[Rebuild, ...] = ()
    """Parts to compute from parity blocks first; they are then held as `copies` specifies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCheckpoint:
    """The state is read from a committed checkpoint."""

    step: int
    prefix: str
    digest: str | None = None
    """Manifest digest that the driver verified; no other manifest may be read."""
    url: str = ""
    """URL of the checkpoint's storage, if it is not the run's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromStart:
    """The state is drawn from the run's seed."""

    step: int = 0


Source = FromMemory | FromCheckpoint | FromStart


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSpec:
    """One membership: its workers in order, their rendezvous, and the source of their state."""

    generation: GenerationId
    members: tuple[WorkerId, ...]
    """Members, by rank."""
    source: Source
    host: str
    port: int
    prefix: str
    """Prefix of the rendezvous store's keys; it includes the driver, so that drivers never share keys."""
    secret: bytes = field(default=b"", repr=False)
    """Secret of the members, which the driver adds when it calls them: it is in no state, journal or log."""
    driver: str = ""
    """Name of the driver that formed the generation."""
    decisions: Decisions = field(default_factory=Decisions)
    """Decisions that the steps are computed with."""
    replicas: int = 1
    """Number of shard groups, each of which holds the whole state."""
    tensor: int = 1
    """The tensor parallel degree."""
    apart: int = 1
    """Distance of mirrors, as in `Mesh`."""
    nodes: tuple[int, ...] = ()
    """Node number for each rank, if ranks are in order of their nodes; empty otherwise."""
    prepared: str = ""
    """Prefix of the rendezvous at which the members prepared the generation in the background; empty: not prepared."""
    attempt: int = 0
    """Number of the preparation attempt: a later one replaces earlier ones, in any order of arrival."""
    numerics: str = ""
    """The rules that the run computes under, as `raysharded.numerics` writes them."""
    newcomers: tuple[WorkerId, ...] = ()
    """Members without a computed step that others could have checked: the first step is to be proven."""
    build_seed: int = 0
    """Seed of the run's constructors, with which it began."""
    shift: tuple[int, int] = (0, 0)
    """(step, places): each worker computes the microbatches of the worker so many places further, in a retried step."""
    blocks: tuple[int, int] = (1, 1)
    """(samples per block of the data, samples per step), with which the run began: its order of samples."""
    failed_devices: tuple[WorkerId, ...] = ()
    """No members, as their GPU failed: they hand over what they alone hold, over gloo, and use no device."""

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def mesh(self) -> Mesh:
        shards = self.world_size // self.replicas
        return Mesh(replicas=self.replicas, shards=shards, tensor=self.tensor, apart=self.apart)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker's description of itself when it is ready."""

    pid: int
    node: str
    """Host name."""
    arithmetic: Mapping[str, str]
    """Facts that the worker's bits depend on: device model or CPU instruction set, library versions, threads.

    The key `numerics` holds the rules that it can compute under.
    """
    num_samples: int
    node_id: str = ""
    """Id of the Ray node (hex); the host name for plain processes."""
    started: int = 0
    """Start time of the process, in clock ticks since boot; with `pid` it identifies the process."""
    start_cpu_s: float = 0.0
    """CPU seconds that the process has used so far, mostly for imports; others may have lacked them."""
    device: str = ""
    """GPU, by number and UUID, as nvidia-smi lists it; empty: none."""
    mailbox: str = ""
    """HOST:PORT at which the run's other workers reach it without the driver and the cluster; empty: they cannot."""
    samples_per_block: int = 1
    """Consecutive samples of the data that are read at once; 1: it has no blocks. Below 0: minus the digest of the
    order that the data have themselves."""
    mixture: str = ""
    """All that the order of a mixture's samples depends on, as JSON; empty for other data."""
    contents: str = ""
    """Digests of what the samples are made of, as of `Reader.contents`; empty for data without one."""
    open_files: int | None = None
    """Number of files that the process may still open, for connections to its peers; None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNotice:
    """A notice that a worker must leave."""

    number: int
    """Number of the notice, from 1 for each worker."""
    reason: str
    left_s: float
    """Remaining time in seconds."""
    whole_node: bool
    """Whether the notice concerns the worker's machine, not only its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """A number of a step that is NaN or infinite, as all workers agreed on it."""

    what: Literal["loss", "gradient"]
    loss: float
    microbatches: tuple[int, ...] = ()
    """Microbatches that produced it; empty if each is finite and only their sum is not, or if they are unknown."""

    def text(self) -> str:
        """The finding for people."""
        what = f"the loss is {self.loss}" if self.what == "loss" else "the gradient is not finite"
        if not self.microbatches:
            return what
        name = "microbatch" if len(self.microbatches) == 1 else "microbatches"
        return f"{what} ({name} {', '.join(map(str, self.microbatches))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """The finding of an audit, or of the proof of a first step, the same on every worker."""

    step: int
    """The audited step, which was not applied."""
    what: str
    """gradient: a microbatch gave other numbers on another worker. sum: the addition of gradients did. state: copies
    differ. The proof of a first step finds gradient or, if gradients agree, loss or metric."""
    culprits: tuple[WorkerId, ...]
    """Workers to remove: those that are wrong, or may be."""
    workers: tuple[WorkerId, ...]
    """All workers whose results differ from another's, or from their own."""
    microbatches: tuple[int, ...] = ()
    by_proof: bool = False
    """Whether the proof of a generation's first step found it, not an audit."""
    takes_back: bool = True
    """Whether results since the newest verified step may be wrong, too."""

    def fields(self) -> dict[str, Any]:
        """Fields for the journal's entries."""
        return {
            "step": self.step,
            "what": self.what,
            "workers": list(self.workers),
            "culprits": list(self.culprits),
            "microbatches": list(self.microbatches),
        }

    def text(self) -> str:
        """The finding for people."""
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
    """Wall clock of the worker at the end of the phase Apply."""
    save_started: bool = False
    """Whether a checkpoint of this step is being written."""
    save_asked: bool = False
    """Whether that checkpoint was begun by request."""
    save_late: bool = False
    """Whether a due checkpoint of this step is skipped because the previous one is still being written."""
    skipped: NonFinite | None = None
    """Reason for skipping the update; the state is that of the step before."""
    audit_s: float | None = None
    """Seconds of the step's audit, which found nothing; None if it was not audited."""
    remarks: tuple[str, ...] = ()
    """Sentences on what may not be as the task's author intended, since the report of the step before."""
    gpu: Mapping[str, float] = field(default_factory=dict)
    """Use of the reporting worker's GPU, by name; empty without one."""
    microbatches: tuple[tuple[float, float], ...] = ()
    """(sum of the loss, weight) of each microbatch, if they are recorded."""

    def measured(self) -> dict[str, float]:
        """The step's finite numbers by name, as a checkpoint keeps them; those of the evaluation as `evaluation.*`."""
        numbers = {**self.metrics, "loss": self.loss}
        numbers |= {f"evaluation.{name}": value for name, value in self.evaluation.items()}
        return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}

    def fields(self) -> dict[str, object]:
        """The step's fields for the journal."""
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
        only_some: dict[str, object] = {
            "metrics": dict(self.metrics),
            "evaluation": dict(self.evaluation),
            "microbatches": list(map(list, self.microbatches)),
            "skipped": self.skipped is not None,
            "remarks": list(self.remarks),
            "gpu": dict(self.gpu),
        }
        return fields | {name: value for name, value in only_some.items() if value}


class StopReason(Enum):
    """Reason why a worker stopped training."""

    FINISHED = "finished"
    BOUNDARY = "boundary"
    ABORTED = "aborted"
    TASK_ERROR = "task_error"
    CORRUPT = "corrupt"
    """An audit, or the proof of a first step, found wrong numbers."""
    REFUSED = "refused"
    """Exact mode cannot be kept, or the state does not fit: a retry would not help."""
    DEVICE = "device"
    """The worker's GPU does not work in its process any more; its host memory does."""


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
    """A worker has prepared the next generation in the background, or could not."""

    prefix: str
    """Prefix of the rendezvous, which identifies the preparation."""
    error: str = ""
    """Reason why the preparation failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A worker stopped forming or training, and reports what it holds."""

    generation: GenerationId
    reason: StopReason
    step: int
    """Newest step that this worker applied."""
    phase: str
    stopped_at: float
    """Wall clock of the worker."""
    held: tuple[Held, ...] = ()
    specs: Mapping[int, StateSpec] = field(default_factory=dict)
    """Step -> the state's spec at that step."""
    reports: tuple[StepReport, ...] = ()
    """Reports of the newest steps, in case the driver did not receive them."""
    error: BaseException | None = None
    corruption: Corruption | None = None
    """The finding, if that is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Steps agreed on since the driver's last query."""

    generation: GenerationId
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReply:
    """A worker's position in a step right now."""

    generation: GenerationId
    step: int
    """Newest step that the worker applied."""
    phase: str
    phase_s: float
    """Seconds in that phase so far."""
    waits: bool
    """Whether it waits for others in a collective; otherwise it computes, or runs the user's code."""
    stack: str
    """Stack of the thread that computes, the innermost call last."""
    where: str = ""
    """Innermost line of the stack that is neither raysharded's nor a library's."""
    in_collective: bool | None = None
    """Whether the GPU has begun a collective that has not ended; None if that is not known."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds per step without waiting for others: an average of the newest steps."""
    num_steps: int = 0
    """Number of averaged steps, in this generation."""


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
    registered: str = ""
    """With the part of rank 0: a session's registered state; empty without a session."""
    error: str | None = None
    unknown: bool = False
    """With an error: nothing failed; the worker never began the save, or no longer knows it."""
    seconds: float = 0.0
    """Seconds from the start of the save until it was durable."""
    retries: int = 0
    """Number of the worker's storage operations that were retried."""
