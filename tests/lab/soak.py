"""An hour of faults of every kind in the laboratory, at the end of which nothing has changed.

    python -m tests.lab.soak FOLDER [--minutes 60] [--every 20] [--seed 0]

Every 20 seconds, or as soon as the run trains as before, the next story that a run survives begins; each comes once
before any comes again. Each prints a row. At the end the run is stopped with a checkpoint. The exit status is 1 unless
all of this holds. Every step and the last state have the bits of an undisturbed run. Each step of a generation is
in the journal once, and every sample was read once. All checkpoints are complete. Processes, descriptors and memory
grow no faster than `MOST_PER_MINUTE`.

It may be ended and started again with the same folder: the run resumes, and the remaining minutes follow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.journal.log import read
from raysharded.report import load
from tests.lab.machines import Machine, why_not
from tests.lab.ray_machines import RayMachines
from tests.lab.stories import DRIVER, FIRST, GOES_ON, HEADER, SLOTS, Row, Story
from tests.lab.training import LabRun, undisturbed
from tests.ray.leftovers import wait_until

STEPS = 100_000
"""Far more than an hour has."""
EVERY_STEPS = 50
"""Interval of the checkpoints: what a restart of the soak computes again at most."""
MOST_PER_MINUTE = {"rss_kb": 1024.0, "descriptors": 0.5, "threads": 0.5, "processes": 0.1}
"""Growth of a process, by regression over the last half of its samples."""
_OFTEN = 6
"""Least number of samples of one process that are enough to judge its growth."""


class Record:
    """The stories of a soak so far, on disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "soak.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def seconds(self) -> float:
        """Time spent, over all starts."""
        return sum(float(row["took_s"]) for row in self.rows)

    def add(self, row: Row, took_s: float, sizes: dict[str, dict[str, int]]) -> None:
        """Add a story with what the processes needed after it."""
        self.rows.append({**asdict(row), "took_s": took_s, "at_s": self.seconds() + took_s, "sizes": sizes})
        with self._path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def chosen(seed: int, after: int) -> Iterator[Story]:
    """Stories in random order, each once before any comes again; `after`: number of earlier ones."""
    draws, count = random.Random(seed), 0
    while True:
        for story in draws.sample(GOES_ON, len(GOES_ON)):
            count += 1
            if count > after:
                yield story


def sizes(cluster: RayMachines) -> dict[str, dict[str, int]]:
    """Resident memory in kB, descriptors and threads of the driver and of one worker; processes on their machines."""
    found = {}
    for name, number, command in (("driver", DRIVER, "tests.lab.training"), ("worker", FIRST, "ray::Tenant")):
        pids = [pid for pid in cluster.processes(number, command) if not _is_wrapper(pid)]
        machine: Machine = cluster.machines[number]
        for pid in pids[:1]:
            status = Path(f"/proc/{pid}/status").read_text()
            found[name] = {
                "pid": pid,
                "rss_kb": int(status.partition("VmRSS:")[2].split()[0]),
                "threads": int(status.partition("Threads:")[2].split()[0]),
                "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                "processes": len(machine.processes()),
            }
    return found


def _workers(cluster: RayMachines) -> list[int]:
    return [pid for number in range(1, len(SLOTS)) for pid in cluster.processes(number, "ray::Tenant")]


def _is_wrapper(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() in ("env", "nsenter", "sh")


def grown(rows: Sequence[dict[str, dict[str, dict[str, int]]]]) -> list[str]:
    """Sentences on what has grown, over the last half of the samples of the newest process of each name."""
    found = []
    for name in ("driver", "worker"):
        newest = [row for row in rows if name in row["sizes"]]
        newest = [row for row in newest if row["sizes"][name]["pid"] == newest[-1]["sizes"][name]["pid"]]
        half = newest[len(newest) // 2 :]
        if len(half) < _OFTEN:
            found.append(f"{name}: {len(half)} samples of one process: its growth is unknown")
            continue
        minutes = [float(row["at_s"]) / 60 for row in half]  # type: ignore[arg-type]
        for what, most in MOST_PER_MINUTE.items():
            slope = float(np.polyfit(minutes, [row["sizes"][name][what] for row in half], 1)[0])
            print(f"{name}: {what} {slope:+.2f} a minute, {half[-1]['sizes'][name][what]} now")  # noqa: T201
            if slope > most:
                found.append(f"{name}: {what} grows")
    return found


def wrong(folder: Path) -> list[str]:
    """Sentences on what is wrong after the run's end, on storage."""
    url = f"{folder}/run/lab"
    entries, found = list(read(open_storage(url))), []
    report = load(url)
    if not report.ok:
        found.append("the report does not hold")
    last = next((entry for entry in reversed(entries) if entry["kind"] == "checkpoint"), None)
    if entries[-1]["kind"] != "stopped" or last is None or last["step"] != entries[-1]["step"]:
        found.append("the run was not stopped with a checkpoint of its last step")
    elif last["fingerprint"] != undisturbed(int(last["step"])):
        found.append("the last state is not that of an undisturbed run")
    counted = {record.step for record in report.summary.steps}
    if counted != set(range(1, max(counted, default=0) + 1)):
        found.append("a step is not in the journal")
    recorded = Counter((entry["generation"], entry["step"]) for entry in entries if entry["kind"] == "step")
    if twice := [step for step, number in recorded.items() if number > 1]:
        found.append(f"(generation, step) in the journal twice: {twice[:3]}")
    if left := [one.prefix for one in list_checkpoints(open_storage(url)) if not one.complete]:
        found.append(f"checkpoints are not complete: {', '.join(left)}")
    return found


def soak(folder: Path, minutes: float, every_s: float, seed: int) -> list[str]:
    """Run stories until the minutes are over, and end the run; returns what is wrong."""
    record, failed = Record(folder), list[str]()
    with RayMachines(SLOTS, redis=True) as cluster:
        run = LabRun(cluster, DRIVER, folder / "run", workers=(1, 2), max_steps=STEPS, every_steps=EVERY_STEPS)
        run.wait_until_trained(2)
        for story in chosen(seed, len(record.rows)):
            if record.seconds() >= minutes * 60:
                break
            began = time.monotonic()
            row = story(cluster, run)
            time.sleep(max(0.0, began + every_s - time.monotonic()))  # the interval of the faults
            record.add(row, time.monotonic() - began, sizes(cluster))
            print(f"{record.seconds() / 60:5.1f} min  {row.text()}", flush=True)  # noqa: T201
        failed += [f"{row['story']}: other bits" for row in record.rows if not row["equal"]]
        failed += grown(record.rows)
        (driver,) = (pid for pid in cluster.processes(DRIVER, "tests.lab.training") if not _is_wrapper(pid))
        os.kill(driver, signal.SIGTERM)  # it ends with a checkpoint
        print(run.wait(), flush=True)  # noqa: T201
        wait_until(lambda: not _workers(cluster), "the workers' end", 60.0)
    return failed + wrong(folder)


def main(given: Sequence[str]) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    if reason := why_not():
        print(f"no laboratory here: {reason}")  # noqa: T201
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)  # noqa: T201
    failed = soak(args.folder.resolve(), args.minutes, args.every, args.seed)
    print("\n".join(failed) or "All bits are those of an undisturbed run, and nothing is left over.")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
