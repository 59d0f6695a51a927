"""What a user configures. Every value is checked when it is made, with the remedy in the message.

Standard library only: importing this loads neither torch nor Ray.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from raysharded.errors import ConfigError

Reduction = Literal["exact", "fast"]
Accumulation = Literal["sharded", "local"]
DtypeName = Literal["float32", "bfloat16"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_number(owner: str, name: str, value: object, lowest: float, *, above: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > lowest if above else value >= lowest)  # type: ignore[operator] # a number
    _require(ok, f"{owner}.{name}={value!r}: give a number {'above' if above else 'of at least'} {lowest:g}.")


def _require_kind(owner: str, name: str, value: object, kind: type) -> None:
    _require(isinstance(value, kind), f"{owner}.{name}={value!r}: give a {kind.__name__}.")


T = TypeVar("T")


def names_checked(cls: type[T]) -> type[T]:
    """Refuse arguments of the constructor that do not exist or are missing, with a suggestion; a class decorator."""
    original = cls.__init__
    parameters = [p for p in inspect.signature(original).parameters.values() if p.name != "self"]
    names = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is p.empty]

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **given: Any) -> None:  # noqa: N807 - it becomes one
        _require(not args, f"{cls.__name__}: give its fields by name: {', '.join(names)}.")
        for name in given.keys() - set(names):
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{cls.__name__} has no field {name!r}: {hint}Its fields are {', '.join(names)}.")
        missing = [name for name in required if name not in given]
        _require(
            not missing, f"{cls.__name__} needs {', '.join(missing)}; give {'them' if missing[1:] else 'it'} by name."
        )
        original(self, **given)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment] # takes any names, to say which are wrong
    return cls


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """What one optimizer step consumes. Nothing here depends on the number of workers."""

    global_batch_size: int
    """Samples per optimizer step."""
    microbatch_size: int
    """Samples per forward and backward; `global_batch_size` must be a multiple of it."""
    seed: int = 0
    """Orders the samples, draws the initial weights and the dropout masks."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "microbatch_size"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"BatchConfig.{name}={value!r}: give a whole number of 1 or more.")
        _require(_is_int(self.seed), f"BatchConfig.seed={self.seed!r}: give a whole number.")
        rest = self.global_batch_size % self.microbatch_size
        _require(
            rest == 0,
            f"BatchConfig: global_batch_size={self.global_batch_size} is not a multiple of "
            f"microbatch_size={self.microbatch_size} (remainder {rest}). "
            f"Take global_batch_size={self.global_batch_size - rest or self.microbatch_size}.",
        )

    @property
    def num_microbatches(self) -> int:
        """M: the logical microbatches of every step, whatever the number of workers."""
        return self.global_batch_size // self.microbatch_size


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How many workers, and what each takes from the cluster."""

    num_workers: int | tuple[int, int]
    """A fixed number, or (min, max): the run goes on with any number between."""
    use_gpu: bool = False
    """One GPU per worker and NCCL; otherwise CPU and gloo."""
    cpus_per_worker: float = 1.0
    """Ray CPUs that each worker reserves; also its number of torch threads (rounded down, at least 1)."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Further Ray resources that each worker reserves."""
    start_timeout_s: float = 120.0
    """How long to wait for `min` workers, at the start and after losses, before the run ends with an error."""
    replacement_wait_s: float = 0.0
    """After a loss, how long to wait for a replacement before going on with fewer workers."""

    def __post_init__(self) -> None:
        value = self.num_workers
        pair = value if isinstance(value, tuple) else (value, value)
        ok = len(pair) == 2 and all(_is_int(n) for n in pair)
        _require(ok, f"ScalingConfig.num_workers={value!r}: give a whole number or (min, max).")
        _require(
            1 <= pair[0] <= pair[1],
            f"ScalingConfig.num_workers={value!r}: need 1 <= min <= max.",
        )
        _require_kind("ScalingConfig", "use_gpu", self.use_gpu, bool)
        _require_number("ScalingConfig", "cpus_per_worker", self.cpus_per_worker, 0)
        _require_number("ScalingConfig", "start_timeout_s", self.start_timeout_s, 0, above=True)
        _require_number("ScalingConfig", "replacement_wait_s", self.replacement_wait_s, 0)
        _require_kind("ScalingConfig", "resources_per_worker", self.resources_per_worker, dict)
        for name, amount in self.resources_per_worker.items():
            _require_number("ScalingConfig", f"resources_per_worker[{name!r}]", amount, 0)

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to write checkpoints to the run's storage, and which to keep."""

    every_steps: int | None = None
    """Write one every so many steps; None: only at the end. It is left out while another is still being written."""
    keep_last: int = 2
    """Complete checkpoints to keep; the newest complete one is never deleted."""
    at_end: bool = True
    """Write one of the last step, whether or not `every_steps` falls on it; never when a run is stopped or fails."""

    def __post_init__(self) -> None:
        _require(
            self.every_steps is None or (_is_int(self.every_steps) and self.every_steps >= 1),
            f"CheckpointConfig.every_steps={self.every_steps!r}: give a whole number of 1 or more, or None.",
        )
        _require(
            _is_int(self.keep_last) and self.keep_last >= 1,
            f"CheckpointConfig.keep_last={self.keep_last!r}: give a whole number of 1 or more.",
        )
        _require_kind("CheckpointConfig", "at_end", self.at_end, bool)


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """How much may go wrong before the run gives up."""

    max_worker_losses: int | None = None
    """Workers that may be lost in one `fit()`; None: no limit."""
    task_error_retries: int = 1
    """Times that a step may be tried again after the task, its data or storage raised."""
    progress_timeout_s: float = 300.0
    """Without a step for so long, or when taking over the state takes so long, the workers are interrupted, and those
    that do not answer are treated as lost. Raise it for steps, checkpoints or first weights that take minutes."""

    def __post_init__(self) -> None:
        _require(
            self.max_worker_losses is None or (_is_int(self.max_worker_losses) and self.max_worker_losses >= 0),
            f"FailureConfig.max_worker_losses={self.max_worker_losses!r}: give a whole number >= 0, or None.",
        )
        _require(
            _is_int(self.task_error_retries) and self.task_error_retries >= 0,
            f"FailureConfig.task_error_retries={self.task_error_retries!r}: give a whole number >= 0.",
        )
        _require_number("FailureConfig", "progress_timeout_s", self.progress_timeout_s, 0, above=True)


