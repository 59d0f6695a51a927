"""A run's status, checkpoints and result. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysharded.report import RunReport

Listener = Callable[[str, dict[str, Any]], None]
"""Callback for every journal entry: (kind, fields)."""
Entry = tuple[int, str, dict[str, Any]]
"""A journal entry of a handle: a number that only grows, the kind, and the fields, with `at` (seconds since 1970)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run."""

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

    def report(self) -> RunReport:
        """Report of the journal: losses, recoveries, the ledger of samples."""
        from raysharded.report import load

        return load(self.url)


def last_numbers(measured: Mapping[str, float]) -> dict[str, Any]:
    """The fields `loss`, `metrics` and `evaluation` of a `Result`, from a step's numbers as checkpoints keep them."""
    prefix = "evaluation."
    return {
        "loss": measured.get("loss"),
        "metrics": {k: v for k, v in measured.items() if k != "loss" and not k.startswith(prefix)},
        "evaluation": {k.removeprefix(prefix): v for k, v in measured.items() if k.startswith(prefix)},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The current status of a run."""

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
    losses: int = 0
    """Workers that this driver has lost."""
    checkpoint_step: int | None = None
    """Step of the newest committed checkpoint."""
    doing: Mapping[int, str] = field(default_factory=dict)
    """Worker -> its phase of a step at the last probe, at most every 10 s."""
    busy_s: Mapping[int, float] = field(default_factory=dict)
    """Worker -> seconds per step in which it did not wait for others, an average of its newest steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is committed."""

    step: int
    url: str
    """Folder of the checkpoint."""
