"""Scenarios on a cluster of several Ray nodes. Run as a program: a process can be on one cluster only.

python -m tests.ray.node_scenarios SCENARIO FOLDER; prints its findings as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raysharded as rs
from raysharded.actors.process.os_processes import start_ticks
from raysharded.display.raylet_output import quiet_raylet
from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.worker_launcher import Happened, Reply
from raysharded.ray_backend.placement import has_process
from raysharded.ray_backend.ray_launcher import RayLauncher
from raysharded.testing.ray_nodes import RayNodes
from tests.ray.driving import PacedTokens, hurry
from tests.ray.launchers import make_launcher
from tests.ray.leftovers import wait_until
from tests.ray.pacing import PATIENT_S, waiting
from tests.training.harness import GptTask, Tokens, make_job

STEPS = 24
MICROBATCHES = 4
WAIT_S = 180.0


class Watched:
    """A run of up to 4 workers with a listener on its journal. Its first steps wait until all are ready; `moments`: see
    `waiting`."""

    def __init__(
        self, folder: Path, *moments: tuple[int, int], shard_group_size: int | None = None, **failure: Any
    ) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []
        self._folder = folder
        self.node_of: dict[int, str] = {}
        trainer = rs.ElasticTrainer(
            task=GptTask(),
            data=PacedTokens(folder),
            batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
            scaling=rs.ScalingConfig(num_workers=(2, 4), cpus_per_worker=1, shard_group_size=shard_group_size),
            run=rs.RunConfig(
                name="job",
                storage_path=str(folder),
                max_steps=STEPS,
                failure=rs.FailureConfig(hang_timeout_s=PATIENT_S, **failure),
            ),
            engine=rs.EngineConfig(prefetch=False),
        )
        trainer.faults = waiting(folder, (2, 3), *moments)
        self.run = trainer.start_local(self.listen)

    def listen(self, kind: str, fields: dict[str, Any]) -> None:
        self.entries.append((kind, dict(fields)))
        if kind == "worker_ready":
            self.node_of[fields["worker"]] = fields["node_id"]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.entries if name == kind]

    def members_on(self, node: str) -> list[int]:
        return [worker for worker in self.run.status().workers if self.node_of[worker] == node]

    def trains_with(self, count: int) -> None:
        """Return when so many workers have done a step together."""
        wait_until(
            lambda: bool(self.of("step")) and self.of("step")[-1]["workers"] == count, f"{count} workers", WAIT_S
        )

    def found(self) -> dict[str, Any]:
        """The end of the run."""
        hurry(self._folder)
        result = self.run.wait(2 * WAIT_S)
        report = result.report()
        return {
            "fingerprint": result.fingerprint,
            "recoveries": self.of("recovery"),
            "avoided": report.as_dict()["avoided_nodes"],
            "ok": report.ok,
            "node_of": self.node_of,
        }


def death(folder: Path, nodes: RayNodes) -> dict[str, Any]:
    """One of two nodes dies with both of its workers; later another takes its place."""
    nodes.add(2)
    second = nodes.add(2)
    watched = Watched(folder, (STEPS // 2, 5))
    watched.trains_with(4)
    wait_until(lambda: len(watched.of("step")) >= 3, "step 3", WAIT_S)
    lost = watched.members_on(second)
    nodes.kill(second)
    at = time.monotonic()
    wait_until(lambda: bool(watched.of("worker_lost")), "the loss being noticed", WAIT_S)
    noticed_s = time.monotonic() - at
    watched.trains_with(2)
    third = nodes.add(2)
    watched.trains_with(4)
    joined = watched.members_on(third)
    return {**watched.found(), "lost": sorted(lost), "noticed_s": noticed_s, "joined": len(joined)}


def groups(folder: Path, nodes: RayNodes) -> dict[str, Any]:
    """One of two nodes dies, each of which has a shard group; later another takes its place."""
    nodes.add(2)
    second = nodes.add(2)
    watched = Watched(folder, (STEPS // 2, 5), shard_group_size=2)
    watched.trains_with(4)
    wait_until(lambda: len(watched.of("step")) >= 3, "step 3", WAIT_S)
    nodes.kill(second)
    watched.trains_with(2)
    nodes.add(2)
    watched.trains_with(4)
    formed = [
        {"mesh": fields["mesh"], "nodes": [watched.node_of[worker] for worker in fields["members"]]}
        for fields in watched.of("generation")
    ]
    return {**watched.found(), "formed": formed}


def avoidance(folder: Path, nodes: RayNodes) -> dict[str, Any]:
    """Workers on one node are killed again and again."""
    nodes.add(4)
    second = nodes.add(2)
    watched = Watched(folder, (STEPS // 3, 4), (STEPS - 6, 5), max_node_failures=2)
    for _ in range(2):
        watched.trains_with(4)
        wait_until(lambda: bool(watched.members_on(second)), "a worker on the second node", WAIT_S)
        victim = watched.members_on(second)[0]
        known = set(watched.node_of)
        os.kill(watched.run.status().pids[victim], signal.SIGKILL)
        watched.trains_with(3)
    watched.trains_with(4)
    later = [node for worker, node in watched.node_of.items() if worker not in known]
    return {**watched.found(), "second": second, "later": later}


def launched(folder: Path, nodes: RayNodes) -> dict[str, Any]:
    """Scenarios that need a launcher alone, one after the other on one node with a slot for one worker."""
    node = nodes.add(1)
    return {
        "failed_starts": failed_starts(folder, node),
        "stopped": stopped(folder),
        "one_starts": one_starts(folder),
        "only_avoided": only_avoided(folder, node, nodes),
    }


def only_avoided(folder: Path, node: str, nodes: RayNodes) -> dict[str, Any]:
    """A worker must not be placed on the only node with a free slot."""
    launcher = make_launcher(make_job(str(folder)))
    launcher.start(WorkerId(0), avoid=(node,))
    until = time.monotonic() + 5.0  # it would be ready by then
    happened = [type(one).__name__ for _ in iter(lambda: time.monotonic() < until, False) for one in launcher.wait(0.2)]
    shortage = launcher.describe_shortage()
    other = nodes.add(1)
    facts = answer_of(launcher, WAIT_S)
    launcher.close()
    return {"happened": happened, "shortage": shortage, "node": node, "on_other": facts.node_id == other}


def one_starts(folder: Path) -> tuple[str, str]:
    """Shortages of a run that needs one worker and may have two, of which one is starting and has the whole node: of
    the first, and of both."""
    launcher = make_launcher(make_job(str(folder)))
    for worker in (WorkerId(0), WorkerId(1)):
        launcher.start(worker)
    actors = launcher._actors.values()
    wait_until(lambda: any(map(has_process, actors)), "a worker's process", WAIT_S)
    shortages = launcher.describe_shortage(), launcher.describe_shortage(2)
    assert sum(map(has_process, actors)) == 1, "the node has one slot"
    launcher.close()
    return shortages


def stopped(folder: Path) -> dict[str, Any]:
    """A worker that is stopped (SIGSTOP) is ended by its node's agent."""
    launcher = make_launcher(make_job(str(folder)))
    launcher.start(WorkerId(0))
    wait_until(lambda: has_process(launcher._actors[WorkerId(0)]), "the worker's process", WAIT_S)
    shortage = launcher.describe_shortage()  # the worker, which has not answered yet, has all of the node
    facts = answer_of(launcher, WAIT_S)
    wait_until(lambda: bool(agents()), "the agent", WAIT_S)
    os.kill(facts.pid, signal.SIGSTOP)
    at = time.monotonic()
    launcher.kill(WorkerId(0))
    call_s = time.monotonic() - at
    wait_until(lambda: start_ticks(facts.pid) != facts.started, "the worker's end", WAIT_S)
    killed_s = time.monotonic() - at
    launcher.close()
    wait_until(lambda: not agents(), "the agent's end", WAIT_S)
    about = {"started": facts.started, "node_id": facts.node_id, "shortage": shortage}
    return {"call_s": call_s, "killed_s": killed_s, **about}


