"""Faults at chosen places: by worker, step and phase, each with a proof that it fired.

A plan is a frozen value. A fault's effect on its process is executed by the computing thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.testing import network

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LOOK_UP_S = 0.05


class InjectedFault(Exception):
    """The error of a fault of kind "raise": not raysharded's, but one that user code might raise."""


def strike(kind: str, seconds: float | None, message: str) -> None:
    """Inject a fault of this kind, here and now, as described in `Fault`. Does not return from a kill; raises
    `InjectedFault` with the message for "raise"."""
    match kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), _SIGNALS[kind])
        case "slow" if seconds is not None:
            time.sleep(seconds)
        case "wedge" if seconds is not None:
            hold_the_interpreter(seconds)
        case "stuck":
            wait_in_python(math.inf if seconds is None else seconds)
        case "drop":
            network.cut_off()
        case "raise":
            raise InjectedFault(message)


def hold_the_interpreter(seconds: float) -> None:
    """Return after `seconds`; meanwhile no other thread of this process runs Python, as in an extension that hangs."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock during the call
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        library.usleep(max(1, int(left * 1e6)))  # a signal ends it early


def wait_in_python(seconds: float) -> None:
    """Return after `seconds`; meanwhile other threads run and answer, as in a read that never ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_UP_S)


Kind = Literal["kill", "stop", "slow", "wedge", "stuck", "raise", "drop", "corrupt", "term", "wait"]
KINDS: tuple[str, ...] = get_args(Kind)
READY = "ready"
"""The phase of a worker that has started, before it joins a generation; in step 0."""
PHASES = (READY, "form", "transfer", "data", "forward", "backward", "agree", "apply", "snapshot", "save")
"""Phases in the order in which a worker reaches them. `form` and `transfer` belong to the building of a generation, in
the step from which it continues; the others belong to a step."""
_TAKES_TIME = ("slow", "wedge")
_WAIT_S = 180.0
_ORDERS = "orders"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault that one worker meets when it first reaches a phase of a step (or of any step from `step` on)."""

    worker: WorkerId
    """The worker's number. Workers are numbered in order of start, from 0; a replacement gets a new number."""
    step: int
    """The optimizer step, from 1 on; 0 with the phase `ready`."""
    phase: str
    """A phase of `raysharded.testing.faults.PHASES`."""
    kind: Kind = "kill"
    """kill: SIGKILL. stop: SIGSTOP. term: SIGTERM. slow: sleeps for `seconds`. wedge: for `seconds` no thread of the
    process runs. stuck: waits for `seconds`, or until killed, while other threads run. raise: an error. drop: its
    network silently carries no data any more. corrupt: a bit of its gradients is flipped. wait: until another worker is
    ready."""
    seconds: float | None = None
    """Duration of slow, wedge and stuck."""
    every: bool = False
    """For slow: repeat on every step from there on. For corrupt: flip a bit in every gradient from there on."""
    message: str = "injected by a fault plan"
    """Message of raise."""
    until: WorkerId | None = None
    """For wait: the worker that has to be ready first."""

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"kind={self.kind!r}: choose one of {', '.join(KINDS)}")
        _require(self.phase in PHASES, f"phase={self.phase!r}: choose one of {', '.join(PHASES)}")
        seconds = self.seconds
        _require(seconds is None or (math.isfinite(seconds) and seconds > 0), f"seconds={seconds}: give some above 0")
        _require(seconds is not None or self.kind not in _TAKES_TIME, f"kind={self.kind!r} needs seconds")
        _require(
            not self.every or self.kind in ("slow", "corrupt"),
            f"every=True is for slow and corrupt alone, not for {self.kind!r}",
        )
        _require(self.until is not None or self.kind != "wait", "kind='wait' needs until, the worker it waits for")

    @property
    def marker(self) -> str:
        """The name of the file that proves that this fault fired."""
        return f"{self.kind}-worker{self.worker}-step{self.step}-{self.phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """Faults for the workers of one run, with a shared folder in which each leaves a marker just before it strikes.

    It must survive pickling, because it is sent to the workers with their job.
    """

    faults: tuple[Fault, ...]
    """The faults, in any order."""
    folder: str
    """Folder of the markers; shared if there are several machines."""
    listens: bool = False
    """Whether workers also check for faults that `order` adds while they run."""

    def strike(self, worker: WorkerId, step: int, phase: str) -> None:
        """Called by workers at every phase, and when they are ready; does not return if a kill is due."""
        if phase == READY:
            self._ready(worker).touch()
        for fault in (*self.faults, *(self._ordered(worker) if self.listens else ())):
            if fault.kind != "corrupt" and self._is_due(fault, worker, step, phase):
                self._mark(fault, step)
                self._strike(fault)

    def corrupts(self, worker: WorkerId, step: int) -> bool:
        """True if the gradient that this worker just computed must be damaged: once for every such fault, or always
        with `every`."""
        for fault in (*self.faults, *(self._ordered(worker) if self.listens else ())):
            lasts = fault.every and fault.worker == worker and step >= fault.step
            if fault.kind == "corrupt" and (lasts or self._is_due(fault, worker, step, fault.phase)):
                self._mark(fault, step)
                return True
        return False

    def order(self, fault: Fault) -> None:
        """Add a fault to a plan that `listens`, while the run trains. Callable in any process with access to the
        folder."""
        folder = Path(self.folder, _ORDERS, str(fault.worker))
        folder.mkdir(parents=True, exist_ok=True)
        unseen = folder / f".{fault.marker}"
        unseen.write_text(json.dumps(asdict(fault)))
        unseen.rename(folder / f"{fault.marker}.json")

    def fired(self, fault: Fault) -> bool:
        """True if a fault struck."""
        return os.path.exists(self._marker(fault))

    def _ordered(self, worker: WorkerId) -> Iterator[Fault]:
        folder = f"{self.folder}/{_ORDERS}/{worker}"
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if not name.startswith("."):
                    yield Fault(**json.loads(_text_of(f"{folder}/{name}")))

    def _is_due(self, fault: Fault, worker: WorkerId, step: int, phase: str) -> bool:
        if (fault.worker, fault.phase) != (worker, phase) or step < fault.step:
            return False
        return not self.fired(fault) or (fault.every and _text_of(self._marker(fault)) != str(step))

    def _mark(self, fault: Fault, step: int) -> None:
        Path(self._marker(fault)).write_text(str(step))

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "wait" and fault.until is not None:
            self._wait_for(fault.until)
        else:
            strike(fault.kind, fault.seconds, fault.message)

    def _wait_for(self, other: WorkerId) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self._ready(other).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"worker {other} was not ready within {_WAIT_S:.0f} s")
            time.sleep(0.01)

    def _ready(self, worker: WorkerId) -> Path:
        return Path(self.folder, f"{READY}-worker{worker}")

    def _marker(self, fault: Fault) -> str:
        return f"{self.folder}/{fault.marker}"


def _text_of(file: str) -> str:
    """A small file's text. Every phase reads some, and `pathlib` would add each name to Python's interned strings."""
    with open(file) as opened:
        return opened.read()


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(f"Fault: {message}.")
