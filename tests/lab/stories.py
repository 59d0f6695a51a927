"""Faults of links, machines and the head node under a run that trains, and what came of each.

A story strikes a run on the laboratory's machines, waits until it trains as before or has ended, and returns one row:
when the fault was noticed, when the run did a new step, what was computed again, and what was logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.lab.ray_machines import HEAD, RayMachines
from tests.lab.training import WITHIN_S, LabRun
from tests.ray.leftovers import wait_until

DRIVER, FIRST, SECOND = 1, 2, 3
"""The machine of the driver, and those of one worker each."""
SLOTS = (0, 0, 1, 1)
_NOTICES = frozenset({"worker_lost", "stuck", "recovery", "gcs_lost"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result of a story. Seconds are those since its fault."""

    story: str
    noticed_s: float | None
    """None: nothing was, or had to be."""
    progress_s: float | None
    """None: the run ended."""
    again: int
    """Steps that were computed again."""
    lost: tuple[str, ...]
    """Why workers were lost."""
    said: str
    """The run's log for a person."""

    def text(self) -> str:
        """The row for a person."""
        seconds = [f"{one:.1f} s" if one is not None else "-" for one in (self.noticed_s, self.progress_s)]
        said = self.said.strip().splitlines()
        return f"{self.story:16} {seconds[0]:>9} {seconds[1]:>9} {self.again:5}  {said[0] if said else '-'}"


HEADER = f"{'story':16} {'noticed':>9} {'progress':>9} {'again':>5}  said first"


class _Strike:
    """A fault that begins now."""

    def __init__(self, run: LabRun) -> None:
        self._run, self.at, self._said = run, time.monotonic(), len(run.said())
        self._begin = len(run.entries)

    def row(self, story: str, progress_at: float | None) -> Row:
        """The row, as far as entries have come."""
        entries = list(self._run.entries)[self._begin :]
        noticed = next((at for at, kind, _ in entries if kind in _NOTICES), None)
        return Row(
            story=story,
            noticed_s=None if noticed is None else noticed - self.at,
            progress_s=None if progress_at is None else progress_at - self.at,
            again=sum(int(fields["steps_redone"]) for _, kind, fields in entries if kind == "recovery"),
            lost=tuple(str(fields["reason"]) for _, kind, fields in entries if kind == "worker_lost"),
            said=self._run.said()[self._said :],
        )

    def trains(self, workers: int, more: int = 3) -> float:
        """When the first step was done after the notice, once `workers` have done `more` steps since now."""
        run, begin = self._run, len(self._run.entries)

        def steps() -> list[float]:
            found = list(run.entries)[begin:]
            return [at for at, kind, fields in found if kind == "step" and fields["workers"] == workers]

        wait_until(lambda: len(steps()) >= more or run.process.poll() is not None, f"{workers} workers train", WITHIN_S)
        assert len(steps()) >= more, run.said()[-3000:]
        entries = list(run.entries)[self._begin :]
        noticed = next((at for at, kind, _ in entries if kind in _NOTICES), self.at)
        return next(at for at, kind, _ in entries if kind == "step" and at > noticed)


def slow_link(cluster: RayMachines, run: LabRun) -> Row:
    """Packets of one worker take 60 ms to the other, and one in fifty is lost, for some steps."""
    strike = _Strike(run)
    cluster.machines.slow_down(SECOND, FIRST, delay_ms=60, jitter_ms=10, loss_percent=2)
    progress_at = strike.trains(2, 4)
    cluster.machines.mend(SECOND, FIRST)
    strike.trains(2)
    return strike.row("slow link", progress_at)


def narrow_link(cluster: RayMachines, run: LabRun) -> Row:
    """All that one worker sends and receives is limited to 2 Mbit/s, for some steps."""
    strike = _Strike(run)
    cluster.machines.limit(SECOND, out_mbit=2, in_mbit=2)
    progress_at = strike.trains(2, 4)
    cluster.machines.limit(SECOND)
    strike.trains(2)
    return strike.row("narrow link", progress_at)


def one_way(cluster: RayMachines, run: LabRun) -> Row:
    """One worker's packets to the other vanish until the run reports something, or for 8 s; then the link is well."""
    strike = _Strike(run)
    cluster.machines.cut(FIRST, SECOND)
    deadline = time.monotonic() + 8.0
    while time.monotonic() < deadline and strike.row("", None).noticed_s is None:
        time.sleep(0.05)  # the entries come from another process
    cluster.machines.mend(FIRST, SECOND)
    return strike.row("one way", strike.trains(2))


def frozen(cluster: RayMachines, run: LabRun) -> Row:
    """All processes of one worker's machine stop, until the run trains without it; then they continue."""
    strike = _Strike(run)
    cluster.machines[SECOND].freeze()
    progress_at = strike.trains(1)
    cluster.machines[SECOND].thaw()
    strike.trains(2)
    return strike.row("frozen", progress_at)


def power_off(cluster: RayMachines, run: LabRun) -> Row:
    """The machine of one worker is powered off, and on again once the run trains without it."""
    strike = _Strike(run)
    cluster.machines.power_off(SECOND)
    progress_at = strike.trains(1)
    cluster.machines.power_on(SECOND)
    cluster.start(SECOND)
    strike.trains(2)
    return strike.row("power off", progress_at)


def gcs_back(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS is killed, and started again as soon as the driver has reported its loss."""
    strike, before = _Strike(run), len(run.of("gcs_back"))
    cluster.kill_gcs()
    run.wait_for("gcs_lost", len(run.of("gcs_lost")) + 1)
    cluster.restart_gcs()
    run.wait_for("gcs_back", before + 1)
    return strike.row("GCS back", strike.trains(2))


def gcs_lost(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS is killed, and not started again; the driver lives."""
    strike = _Strike(run)
    cluster.kill_gcs()
    run.wait()
    return strike.row("GCS lost", None)


def head_lost(cluster: RayMachines, run: LabRun) -> Row:
    """The head node's machine is powered off; the driver, on another, lives."""
    strike = _Strike(run)
    cluster.machines.power_off(HEAD)
    run.wait()
    return strike.row("head lost", None)


Story = Callable[[RayMachines, LabRun], Row]
LINKS: tuple[Story, ...] = (slow_link, narrow_link, one_way)
NODES: tuple[Story, ...] = (frozen, power_off)
GOES_ON: tuple[Story, ...] = (*LINKS, *NODES, gcs_back)
"""After these the run trains as before: one run and one start of the nodes are enough for all."""
ENDS: tuple[Story, ...] = (gcs_lost, head_lost)
"""These end the cluster."""
