"""Goodput: how much of the time goes into steps that count, with a worker killed every minute.

python benchmarks/goodput.py [--minutes 10] [--every 60] [--workers 4] [--json PATH]

1 - (computed again + recovering + paused) / wall time, from the first step to the last; everything that is not a step
that counts is one of the three. The CPU that replacements take for their start, which on shared cores makes the steps
beside it slower, is reported apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import trainer
from raysharded.errors import RunFailed
from raysharded.report import load


def killed_every(every_s: float, minutes: float, workers: int, folder: str) -> int:
    """Run for so long, killing one worker after another; how many were killed."""
    run = trainer("goodput", (2, workers), folder, cpus_per_worker=0.25).start_here()
    while len(run.status().workers) < workers or run.status().step < 2:
        time.sleep(0.05)
    began, killed = time.monotonic(), 0
    while time.monotonic() - began < minutes * 60:
        time.sleep(max(0.0, min(began + (killed + 1) * every_s, began + minutes * 60) - time.monotonic()))
        status = run.status()
        if time.monotonic() - began < minutes * 60 and status.workers:
            os.kill(status.pids[status.workers[killed % len(status.workers)]], signal.SIGKILL)
            killed += 1
    run.stop()
    with contextlib.suppress(RunFailed):
        run.wait()
    return killed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--every", type=float, default=60.0)
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed = killed_every(options.every, options.minutes, options.workers, folder)
        summary = load(f"{folder}/goodput").summary
    steps = summary.steps[1:]  # the first begins before there is anything to lose
    wall = steps[-1].at - summary.steps[0].at
    found: dict[str, Any] = {
        "goodput": sum(step.total_s for step in steps) / wall,
        "wall_s": wall,
        "kills": killed,
        "recoveries": len(summary.recoveries),
        "steps": len(steps),
        "steps_computed_again": sum(recovery.steps_redone for recovery in summary.recoveries),
        "lost_s": summary.times.seconds("lost"),
        "recovering_s": summary.times.seconds("recovering"),
        "starting_cpu_s": summary.starting_cpu_s,
    }
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
