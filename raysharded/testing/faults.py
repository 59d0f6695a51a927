"""Faults at chosen places: keyed by worker, step and phase, each proving that it fired."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raysharded.ids import WorkerId

Kind = Literal["kill", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Let one worker meet a fault when it first comes to a phase of a step (or of any step from `step` on)."""

    worker: WorkerId
    step: int
    phase: str
    """forward, backward, agree, apply, snapshot; transfer and form are phases of building a generation."""
    kind: Kind = "kill"

    @property
    def marker(self) -> str:
        """The name of the file that proves that this fault fired."""
        return f"{self.kind}-worker{self.worker}-step{self.step}-{self.phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """Faults for the workers of one run, with a local folder where each leaves a marker just before it strikes."""

    faults: tuple[Fault, ...]
    folder: str

    def strike(self, worker: WorkerId, step: int, phase: str) -> None:
        """Called by workers at every phase; does not return if a kill is due here."""
        for fault in self.faults:
            if fault.worker == worker and fault.phase == phase and step >= fault.step and not self.fired(fault):
                Path(self.folder, fault.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def fired(self, fault: Fault) -> bool:
        """Whether a fault struck."""
        return Path(self.folder, fault.marker).exists()
