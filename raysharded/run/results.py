"""A run's status, checkpoints and result, which are frozen values; and the error of a run that was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from raysharded.errors import RunFailed

if TYPE_CHECKING:
    from raysharded.report import RunReport

Listener = Callable[[str, dict[str, Any]], None]
"""Callback for every journal entry: (kind, fields)."""
Entry = tuple[int, str, dict[str, Any]]
"""A journal entry of a handle: a number that only grows, the kind, and the fields, with `at` (seconds since 1970)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCheckpoint:
    """A committed checkpoint with its value of a metric."""

    step: int
    """Optimizer step of the checkpoint."""
    url: str
    """Folder of the checkpoint."""
    metric: str
    """Name of the metric, as in `CheckpointConfig.keep_best`."""
    value: float
    """Value of the metric in that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run; in `RunStopped`, one that was stopped."""

    name: str
    url: str
    """The run's folder: its checkpoints and its journal."""
    steps: int
    fingerprint: str
    """Fingerprint of parameters, buffers and optimizer state: independent of the number of workers and of losses."""
    checkpoint: str
    """Folder of the newest checkpoint: the final one, unless `at_end` is False; empty if there is none."""
    loss: float | None = None
    """The last step's loss; None if it is not finite, or not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last step's values of the task's metrics."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """The newest evaluation's loss and metrics; empty if there was none since the run was last started."""
    wall_s: float | None = field(default=None, compare=False)
    """Seconds that this `fit()` or `start()` took; None if the run was finished before."""
    best_checkpoint: ScoredCheckpoint | None = None
    """The best of the checkpoints that exist, by `CheckpointConfig.keep_best`; None without that, or if none has its
    metric."""

    def report(self) -> RunReport:
        """Report of the journal: losses, recoveries, the ledger of samples."""
        from raysharded.report import load

        return load(self.url)


class RunStopped(RunFailed):
    """The run was ended by a request, such as `Run.stop` or SIGTERM, before its last step."""

    exit_status = 3

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message, result)
        self.result = result
        """Result of the newest checkpoint, from which the next `fit()` resumes. `steps` is that
        checkpoint's; 0 and empty texts if there is none."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The current status of a run, as its driver has it, or as its storage shows it."""

    phase: str
    """`starting`, the driver's current activity (`training`, ...), or `over`.

    For a run whose driver takes no requests: the state that `raysharded status` shows.
    """
    step: int
    max_steps: int
    """Last step of the run; 0: unknown."""
    workers: tuple[int, ...]
    """Members of the current generation, by rank."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """Worker -> process id on its node."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> the host name of its node."""
    mesh: str = ""
    """Replicas x data shards of the current generation, and x the tensor parallel degree if that is above 1."""
    name: str = ""
    url: str = ""
    """The run's folder."""
    driver: str = ""
    """The driver, in words; empty: none."""
    started_at: float | None = None
    """Start time of that driver: seconds since 1970."""
    loss: float | None = None
    """Loss of the newest step; None before the first of this driver."""
    losses: int | None = 0
    """Workers that this driver has lost; None: unknown."""
    checkpoint_step: int | None = None
    """Step of the newest committed checkpoint."""
    doing: Mapping[int, str] = field(default_factory=dict)
    """Worker -> its phase of a step at the last probe, at most every 10 s."""
    busy_s: Mapping[int, float] = field(default_factory=dict)
    """Worker -> seconds per step in which it did not wait for others, an average of its newest steps."""
    state: str = ""
    """The state that `raysharded status` shows: `running`, `paused`, `finished`, ..."""
    num_workers: int | None = None
    """Number of members, also where they are not known one by one; None: unknown."""
    num_ready: int | None = None
    """Number of workers that are ready while the driver has no generation yet; None: it has one, or unknown."""
    num_needed: int | None = None
    """The least number of workers for its first generation, at that time."""
    missing: str = ""
    """A sentence on the workers that the run would take in addition, and on the resources that they lack; empty: none,
    or unknown."""
    generation: int | None = None
    driver_pid: int | None = None
    """Process id of the driver on its node."""
    driver_node: str = ""
    """Host name of the driver's node; empty: unknown."""
    checkpoint_at: float | None = None
    """Time of that checkpoint's commit: seconds since 1970."""
    newest_entry_at: float | None = None
    """Time of the newest journal entry: seconds since 1970, by the driver's clock."""
    num_segments: int | None = None
    """Segments of the journal."""
    step_s: float | None = None
    """Seconds per step, over the newest steps."""
    error: str = ""
    """The error that the run failed with, or the damage of its journal."""
    incidents: tuple[tuple[float, str], ...] = ()
    """The newest few incidents, oldest first: seconds since 1970, and one sentence."""
    stop_requested: bool = False
    """Whether a stop was requested, and the driver has not ended yet. Only the driver knows."""
    warnings: tuple[str, ...] = ()
    """The conditions that a person should know now, one sentence each, such as storage that takes no entries."""
    best_checkpoint: ScoredCheckpoint | None = None
    """The run's best checkpoint, by `CheckpointConfig.keep_best`. Only `raysharded status` and the report read it."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the present pace; None if the run does not train, or if it is unknown."""
        if self.state != "running" or not self.max_steps or self.step_s is None:
            return None
        return max(0, self.max_steps - self.step) * self.step_s

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON, in the shape in which every command prints it (docs/cli.md). Unknown values are null."""
        from raysharded.report.run_report import plain

        count = len(self.workers) if self.num_workers is None and self.workers else self.num_workers
        age_s = None if self.newest_entry_at is None else time.time() - self.newest_entry_at
        found: dict[str, Any] = plain(
            {
                "name": self.name,
                "url": self.url,
                "state": self.state,
                "phase": self.phase,
                "error": self.error,
                "warnings": self.warnings,
                "stop_requested": self.stop_requested,
                "step": self.step,
                "max_steps": self.max_steps or None,
                "loss": self.loss,
                "step_s": self.step_s,
                "left_s": self.left_s,
                "workers": count,
                "workers_ready": self.num_ready,
                "workers_needed": self.num_needed,
                "workers_missing": self.missing,
                "members": self.workers,
                "pids": self.pids,
                "nodes": self.nodes,
                "doing": self.doing,
                "busy_s": self.busy_s,
                "generation": self.generation,
                "mesh": self.mesh,
                "losses": self.losses,
                "driver": self.driver,
                "driver_pid": self.driver_pid,
                "driver_node": self.driver_node,
                "started_at": self.started_at,
                "checkpoint_step": self.checkpoint_step,
                "checkpoint_at": self.checkpoint_at,
                "best_checkpoint": None if self.best_checkpoint is None else asdict(self.best_checkpoint),
                "newest_entry_at": self.newest_entry_at,
                "age_s": age_s,
                "num_segments": self.num_segments,
                "incidents": [{"at": at, "text": text} for at, text in self.incidents],
            }
        )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is committed."""

    step: int
    url: str
    """Folder of the checkpoint."""


def start_in_words(checkpoint_step: int | None) -> str:
    """Where a run resumes, from the step of its newest checkpoint; None: it has none."""
    if checkpoint_step is None:
        return "from the start: it has no checkpoint"
    return f"from its checkpoint of step {checkpoint_step}"
