"""Chaos: injects faults into a run's workers at random times while it trains, and records them in its journal."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.testing.faults import Fault, FaultPlan
from raysharded.testing.hazards import ORDERED, Hazard, moments, parse_hazards
from raysharded.testing.process_signals import Signals

if TYPE_CHECKING:
    from raysharded.run import Run, Status

_LOOK_UP_S = 0.05
_LEFT_ALONE = 1
"""Number of healthy members that get no fault: faults faster than any recovery would test nothing."""
_PASSING = ("slow", "raise")
_STEP_PHASES = ("data", "forward", "backward", "agree", "apply", "snapshot")


class Strikable(Protocol):
    """A run to start with faults: an `ElasticTrainer`."""

    faults: Any

    @property
    def url(self) -> str: ...


def chaos_for(trainer: Strikable, hazards: str, *, seed: int = 0) -> Callable[[Run], Chaos]:
    """Chaos of every kind, for `trainer.fit(context=chaos_for(trainer, "kill:every=30s"))`; arguments as for `Chaos`.

    Faults that workers inflict on themselves are ordered through the run's folder, which all of them must be able to
    read. Raises ConfigError if the run's storage is not a file system.
    """
    from raysharded.checkpoint import open_storage
    from raysharded.locations import scheme_of

    parsed = parse_hazards(hazards)
    inside = [hazard.kind for hazard in parsed if hazard.kind in ORDERED]
    if not inside:
        return lambda run: Chaos(run, parsed, seed=seed)
    url = open_storage(trainer.url).url
    if scheme_of(url) is not None:
        raise ConfigError(
            f"chaos {inside[0]!r} is ordered through files, which workers cannot see in {url}. Give the run a "
            "storage_path that is a folder, or raysharded.testing.Chaos a plan with a folder that all workers see."
        )
    folder = Path(url, "chaos", secrets.token_hex(4))  # orders of an earlier chaos of the run do not count
    folder.mkdir(parents=True)
    plan = trainer.faults = FaultPlan(faults=(), folder=str(folder), listens=True)
    return lambda run: Chaos(run, parsed, seed=seed, plan=plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """An injected fault."""

    kind: str
    worker: int
    at: float
    """Time of the fault, in monotonic seconds."""


class Chaos:
    """Injects faults into a run's workers while its block runs, each kind at its average interval.

    `hazards`: as text, "kill:every=30s,slow:every=1m:seconds=5", or as values. kill, stop, term and slow (stopped, and
    continued after `seconds`) are signals from outside, on any node. The others (wedge, stuck, raise, drop, corrupt)
    need a `plan` with `listens=True` that the workers were started with (`trainer.faults = plan`). The same seed gives
    the same times and draws. A generation's last healthy worker gets no fault: a fault waits until there are two again.
    Each fault is recorded in the journal with an entry `chaos`.
    """

    def __init__(
        self, run: Run, hazards: str | Sequence[Hazard], *, seed: int = 0, plan: FaultPlan | None = None
    ) -> None:
        self._run, self._plan, self._seed = run, plan, seed
        self._hazards = parse_hazards(hazards) if isinstance(hazards, str) else tuple(hazards)
        inside = [hazard.kind for hazard in self._hazards if hazard.kind in ORDERED]
        if inside and not (plan and plan.listens):
            raise ConfigError(
                f"chaos {inside[0]!r} is injected by the workers themselves: start the run with trainer.faults = "
                "FaultPlan(faults=(), folder=..., listens=True), and give Chaos that plan."
            )
        self._draw = random.Random(seed)
        self._ailing: set[int] = set()
        """Workers that will not recover."""
        self._signals = Signals()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="chaos")
        self.struck: list[Struck] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Inject no further faults; processes that were stopped temporarily continue."""
        self._stop.set()
        self._thread.join()
        self._signals.close()

    def _go_on(self) -> None:
        began = time.monotonic()
        for at_s, hazard in moments(self._hazards, self._seed):
            if self._stop.wait(max(0.0, began + at_s - time.monotonic())):
                return
            while not self._strike(hazard):
                if self._stop.wait(_LOOK_UP_S):
                    return

    def _strike(self, hazard: Hazard) -> bool:
        """Inject a fault; False if there was no worker to inject it into."""
        status = self._run.status()
        well = [worker for worker in status.workers if worker in status.pids and worker not in self._ailing]
        if len(well) < _LEFT_ALONE + 1:
            return False
        worker = self._draw.choice(well)
        note: dict[str, Any] = {"fault": hazard.kind, "worker": worker, "step": status.step}
        if hazard.seconds is not None:
            note["seconds"] = hazard.seconds
        at = time.monotonic()
        if hazard.kind in ORDERED:
            note["phase"] = self._order(hazard, worker, status.step + 1)
        elif not self._signal(hazard, worker, status):
            return False
        if hazard.kind not in _PASSING:
            self._ailing.add(worker)
        self.struck.append(Struck(kind=hazard.kind, worker=worker, at=at))
        self._run.remark("chaos", note)
        return True

    def _order(self, hazard: Hazard, worker: int, step: int) -> str:
        """Order a fault; returns the phase in which the worker meets it, in this step or the first later one it
        reaches."""
        assert self._plan is not None
        phase = "backward" if hazard.kind == "corrupt" else self._draw.choice(_STEP_PHASES)
        self._plan.order(
            Fault(worker=WorkerId(worker), step=step, phase=phase, kind=hazard.kind, seconds=hazard.seconds)
        )
        return phase

    def _signal(self, hazard: Hazard, worker: int, status: Status) -> bool:
        return self._signals.send(status.nodes[worker], status.pids[worker], hazard.kind, hazard.seconds)
