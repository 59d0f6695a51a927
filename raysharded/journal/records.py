"""What a journal's entries become: frozen values, for reports and for one's own evaluation. Pure."""

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
    order: int = 1
    """The number of the rule `order` (`raysharded.numerics`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticChange:
    """Somebody accepted that the run has other bits than it would have had: from another version, say, or on other
    machines."""

    from_step: int
    """The first step that was computed otherwise."""
    changes: Mapping[str, tuple[str, str]]
    """Name -> (before, after)."""
    at: float

    def text(self) -> str:
        """For people."""
        return ", ".join(f"{name}: {before} -> {after}" for name, (before, after) in sorted(self.changes.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """A step whose update was left out because a number was not finite."""

    step: int
    what: str
    """loss or gradient"""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind:
    """The run went back because a number was not finite, and on past the data of the steps between; or because somebody
    wanted it."""

    step: int
    """The one that went wrong, or the newest then."""
    to_step: int
    samples: int
    """So many were passed over."""
    reason: str
    at: float
    asked: bool = False
    """Somebody wanted it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audits:
    """Steps that were computed a second time on other workers and came out the same."""

    count: int = 0
    seconds: float = 0.0
    newest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """An audit, or the proof of a first step, found wrong numbers."""

    step: int
    what: str
    """gradient, sum or state"""
    workers: tuple[int, ...]
    """All whose results or copies were compared."""
    culprits: tuple[int, ...]
    """Those that were removed."""
    microbatches: tuple[int, ...]
    verified_step: int
    """What came after it was computed again: the newest step before that had passed an audit; of the proof of a first
    step, the one before."""
    at: float
