"""Faults of links, machines and the head node under a run that trains, and what came of each.

A story strikes a run on the laboratory's machines, waits until it trains as before or has ended, and returns one row:
when the fault was noticed, when the run did a new step, what was computed again, whether the bits are those of an
undisturbed run, and what was logged. The row has a proof that the fault struck: counters of the network, or an entry.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from raysharded.checkpoint import list_checkpoints, newest_complete, open_storage
from raysharded.journal.entry_text import incident_text
from tests.lab.ray_machines import HEAD, RayMachines
from tests.lab.training import WITHIN_S, LabRun, undisturbed, undisturbed_steps
from tests.ray.leftovers import wait_until

DRIVER, FIRST, SECOND = 1, 2, 3
"""The machine of the driver, and those of one worker each."""
SLOTS = (0, 0, 1, 1)
"""CPUs of each machine."""
CUT_OFF_S = 20.0
"""Longer than the driver waits for a node's answer, and shorter than Ray does."""
_BEFORE = 40
"""Entries before a fault that show how long a step takes then."""
_NOTICES = frozenset({"worker_lost", "worker_leaving", "stuck", "recovery", "node_lost", "gcs_lost", "storage_failing"})
_SAID = 4


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
    equal: bool
    """Whether all steps since the fault, and the last checkpoint, have the bits of an undisturbed run."""
    proof: str
    """Evidence that the fault struck."""
    said: str
    """The run's log for a person."""

    def text(self) -> str:
        """The row for a person, with the first lines of the log below."""
        seconds = [f"{one:.1f} s" if one is not None else "-" for one in (self.noticed_s, self.progress_s)]
        first = f"{self.story:14} {seconds[0]:>8} {seconds[1]:>8} {self.again:5}  {'yes' if self.equal else 'NO':5}"
        return "\n    ".join([f"{first}  {self.proof}", *self.said.strip().splitlines()[:_SAID]])


HEADER = f"{'fault':14} {'noticed':>8} {'progress':>8} {'again':>5}  equal  proof, and what was said first"


class _Strike:
    """A fault that begins now."""

    def __init__(self, run: LabRun) -> None:
        self._run, self.at, self._said = run, time.monotonic(), len(run.said())
        self._begin = len(run.entries)

    def since(self, kind: str) -> list[Mapping[str, Any]]:
        """The entries of this kind that have come since."""
        return [fields for _, found, fields in list(self._run.entries)[self._begin :] if found == kind]

    def wait_for(self, *kinds: str) -> Mapping[str, Any]:
        """The first entry of one of these kinds."""

        def found() -> list[Mapping[str, Any]]:
            entries = list(self._run.entries)[self._begin :]
            return [{"kind": kind, **fields} for _, kind, fields in entries if kind in kinds]

        run = self._run
        wait_until(
            lambda: bool(found()) or run.process.poll() is not None,
            lambda: f"{kinds}; {run.shown()}",
            WITHIN_S,
        )
        assert found(), run.shown()
        return found()[0]

    def row(self, story: str, progress_at: float | None, proof: str, *, equal: bool | None = None) -> Row:
        """The row, as far as entries have come. `equal`: the story's own comparison, if no step may be seen."""
        entries = list(self._run.entries)[self._begin :]
        noticed = next((at for at, kind, _ in entries if kind in _NOTICES), None)
        return Row(
            story=story,
            noticed_s=None if noticed is None else noticed - self.at,
            progress_s=None if progress_at is None else progress_at - self.at,
            again=sum(int(fields["steps_redone"]) for fields in self.since("recovery")),
            lost=tuple(str(fields["reason"]) for fields in self.since("worker_lost")),
            equal=(bool(self.since("step")) if equal is None else equal)
            and self._has_equal_steps()
            and self._has_equal_checkpoint(),
            proof=proof,
            said=self._run.said()[self._said :],
        )

    def _has_equal_steps(self) -> bool:
        steps = self.since("step")
        expected = undisturbed_steps(max((int(fields["step"]) for fields in steps), default=0))
        return all(expected[int(fields["step"]) - 1].items() <= fields.items() for fields in steps)

    def _has_equal_checkpoint(self) -> bool:
        made = self.since("checkpoint")
        return not made or made[-1]["fingerprint"] == undisturbed(int(made[-1]["step"]))

    def trains(self, workers: int, more: int = 3) -> float:
        """When the first step was done after the notice, once `workers` have done `more` steps since now."""
        run, begin = self._run, len(self._run.entries)

        def steps() -> list[float]:
            found = list(run.entries)[begin:]
            return [at for at, kind, fields in found if kind == "step" and fields["workers"] == workers]

        wait_until(
            lambda: len(steps()) >= more or run.process.poll() is not None,
            lambda: f"{workers} workers train; {run.shown()}",
            WITHIN_S,
        )
        assert len(steps()) >= more, run.shown()
        entries = list(run.entries)[self._begin :]
        noticed = next((at for at, kind, _ in entries if kind in _NOTICES), self.at)
        return next(at for at, kind, _ in entries if kind == "step" and at > noticed)


