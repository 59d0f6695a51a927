"""The cost of large runs, without a cluster: planning a change of size, the driver's work, the size of written data.

Everything is computed by one process. The shapes are those of Llama models with Adam in float32; Llama 3.2 1B without
its tied embedding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.effort import Effort
from benchmarks.memory import peak_bytes
from benchmarks.planner import MODELS, Change, measure
from benchmarks.result import Line
from benchmarks.simulated import STEP_S, Simulated, Work
from raysharded.checkpoint import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.boxes import BoxTable, Int64, padded
from raysharded.checkpoint.format.encoding import encode
from raysharded.checkpoint.format.paths import data_path
from raysharded.checkpoint.format.shardfile import chunk_size_for
from raysharded.checkpoint.writer import MAX_INLINE_CHUNKS
from raysharded.ids import GenerationId
from raysharded.layout import StateSpec, shard_map
from raysharded.protocol.messages import save_id, save_prefix

NAME = "scale"

_WORLDS = (64, 512, 1024, 8192)
_LOST = 8
_ASKED_PLANS = {("7B", 1024): "under 0.5 s", ("405B", 8192): "under 10 s"}
_CREWS, _QUICK_CREWS = (1000, 10_000), (100, 1000)
"""Simulated workers."""
_LOOK_AROUND_STEPS = 100
"""The members of 10,000 are queried for their speed every 500 s: once in so many steps of 5 s."""
_SAVES = (("7B", 64), ("7B", 1024), ("70B", 1024), ("405B", 1024))
_HEADER_BYTES = 1 << 16


def run(effort: Effort) -> list[Line]:
    """All lines: some minutes when full; of smaller runs when quick."""
    rounds = effort.pick(quick=1, hour=1, full=5)
    if effort is Effort.QUICK:
        return [*plans(rounds, _WORLDS[:2]), *memory(), *driver(rounds, _QUICK_CREWS), *manifests(_SAVES[:1])]
    return [*plans(rounds, _WORLDS), *memory(), *driver(rounds, _CREWS), *manifests(_SAVES)]


# -- planning --


def plans(rounds: int, worlds: Sequence[int]) -> list[Line]:
    """Time until a change can begin: the order of ranks, which the driver chooses, and then the plan of one worker, as
    all workers plan at once."""
    pairs = [(model, world) for model in MODELS for world in worlds]
    cases = {
        (model, world): Change(model=model, before=world, after=world - _LOST)
        for model, world in {*pairs, *_ASKED_PLANS}
    }
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    wire: dict[tuple[str, int], float] = {}
    for number in range(rounds):
        for case in sorted(cases):
            figures = measure(cases[case], number, whole=False)
            found[case].append(figures.order_s + figures.worker_s)
            wire[case] = figures.wire_of_state
    lines = []
    for model, world in sorted(cases, key=lambda case: (list(MODELS).index(case[0]), case[1])):
        case = model, world
        what = f"planning, {model} from {world} to {world - _LOST} workers"
        lines += [
            _line(what, "s", found[case], asked=_ASKED_PLANS.get(case)),
            _line(f"{what}: bytes on the wire over the state's", "", [wire[case]]),
        ]
    if len(worlds) > 1:
        for model in MODELS:
            ends = [statistics.median(found[model, world]) for world in (worlds[0], worlds[-1])]
            power = growth(ends, (worlds[0], worlds[-1]))
            lines.append(_growth_line(f"planning, {model}", worlds[0], worlds[-1], [power]))
    return lines


def memory() -> list[Line]:
    """The most memory of a process that plans the largest change and nothing else, its imports included."""
    command = [sys.executable, "-m", "benchmarks.scale", "--plan", "405B", "--workers", "8192"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, before = (int(word) * 1024 / 1e9 for word in done.stdout.split()[-2:])
    note = f"{before:.2f} GB of it before the planning"
    what = "peak memory, planning 405B from 8192 to 8184 workers"
    return [_line(what, "GB", [peak], asked="under 2 GB", note=note)]


# -- the driver --


@dataclass(slots=True)
class _Seen:
    """Figures of one number of workers, by round."""

    start: list[Work] = field(default_factory=list)
    steps: list[Work] = field(default_factory=list)
    loss: list[Work] = field(default_factory=list)
    rejoin: list[Work] = field(default_factory=list)


def driver(rounds: int, crews: Sequence[int]) -> list[Line]:
    """The driver's computations, at several numbers of workers."""
    seen = {workers: _simulated(workers, rounds) for workers in crews}
    lines: list[Line] = []
    for workers, found in seen.items():
        asked = "under 1 %" if workers == _CREWS[-1] else None
        share = [100 * one.total_s / _LOOK_AROUND_STEPS / STEP_S for one in found.steps]
        who = f"driver, {workers} workers"
        per_step = [one.journal_bytes / _LOOK_AROUND_STEPS for one in found.steps]
        lines += [
            _line(f"{who}: share of a step of {STEP_S:g} s", "%", share, asked=asked),
            _line(f"{who}: journal per step", "bytes", per_step),
            _line(f"{who}: start", "s", [one.total_s for one in found.start]),
        ]
        for name, works in ((f"loss of {_LOST}", found.loss), (f"{_LOST} join", found.rejoin)):
            lines += [
                _line(f"{who}: {name}", "s", [one.total_s for one in works]),
                _line(f"{who}: {name}, longest single decision", "s", [one.slowest_s for one in works]),
                _line(f"{who}: {name}, journal", "bytes", [float(one.journal_bytes) for one in works]),
            ]
    few, many = crews[0], crews[-1]
    of: dict[str, Callable[[_Seen], list[Work]]] = {
        "driver, a step": lambda one: one.steps,
        "driver, start": lambda one: one.start,
        f"driver, loss of {_LOST}": lambda one: one.loss,
        f"driver, {_LOST} join": lambda one: one.rejoin,
    }
    for name, which in of.items():
        pairs = zip(which(seen[few]), which(seen[many]), strict=True)
        powers = [growth((a.total_s, b.total_s), (few, many)) for a, b in pairs]
        lines.append(_growth_line(name, few, many, powers))
    return lines


