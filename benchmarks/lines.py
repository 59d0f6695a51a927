"""The events of a trained process: a line of JSON each, in a file that all of a run's processes append to.

Standard library only: the peers use it too. Events: `start`, `restored` (it holds the state after `step`), `step`
(done: `loss`, `samples`), `failed` (it has noticed that something is wrong), `node` (a raylet).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["start", "restored", "step", "failed", "stopped", "node"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line."""

    event: Kind
    at: float
    """Seconds since 1970."""
    pid: int
    rank: int = 0
    world: int = 1
    """Number of processes that write a line about the same step."""
    workers: int = 0
    """Number of the run's workers, if it differs from `world`."""
    step: int = 0
    loss: float | None = None
    """Mean over `samples`."""
    samples: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    """Process ids of the workers by rank, where one process writes for all."""


class Speaker:
    """Writes one process's lines."""

    def __init__(self, path: str | Path, *, rank: int = 0, world: int = 1) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.rank, self.world = rank, world

    def say(self, event: Kind, *, at: float | None = None, **fields: Any) -> None:
        """Append a line, in one write."""
        common = {"event": event, "at": time.time() if at is None else at, "pid": os.getpid()}
        line = {**common, "rank": self.rank, "world": self.world, **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Follower:
    """Reads the lines that are new."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._offset = Path(path), 0

    def read(self) -> Iterator[Event]:
        """Whole lines alone; an incomplete line is read next time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield Event(**json.loads(line))
