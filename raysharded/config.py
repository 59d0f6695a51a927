"""A user's configuration. Every value is checked at construction; the error message contains the remedy.

Standard library only: importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from raysharded.display.plain_text import masked
from raysharded.validation import is_int, names_checked, require, require_kind, require_number

if TYPE_CHECKING:
    import torch

    from raysharded.metrics import MetricsWriter

Reduction = Literal["exact", "fast"]
Accumulation = Literal["sharded", "local"]
DtypeName = Literal["float32", "bfloat16"]
Dtype: TypeAlias = Union[DtypeName, Literal["fp32", "bf16"], "torch.dtype"]  # torch is not imported
"""A dtype in any form that users may write."""
CastInputs = Literal["all", "units", "none"]
BestOf = Literal["min", "max"]
OnFailedSaves = Literal["warn", "stop"]
OnNonFinite = Literal["stop", "skip", "rewind"]
SAVE_EVERY_S = 600.0
"""Seconds between the checkpoints of a run that sets neither `every_steps` nor `every_s`."""
MAX_LEASE_S = 3600.0
"""Longest `lease_s`. A lease on storage that states more is damaged: another driver would wait for that long."""


def _dtype_name(value: object) -> object:
    """torch's name for a dtype or its abbreviation; any other value unchanged."""
    name = str(value).removeprefix("torch.")
    short = {"bf16": "bfloat16", "fp32": "float32"}
    return short.get(name, name if isinstance(value, str) or str(value).startswith("torch.") else value)