def _step_s(run: LabRun, begin: int = 0, end: int | None = None) -> float:
    """The usual time from one step of these entries to the next; the first may have begun earlier."""
    at = [at for at, kind, _ in list(run.entries)[begin:end] if kind == "step"]
    return median(after - before for before, after in itertools.pairwise(at))


def _told(entry: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in entry.items() if name != "kind"}
    return f"{entry['kind']}: {incident_text(str(entry['kind']), fields)}"


# -- links --


def slow_link(cluster: RayMachines, run: LabRun) -> Row:
    """Packets of one worker take 60 ms to the other, and one in fifty is lost, for some steps."""
    usual_s, strike, begin = _step_s(run, -_BEFORE), _Strike(run), len(run.entries)
    cluster.machines.slow_down(SECOND, FIRST, delay_ms=60, jitter_ms=10, loss_percent=2)
    sent, received = cluster.machines.crossed(SECOND, FIRST)
    progress_at = strike.trains(2, 6)
    slow_s, (now_sent, now_received) = _step_s(run, begin), cluster.machines.crossed(SECOND, FIRST)
    cluster.machines.mend(SECOND, FIRST)
    strike.trains(2)
    late, lost = now_sent - sent, (now_sent - sent) - (now_received - received)
    assert late > 0, "no packet crossed the slow link"
    assert slow_s > usual_s
    return strike.row(
        "slow link", progress_at, f"{late} packets late, {lost} of them lost: a step {usual_s:.2f} s -> {slow_s:.2f} s"
    )


def narrow_link(cluster: RayMachines, run: LabRun) -> Row:
    """All that one worker sends and receives is limited to 0.5 Mbit/s, for some steps."""
    usual_s, strike, begin = _step_s(run, -_BEFORE), _Strike(run), len(run.entries)
    cluster.machines.limit(SECOND, out_mbit=0.5, in_mbit=0.5)
    progress_at = strike.trains(2, 6)
    slow_s, (out, into) = _step_s(run, begin), cluster.machines.held_back(SECOND)
    cluster.machines.limit(SECOND)
    strike.trains(2)
    assert out > 0, "no packet was held back"
    assert into > 0, "no packet was held back"
    proof = f"{out} packets out and {into} in were held back: a step {usual_s:.2f} s -> {slow_s:.2f} s"
    return strike.row("narrow link", progress_at, proof)


def one_way(cluster: RayMachines, run: LabRun) -> Row:
    """One worker's packets to the other vanish until the run reports that all wait; then the link is well again."""
    strike = _Strike(run)
    cluster.machines.cut(FIRST, SECOND)
    noticed = strike.wait_for("stuck", "links_broken", "worker_lost")
    cluster.machines.mend(FIRST, SECOND)
    return strike.row("one way", strike.trains(2), _told(noticed))


