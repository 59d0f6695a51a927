"""raysharded's side of the benchmarks of faults: the workload in a separate process that writes its driver's events.

python -m benchmarks.ours --out LINES --folder STORAGE --workers 4 --least 2 [--nodes 2,2] [--every 8] [--steps N]
    [--parameters 50M] [--reduction fast] [--accumulation local] [--no-mirrors] [--patience-s 3600]

A line `resize 3` on standard input changes the number of workers; with `--nodes`, each a separate raylet with so many
slots, `add 2` starts one more, and `drain 5` gives the newest one notice of its end in so many seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from typing import Any

import raysharded as rs
from benchmarks.draining import drain
from benchmarks.lines import Speaker
from benchmarks.workload import SHAPES, trainer
from raysharded.errors import RayshardedError, RunFailed
from raysharded.testing.ray_nodes import RayNodes

_LOOK_EVERY_S = 0.25
"""Interval of the look for new processes; ten times as often, it was 1 % of a step of 2 workers on 2 cores."""


class Listener:
    """Turns the journal's entries into lines."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self.pids: list[int] = []
        """Process ids of the workers, by rank."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            self._speaker.say(
                "step", step=fields["step"], loss=fields["loss"], workers=fields["workers"], pids=self.pids
            )
        elif kind == "recovery":
            found = fields["found_at"] - time.monotonic() + time.time()
            stopped = found + fields["abort_s"]
            step = fields["resumed_after_step"]
            self._speaker.say("failed", at=found, step=step)
            self._speaker.say("stopped", at=stopped, step=step)
            self._speaker.say("restored", at=stopped + fields.get("wait_s", 0.0) + fields["reshard_s"], step=step)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--folder", required=True)
    arguments.add_argument("--steps", type=int, default=1_000_000)
    arguments.add_argument("--every", type=int, default=8, help="steps between checkpoints; 0: none")
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--least", type=int, default=2)
    arguments.add_argument("--shard-group-size", type=int)
    arguments.add_argument("--nodes", help="slots of each node, such as 2,2")
    arguments.add_argument("--parameters", choices=sorted(SHAPES), default="5M")
    arguments.add_argument("--reduction", choices=("exact", "fast"), default="exact")
    arguments.add_argument("--accumulation", choices=("sharded", "local"), default="sharded")
    arguments.add_argument("--no-mirrors", action="store_true")
    arguments.add_argument("--patience-s", type=float, help="how long nobody doubts processes that are stopped")
    arguments.add_argument("--save-s", type=float, default=0.0, help="seconds that storage takes for a worker's part")
    options = arguments.parse_args()
    speaker = Speaker(options.out)
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(RayNodes(os.environ.get("RAY_TMPDIR"))) if options.nodes else None

        newest = [""]

        def add(size: int) -> None:
            assert nodes is not None
            newest[0] = nodes.add(size)
            speaker.say("node", pids=nodes.processes(newest[0])[:1])

        for size in (options.nodes or "").split(","):
            if size:
                add(int(size))
        listener = Listener(speaker)
        checkpoint = rs.CheckpointConfig(every_steps=options.every or None, keep_last=2, at_end=False)
        scaling: dict[str, Any] = {} if nodes else {"cpus_per_worker": 0.25}
        if options.shard_group_size:
            scaling["shard_group_size"] = options.shard_group_size
        run = trainer(
            "ours",
            (options.least, options.workers),
            options.folder,
            steps=options.steps,
            checkpoint=checkpoint,
            engine=rs.EngineConfig(
                reduction=options.reduction, accumulation=options.accumulation, mirrors=not options.no_mirrors
            ),
            parameters=options.parameters,
            patience_s=options.patience_s,
            save_s=options.save_s,
            **scaling,
        ).start_local(listener)

        def obey() -> None:
            for line in sys.stdin:
                word, _, number = line.partition(" ")
                try:
                    match word:
                        case "resize":
                            run.resize(int(number))
                        case "add":
                            add(int(number))
                        case "drain":
                            drain(newest[0], int(number))
                except (RayshardedError, RuntimeError) as error:
                    print(error, file=sys.stderr, flush=True)

        threading.Thread(target=obey, daemon=True).start()
        while not run.is_over():
            status = run.status()
            listener.pids = [status.pids[worker] for worker in status.workers if worker in status.pids]
            time.sleep(_LOOK_EVERY_S)
        with contextlib.suppress(RunFailed):
            run.wait()


if __name__ == "__main__":
    main()
