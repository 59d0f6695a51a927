"""The cost of planned changes of size, and of a loss whose place a spare takes.

Changes: a worker that is requested to leave (4 to 3); the one that joins in its place (3 to 4); both at once, 4 to 4,
where the replacement is ready before the change is prepared. Loss: 3 to 3.

python -m benchmarks.planned [--changes 5] [--json PATH]

The figure is the time from the newest step before the change to the first step after it, less a normal step: the median
of those steps of the same session during which no worker was starting. On shared cores, starting one slows the others
down. A loss also costs the step that it breaks: its time is from the kill on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import raysharded as rs
from benchmarks.workload import trainer
from raysharded.errors import RunFailed

SHARE = 0.25
"""Share of a core for each worker, as Ray counts."""
_STEADY = 6
"""Steps of one generation between two changes."""


@dataclass(slots=True)
class Watch:
    """The time and generation of each step, and the time that each part of forming took."""

    steps: list[tuple[float, int, int, bool]] = field(default_factory=list)
    """(when, generation, workers, whether a worker was starting at the same time)"""
    formed: dict[int, Any] = field(default_factory=dict)
    ready: int = 0
    wanted: int = 0
    """Workers that were requested so far."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            starting = self.ready < self.wanted
            self.steps.append((time.monotonic(), fields["generation"], fields["workers"], starting))
        elif kind == "formed":
            self.formed[fields["generation"]] = {k: round(v, 3) for k, v in fields["seconds"].items()}
        elif kind == "worker_ready":
            self.ready += 1
        elif kind in ("worker_leaving", "worker_lost"):
            self.wanted += 1
        if kind not in ("step", "worker_ready"):
            print(f"{time.monotonic():.2f} {kind} {fields.get('members') or fields.get('worker', '')}", flush=True)

    @property
    def steady(self) -> int:
        """Steps of the newest generation."""
        return sum(generation == self.steps[-1][1] for _, generation, *_ in self.steps) if self.steps else 0

    @property
    def normal_s(self) -> float:
        """The median step that follows another of the same generation, while no worker is starting."""
        pairs = zip(self.steps[2:], self.steps[1:], strict=False)
        return statistics.median(b[0] - a[0] for b, a in pairs if b[1] == a[1] and not a[3] and not b[3])

    def changes(self, before: int, after: int) -> list[tuple[float, int]]:
        """(seconds from the last step of one size to the first of another, generation)"""
        pairs = zip(self.steps[1:], self.steps, strict=False)
        return [(b[0] - a[0], b[1]) for b, a in pairs if (a[2], b[2]) == (before, after) and b[1] != a[1]]


def planned(count: int, folder: str) -> dict[str, Any]:
    """Request a worker to leave, wait until another has joined, and so on."""
    watch = Watch(wanted=4)
    run = trainer("planned", (3, 4), folder, cpus_per_worker=SHARE).start_local(watch)
    told = 0
    while True:
        status = run.status()
        is_settled = len(status.workers) == 4 and watch.steady >= (_STEADY if told < count else 3)
        if is_settled and told == count:
            break
        if is_settled:
            os.kill(status.pids[status.workers[told % 4]], signal.SIGTERM)
            told += 1
            generation = watch.steps[-1][1]
            while watch.steps[-1][1] == generation:
                time.sleep(0.005)
        time.sleep(0.005)
    end(run)
    changes = {(before, after): watch.changes(before, after) for before, after in ((4, 3), (3, 4), (4, 4))}
    return {f"{before} to {after}": extra(watch, found) for (before, after), found in changes.items() if found}


def spares(count: int, folder: str) -> dict[str, Any]:
    """Kill a worker in mid-step when a spare is ready."""
    watch = Watch(wanted=4)
    run = trainer("spares", (2, 3), folder, cpus_per_worker=SHARE, spares=1).start_local(watch)
    took: list[tuple[float, int]] = []
    while len(took) < count:
        status = run.status()
        if watch.steady >= _STEADY and watch.ready >= 4 + len(took):
            broken, generation = len(watch.steps), watch.steps[-1][1]
            while time.monotonic() - watch.steps[-1][0] < 0.5 * watch.normal_s or len(watch.steps) > broken:
                broken = len(watch.steps)
                time.sleep(0.002)
            killed = time.monotonic()
            os.kill(status.pids[status.workers[len(took) % 3]], signal.SIGKILL)
            while watch.steps[-1][1] == generation:
                time.sleep(0.002)
            took.append((watch.steps[-1][0] - killed, watch.steps[-1][1]))
        time.sleep(0.005)
    end(run)
    return {"kill, 3 to 3": extra(watch, took)}


def end(run: rs.Run) -> None:
    run.stop()
    with contextlib.suppress(RunFailed):
        run.wait()


def extra(watch: Watch, changes: list[tuple[float, int]]) -> dict[str, Any]:
    normal = watch.normal_s
    more = [seconds - normal for seconds, _ in changes]
    return {
        "normal_step_s": normal,
        "extra_s": more,
        "median_extra_s": statistics.median(more),
        "formed": [watch.formed.get(generation) for _, generation in changes],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--changes", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = planned(options.changes, folder) | spares(options.changes, folder)
    for what, figures in found.items():
        print(
            f"{what}: median {figures['median_extra_s']:.3f} s more than a normal step of "
            f"{figures['normal_step_s']:.3f} s; {', '.join(f'{one:.3f}' for one in figures['extra_s'])}"
        )
        for formed in figures["formed"]:
            print(f"    {formed}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
