"""Runs of the real engine in real worker processes on simulated streams, and what they find."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import raysharded as rs
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.actors.device.simulated.accelerator import simulate
from tests.actors.device.simulated.removals import Removal
from tests.training.harness import A_CHANGE, samples, train

_LOCAL = rs.EngineConfig(accumulation="local")
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (2, {}),
    "local": (2, {"engine": _LOCAL}),
    "one worker": (1, {}),
    "replicas": (4, {"shards": 2}),
    "all else": (
        2,
        {
            "engine": rs.EngineConfig(audit_every_steps=2),
            "evaluation": rs.EvalConfig(data=samples(), every_steps=2, num_samples=5),
            "save_every": 1,
        },
    ),
    "a loss": (3, {"kills": [(1, 3, "backward")]}),
    "a prepared change": (
        2,
        {
            "kills": [(1, 2, "backward")],
            "faults": [Fault(worker=WorkerId(0), step=4, phase="data", kind="wait", until=A_CHANGE)],
            "steps": 8,
        },
    ),
    "parity": (4, {"engine": rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))}),
    "bfloat16": (2, {"engine": rs.EngineConfig(param_dtype="bfloat16")}),
}
"""Name -> number of workers, and how they train."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of the workers of one run."""

    problems: tuple[str, ...]
    callers: frozenset[tuple[str, int]]
    """Files and lines of the calls that ordered streams."""


def findings(name: str, removal: Removal | None = None, **others: Any) -> Findings:
    """Findings of a run; `others`: other settings of it. Raises AssertionError if a worker was not watched."""
    workers, how = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"steps": 4, "microbatches": 4} | how | others
        outcome = train(workers, use_gpu=True, prepare=partial(simulate, folder, removal), **settings)
        found = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).iterdir()]
    busy = [each for each in found if each["accesses"] > 10_000 and each["streams"] >= 6]
    assert len(busy) >= workers
    if name == "a prepared change":
        assert any("prepared_s" in fields for fields in outcome.of("generation"))
    return Findings(
        problems=tuple(sorted({problem for each in found for problem in each["problems"]})),
        callers=frozenset((file, line) for each in found for file, line in each["callers"]),
    )
