"""What a loss costs: a signal to one of 4 workers in mid-step, until the interrupted step is applied by the 3 others.

python benchmarks/recovery.py [--kills 10] [--signal KILL|STOP] [--shard-group-size 2] [--json PATH]

The figure is the median of (that time - the median step time of 3 undisturbed workers in the same session; of 2 in
groups of 2, with which the run goes on then). A worker that is stopped (SIGSTOP) is only found when a deadline has
passed that follows the step time: it is subtracted too.
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
from pathlib import Path
from typing import Any

from benchmarks.workload import normal_step_s, trainer
from raysharded.errors import RunFailed

SHARE = 0.25
"""Of a core for each worker, as Ray counts."""


def kills(count: int, how: signal.Signals, least: int, folder: str, **scaling: Any) -> list[dict[str, float]]:
    """Hurt a worker in mid-step `count` times, each time after a replacement has joined.

    `total_s` ends when the driver hears that the step which was under way has been applied.
    """
    found: list[dict[str, float]] = []
    kill: dict[str, float] = {}

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step" and fields["step"] == kill.get("broken_step"):
            kill["total_s"] = time.monotonic() - kill["at"]
        elif kind == "stuck":
            kill["deadline_s"] = fields["deadline_s"]
        elif kind == "recovery":
            kill.update({key: fields[key] for key in ("abort_s", "reshard_s", "first_step_s", "steps_redone")})
        if kill.keys() >= {"total_s", "steps_redone"}:
            found.append(dict(kill))
            kill.clear()
            print(f"kill {len(found)}: {found[-1]}", flush=True)

    run = trainer("kills", (least, 4), folder, cpus_per_worker=SHARE, **scaling).start_here(listen)
    step_s, seen, began, steady = 0.0, -1, 0.0, 0
    while len(found) < count and run.status().phase != "over":
        status = run.status()
        now = time.monotonic()
        if status.phase != "training" or len(status.workers) < 4:
            seen, steady = -1, 0
        elif status.step != seen:
            step_s, seen, began, steady = (now - began if seen >= 0 else 0.0), status.step, now, steady + 1
        elif steady >= 4 and now - began > 0.5 * step_s:
            kill.update(at=time.monotonic(), broken_step=status.step + 1)
            os.kill(status.pids[status.workers[len(found) % 4]], how)
            seen, steady = -1, 0
        time.sleep(0.005)
    run.stop()
    with contextlib.suppress(RunFailed):
        run.wait()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    arguments.add_argument("--shard-group-size", type=int, choices=(2,))
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    groups = {"shard_group_size": options.shard_group_size}
    left = options.shard_group_size or 3
    with tempfile.TemporaryDirectory() as folder:
        before = normal_step_s(left, folder, cpus_per_worker=SHARE, **groups)
        totals = kills(options.kills, signal.Signals[f"SIG{options.signal}"], left, folder, **groups)
        after = normal_step_s(left, folder, cpus_per_worker=SHARE, **groups)
    normal = statistics.median([before, after])
    deadlines = [entry.get("deadline_s", 0.0) for entry in totals]
    extra = [entry["total_s"] - deadline - normal for entry, deadline in zip(totals, deadlines, strict=True)]
    print(f"normal step of {left} workers: {before:.3f} s before, {after:.3f} s after")
    total = statistics.median(entry["total_s"] for entry in totals)
    print(f"SIG{options.signal} to the interrupted step applied: median {total:.3f} s")
    print(f"the deadline in force: {min(deadlines):.3f} to {max(deadlines):.3f} s")
    print(
        f"more than that and a normal step: median {statistics.median(extra):.3f} s, "
        f"from {min(extra):.3f} to {max(extra):.3f} s"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"normal_step_s": normal, "kills": totals, "extra_s": extra}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