def broken_link(cluster: RayMachines, run: LabRun) -> Row:
    """A link is cut one way until the run trains without one of the workers; when it is well, that one joins again."""
    strike = _Strike(run)
    cluster.machines.cut(FIRST, SECOND)
    broken = strike.wait_for("links_broken", "worker_lost")
    progress_at = strike.trains(1)
    cluster.machines.mend(FIRST, SECOND)
    strike.trains(2)
    return strike.row("broken link", progress_at, _told(broken))


# -- machines --


def cut_off(cluster: RayMachines, run: LabRun) -> Row:
    """One worker's machine is cut off for 20 s, and is back before Ray gives it up: then the run uses it again."""
    strike = _Strike(run)
    cluster.machines.isolate(SECOND)
    lost = strike.wait_for("node_lost")
    progress_at = strike.trains(1)
    time.sleep(max(0.0, strike.at + CUT_OFF_S - time.monotonic()))  # the fault's own length
    cluster.machines.rejoin(SECOND)
    rejoined_at, back = time.monotonic(), strike.wait_for("node_back")
    back_s = time.monotonic() - rejoined_at
    strike.trains(2)
    both_s = time.monotonic() - rejoined_at
    assert back["node"] == lost["node"]
    return strike.row(
        "cut off",
        progress_at,
        f"{_told(lost)}; the same node back {back_s:.1f} s after the link, its worker {both_s:.1f} s",
    )


def frozen(cluster: RayMachines, run: LabRun) -> Row:
    """All processes of one worker's machine stop, until the run trains without it; then they continue."""
    strike = _Strike(run)
    cluster.machines[SECOND].freeze()
    lost = strike.wait_for("worker_lost")
    progress_at = strike.trains(1)
    cluster.machines[SECOND].thaw()
    strike.trains(2)
    return strike.row("frozen", progress_at, _told(lost))


def power_off(cluster: RayMachines, run: LabRun) -> Row:
    """The machine of one worker is powered off, and on again once the run trains without it."""
    strike = _Strike(run)
    cluster.machines.power_off(SECOND)
    lost = strike.wait_for("worker_lost")
    progress_at = strike.trains(1)
    cluster.machines.power_on(SECOND)
    cluster.start(SECOND)
    strike.trains(2)
    return strike.row("power off", progress_at, _told(lost))


# -- workers, and the driver's storage --


def _worker(cluster: RayMachines) -> int:
    wait_until(lambda: len(cluster.processes(SECOND, "ray::Tenant")) == 1, "one worker on its machine", WITHIN_S)
    return cluster.processes(SECOND, "ray::Tenant")[0]


def killed(cluster: RayMachines, run: LabRun) -> Row:
    """One worker's process is killed."""
    strike = _Strike(run)
    os.kill(_worker(cluster), signal.SIGKILL)
    lost = strike.wait_for("worker_lost")
    return strike.row("killed", strike.trains(2), _told(lost))


def stopped(cluster: RayMachines, run: LabRun) -> Row:
    """One worker's process stops permanently, and is replaced."""
    strike = _Strike(run)
    os.kill(_worker(cluster), signal.SIGSTOP)
    lost = strike.wait_for("worker_lost")
    return strike.row("stopped", strike.trains(2), _told(lost))


def leaves(cluster: RayMachines, run: LabRun) -> Row:
    """One worker gets a leave notice, SIGTERM, and is replaced."""
    strike = _Strike(run)
    os.kill(_worker(cluster), signal.SIGTERM)
    left = strike.wait_for("worker_left", "worker_lost")
    assert left["kind"] == "worker_left", left
    return strike.row("leaves", strike.trains(2), f"worker {left['worker']} has left")


def storage_away(cluster: RayMachines, run: LabRun) -> Row:
    """Another file system is mounted over the run's folder on the driver's machine, until the driver reports it."""
    strike, folder = _Strike(run), f"{run.folder}/lab"
    cluster.machines[DRIVER].run(["mount", "-t", "tmpfs", "tmpfs", folder])
    failing = strike.wait_for("storage_failing")
    trained = strike.trains(2)
    assert cluster.machines[DRIVER].run(["ls", "-A", folder]) == "", "a tree was made anew"
    cluster.machines[DRIVER].run(["umount", folder])
    strike.wait_for("storage_back")
    return strike.row("storage away", trained, _told(failing)[:160])