def _simulated(workers: int, rounds: int) -> _Seen:
    seen = _Seen()
    with tempfile.TemporaryDirectory() as folder:
        crew = Simulated(folder=folder, workers=workers, spec=MODELS["7B"].state)
        with crew.measured() as work:
            crew.begin()
        seen.start += work
        for _ in range(rounds):
            crew.run_to(crew.state.step + 2)
            with crew.measured() as work:
                crew.run_to(crew.state.step + _LOOK_AROUND_STEPS)
            seen.steps += work
            with crew.measured() as work:
                crew.lose(_LOST)
            seen.loss += work
            crew.run_to(crew.state.step + 2)
            with crew.measured() as work:
                crew.rejoin()
            seen.rejoin += work
        crew.close()
    return seen


# -- what is written --


def manifests(cases: Sequence[tuple[str, int]]) -> list[Line]:
    """The manifest of a checkpoint and its index, and the driver's time to make them from its workers' parts."""
    lines = []
    for model, workers in cases:
        spec = MODELS[model].state
        manifest = manifest_of(spec, workers)
        began = time.perf_counter()
        encoded = encode(manifest)
        seconds = time.perf_counter() - began
        size = len(encoded.manifest) + len(encoded.index)
        boxes = sum(len(file.boxes) for file in manifest.files)
        who = f"checkpoint, {model} of {workers} workers"
        note = f"{boxes} boxes; {1e6 * size / spec.total_bytes:.0f} bytes per MB of state"
        lines += [
            _line(f"{who}: manifest and index", "MB", [size / 1e6], note=note),
            _line(f"{who}: making them", "s", [seconds]),
        ]
    return lines


def manifest_of(spec: StateSpec, workers: int) -> Manifest:
    """The manifest of a run's checkpoint as the driver makes it, with random digests."""
    generation = GenerationId(1)
    prefix = save_prefix(1000, generation, "0123abcd")
    names = tuple(tensor.name for tensor in spec.tensors)
    width = max(len(tensor.shape) for tensor in spec.tensors)
    whole: Int64 = padded([tensor.shape for tensor in spec.tensors], width, 1)
    ndim = np.array([len(tensor.shape) for tensor in spec.tensors], np.int32)
    random, files = np.random.default_rng(0), []
    for rank in range(workers):
        shards = shard_map(spec, workers, rank)
        mine = (rank == 0) | ~spec.replicated[shards.tensor]
        tensor = shards.tensor[mine]
        sizes, offsets = whole[tensor], np.zeros((len(tensor), width), np.int64)
        cut = ndim[tensor] > 0
        offsets[cut, 0] = shards.row_start[mine][cut]
        sizes[cut, 0] = (shards.row_stop - shards.row_start)[mine][cut]
        nbytes = (shards.line_stop - shards.line_start)[mine]
        start = _HEADER_BYTES + np.concatenate([[0], np.cumsum(nbytes)[:-1]])
        table = BoxTable(
            names=names, tensor=tensor.astype(np.int32), ndim=ndim[tensor], offsets=offsets, sizes=sizes, start=start
        )
        size, chunk = int(start[-1] + nbytes[-1]), chunk_size_for(nbytes.tolist())
        chunks = -(-size // chunk)
        inline = chunks <= MAX_INLINE_CHUNKS
        files.append(
            FileRecord(
                path=data_path(prefix, f"rank{rank:05d}", partitioned=True, subfolder=""),
                size_bytes=size,
                chunk_size_bytes=chunk,
                digests=random.bytes(32 * chunks) if inline else b"",
                digest_table="" if inline else random.bytes(32).hex(),
                boxes=table,
            )
        )
    return Manifest(
        run="scale",
        step=1000,
        generation=generation,
        save_id=save_id(generation, "0123abcd"),
        writer="0123abcd",
        created_at=0.0,
        tensors={tensor.name: TensorInfo(dtype=tensor.dtype, shape=tensor.shape) for tensor in spec.tensors},
        files=tuple(files),
    )


# -- lines --


def growth(costs: Sequence[float], sizes: Sequence[int]) -> float:
    """The exponent e of cost ~ size ** e between two sizes: 1 is in proportion, 2 is its square."""
    return math.log(costs[1] / costs[0]) / math.log(sizes[1] / sizes[0])


def _growth_line(what: str, few: int, many: int, powers: list[float]) -> Line:
    note = f"exponent from {few} to {many} workers; 1: in proportion to them"
    return _line(f"{what}: growth", "", powers, note=note)


def _line(what: str, unit: str, values: list[float], *, asked: str | None = None, note: str = "") -> Line:
    return Line(benchmark=NAME, what=what, subject="raysharded", unit=unit, values=values, asked=asked, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan one change; print the peak and the earlier memory in KiB.")
    parser.add_argument("--plan", choices=sorted(MODELS), required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    before = peak_bytes() >> 10
    measure(Change(model=options.plan, before=options.workers, after=options.workers - _LOST), 0, whole=False)
    print(peak_bytes() >> 10, before)


if __name__ == "__main__":
    main()
