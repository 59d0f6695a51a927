"""What exact reduction and mirrors cost: raysharded's step against a plain FSDP2 loop under torchrun, alternately.

python benchmarks/step_cost.py [--workers 4] [--rounds 5] [--steps 16] [--json PATH]

Both train the same model on the same samples in the same batches, with one thread per worker. A pair of runs gives a
ratio of their median step times; the figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import raysharded as rs
from benchmarks.workload import trainer

_WARM_UP_STEPS = 3


def plain(workers: int, steps: int, *, no_sync: bool) -> float:
    """Median seconds per step of the plain loop."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone"]
    command += [str(Path(__file__).with_name("plain_fsdp2.py")), f"--steps={steps}"]
    done = subprocess.run(command + ["--no-sync"] * no_sync, check=True, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    seconds: list[float] = json.loads(line)["seconds"]
    return statistics.median(seconds[_WARM_UP_STEPS:])


def ours(workers: int, steps: int, engine: rs.EngineConfig) -> float:
    """Median seconds per step of raysharded."""
    with tempfile.TemporaryDirectory() as folder:
        times: list[float] = []

        def listen(kind: str, _: dict[str, Any]) -> None:
            if kind == "step":
                times.append(time.perf_counter())

        trainer("cost", workers, folder, steps=steps, engine=engine, cpus_per_worker=0.25).fit(listen)
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.median(gaps[_WARM_UP_STEPS - 1 :])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    cases = {
        "sharded accumulation": (rs.EngineConfig(accumulation="sharded"), False),
        "local accumulation": (rs.EngineConfig(accumulation="local"), True),
    }
    results = {}
    for name, (engine, no_sync) in cases.items():
        pairs = []
        for _ in range(options.rounds):
            pair = (
                ours(options.workers, options.steps, engine),
                plain(options.workers, options.steps, no_sync=no_sync),
            )
            pairs.append(pair)
            print(
                f"{name}: raysharded {pair[0]:.3f} s, plain FSDP2 {pair[1]:.3f} s, ratio {pair[0] / pair[1]:.3f}",
                flush=True,
            )
        ratios = [a / b for a, b in pairs]
        results[name] = {
            "raysharded_s": statistics.median(a for a, _ in pairs),
            "plain_s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
        print(f"{name}, {options.workers} workers: median ratio {results[name]['ratio']:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