# -- the head node --


def gcs_hangs(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS stops, and continues as soon as the driver has reported its loss."""
    strike = _Strike(run)
    cluster.stop_gcs()
    strike.wait_for("gcs_lost")
    cluster.continue_gcs()
    back = strike.wait_for("gcs_back")
    return strike.row("GCS hangs", strike.trains(2), _told(back))


def gcs_back(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS is killed, and started again as soon as the driver has reported its loss."""
    strike = _Strike(run)
    cluster.kill_gcs()
    strike.wait_for("gcs_lost")
    cluster.restart_gcs()
    back = strike.wait_for("gcs_back")
    return strike.row("GCS back", strike.trains(2), _told(back))


def gcs_back_later(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS is killed, then a worker; the GCS is started again once the run trains without that worker.

    Seconds are those since the worker's end.
    """
    strike = _Strike(run)
    cluster.kill_gcs()
    strike.wait_for("gcs_lost")
    loss = _Strike(run)
    os.kill(_worker(cluster), signal.SIGKILL)
    lost = loss.wait_for("worker_lost")
    progress_at = loss.trains(1)
    cluster.restart_gcs()
    strike.wait_for("gcs_back")
    strike.trains(2)
    return loss.row("GCS back later", progress_at, _told(lost))


def gcs_lost(cluster: RayMachines, run: LabRun) -> Row:
    """The GCS is killed, and not started again; the driver lives."""
    strike = _Strike(run)
    cluster.kill_gcs()
    return strike.row("GCS lost", None, run.wait())


def head_lost(cluster: RayMachines, run: LabRun) -> Row:
    """The head node's machine is powered off; the driver, on another, lives."""
    strike = _Strike(run)
    cluster.machines.power_off(HEAD)
    return strike.row("head lost", None, run.wait())


def driver_lost(cluster: RayMachines, run: LabRun) -> Row:
    """The head node's machine is powered off, with the driver actor on it: the workers write a last checkpoint."""
    hosts, strike = cluster.processes(HEAD, "ray::Host"), _Strike(run)
    assert len(hosts) == 1
    cluster.machines.power_off(HEAD)
    storage = open_storage(f"{run.folder}/lab")
    wait_until(lambda: any(one.complete for one in list_checkpoints(storage)), "the last checkpoint", WITHIN_S)
    written_s, seen = time.monotonic() - strike.at, run.step()
    for number in (FIRST, SECOND):
        wait_until(lambda number=number: not cluster.processes(number, "ray::Tenant"), "the workers' end", 30.0)  # type: ignore[misc]
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    equal = newest.manifest.metadata["fingerprint"] == undisturbed(newest.step)
    proof = f"step {seen} was the last that was seen; that of step {newest.step} was written after {written_s:.1f} s"
    return strike.row("driver lost", None, proof, equal=equal and newest.step >= seen)


Story = Callable[[RayMachines, LabRun], Row]
LINKS: tuple[Story, ...] = (one_way, broken_link, slow_link, narrow_link)
NODES: tuple[Story, ...] = (cut_off, frozen, power_off)
WORKERS: tuple[Story, ...] = (killed, stopped, leaves)
GOES_ON: tuple[Story, ...] = (*LINKS, *NODES, *WORKERS, storage_away, gcs_hangs, gcs_back, gcs_back_later)
"""After these the run trains as before: one run and one start of the nodes are enough for all."""
ENDS: tuple[Story, ...] = (gcs_lost, head_lost)
"""These end the cluster."""
ENDS_STARTED: tuple[Story, ...] = (driver_lost,)
"""These end the cluster of a run that was started, whose driver is an actor on the head node."""
