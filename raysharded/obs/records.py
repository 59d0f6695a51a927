"""What a journal's entries become: frozen values, for reports and for one's own evaluation. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["finished", "failed", "stopped", "unfinished"]
"""unfinished: the newest driver is still at work, or died without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A committed step, as all its workers agreed on it."""

    step: int
    generation: int
    workers: int
    loss: float
    weight: float
    """What the loss is averaged over: tokens, samples."""
    gradient_norm: float
    lr: float
    digest: tuple[int, int]
    """Of the samples that were really read."""
    reads: int
    seconds: Mapping[str, float]
    """Phase -> seconds, of one worker."""
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    at: float
    """Wall clock."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A loss, from when it was found until the step it broke was done again. Times are seconds."""

    lost: tuple[int, ...]
    reasons: tuple[str, ...]
    workers_before: int
    workers_after: int
    found_at: float
    """The driver's monotonic clock."""
    abort_s: float
    """Until every survivor had stopped and said what it holds."""
    reshard_s: float
    """From then until the next generation held the state."""
    first_step_s: float
    """From then until its first step was done."""
    total_s: float
    steps_redone: int
    source: str
    """Where the state came from: memory, checkpoint or start."""
    resumed_after_step: int
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRecord:
    """A membership that was decided."""

    generation: int
    members: tuple[int, ...]
    """By rank."""
    step: int
    """The step it goes on from."""
    source: str
    at: float
    formed_at: float | None = None
    """None: a member was lost before all were ready."""
    bytes_received: int = 0
    bytes_read: int = 0
    spares: tuple[int, ...] = ()
    """Workers that are ready beside it."""
    mesh: str = ""
    """Replicas x shards, where shard groups were asked for."""
    why: str = ""
    """It was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """A worker that was lost, joined, was told to leave, left, was refused or did not start; that was found stuck, or
    slower than its peers; or that was hurt on purpose, by chaos."""

    what: Literal["lost", "joined", "leaving", "left", "refused", "start failed", "stuck", "slow", "injected"]
    worker: int
    step: int
    """The newest step at that moment."""
    reason: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AvoidedNode:
    """A node that got no new workers from then on, until the run was resumed."""

    node: str
    """Its id."""
    host: str
    step: int
    """The newest step at that moment."""
    failures: int
    reasons: tuple[str, ...]
    """Of the last few failures."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint: committed if it has a prefix; otherwise `problem` says what went wrong."""

    step: int
    prefix: str
    fingerprint: str
    problem: str
    at: float
    size_bytes: int | None = None
    """What was written; None if the journal does not say."""
    num_files: int | None = None
    seconds: float = math.nan
    """From when its workers began until it was committed."""
    retries: int = 0
    """How many operations on storage were tried again."""
    late: bool = False
    """It was left out: storage was slower than the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A step that was computed again and did not come out the same."""

    step: int
    fields: tuple[str, ...]
    generations: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive steps with one order of samples; what a ledger needs to know."""

    first_step: int
    last_step: int
    batch: Mapping[str, int] | None
    """global_batch_size, microbatch_size, seed."""
    num_samples: int | None
    skipped: int = 0
    """Samples that the run had passed over before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """A step whose update was left out because a number was not finite."""

    step: int
    what: str
    """loss or gradient"""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind:
    """The run went back because a number was not finite, and on past the data of the steps between."""

    step: int
    """The one that went wrong."""
    to_step: int
    samples: int
    """So many were passed over."""
    reason: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Audits:
    """Steps that were computed a second time on other workers and came out the same."""

    count: int = 0
    seconds: float = 0.0
    newest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """An audit found wrong numbers."""

    step: int
    what: str
    """gradient, sum or state"""
    workers: tuple[int, ...]
    """All whose results or copies were compared."""
    culprits: tuple[int, ...]
    """Those that were removed."""
    microbatches: tuple[int, ...]
    verified_step: int
    """The newest step before that had passed an audit; what came after it was computed again."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Everything that the journal says of a run."""

    run: str
    status: Status
    error: str
    """Why it failed; empty otherwise."""
    fingerprint: str
    """Of the final state; empty unless the run finished."""
    max_steps: int | None
    last_step: int
    """The newest step that was not lost."""
    exact: bool
    """Whether the run promises the same bits."""
    starts: int
    """Drivers that have worked on the run: 1, and one more each time it was resumed."""
    versions: Mapping[str, str]
    steps: tuple[StepRecord, ...]
    """Those that count, in order."""
    generations: tuple[GenerationRecord, ...]
    recoveries: tuple[Recovery, ...]
    worker_events: tuple[WorkerEvent, ...]
    avoided_nodes: tuple[AvoidedNode, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    """Also those that failed or were passed over."""
    failed_saves: int
    """Checkpoints that could not be written since the newest that was."""
    failing: bool
    """Whether those are so many that the run said so."""
    differences: tuple[Difference, ...]
    """Steps that were computed again with another result: none, if the promise holds."""
    spans: tuple[Span, ...]
    skipped_steps: tuple[SkippedStep, ...]
    rewinds: tuple[Rewind, ...]
    audits: Audits
    corruptions: tuple[Corruption, ...]
    first_at: float
    last_at: float
    """Wall clock of the oldest and the newest entry."""
    elapsed_s: float
    """Seconds that drivers were at work."""
    lost_step_s: float
    """Seconds of steps whose result was lost."""
    starting_cpu_s: float
    """CPU seconds that all workers took to start, for imports above all. On shared cores the others miss them."""

    @property
    def preemptions(self) -> int:
        """Workers that were told to leave; they are no losses."""
        return sum(event.what == "leaving" for event in self.worker_events)

    @property
    def workers_by_step(self) -> dict[int, int]:
        """Step -> how many workers computed it."""
        return {record.step: record.workers for record in self.steps}

    @property
    def computing_s(self) -> float:
        """Seconds of the steps that count."""
        return sum(record.total_s for record in self.steps)

    @property
    def recovering_s(self) -> float:
        """Seconds between finding a loss and training again."""
        return sum(recovery.abort_s + recovery.reshard_s for recovery in self.recoveries)

    @property
    def goodput(self) -> float:
        """The part of the elapsed time that was spent on steps that count; NaN before the first."""
        return self.computing_s / self.elapsed_s if self.elapsed_s > 0 and self.steps else math.nan

    @property
    def weight(self) -> float:
        """The loss's weights, added up: the tokens (or samples) trained on."""
        return math.fsum(record.weight for record in self.steps)

    @property
    def weight_per_s(self) -> float:
        """Tokens (or samples) per second at work, starting and recovering included; NaN without a time."""
        return self.weight / self.elapsed_s if self.elapsed_s > 0 else math.nan

    @property
    def slowest(self) -> WorkerEvent | None:
        """The worker that was last found to be slower than its peers."""
        return next((event for event in reversed(self.worker_events) if event.what == "slow"), None)

    @property
    def committed(self) -> tuple[CheckpointRecord, ...]:
        """The checkpoints that were written; older ones may have been deleted since."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.prefix)

    @property
    def late(self) -> tuple[CheckpointRecord, ...]:
        """Those that were left out because the one before was still being written."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.late)
