"""The driver's whole state, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raysharded.driver.state.broken_links import Links
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.node_health import Nodes
from raysharded.driver.state.step_watch import StepWatch
from raysharded.driver.state.stragglers import StepTimes
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh, StateSpec
from raysharded.overrides import Decisions
from raysharded.protocol.messages import Saved, Source, Stopped, WorkerInfo

_BEFORE_THE_FIRST = GenerationId(0)
_FIRST_WORKER = WorkerId(0)


class Phase(Enum):
    """The current activity of the run."""

    GATHERING = "waiting for workers"
    FORMING = "forming a generation"
    TRAINING = "training"
    STOPPING = "stopping"
    PAUSED = "paused"
    CLOSING = "writing the last checkpoint"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed:
    """A committed checkpoint."""

    step: int
    prefix: str
    fingerprint: str = ""
    digest: str | None = None
    """Manifest digest, if known."""
    url: str = ""
    """URL of the storage, if it is not the run's own: a fork begins with its parent's checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A checkpoint that workers are writing."""

    generation: GenerationId
    step: int
    members: tuple[WorkerId, ...]
    since: float
    measured: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[int, ...] = ()
    """Requests that this checkpoint answers."""
    parts: Mapping[WorkerId, Saved] = field(default_factory=dict)
    committing: bool = False
    """Whether all parts are written, and are being committed."""
    fingerprint_only: bool = False
    """Whether nothing is written: the run ends without a checkpoint."""
    repeats: bool = False
    """Whether it was requested in place of one that was abandoned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUpSave:
    """A checkpoint that was abandoned, and that no later one has replaced yet."""

    generation: GenerationId
    step: int
    again_at: float = -math.inf
    """Time from which another one is requested."""
    failures: int = 0
    """Failures in a row that were no loss of a worker: the wait doubles with each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A loss (or failed collective) from its first sign until the step it broke is done again."""

    found_at: float
    lost: tuple[WorkerId, ...]
    reasons: tuple[str, ...]
    workers_before: int
    step_before: int
    """Newest step reported before the incident."""
    stopped_at: float | None = None
    decided_at: float | None = None
    """Time at which the next members were decided: after a wait, if there were too few workers."""
    formed_at: float | None = None
    source: str = ""
    resume_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnDeath:
    """The death of a member that its own code caused."""

    worker: WorkerId
    generation: int
    step: int
    phase: str
    cause: str
    microbatch: int | None
    node_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """The departure of a worker that must leave. Times are the driver's monotonic seconds."""

    reason: str
    since: float
    by: float
    """Time at which it will be taken away, prepared or not."""
    step: int
    """Newest step reported at the time of the notice, or when the last checkpoint before it goes was requested."""
    saves_last: bool = False
    """Whether that last checkpoint was requested: it goes when that is committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """The next generation's preparation by its members in the background. Times are the driver's monotonic seconds."""

    members: tuple[WorkerId, ...]
    """Members by rank."""
    mesh: Mesh
    prefix: str
    """Key prefix of the rendezvous at which they meet."""
    since: float
    by: float
    """Deadline of the preparation."""
    ready: frozenset[WorkerId]
    staying: frozenset[WorkerId]
    grouping: Grouping | None
    """The values of `ready`, `staying` and `grouping` from which it was decided."""
    awaited: frozenset[WorkerId]
    """Members that have not reported completion."""
    failed: str = ""
    """Reason why a member could not prepare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewinding:
    """A checkpoint that the run is to go back to, by request."""

    checkpoint: Checkpointed
    skip_data: bool
    """Skip the data that was read since."""
    number: int
    """Number of the request, among all requested changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedRate:
    """A requested learning rate; `number` as in `Rewinding`."""

    factor: float
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedWeights:  # `number` as in `Rewinding`
    weights: tuple[tuple[str, float], ...]
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingOverrides:
    """Decisions made as soon as the generation that is being formed holds its state."""

    decisions: Decisions
    """All of the run's decisions, including these."""
    answers: int
    """Number of the newest request that this answers; all earlier requests are answered too."""
    rate: tuple[int, float] | None = None
    """(first step, factor)"""
    rewind: Rewinding | None = None
    weights: tuple[int, int, tuple[tuple[str, float], ...]] | None = None  # (first step, first position, weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A pause that a user requested and has not ended. Times are the driver's monotonic seconds."""

    asked_at: float
    reached_at: float | None = None
    """Time at which the workers first stood still."""
    tried: tuple[frozenset[WorkerId], frozenset[WorkerId]] | None = None
    """(ready, leaving): the workers last checked for whether others should hold the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that the driver knows. Changed by `machine.step` alone."""

    limits: DriverConfig
    phase: Phase = Phase.GATHERING
    since: float = 0.0
    """Time at which this phase began, or last made progress."""
    generation: GenerationId = _BEFORE_THE_FIRST
    members: tuple[WorkerId, ...] = ()
    """Members of the current generation, by rank."""
    replicas: int = 1
    tensor: int = 1
    apart: int = 1
    """Mirror distance of the current generation's mesh; `replicas` and `tensor` are of that mesh too."""
    spec: StateSpec | None = None
    """Spec of the state, as in the newest generation that trained."""
    ready: frozenset[WorkerId] = frozenset()
    starting: Mapping[WorkerId, float] = field(default_factory=dict)
    """Worker -> time at which its start was requested."""
    leaving: Mapping[WorkerId, Departure] = field(default_factory=dict)
    """Ready workers that must leave."""
    leavers_save_s: float | None = None
    """Seconds that the newest checkpoint took of several workers that must all leave; None before the first."""
    terminating_nodes: Mapping[str, float] = field(default_factory=dict)
    """Node id -> announced time at which its machine will be taken away."""
    preemptions: int = 0
    """Workers that got a leave notice so far; they are not losses."""
    device_failures: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)  # (step, generation)
    last_ready_at: float = 0.0
    next_worker: WorkerId = _FIRST_WORKER
    awaited: frozenset[WorkerId] = frozenset()
    """Members whose answer the phase waits for."""
    stops: Mapping[WorkerId, Stopped] = field(default_factory=dict)
    """Reports of this generation's members when they stopped."""
    holdings: Mapping[WorkerId, Stopped] = field(default_factory=dict)
    """The newest report of every live worker about what it holds."""
    step: int = 0
    """Newest reported step."""
    watch: StepWatch = field(default_factory=StepWatch)
    step_times: StepTimes = field(default_factory=StepTimes)
    measured_step: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers of step `measured_step`, as a checkpoint keeps them."""
    generation_start_step: int = 0
    has_trained: bool = False
    """Whether the current generation has begun to train: its members hold more than `holdings` shows."""
    source: Source | None = None
    """Source of the current generation's state."""
    bytes_received: int = 0
    bytes_read: int = 0
    """Bytes that all members read from storage to form it; `bytes_received` came from each other."""
    facts: Mapping[WorkerId, WorkerInfo] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    relayed: bool = False
    """Whether the current generation does no step: its members hand their state over to those that continue."""
    nodes: Nodes = field(default_factory=dict)
    """Observations of the nodes that workers ran on."""
    arithmetic: Mapping[str, str] | None = None
    """Facts that the bits of the run's workers depend on, without the rules; None until they are known."""
    arithmetic_unmet: bool = False
    """Whether `arithmetic` is that of earlier drivers, and no worker of this one has had it yet."""
    differing: Mapping[WorkerId, WorkerInfo] = field(default_factory=dict)
    """Starting workers that are ready with another arithmetic: they are decided on together."""
    numerics: str = ""
    """The rules that the run computes under, as `raysharded.numerics` writes them."""
    build_seed: int = 0
    """Seed of the task's constructors, with which the run, or the one it was forked from, began."""
    boundary_requested: bool = False
    resharding: bool = False
    """Whether another mesh is wanted than before."""
    preparation: Preparation | None = None
    """Preparation of the generation after this one."""
    num_preparations: int = 0
    checkpoint: Checkpointed | None = None
    """Newest checkpoint that is committed and not known to be damaged."""
    older_checkpoints: tuple[Checkpointed, ...] = ()
    """Checkpoints before the newest, oldest first."""
    saves: Mapping[tuple[GenerationId, int], Saving] = field(default_factory=dict)
    """(generation, step) -> the checkpoint being written."""
    newest_save: tuple[GenerationId, int] = (_BEFORE_THE_FIRST, 0)
    """(generation, step) of the newest checkpoint that was begun: a generation saves a step once."""
    save_began_at: float | None = None
    """With `save_every_s`: time at which this driver's newest checkpoint, or its training, began; None before."""
    save_requested_in: GenerationId | None = None
    """Generation in which the driver requested a checkpoint, by time or for `given_up`, that has not begun."""
    given_up: GivenUpSave | None = None
    """Newest checkpoint that was abandoned; None if there is a newer one."""
    asked: tuple[int, ...] = ()
    """Requests for a checkpoint that no begun checkpoint answers yet."""
    failed_saves: int = 0  # failed checkpoints in a row
    unconfirmed_saves: tuple[tuple[int, str], ...] = ()
    """(step, folder) of each checkpoint whose commit failed: storage may have it all the same."""
    last_save_failures: int = 0
    last_save_at: float | None = None
    """Time at which the last checkpoint is retried."""
    incident: Incident | None = None
    losses: int = 0
    losses_without_step: int = 0
    """Consecutive losses before a new step or checkpoint; losses of one generation count once."""
    losing_step: int = 0
    """Newest step in which these losses happened."""
    losing_generation: GenerationId = _BEFORE_THE_FIRST
    """Newest generation that lost workers without notice."""
    first_loss: str = ""
    """Worker, step and reason of the first loss; `first_loss_without_step` is the first of those in a row."""
    first_loss_without_step: str = ""
    deaths: tuple[OwnDeath, ...] = ()
    """Deaths of members by themselves since the newest new step or checkpoint."""
    start_failures: int = 0  # failed starts in a row
    first_start_failure: str = ""  # reason of the first of them
    start_failed_at: float = 0.0  # time of the last of them
    start_after: float = 0.0  # time before which no worker is requested
    failed_starts: Mapping[str, float] = field(default_factory=dict)
    """Node id -> time of the newest failed start there: for a short time no worker is placed there."""
    task_errors: int = 0
    """Task errors at or before the failing step, since it was last done."""
    first_task_error: BaseException | None = None
    """The first of these task errors."""
    failing_step: int = 0
    """Step in which the task last failed."""
    failed_at: tuple[tuple[WorkerId, str], ...] = ()
    """(worker, host name) of each of these task errors; `failed_worker` is the last one's."""
    failed_worker: WorkerId | None = None
    idle_generations: int = 0
    """Consecutive generations without a step and without a loss."""
    first_idle: str = ""  # reason of the first of these failures
    skipped_steps: tuple[int, int] | None = None
    """(first, last) of the newest consecutive steps that were skipped."""
    first_skip: str = ""
    """Reason for the first of these skips."""
    decisions: Decisions = field(default_factory=Decisions)
    """Decisions that steps are computed with: recorded in the journal, or about to be."""
    reached: int = 0
    """Newest step done since the last rollback: new decisions apply only to later steps."""
    changes_asked: int = 0
    """Number of requested changes of the computation that were not refused at once; they are numbered from 1."""
    wanted_rate: WantedRate | None = None
    """Requested learning rate, and weights of the mixture, until they are decided."""
    wanted_weights: WantedWeights | None = None
    wanted_rewind: Rewinding | None = None
    """Requested rewind, until it is decided. It undoes earlier requests."""
    plan: PendingOverrides | None = None
    """Decisions of the generation that is being formed, if there are any."""
    unrecorded: GenerationId | None = None
    """Newest generation with a decision that may not be recorded yet: nothing is trained until it is."""
    rolled_back: tuple[str, ...] = ()
    """Folders of checkpoints that are deleted once it is recorded."""
    rewound: tuple[int, str] | None = None
    """(checkpoint's step, reason) of the last rollback for a number that was not finite."""
    invalidated_up_to: GenerationId = _BEFORE_THE_FIRST
    """In-memory state of this and older generations must not be used for recovery."""
    invalidated_after: int | None = None
    """Their checkpoints of later steps than this must not be used either; None: all may be used."""
    verified_step: int = 0
    """Newest step whose audit found nothing."""
    corrupted: tuple[int, str] | None = None
    """(step, finding) of the newest audit that found something."""
    proven: frozenset[WorkerId] = frozenset()
    """Workers of generations whose first step was proven, if a proof is required."""
    num_samples: int | None = None
    blocks: tuple[int, int] = (1, 1)
    """(samples per block, or below 0 for data that have an order themselves; samples per step), as the run began."""
    contents: str = ""  # digests of the data's contents; empty: unknown
    driver: str = ""
    """The driver's name, in what its workers write."""
    rendezvous: Any = None
    """(host, port, key prefix of this driver)"""
    result_fingerprint: str | None = None
    pause: Pause | None = None
    ending: BaseException | None = None
    """Error with which the run ends after a checkpoint of the newest complete step."""
    stop_requested: bool = False
    stop_by: float | None = None
    """Time at which the run ends, with or without the checkpoint that it waits for."""

    @property
    def mesh(self) -> Mesh:
        """Mesh of the current generation; there must have been one."""
        shards = len(self.members) // self.replicas
        return Mesh(replicas=self.replicas, shards=shards, tensor=self.tensor, apart=self.apart)

    @property
    def staying(self) -> frozenset[WorkerId]:
        """Ready workers that need not leave."""
        return self.ready - self.leaving.keys() if self.leaving else self.ready

    @property
    def saved_step(self) -> int:
        """Step of the newest committed checkpoint; 0 without one."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def current_step(self) -> int:
        """The step that is computed; the last one while its checkpoint is written."""
        return min(self.step + 1, self.limits.max_steps)

    @property
    def is_last_step_being_saved(self) -> bool:
        """Whether a checkpoint of the run's last step, or its fingerprint alone, is being written."""
        return any(step == self.limits.max_steps for _, step in self.saves)
