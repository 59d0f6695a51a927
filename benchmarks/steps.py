"""What a step costs beside a plain FSDP2 loop, at 2 and 4 workers, of 5M and 50M parameters; and where its time goes.

A round runs every subject once, one after the other, for some steps of which the first do not count; its figure is the
median of the others. raysharded and Ray Train run on a Ray of one node, the plain loop under torchrun.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import raysharded as rs
from benchmarks.result import ROOT, Line, alternate, ratios
from benchmarks.workload import trainer

NAME = "steps"
PLAIN = "torchrun, plain FSDP2"
RAY_TRAIN = "Ray Train"
_WARM_UP_STEPS = 2
_RAY_TRAIN_PYTHON = ROOT / ".venv-bench" / "ray-train" / "bin" / "python"
_RAY_TRAIN_PROGRAM = "benchmarks.peers.ray_train"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How raysharded can be set."""

    name: str
    engine: rs.EngineConfig
    asked: str | None = None


EXACT = Way(name="raysharded, exact, mirrors", engine=rs.EngineConfig(), asked="at most 1.05")
EXACT_ALONE = Way(name="raysharded, exact, no mirrors", engine=rs.EngineConfig(mirrors=False))
FAST = Way(name="raysharded, fast, mirrors", engine=rs.EngineConfig(reduction="fast"))
FAST_ALONE = Way(
    name="raysharded, fast, no mirrors", engine=rs.EngineConfig(reduction="fast", mirrors=False), asked="at most 1.01"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size of the model and of the run."""

    parameters: str
    workers: int
    steps: int
    """Of each run, those included that do not count."""
    ways: tuple[Way, ...]
    ray_train: bool = False
    """Its script is of the model of 5M parameters."""

    @property
    def what(self) -> str:
        return f"step, {self.parameters} parameters, {self.workers} workers"


CASES = (
    Case(parameters="5M", workers=4, steps=10, ways=(EXACT, EXACT_ALONE, FAST, FAST_ALONE), ray_train=True),
    Case(parameters="5M", workers=2, steps=10, ways=(EXACT, FAST_ALONE), ray_train=True),
    Case(parameters="50M", workers=4, steps=5, ways=(EXACT, FAST_ALONE)),
    Case(parameters="50M", workers=2, steps=5, ways=(EXACT, FAST_ALONE)),
)
QUICK_CASES = (Case(parameters="5M", workers=2, steps=5, ways=(EXACT, FAST_ALONE), ray_train=True),)


def run(*, quick: bool) -> list[Line]:
    """All lines. Full: about twenty minutes; quick: one."""
    return [line for case in (QUICK_CASES if quick else CASES) for line in measured(case, 1 if quick else 5)]


def measured(case: Case, rounds: int) -> list[Line]:
    """One case, all of its subjects in turn."""
    phases: dict[str, list[dict[str, float]]] = {way.name: [] for way in case.ways}
    subjects: dict[str, Callable[[], float]] = {PLAIN: lambda: plain(case)}
    for way in case.ways:
        subjects[way.name] = lambda way=way: ours(case, way, phases[way.name])  # type: ignore[misc]  # bound at once
    absent = why_no_ray_train() if case.ray_train else None
    if case.ray_train and absent is None:
        subjects[RAY_TRAIN] = lambda: ray_train(case)
    found = alternate(subjects, rounds)
    asked = {way.name: way.asked for way in case.ways}
    lines = [
        Line(
            benchmark=NAME,
            what=case.what,
            subject=name,
            unit="s",
            values=values,
            ratio=None if name == PLAIN else ratios(values, found[PLAIN]),
            against="" if name == PLAIN else "times the plain loop",
            asked=asked.get(name),
        )
        for name, values in found.items()
    ]
    if absent:
        lines.append(Line(benchmark=NAME, what=case.what, subject=RAY_TRAIN, unit="s", values=[], note=absent))
    return lines + [line for way in case.ways for line in where_it_goes(case, way, phases[way.name])]


def where_it_goes(case: Case, way: Way, rounds: Sequence[dict[str, float]]) -> list[Line]:
    """The phases of a step, of the worker that reports it, as the journal has them."""
    names = sorted({name for one in rounds for name in one})
    return [
        Line(
            benchmark=NAME,
            what=f"{case.what}: {name}",
            subject=way.name,
            unit="s",
            values=[one.get(name, 0.0) for one in rounds],
        )
        for name in names
    ]


def plain(case: Case) -> float:
    """Median seconds per step of the plain loop."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.workers}", "--standalone"]
    command += ["-m", "benchmarks.peers.plain_fsdp2", f"--steps={case.steps}", f"--parameters={case.parameters}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=_TIMEOUT_S)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    seconds: list[float] = json.loads(line)["seconds"]
    return statistics.median(seconds[_WARM_UP_STEPS:])


def ours(case: Case, way: Way, phases: list[dict[str, float]]) -> float:
    """Median seconds per step of raysharded; the medians of its phases are added to `phases`."""
    times: list[float] = []
    seconds: list[dict[str, float]] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            times.append(time.perf_counter())
            seconds.append(dict(fields["seconds"]))

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            f"steps-{time.time_ns()}",
            case.workers,
            folder,
            steps=case.steps,
            engine=way.engine,
            parameters=case.parameters,
            cpus_per_worker=1 / case.workers,
        ).fit(listen)
    counted = seconds[_WARM_UP_STEPS:]
    names = sorted({name for one in counted for name in one})
    phases.append({name: statistics.median(one.get(name, 0.0) for one in counted) for name in names})
    return statistics.median(_gaps(times))


def why_no_ray_train() -> str | None:
    """Why it is not measured; None if it is."""
    if not _RAY_TRAIN_PYTHON.exists():
        return f"there is no {_RAY_TRAIN_PYTHON.relative_to(ROOT)}: `make bench` makes it"
    return None


def ray_train(case: Case) -> float:
    """Median seconds per step of Ray Train, without checkpoints: a step is done when its last rank says so."""
    from benchmarks.workload import write_order

    with tempfile.TemporaryDirectory() as folder:
        lines, order = Path(folder, "lines"), Path(folder, "order.npy")
        write_order(order, case.steps)
        command = [_RAY_TRAIN_PYTHON, "-m", _RAY_TRAIN_PROGRAM, "--out", lines, "--order", order, "--folder", folder]
        more = ["--steps", str(case.steps), "--every", "0", "--workers", str(case.workers)]
        subprocess.run([*map(str, command), *more], check=True, capture_output=True, cwd=ROOT, timeout=_TIMEOUT_S)
        done: dict[int, float] = {}
        for line in lines.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                done[event["step"]] = max(done.get(event["step"], 0.0), event["at"])
    return statistics.median(_gaps([done[step] for step in sorted(done)]))


def _gaps(times: Sequence[float]) -> list[float]:
    """Between steps, without the first ones."""
    return [b - a for a, b in pairwise(times)][_WARM_UP_STEPS - 1 :]
