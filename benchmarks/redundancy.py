"""What redundancy costs beside training: steps with none, with mirrors and with parity, alternately.

python benchmarks/redundancy.py [--workers 6] [--rounds 5] [--steps 16] [--json PATH]

Workers are processes of this machine, with one thread each. Of every run: the median seconds per step, the CPU seconds
per step of all workers together, and the bytes that redundancy keeps, of one step, against those of the snapshots. On
cores that are all busy CPU seconds are what a step waits for. The figures are medians of the ratios to the run without
redundancy of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from workload import trainer

import raysharded as rs
from raysharded.testing.processes import ProcessLauncher

_WARM_UP_STEPS = 4
_TICKS = os.sysconf("SC_CLK_TCK")
CASES = {
    "none": rs.EngineConfig(mirrors=False),
    "mirrors": rs.EngineConfig(),
    "parity (4, 1)": rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 1))),
    "parity (4, 2)": rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 2))),
}


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that these processes have taken."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


def measured(workers: int, steps: int, engine: rs.EngineConfig) -> tuple[float, float]:
    """Seconds, and CPU seconds of all workers, per step."""
    with tempfile.TemporaryDirectory() as folder:
        times: list[float] = []
        cpu: list[float] = []

        def listen(kind: str, _: dict[str, Any]) -> None:
            if kind == "step":
                times.append(time.perf_counter())
                if len(times) in (_WARM_UP_STEPS, steps - 1):  # after the last one they may be gone
                    cpu.append(cpu_s(list(run.status().pids.values())))

        run = trainer("cost", workers, folder, steps=steps, engine=engine, cpus_per_worker=0.25).start_with(
            ProcessLauncher, listen
        )
        run.wait()
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.median(gaps[_WARM_UP_STEPS - 1 :]), (cpu[1] - cpu[0]) / (steps - 1 - _WARM_UP_STEPS)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workers", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.cases}
    for number in range(options.rounds):
        for name in options.cases[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measured(options.workers, options.steps, CASES[name]))
            print(f"{name}: {found[name][-1][0]:.3f} s, CPU {found[name][-1][1]:.3f} s per step", flush=True)
    first = found[options.cases[0]]
    results = {
        name: {
            "step_s": statistics.median(wall for wall, _ in runs),
            "cpu_s": statistics.median(cpu for _, cpu in runs),
            "ratio": statistics.median(a[0] / b[0] for a, b in zip(runs, first, strict=True)),
            "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(runs, first, strict=True)),
        }
        for name, runs in found.items()
    }
    for name, result in results.items():
        print(json.dumps({"case": name, "workers": options.workers, **result}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
