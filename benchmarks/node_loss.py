"""What the loss of a whole node costs: SIGKILL to the raylet and all processes of one of two nodes with 2 workers each.

python benchmarks/node_loss.py [--kills 5] [--json PATH]

Ends when the interrupted step is applied by the 2 others. The figure is the median of (that time - the median step time
of 2 undisturbed workers in the same session).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import normal_step_s, trainer
from raysharded.errors import RunFailed
from raysharded.testing.ray_nodes import RayNodes

_SETTLED_STEPS = 4


def kills(nodes: RayNodes, count: int, folder: str) -> list[dict[str, Any]]:
    """Kill the newer node in mid-step `count` times, each time after another one has taken its place."""
    found: list[dict[str, Any]] = []
    kill: dict[str, Any] = {}
    newest = nodes.add(2)

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step" and fields["step"] == kill.get("broken_step"):
            kill["total_s"] = time.monotonic() - kill["at"]
        elif kind == "recovery":
            kill.update({key: fields[key] for key in ("lost", "source", "abort_s", "reshard_s", "first_step_s")})
            kill["found_s"] = fields["found_at"] - kill["at"]
        elif kind == "worker_lost":
            print(f"{time.monotonic() - kill['at']:.3f} s: worker {fields['worker']}: {fields['reason']}", flush=True)

    run = trainer("node-loss", (2, 4), folder).start_here(listen)
    step_s, seen, began, steady = 0.0, -1, 0.0, 0
    while len(found) < count and run.status().phase != "over":
        status, now = run.status(), time.monotonic()
        if kill.keys() >= {"total_s", "source"}:
            found.append(dict(kill))
            kill.clear()
            print(f"kill {len(found)}: {found[-1]}", flush=True)
            newest = nodes.add(2)
        elif status.phase != "training" or len(status.workers) < 4 or kill:
            seen, steady = -1, 0
        elif status.step != seen:
            step_s, seen, began, steady = (now - began if seen >= 0 else 0.0), status.step, now, steady + 1
        elif steady >= _SETTLED_STEPS and now - began > 0.5 * step_s:
            victims = nodes.processes(newest)
            kill.update(at=time.monotonic(), broken_step=run.status().step + 1)
            nodes.kill(newest, victims)
            seen, steady = -1, 0
        time.sleep(0.005)
    run.stop()
    with contextlib.suppress(RunFailed):
        run.wait()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, RayNodes() as nodes:
        nodes.add(2)
        before = normal_step_s(2, folder)
        losses = kills(nodes, options.kills, folder)
        after = normal_step_s(2, folder)
    normal = statistics.median([before, after])
    extra = [loss["total_s"] - normal for loss in losses]
    print(f"normal step of 2 workers: {before:.3f} s before, {after:.3f} s after")
    print(
        f"node's death to the interrupted step applied: median {statistics.median(e['total_s'] for e in losses):.3f} s"
    )
    print(
        f"more than a normal step: median {statistics.median(extra):.3f} s, from {min(extra):.3f} to {max(extra):.3f} s"
    )
    if options.json:
        result = {"normal_step_s": normal, "losses": losses, "extra_s": extra}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