_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run: its name, its storage and its end."""

    name: str
    """Identifies the run under `storage_path`; a later `fit()` of the same name resumes it."""
    storage_path: str
    """A folder or any fsspec URL that all machines see; the run's files live under `<storage_path>/<name>`."""
    max_steps: int
    """The number of optimizer steps after which the run is finished."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, and how many are kept."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """How much may go wrong."""

    def __post_init__(self) -> None:
        _require(
            isinstance(self.name, str) and _RUN_NAME.fullmatch(self.name) is not None,
            f"RunConfig.name={self.name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter "
            "or a digit.",
        )
        _require(
            isinstance(self.storage_path, str) and self.storage_path != "",
            f"RunConfig.storage_path={self.storage_path!r}: give a folder or an fsspec URL.",
        )
        _require(
            _is_int(self.max_steps) and self.max_steps >= 1,
            f"RunConfig.max_steps={self.max_steps!r}: give a whole number of 1 or more.",
        )
        _require_kind("RunConfig", "checkpoint", self.checkpoint, CheckpointConfig)
        _require_kind("RunConfig", "failure", self.failure, FailureConfig)


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the workers compute."""

    reduction: Reduction = "exact"
    """exact: the same bits at every size; fast: the backend's own reduce-scatter, the same batch, not the same bits."""
    accumulation: Accumulation = "sharded"
    """sharded: reduce after every microbatch, least memory; local: add whole gradients first and communicate once a
    step, least traffic. Under exact reduction both give the same bits."""
    param_dtype: DtypeName | None = None
    """Forward and backward in this dtype (mixed precision); None: the parameters' own."""
    reduce_dtype: DtypeName = "float32"
    """Gradients are exchanged in this dtype when `param_dtype` is set."""
    activation_checkpointing: bool = False
    """Recompute the activations of each unit but the root in backward."""
    compile: bool = False
    """`torch.compile` each unit but the root."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward (less memory) or keep them until its backward."""
    mirrors: bool = True
    """Keep a copy of every worker's newest shards in the memory of another worker."""
    prefetch: bool = True
    """Read the samples of the next microbatches beside the computation."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[object, ...]] = {
            "reduction": ("exact", "fast"),
            "accumulation": ("sharded", "local"),
            "param_dtype": (None, "float32", "bfloat16"),
            "reduce_dtype": ("float32", "bfloat16"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            _require(value in values, f"EngineConfig.{name}={value!r}: choose one of {', '.join(map(repr, values))}.")
        for name in ("activation_checkpointing", "compile", "reshard_after_forward", "mirrors", "prefetch"):
            _require_kind("EngineConfig", name, getattr(self, name), bool)


@names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out data; the numbers are the same at every size."""

    data: Any
    """A dataset as for training; its first `num_samples` samples are evaluated, in order."""
    every_steps: int
    """Evaluate after every so many steps."""
    num_samples: int
    """At most the dataset's length. Need not be a multiple of the microbatch size: the last one may be smaller."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "num_samples"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"EvalConfig.{name}={value!r}: give a whole number of 1 or more.")
