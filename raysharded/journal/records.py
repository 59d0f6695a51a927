"""Records of journal entries: frozen values, for reports and for custom evaluations. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A committed step, as all its workers agreed on it."""

    step: int
    generation: int
    workers: int
    loss: float
    weight: float
    """Weight over which the loss is averaged: tokens, samples."""
    gradient_norm: float
    lr: float
    digest: tuple[int, int]
    """Digest of the samples actually read."""
    reads: int
    seconds: Mapping[str, float]
    """Seconds per phase, of one worker."""
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    at: float
    """Wall clock time."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A recovery, from the detection of a loss until the interrupted step was completed. Times are seconds."""

    lost: tuple[int, ...]
    reasons: tuple[str, ...]
    workers_before: int
    workers_after: int
    found_at: float
    """Time on the driver's monotonic clock."""
    abort_s: float
    """Time until every survivor had stopped and reported what it holds."""
    wait_s: float = 0.0
    """Time from then until there were enough workers to continue; 0 in journals that count it in `reshard_s`."""
    reshard_s: float
    """Time from then until the next generation held the state."""
    first_step_s: float
    """Time from then until the generation's first step was done."""
    total_s: float
    steps_redone: int
    source: str
    """Source of the state: memory, checkpoint or start."""
    resumed_after_step: int
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRecord:
    """A membership that was decided."""

    generation: int
    members: tuple[int, ...]
    """Members by rank."""
    step: int
    """The step from which the generation continues."""
    source: str
    at: float
    formed_at: float | None = None
    """Time when all members were ready; None: one was lost before."""
    bytes_received: int = 0
    bytes_read: int = 0
    spares: tuple[int, ...] = ()
    """Ready workers that are not members."""
    mesh: str = ""
    """Replicas x shards, where shard groups were requested."""
    why: str = ""
    """Reason for the membership."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """A worker that was lost, joined, had to leave, left, was rejected, or failed to start.

    Also one that was stuck, slower than its peers, or the target of an injected fault.
    """

    what: Literal["lost", "joined", "leaving", "left", "refused", "start failed", "stuck", "slow", "injected"]
    worker: int
    step: int
    """The newest finished step at that moment. Of a worker that was lost or stuck, the step that it computed; of one
    that joined, the first that it computes."""
    reason: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AvoidedNode:
    """A node that got no new workers from then on, until the run was resumed."""

    node: str
    """Id of the node."""
    host: str
    step: int
    """The newest step at that moment."""
    failures: int
    reasons: tuple[str, ...]
    """Reasons of the last few failures."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint: committed if it has a prefix; otherwise `problem` describes the failure."""

    step: int
    prefix: str
    fingerprint: str
    problem: str
    at: float
    size_bytes: int | None = None
    """Size of the written data; None if the journal lacks it."""
    num_files: int | None = None
    seconds: float = math.nan
    """Time from the workers' start of the save until it was committed."""
    retries: int = 0
    """Number of retried storage operations."""
    late: bool = False
    """True if it was left out because storage was slower than the interval."""
    deleted: bool = False
    """True if it was committed and its folder was gone when the report was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A step that was computed again with a different result."""

    step: int
    fields: tuple[str, ...]
    generations: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive steps with one order of samples, with the facts that a ledger needs."""

    first_step: int
    last_step: int
    batch: Mapping[str, int] | None
    """Numbers by name: global_batch_size, microbatch_size, seed."""
    num_samples: int | None
    skipped: int = 0
    """Samples that the run skipped before."""
    order: int = 1
    """The number of the rule `order` (`raysharded.numerics`)."""
    blocks: tuple[int, int] = (1, 1)
    """(samples per block of the data, samples per step), with which the run began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticChange:
    """A user's acceptance that the run has other bits than it would have had.

    The reason may be another version, or other machines.
    """

    from_step: int
    """The first step that was computed differently."""
    changes: Mapping[str, tuple[str, str]]
    """Map from name to (before, after)."""
    at: float

    def text(self) -> str:
        """Text for display."""
        return ", ".join(f"{name}: {before} -> {after}" for name, (before, after) in sorted(self.changes.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """A step whose update was left out because a number was not finite."""

    step: int
    what: str
    """Value that was not finite: loss or gradient."""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind:
    """A return of the run to an older step: because a number was not finite, or on request.

    After a number that is not finite the run continues past the data of the steps between.
    """

    step: int
    """The step that failed, or the newest step at that moment."""
    to_step: int
    samples: int
    """Number of samples that were skipped."""
    reason: str
    at: float
    asked: bool = False
    """Whether the rewind was requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audits:
    """Steps that were computed a second time on other workers with the same result."""

    count: int = 0
    seconds: float = 0.0
    newest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """Wrong numbers that an audit, or the proof of a first step, found."""

    step: int
    what: str
    """Wrong value: gradient, sum or state."""
    workers: tuple[int, ...]
    """All workers whose results or copies were compared."""
    culprits: tuple[int, ...]
    """Removed workers."""
    microbatches: tuple[int, ...]
    verified_step: int
    """The newest earlier step that had passed an audit. Later steps were computed again.

    For the proof of a first step it is the step before.
    """
    at: float