class DiesWhenRead(Tokens):
    """Ends the process when it is read."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class RaisesWhenRead(Tokens):
    """Raises when it is read, as if its file was not on this machine."""

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError("not mounted here")


def failed_starts(folder: Path, node: str) -> dict[str, Any]:
    """Workers whose process dies, or that raise, before they are ready: it is known that they were on the node."""
    found = []
    for data in (DiesWhenRead(), RaisesWhenRead()):
        job = make_job(str(folder), data=data, engine=rs.EngineConfig(prefetch=False))  # read by the worker itself
        launcher = make_launcher(job)
        launcher.start(WorkerId(0))
        deadline = time.monotonic() + WAIT_S
        happened: list[Happened] = []
        while not happened and time.monotonic() < deadline:
            happened = launcher.wait(0.2)
        launcher.close()
        found += [(type(one).__name__, getattr(one, "node_id", "")) for one in happened]
    return {"found": [(what, where == node) for what, where in found]}


def answer_of(launcher: RayLauncher, within_s: float) -> WorkerInfo:
    """The worker's message when it is ready."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for happened in launcher.wait(0.2):
            assert isinstance(happened, Reply), happened
            if happened.method == "ready":  # it is also queried for leave notices
                assert isinstance(happened.value, WorkerInfo), happened.error
                return happened.value
    raise AssertionError("the worker is not ready")


def agents() -> list[int]:
    """The node agents' processes of this cluster: those that inherited its folder."""
    mine = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if b"ray::Agent" in (folder / "cmdline").read_bytes() and mine in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


SCENARIOS: dict[str, Callable[[Path, RayNodes], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (death, groups, avoidance, launched)
}

if __name__ == "__main__":
    with quiet_raylet(), RayNodes() as ray_nodes:
        found = SCENARIOS[sys.argv[1]](Path(sys.argv[2]), ray_nodes)
    sys.stdout.write(f"{json.dumps(found)}\n")