def _writes_metrics(value: object) -> bool:
    methods = ("begin", "step", "event", "close")  # of raysharded.metrics.MetricsWriter
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _is_best(value: object) -> bool:
    """True for a tuple of (name, "min" or "max", count)."""
    if not isinstance(value, tuple) or len(value) != 3:
        return False
    name, mode, how_many = value
    return isinstance(name, str) and name != "" and mode in ("min", "max") and is_int(how_many) and how_many >= 1


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The samples of one optimizer step. Nothing here depends on the number of workers."""

    global_batch_size: int
    """Samples per optimizer step."""
    microbatch_size: int
    """Samples per forward and backward; `global_batch_size` must be a multiple of it."""
    seed: int = 0
    """Determines the sample order, the initial weights and the dropout masks."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "microbatch_size"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, f"BatchConfig.{name}={value!r}: give a whole number of 1 or more.")
        require(is_int(self.seed), f"BatchConfig.seed={self.seed!r}: give a whole number.")
        rest = self.global_batch_size % self.microbatch_size
        require(
            rest == 0,
            f"BatchConfig: global_batch_size={self.global_batch_size} is not a multiple of "
            f"microbatch_size={self.microbatch_size} (remainder {rest}). "
            f"Take global_batch_size={self.global_batch_size - rest or self.microbatch_size}.",
        )

    @property
    def num_microbatches(self) -> int:
        """M: the logical microbatches of every step, at any number of workers."""
        return self.global_batch_size // self.microbatch_size


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """The number of workers, and the resources that each takes from the cluster."""

    num_workers: int | Sequence[int]
    """A fixed number, or (min, max): the run continues with any number in between. A list is stored as a tuple."""
    use_gpu: bool = False
    """One GPU per worker and NCCL; otherwise CPU and gloo."""
    cpus_per_worker: float = 1.0
    """Ray CPUs that each worker reserves; also its number of torch threads (rounded down, at least 1)."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Additional Ray resources that each worker reserves."""
    start_timeout_s: float = 120.0
    """Seconds to wait for `min` workers, at the start and after losses, before the run ends with an error."""
    replacement_wait_s: float = 0.0
    """Seconds to wait for a replacement after a loss, before the run continues with fewer workers. A worker with a
    leave notice keeps training for as long, at most half of its remaining time. So a replacement can take over from
    it."""
    spares: int = 0
    """Ready workers beyond the maximum; a spare replaces a lost worker at once."""
    shard_group_size: int | None = None
    """Workers that together hold one sharded copy of the state. Every other group of this size holds another copy, and
    the groups mirror each other. Use the number of well-connected GPUs, usually those of one node. After a loss the run
    continues in the mesh that is fastest with the remaining workers. None: one group of all workers."""
    tensor_parallel_degree: int = 1
    """Workers that compute every microbatch together, as `Task.parallelize` defines: a tensor parallel group. Shard
    groups consist of whole tensor parallel groups, each on one node where possible. Workers left over stand by."""
    memory_per_worker: int | None = None
    """Bytes of each worker's GPU, or of host memory for each CPU worker; a tenth is left free. With this setting the
    run is planned before it starts, in seconds, as by `raysharded plan`. A run that fits in no mesh is rejected; of the
    meshes that fit, the one with the shortest step is used. None: memory is not checked."""

    def __post_init__(self) -> None:
        value = self.num_workers
        pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
        ok = len(pair) == 2 and all(is_int(n) for n in pair)
        require(ok, f"ScalingConfig.num_workers={value!r}: give a whole number or (min, max).")
        if isinstance(value, list):
            object.__setattr__(self, "num_workers", pair)
        lowest = "a number" if is_int(value) else "a minimum"
        require(pair[0] >= 1, f"ScalingConfig.num_workers={value!r}: give {lowest} of 1 or more.")
        require(pair[0] <= pair[1], f"ScalingConfig.num_workers={value!r}: give the minimum first, as (min, max).")
        require_kind("ScalingConfig", "use_gpu", self.use_gpu, bool)
        require_number("ScalingConfig", "cpus_per_worker", self.cpus_per_worker, 0)
        require_number("ScalingConfig", "start_timeout_s", self.start_timeout_s, 0, above=True)
        require_number("ScalingConfig", "replacement_wait_s", self.replacement_wait_s, 0)
        require(
            is_int(self.spares) and self.spares >= 0,
            f"ScalingConfig.spares={self.spares!r}: give a whole number of 0 or more.",
        )
        memory = self.memory_per_worker
        require(
            memory is None or (is_int(memory) and memory >= 1),
            f"ScalingConfig.memory_per_worker={memory!r}: give a whole number of bytes, such as 80 * 2**30, or None.",
        )
        self._require_tensor_groups(pair[0], pair[1])
        self._require_groups(pair[0], pair[1])
        require_kind("ScalingConfig", "resources_per_worker", self.resources_per_worker, dict)
        for name, amount in self.resources_per_worker.items():
            require_number("ScalingConfig", f"resources_per_worker[{name!r}]", amount, 0)

    def _require_tensor_groups(self, least: int, most: int) -> None:
        degree, size = self.tensor_parallel_degree, self.shard_group_size
        require(
            is_int(degree) and degree >= 1,
            f"ScalingConfig.tensor_parallel_degree={degree!r}: give a whole number of 1 or more.",
        )
        require(
            degree <= least,
            f"ScalingConfig: tensor_parallel_degree={degree} needs {degree} workers, and num_workers="
            f"{self.num_workers!r} allows {least}. Take a minimum of {degree} or more, or a smaller degree.",
        )
        rest = most % degree
        require(
            least < most or rest == 0,
            f"ScalingConfig: num_workers={most} is not a multiple of tensor_parallel_degree={degree}: {rest} of them "
            f"would stand by. Take num_workers={most - rest} or {most - rest + degree}.",
        )
        require(
            size is None or not is_int(size) or size % degree == 0,
            f"ScalingConfig: shard_group_size={size} is not a multiple of tensor_parallel_degree={degree}: a shard "
            "group is made of whole tensor parallel groups. Take a multiple, or None.",
        )

    def _require_groups(self, least: int, most: int) -> None:
        size = self.shard_group_size
        if size is None:
            return
        require(
            is_int(size) and size >= 1,
            f"ScalingConfig.shard_group_size={size!r}: give a whole number of 1 or more, or None.",
        )
        require(
            size <= most,
            f"ScalingConfig: shard_group_size={size} needs {size} workers, and num_workers={self.num_workers!r} allows "
            f"for {most}. Take shard_group_size={most} or less, or more workers.",
        )
        rest = most % size
        require(
            least < most or rest == 0,
            f"ScalingConfig: num_workers={most} is not a multiple of shard_group_size={size}: {rest} of them would "
            f"stand by. Take num_workers={most - rest} or {most - rest + size}.",
        )

    @property
    def min_workers(self) -> int:
        """The smallest number of workers with which the run continues."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The largest number of workers that the run uses."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to write checkpoints to the run's storage, and which ones to keep."""

    every_steps: int | None = None
    """Number of steps between checkpoints; None: not by steps. A checkpoint is skipped, with a warning, while another
    one is being written."""
    every_s: float | Literal["auto"] | None = "auto"
    """Write a checkpoint when the newest one began this many seconds ago; None: not by time. "auto": 600 without
    `every_steps`, None with it."""
    keep_last: int = 2
    """Complete checkpoints to keep; the newest complete one is never deleted. Pinned ones are kept in addition."""
    keep_every: int | None = None
    """Also keep the last checkpoint of every interval of this many steps; None: no such rule."""
    keep_best: tuple[str, BestOf, int] | None = None
    """Also keep the checkpoints with the best value of a metric: (its name, "min" or "max", how many). The metric is
    `loss`, a metric of the task, or one of the evaluation: `evaluation.loss`. A step without that metric is never among
    the best. `Result.best_checkpoint` names the best of all."""
    at_end: bool = True
    """Write a checkpoint of the last step, whether or not `every_steps` falls on it. A failed write is retried; then
    the run fails, and can be resumed."""
    max_failed_saves: int = 3
    """After this many failed saves in a row, the run reports an error in its log, journal and report."""
    on_failed_saves: OnFailedSaves = "warn"
    """Reaction after `max_failed_saves`: "warn" only reports it, "stop" also ends the run with an error."""
    grace_s: float = 25.0
    """On SIGTERM or SIGHUP to the driver: how long the run continues for one more checkpoint. On SIGTERM to a worker:
    how long that worker stays until the others have its state."""
    signing_key_file: str | None = None
    """A file on the driver's machine with a key of 16 bytes or more. The run's files on storage are signed with it, and
    what has no valid signature decides nothing. None: the key of the environment ($RAYSHARDED_CHECKPOINT_KEY or
    $RAYSHARDED_CHECKPOINT_KEY_FILE), if set."""
    require_signed: bool = False
    """Refuse to begin without a signing key, so that a missing secret does not go unnoticed."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every"):
            value = getattr(self, name)
            require(
                value is None or (is_int(value) and value >= 1),
                f"CheckpointConfig.{name}={value!r}: give a whole number of 1 or more, or None.",
            )
        if self.every_s is not None and self.every_s != "auto":
            require_number("CheckpointConfig", "every_s", self.every_s, 0, above=True)
        for name in ("keep_last", "max_failed_saves"):
            value = getattr(self, name)
            require(
                is_int(value) and value >= 1, f"CheckpointConfig.{name}={value!r}: give a whole number of 1 or more."
            )
        require(
            self.keep_best is None or _is_best(self.keep_best),
            f'CheckpointConfig.keep_best={self.keep_best!r}: give a number\'s name, "min" or "max", and how many, as '
            'in ("evaluation.loss", "min", 1), or None.',
        )
        require(
            self.on_failed_saves in ("warn", "stop"),
            f"CheckpointConfig.on_failed_saves={self.on_failed_saves!r}: choose one of 'warn', 'stop'.",
        )
        require_kind("CheckpointConfig", "at_end", self.at_end, bool)
        require_number("CheckpointConfig", "grace_s", self.grace_s, 0)
        if self.signing_key_file is not None:
            require_kind("CheckpointConfig", "signing_key_file", self.signing_key_file, str)
        require_kind("CheckpointConfig", "require_signed", self.require_signed, bool)

    @property
    def save_every_s(self) -> float | None:
        """Seconds between checkpoints by time; None if there are none by time."""
        if self.every_s == "auto":
            return SAVE_EVERY_S if self.every_steps is None else None
        return self.every_s

    @property
    def writes_meanwhile(self) -> bool:
        """True if checkpoints are written before the last step."""
        return self.every_steps is not None or self.save_every_s is not None


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """The failures that a run tolerates."""

    max_worker_losses: int | None = None
    """Workers that may be lost in one `fit()`; None: no limit. Workers that leave with notice do not count."""
    max_node_failures: int | None = 3
    """After this many failures on a node within `node_failure_window_s`, no new worker is placed on it, unless no other
    node is left. Failures are lost workers, failed starts and evictions of slow workers. Those within 30 s are one
    failure, however many workers they hit. None: nodes are never avoided."""
    node_failure_window_s: float = 3600.0
    """Seconds for which a failure on a node counts. An avoided node is used again when too few of them count."""
    preemption_notices: tuple[str | Callable[[], float | None], ...] = ()
    """Each worker's source of notices that its machine will be taken away: "aws" (spot instances), "gcp", or a
    function. The function is called every second and returns the seconds left, or None."""
    task_error_retries: int = 1
    """Retries of a step after the task, its data or storage raised an error."""
    max_same_deaths: int | None = 3
    """End the run when workers of this many generations ended by themselves, with the same exit status or signal, in
    the same phase of the same step: it would not get past it. Kills (SIGKILL, SIGTERM, a lack of memory, a lost node,
    Ray) do not count. None: no limit."""
    evict_slower_than: float | None = None
    """Replace a worker that repeatedly takes this many times as long per step as its peers; None: it is only reported.
    Its state moves to the others at a step boundary."""
    hang_timeout_s: float = 5.0
    """The shortest deadline of a step. A step is investigated when it takes longer than this and than five times the
    longest of the newest steps. A worker that is hung, stopped or partitioned is then treated as lost. Raise it for
    data that stalls."""
    progress_timeout_s: float = 300.0
    """Limit for the time without a finished step, and for taking over the state. Beyond it the workers are interrupted,
    and those that do not answer are treated as lost. Raise it for steps, checkpoints or first weights that take
    minutes."""
    on_non_finite: OnNonFinite = "stop"
    """Reaction to a NaN or infinite loss or gradient. stop: end with an error; skip: omit that step's update; rewind:
    return to the newest step whose checkpoint was due by `CheckpointConfig.every_steps`, and continue from there past
    the data of the steps since."""
    max_skipped_steps: int = 10
    """Steps in a row that `on_non_finite="skip"` may omit; one more ends the run."""
    storage_patience_s: float = 3600.0
    """Seconds for which storage may take no entries of the journal before the run ends with `StorageError`. The run
    trains on meanwhile, and keeps the entries in memory: less than 1 KB for each step. A pause does not count."""
    storage_backlog_bytes: int = 1 << 28
    """Bytes of entries that are kept in memory while storage takes none, 256 MiB. Beyond it the oldest entries of steps
    are dropped, and the journal records how many."""
    orphan_wait_s: float = 300.0
    """Seconds that workers without a driver wait for another one, before they write a last checkpoint and end. Applies
    on a cluster that existed before the run."""

    def __post_init__(self) -> None:
        require(
            self.max_worker_losses is None or (is_int(self.max_worker_losses) and self.max_worker_losses >= 0),
            f"FailureConfig.max_worker_losses={self.max_worker_losses!r}: give a whole number >= 0, or None.",
        )
        require(
            self.max_node_failures is None or (is_int(self.max_node_failures) and self.max_node_failures >= 1),
            f"FailureConfig.max_node_failures={self.max_node_failures!r}: give a whole number of 1 or more, or None.",
        )
        require_number("FailureConfig", "node_failure_window_s", self.node_failure_window_s, 0, above=True)
        require(
            is_int(self.task_error_retries) and self.task_error_retries >= 0,
            f"FailureConfig.task_error_retries={self.task_error_retries!r}: give a whole number >= 0.",
        )
        require(
            self.max_same_deaths is None or (is_int(self.max_same_deaths) and self.max_same_deaths >= 2),
            f"FailureConfig.max_same_deaths={self.max_same_deaths!r}: give a whole number of 2 or more, or None.",
        )
        if self.evict_slower_than is not None:
            require_number("FailureConfig", "evict_slower_than", self.evict_slower_than, 1.25)
        require_number("FailureConfig", "hang_timeout_s", self.hang_timeout_s, 0, above=True)
        require_number("FailureConfig", "progress_timeout_s", self.progress_timeout_s, 0, above=True)
        require(
            self.on_non_finite in ("stop", "skip", "rewind"),
            f"FailureConfig.on_non_finite={self.on_non_finite!r}: choose one of 'stop', 'skip', 'rewind'.",
        )
        require(
            is_int(self.max_skipped_steps) and self.max_skipped_steps >= 1,
            f"FailureConfig.max_skipped_steps={self.max_skipped_steps!r}: give a whole number of 1 or more.",
        )
        notices = self.preemption_notices
        require(
            isinstance(notices, tuple) and all(each in ("aws", "gcp") or callable(each) for each in notices),
            f"FailureConfig.preemption_notices={notices!r}: give a tuple of 'aws', 'gcp' or functions that return the "
            "seconds left, or None.",
        )
        require_number("FailureConfig", "storage_patience_s", self.storage_patience_s, 0, above=True)
        require(
            is_int(self.storage_backlog_bytes) and self.storage_backlog_bytes >= 1 << 20,
            f"FailureConfig.storage_backlog_bytes={self.storage_backlog_bytes!r}: give a whole number of 1 MiB "
            f"({1 << 20}) or more.",
        )
        require_number("FailureConfig", "orphan_wait_s", self.orphan_wait_s, 0)


_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run: its name, its storage and its end."""

    name: str
    """Name of the run under `storage_path`; a later `fit()` with this name resumes it."""
    storage_path: str | os.PathLike[str]
    """A folder or fsspec URL that all machines can access; the run's files are under `<storage_path>/<name>`. A path is
    stored as text."""
    max_steps: int
    """The number of optimizer steps after which the run is finished."""
    start_from: str | os.PathLike[str] | None = None
    """Source of a new run's first weights: the folder or URL of a run, of one checkpoint, or of one imported from
    Hugging Face or `torch.distributed.checkpoint`. Optimizer, steps and data start fresh; a line of a worker's log
    names what is taken and what is left out. The source is resolved once: a run keeps the checkpoint that it began
    with. A fork begins with its own. None: the task draws the weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, and how many are kept."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """The failures that the run tolerates."""
    lease_s: float = 15.0
    """Seconds, up to 3600, that a driver may be silent before another one may take over the run. Workers whose driver
    is silent for as long stop after their current step."""
    record_events: bool = False
    """Also record all events of the driver in the journal, so that `raysharded replay` can reproduce an incident. The
    journal grows to about three times its size."""
    record_microbatches: bool = False
    """Also record in each step's journal entry, as `microbatches`, the sum of the loss and the weight of each of its
    microbatches. The workers exchange 16 bytes for each, after the optimizer's step; the journal grows by about 40."""
    accept_arithmetic: bool = False
    """Continue from a checkpoint although all workers would compute different bits than the run so far. Causes are
    another version of torch, another kind of machine, and rules that this version has dropped. The journal and the
    report record the first such step. False: such a run is rejected, with both values."""
    accept_unsigned: bool = False
    """Continue although the run's signing key did not sign its newest checkpoint or its journal, or although signed
    parts of its journal are missing. From then on everything is signed. False: such a run is rejected, with the
    reason."""
    at_least_step: int | None = None
    """Reject the run unless its newest checkpoint is of this step or a later one. Signatures do not show that a whole
    storage was set back to an earlier state; this does. None: no such check."""
    metrics: Sequence[MetricsWriter] = ()
    """Writers of metrics besides the journal: `raysharded.metrics.TensorBoard("folder")`, `RayMetrics()`, or custom
    objects. Their failures are logged and do not affect the run."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and _RUN_NAME.fullmatch(self.name) is not None,
            f"RunConfig.name={self.name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter "
            "or a digit.",
        )
        if isinstance(self.storage_path, os.PathLike):
            object.__setattr__(self, "storage_path", os.fspath(self.storage_path))
        require(
            isinstance(self.storage_path, str) and self.storage_path != "",
            f"RunConfig.storage_path={self.storage_path!r}: give a folder or an fsspec URL.",
        )
        start = self.start_from
        require(
            start is None or (isinstance(start, (str, os.PathLike)) and os.fspath(start) != ""),
            f"RunConfig.start_from={start!r}: give the folder or URL of a checkpoint or of a run, or None.",
        )
        if isinstance(start, os.PathLike):
            object.__setattr__(self, "start_from", os.fspath(start))
        require(
            is_int(self.max_steps) and self.max_steps >= 1,
            f"RunConfig.max_steps={self.max_steps!r}: give a whole number of 1 or more.",
        )
        require_kind("RunConfig", "checkpoint", self.checkpoint, CheckpointConfig)
        require_kind("RunConfig", "failure", self.failure, FailureConfig)
        require(
            self.failure.on_non_finite != "rewind" or self.checkpoint.every_steps is not None,
            'FailureConfig(on_non_finite="rewind") needs CheckpointConfig(every_steps=...): the run goes back to the '
            "newest step with a due checkpoint. By time alone, it would depend on the machine which step that is.",
        )
        require_number("RunConfig", "lease_s", self.lease_s, 1.0)
        require(self.lease_s <= MAX_LEASE_S, f"RunConfig.lease_s={self.lease_s!r}: give at most {MAX_LEASE_S:g}.")
        require_kind("RunConfig", "record_events", self.record_events, bool)
        require_kind("RunConfig", "record_microbatches", self.record_microbatches, bool)
        require_kind("RunConfig", "accept_arithmetic", self.accept_arithmetic, bool)
        require_kind("RunConfig", "accept_unsigned", self.accept_unsigned, bool)
        require(
            self.at_least_step is None or (is_int(self.at_least_step) and 1 <= self.at_least_step <= self.max_steps),
            f"RunConfig.at_least_step={self.at_least_step!r}: give a whole number from 1 to max_steps, or None.",
        )
        require(
            isinstance(self.metrics, (list, tuple)) and all(map(_writes_metrics, self.metrics)),
            f"RunConfig.metrics={self.metrics!r}: give a list of objects with the methods of "
            "raysharded.metrics.MetricsWriter: begin, step, event, close (instances, not classes).",
        )

    def __repr__(self) -> str:
        """All fields, without the passwords of URLs."""
        shown = (f"{one.name}={masked(repr(getattr(self, one.name)))}" for one in fields(self))
        return f"{type(self).__name__}({', '.join(shown)})"


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class Redundancy:
    """Recovery of lost shards without a second copy of all of them."""

    parity: tuple[int, int]
    """(k, m): m parity blocks, in the memory of m workers, protect every k parts of the state, of k other workers. Any
    m workers may be lost at once; the blocks take m/k of the state's memory. Needs k + m workers; a smaller run uses
    mirrors instead. With m = 1 it is plain XOR; with m of 2 or more a Reed-Solomon code, which needs
    `raysharded[parity]`."""

    def __post_init__(self) -> None:
        value = self.parity
        ok = isinstance(value, tuple) and len(value) == 2 and all(is_int(n) and n >= 1 for n in value)
        require(
            ok and sum(value) <= 256,
            f"Redundancy.parity={value!r}: give whole numbers (k, m) of 1 or more, together 256 at most; e.g. (4, 1).",
        )


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of the workers' computation."""

    reduction: Reduction = "exact"
    """exact: the same bits at every number of workers. fast: the fastest order (NCCL's reduce-scatter; on CPUs an
    exchange and a sum), with the same batch but not the same bits."""
    accumulation: Accumulation = "sharded"
    """sharded: reduce after every microbatch, least memory. local: add whole gradients first and communicate once a
    step, least traffic. Under exact reduction both give the same bits."""
    param_dtype: Dtype | None = None
    """Dtype of forward and backward (mixed precision); None: the parameters' dtype. Stored under torch's name:
    `torch.bfloat16` and "bf16" as "bfloat16"."""
    reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are exchanged when `param_dtype` is set."""
    cast_inputs: CastInputs = "all"
    """Floating-point inputs that are cast to `param_dtype`. all: inputs of the model and of its units. units: not the
    model's inputs, so that times and positions keep their precision. none: neither; forward casts where needed."""
    activation_checkpointing: bool = False
    """Recompute the activations of each unit but the root in backward."""
    compile: bool = False
    """`torch.compile` each unit but the root."""
    max_compiled_shapes: int = 64
    """With `compile`, a unit with more input shapes than this on one worker ends the run, with a checkpoint. So do more
    than 16 variants of a function's code for each of these shapes and one, also of code that the program itself
    compiles. Each shape is compiled separately. Changing the limit changes no bits."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward (less memory) or keep them until its backward."""
    mirrors: bool = True
    """Keep a copy of every worker's newest shards in the memory of another worker."""
    redundancy: Redundancy | None = None
    """Parity in place of mirrors; None: as `mirrors` sets."""
    prepare_changes: bool | None = None
    """Prepare planned changes in the background: a worker joins or leaves with notice, or another mesh is requested.
    The workers connect and build the next generation while training continues, which then stops for little more than
    the transfer. None: on CPUs only. On GPUs it allocates device memory beside running collectives: these may wait for
    each other (docs/how-it-works.md), and it has not been run there."""
    prefetch: bool = True
    """Read the samples of the next microbatches in the background; a custom dataset is read in a separate process.
    False: read them in the training thread."""
    data_processes: int | None = None
    """Number of processes of each worker that read a custom dataset, and call the task's `collate`. None: one for a
    custom dataset; others are read in a thread, and `collate` is called in the training thread. Changes no bits."""
    audit_every_steps: int | None = None
    """Number of steps between audits. An audit computes the gradient a second time on other workers and compares the
    bits. It detects a worker that computes wrong numbers. 100 costs about 1 %; None: no audits. Needs exact
    reduction."""
    prove_first_step: bool = True
    """When a run starts, and when a worker joins, compute one microbatch of each worker twice and compare the bits.
    Detects nondeterministic programs and workers that compute wrong numbers. In exact mode only."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _dtype_name(getattr(self, name)))
        allowed: dict[str, tuple[object, ...]] = {
            "reduction": ("exact", "fast"),
            "accumulation": ("sharded", "local"),
            "param_dtype": (None, "float32", "bfloat16"),
            "reduce_dtype": ("float32", "bfloat16"),
            "cast_inputs": ("all", "units", "none"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            require(value in values, f"EngineConfig.{name}={value!r}: choose one of {', '.join(map(repr, values))}.")
        switches = ("activation_checkpointing", "compile", "reshard_after_forward", "mirrors", "prefetch")
        for name in (*switches, "prove_first_step"):
            require_kind("EngineConfig", name, getattr(self, name), bool)
        require(
            self.prepare_changes is None or isinstance(self.prepare_changes, bool),
            f"EngineConfig.prepare_changes={self.prepare_changes!r}: choose one of True, False, None.",
        )
        require(
            self.redundancy is None or isinstance(self.redundancy, Redundancy),
            f"EngineConfig.redundancy={self.redundancy!r}: give a Redundancy, or None.",
        )
        require(
            self.redundancy is None or self.mirrors,
            "EngineConfig: with redundancy a run of few workers has mirrors; leave out either it or mirrors=False.",
        )
        processes = self.data_processes
        require(
            processes is None or (is_int(processes) and processes >= 1),
            f"EngineConfig.data_processes={processes!r}: give a whole number of 1 or more, or None.",
        )
        require(
            processes is None or self.prefetch,
            "EngineConfig: data_processes needs prefetch=True; omit one of the two.",
        )
        most = self.max_compiled_shapes
        require(
            is_int(most) and most >= 1,
            f"EngineConfig.max_compiled_shapes={most!r}: give a whole number of 1 or more.",
        )
        every = self.audit_every_steps
        require(
            every is None or (is_int(every) and every >= 1),
            f"EngineConfig.audit_every_steps={every!r}: give a whole number of 1 or more, or None.",
        )
        require(
            every is None or self.reduction == "exact",
            "EngineConfig: audit_every_steps needs equal bits, so reduction='exact'; omit one of the two.",
        )


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out data; the results are the same at every number of workers."""

    data: Any
    """A dataset as for training; its first `num_samples` samples are evaluated, in order."""
    every_steps: int
    """Number of steps between evaluations."""
    num_samples: int
    """Number of samples, at most the dataset's length. It need not be a multiple of the microbatch size: the last
    microbatch may be smaller."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "num_samples"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, f"EvalConfig.{name}={value!r}: give a whole number of 1 or more.")
