"""The driver's whole state, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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
    """What the run is doing."""

    GATHERING = "waiting for workers"
    FORMING = "forming a generation"
    TRAINING = "training"
    STOPPING = "stopping"
    PAUSED = "paused"
    CLOSING = "writing the last checkpoint"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed:
    """The newest committed checkpoint."""

    step: int
    prefix: str
    fingerprint: str = ""
    digest: str | None = None
    """Of its manifest, if it is known."""
    url: str = ""
    """Of the storage that it is in, if that is not the run's own: a fork begins with its parent's checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A checkpoint that workers are writing."""

    generation: GenerationId
    step: int
    members: tuple[WorkerId, ...]
    since: float
    measured: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[int, ...] = ()
    """The requests that it answers."""
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
class Departure:
    """A worker that was told to leave. Times are the driver's monotonic seconds."""

    reason: str
    since: float
    by: float
    """When it will be gone, whether or not anybody is ready for that."""
    step: int
    """The newest step that was reported when it was told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """The next generation, as its members make it ready beside training. Times are the driver's monotonic seconds."""

    members: tuple[WorkerId, ...]
    """By rank."""
    mesh: Mesh
    prefix: str
    """Of the rendezvous at which they meet."""
    since: float
    by: float
    """It is not waited for any longer."""
    ready: frozenset[WorkerId]
    staying: frozenset[WorkerId]
    grouping: Grouping | None
    """What it was decided from."""
    awaited: frozenset[WorkerId]
    """Members that have not said that they are done."""
    failed: str = ""
    """Why one of them could not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewinding:
    """A checkpoint that the run is to go back to, because somebody wants it."""

    checkpoint: Checkpointed
    skip_data: bool
    """Pass over the data that was read since."""
    number: int
    """Of the request, among all changes that were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedRate:
    """Another learning rate, because somebody wants it."""

    factor: float
    number: int
    """As that of a rewind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingOverrides:
    """What is decided as soon as the generation that is being formed holds its state."""

    decisions: Decisions
    """All of the run, with these."""
    answers: int
    """The number of the newest request that it answers, and with it all that came before."""
    rate: tuple[int, float] | None = None
    """(first step, factor)"""
    rewind: Rewinding | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Somebody asked for a pause, and has not ended it. Times are the driver's monotonic seconds."""

    asked_at: float
    reached_at: float | None = None
    """When the workers stood still for the first time."""
    tried: tuple[frozenset[WorkerId], frozenset[WorkerId]] | None = None
    """(ready, leaving): the workers for which it was last looked at whether the state should be held by others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything the driver knows. Changed by `machine.step` alone."""

    limits: DriverConfig
    phase: Phase = Phase.GATHERING
    since: float = 0.0
    """When this phase began, or last made progress."""
    generation: GenerationId = _BEFORE_THE_FIRST
    members: tuple[WorkerId, ...] = ()
    """Of the current generation, by rank."""
    replicas: int = 1
    tensor: int = 1
    apart: int = 1
    """Of the current generation's mesh."""
    spec: StateSpec | None = None
    """Of the state, as the newest generation that trained has it."""
    ready: frozenset[WorkerId] = frozenset()
    starting: Mapping[WorkerId, float] = field(default_factory=dict)
    """Worker -> when it was asked for."""
    leaving: Mapping[WorkerId, Departure] = field(default_factory=dict)
    """Of the workers that are ready, those that were told to leave."""
    terminating_nodes: Mapping[str, float] = field(default_factory=dict)
    """Node id -> when its machine will be taken away, as was said of it."""
    preemptions: int = 0
    """Workers that were told to leave so far; they are not losses."""
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
    watch: StepWatch = field(default_factory=StepWatch)
    step_times: StepTimes = field(default_factory=StepTimes)
    measured_step: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    """The numbers of that step, as a checkpoint keeps them."""
    generation_start_step: int = 0
    has_trained: bool = False
    """Whether the current generation has begun to: its members hold more than `holdings` says."""
    source: Source | None = None
    """Where the current generation's state came from."""
    bytes_received: int = 0
    bytes_read: int = 0
    """Of all members that formed it: from each other, from storage."""
    facts: Mapping[WorkerId, WorkerInfo] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=dict)
    """What was seen of the nodes that workers ran on."""
    arithmetic: Mapping[str, str] | None = None
    """What the bits of the run's workers depend on, without the rules; None until it is known."""
    arithmetic_unmet: bool = False
    """It is that of the drivers before, and no worker of this one has had it yet."""
    differing: Mapping[WorkerId, WorkerInfo] = field(default_factory=dict)
    """Of the workers that are starting, those that are ready and have another: they are decided on together."""
    numerics: str = ""
    """The rules that the run computes under, as `raysharded.numerics` writes them."""
    build_seed: int = 0
    """Of the task's constructors: the seed that the run, or the one that it was forked from, began with."""
    boundary_requested: bool = False
    resharding: bool = False
    """Another mesh is wanted than before."""
    preparation: Preparation | None = None
    """Of the generation after this one."""
    num_preparations: int = 0
    checkpoint: Checkpointed | None = None
    """The newest that is committed and not known to be damaged."""
    older_checkpoints: tuple[Checkpointed, ...] = ()
    """Those before it, oldest first."""
    saves: Mapping[tuple[GenerationId, int], Saving] = field(default_factory=dict)
    """(generation, step) -> the checkpoint that it writes of it."""
    newest_save: tuple[GenerationId, int] = (_BEFORE_THE_FIRST, 0)
    """(generation, step) of the newest checkpoint that was begun: a generation saves a step once."""
    save_began_at: float | None = None
    """With `save_every_s`: when the newest checkpoint of this driver began, or its training; None before that."""
    save_requested_in: GenerationId | None = None
    """With `save_every_s`: the generation in which a checkpoint was requested that has not begun."""
    asked: tuple[int, ...] = ()
    """Requests for a checkpoint that none that was begun answers yet."""
    failed_saves: int = 0
    """In a row."""
    last_save_failures: int = 0
    last_save_at: float | None = None
    """When the last checkpoint is tried again."""
    incident: Incident | None = None
    losses: int = 0
    losses_without_step: int = 0
    """How often in a row workers were lost before a step or a checkpoint was done that had not been done before; those
    of one generation, as many as they are, are once."""
    losing_step: int = 0
    """The newest step that they were lost in."""
    losing_generation: GenerationId = _BEFORE_THE_FIRST
    """The newest that lost workers."""
    first_loss: str = ""
    """The first of the losses, and the first of those in a row: who, when and why."""
    first_loss_without_step: str = ""
    start_failures: int = 0
    """In a row."""
    first_start_failure: str = ""
    """Why the first of them did not start."""
    start_after: float = 0.0
    """No worker is asked for before."""
    task_errors: int = 0
    """At or before the failing step, since it was last done."""
    first_task_error: BaseException | None = None
    """What the first of these errors was."""
    failing_step: int = 0
    """The step that the task last failed in."""
    idle_generations: int = 0
    """In a row."""
    first_idle: str = ""
    """Why the first of them failed."""
    skipped_steps: tuple[int, int] | None = None
    """(first, last) of the newest steps in a row that were left out."""
    first_skip: str = ""
    """What was wrong with the first of them."""
    decisions: Decisions = field(default_factory=Decisions)
    """What steps are computed with: all that is on record, or about to be."""
    reached: int = 0
    """The newest step that was done since the run last went back: up to it, nothing is decided any more."""
    changes_asked: int = 0
    """How many changes of what is computed were asked for, and not refused at once: they are numbered from 1."""
    wanted_rate: WantedRate | None = None
    """The learning rate that somebody asked for, as long as that is not decided."""
    wanted_rewind: Rewinding | None = None
    """Where somebody wants the run to go back to, as long as that is not decided. It undoes what was asked for before
    it."""
    plan: PendingOverrides | None = None
    """Of the generation that is being formed, if it decides anything."""
    unrecorded: GenerationId | None = None
    """The newest generation that decided something which may not be on record yet: nothing is trained until it is."""
    rolled_back: tuple[str, ...] = ()
    """The folders of checkpoints that are deleted then."""
    rewound: tuple[int, str] | None = None
    """(checkpoint's step, why): where the run went back to last, because a number was not finite."""
    invalidated_up_to: GenerationId = _BEFORE_THE_FIRST
    """What this generation and older ones left in memory is not to be gone on from."""
    invalidated_after: int | None = None
    """Nor are the checkpoints that they write of later steps than this one, if it is set."""
    verified_step: int = 0
    """The newest step whose audit found nothing."""
    corrupted: tuple[int, str] | None = None
    """(step, what) of the newest audit that found something."""
    proven: frozenset[WorkerId] = frozenset()
    """Workers of generations whose first step was proven, if that is asked of them."""
    num_samples: int | None = None
    driver: str = ""
    """The driver's name, in what its workers write."""
    rendezvous: Any = None
    """(host, port, key prefix of this driver)"""
    result_fingerprint: str | None = None
    pause: Pause | None = None
    stop_requested: bool = False
    stop_by: float | None = None
    """When the run ends, with or without the checkpoint that it waits for."""

    @property
    def mesh(self) -> Mesh:
        """Of the current generation; there must have been one."""
        shards = len(self.members) // self.replicas
        return Mesh(replicas=self.replicas, shards=shards, tensor=self.tensor, apart=self.apart)

    @property
    def staying(self) -> frozenset[WorkerId]:
        """The workers that are ready and were not told to leave."""
        return self.ready - self.leaving.keys() if self.leaving else self.ready

    @property
    def is_last_step_being_saved(self) -> bool:
        """Whether a checkpoint of the run's last step, or its fingerprint alone, is on its way."""
        return any(step == self.limits.max_steps for _, step in self.saves)
