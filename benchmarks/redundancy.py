"""The cost of redundancy during training: mirrors and parity compared with none.

python -m benchmarks.redundancy [--workers 6] [--rounds 3] [--steps 12] [--json PATH]

Workers are processes of this machine, with one thread each. *Transfers*: the CPU seconds of all workers together for
one step's mirrors or parity blocks, with nothing else to do, against those of a step without redundancy. Where all
cores are busy, that is what a step takes longer; where some are idle it is less. *Steps*: the median time of a step,
and its CPU seconds, in runs that alternate; differences of a few percent need a machine without other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import raysharded as rs
from benchmarks.workload import task, trainer
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.shards.mirror import Mirror
from raysharded.actors.shards.parity import ParityKeeper
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.store import ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh, Parity, StateSpec, TensorSpec, parity_of
from raysharded.protocol.messages import FromStart, GenerationSpec
from raysharded.rendezvous.server import RendezvousStore
from raysharded.testing.processes import ProcessLauncher

_WARM_UP_STEPS = 4
_TRANSFERS = 20
_TICKS = os.sysconf("SC_CLK_TCK")
CASES = {
    "none": rs.EngineConfig(mirrors=False),
    "mirrors": rs.EngineConfig(),
    "parity (4, 1)": rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 1))),
    "parity (4, 2)": rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 2))),
}


def state_spec() -> StateSpec:
    """The benchmarks' model under Adam."""
    with torch.device("meta"):
        model = task().build_model()
    return StateSpec(
        tensors=tuple(
            TensorSpec(name=f"{kind}.{name}", dtype="float32", shape=tuple(param.shape))
            for name, param in model.named_parameters()
            for kind in ("model", "exp_avg", "exp_avg_sq")
        )
    )


def transfer(rank: int, world: int, port: int, secret: bytes, parity: Parity | None, answer: Any) -> None:
    """One worker that keeps redundancy and does nothing else; answers (CPU seconds, seconds) of one step's."""
    torch.set_num_threads(1)
    groups, store, spec = Groups(use_gpu=False), ShardStore(), state_spec()
    groups.form(
        Rendezvous(
            host="127.0.0.1",
            port=port,
            prefix="transfers",
            secret=secret,
            rank=rank,
            mesh=Mesh(shards=world),
            arrival_timeout_s=120.0,
            collective_timeout_s=120.0,
        )
    )
    members = tuple(WorkerId(number) for number in range(world))
    generation = GenerationSpec(
        generation=GenerationId(1), members=members, source=FromStart(), host="", port=0, prefix=""
    )
    place = RankPosition(spec=generation, worker=WorkerId(rank), mirrors=True, parity=parity)
    keeper = Mirror(place, groups, store) if parity is None else ParityKeeper(place, parity, groups, store)
    taken: list[tuple[float, float]] = []
    for step in range(_WARM_UP_STEPS + _TRANSFERS):
        own = place.begin_snapshot(store, step, spec)
        own.complete = True
        groups.state.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        keeper.start(own)
        keeper.join()
        taken.append((time.process_time() - cpu, time.perf_counter() - wall))
        groups.state.barrier()
    measured = taken[_WARM_UP_STEPS:]
    answer.put((statistics.mean(cpu for cpu, _ in measured), statistics.median(wall for _, wall in measured)))
    answer.close()
    answer.join_thread()
    groups.state.barrier()


def transfers(world: int, parity: Parity | None) -> tuple[float, float]:
    """CPU seconds of all workers, and seconds, for the redundancy of one step."""
    context = multiprocessing.get_context("spawn")
    answer, store = context.Queue(), RendezvousStore("127.0.0.1")
    secret = store.secret("transfers")
    workers = [
        context.Process(target=transfer, args=(r, world, store.port, secret, parity, answer)) for r in range(world)
    ]
    for worker in workers:
        worker.start()
    answers = [answer.get(timeout=240) for _ in workers]
    for worker in workers:
        worker.join()
    return sum(cpu for cpu, _ in answers), max(wall for _, wall in answers)


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that these processes have taken."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


def steps_of(workers: int, steps: int, engine: rs.EngineConfig) -> tuple[float, float]:
    """Seconds, and CPU seconds of all workers, per step."""
    with tempfile.TemporaryDirectory() as folder:
        times: list[float] = []
        cpu: list[float] = []

        def listen(kind: str, _: dict[str, Any]) -> None:
            if kind == "step":
                times.append(time.perf_counter())
                if len(times) in (_WARM_UP_STEPS, steps - 1):  # after the last one they may have exited
                    cpu.append(cpu_s(list(run.status().pids.values())))

        job = trainer("cost", workers, folder, steps=steps, engine=engine, cpus_per_worker=0.25)
        run = job.start_with(ProcessLauncher, listen)
        run.wait()
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.median(gaps[_WARM_UP_STEPS - 1 :]), (cpu[1] - cpu[0]) / (steps - 1 - _WARM_UP_STEPS)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workers", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="none is always run")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    cases = list(dict.fromkeys(["none", *options.cases]))
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    moved: dict[str, list[tuple[float, float]]] = {name: [] for name in cases[1:]}
    for number in range(options.rounds):
        for name in cases[:: 1 if number % 2 == 0 else -1]:
            steps[name].append(steps_of(options.workers, options.steps, CASES[name]))
            print(f"{name}: {steps[name][-1][0]:.3f} s, CPU {steps[name][-1][1]:.3f} s per step", flush=True)
        for name in cases[1:]:
            moved[name].append(transfers(options.workers, parity_of(CASES[name].redundancy)))
            print(f"{name}: transfers {moved[name][-1][1]:.4f} s, CPU {moved[name][-1][0]:.4f} s", flush=True)
    plain_cpu = statistics.median(cpu for _, cpu in steps["none"])
    results: dict[str, dict[str, float]] = {}
    for name in cases:
        results[name] = {
            "step_s": statistics.median(wall for wall, _ in steps[name]),
            "step_cpu_s": statistics.median(cpu for _, cpu in steps[name]),
            "step_ratio": statistics.median(a[0] / b[0] for a, b in zip(steps[name], steps["none"], strict=True)),
        }
        if name in moved:
            cpu = statistics.median(cpu for cpu, _ in moved[name])
            results[name] |= {"transfers_cpu_s": cpu, "transfers_of_a_step": cpu / plain_cpu}
        print(json.dumps({"case": name, "workers": options.workers, **results[name]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
