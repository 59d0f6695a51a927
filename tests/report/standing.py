"""The status of a run, as from a handle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stands:
    """The fields of `Run.status()`."""

    name: str = "tiny"
    url: str = "/runs/tiny"
    phase: str = "training"
    step: int = 5
    max_steps: int = 6
    workers: tuple[int, ...] = (0, 2)
    pids: Mapping[int, int] = field(default_factory=lambda: {0: 4711, 2: 4713})
    nodes: Mapping[int, str] = field(default_factory=lambda: {0: "trainer-1", 2: "trainer-2"})
    mesh: str = "1 x 2"
    driver: str = "process 4700 on trainer-1"
    loss: float | None = 1.0
    checkpoint_step: int | None = 3
    doing: Mapping[int, str] = field(default_factory=lambda: {0: "forward", 2: "agree"})
    busy_s: Mapping[int, float] = field(default_factory=lambda: {0: 0.75, 2: 0.25})
