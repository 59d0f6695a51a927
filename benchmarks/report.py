"""The cost of a long run's report: a journal of a million steps, read, checked and drawn.

A short real run gives the entries. Its steps are then repeated, each with another number, time, loss and digest of the
samples read, so that the check of the samples finds the expected ones. A segment holds as many steps as the driver
writes in two seconds when a step takes 70 ms.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.effort import Effort
from benchmarks.memory import peak_bytes, reset_peak
from benchmarks.result import Line
from benchmarks.workload import BATCH, NUM_SAMPLES, trainer
from raysharded.checkpoint import Storage, open_storage
from raysharded.data.ledger import expected_digests
from raysharded.journal import log
from raysharded.report import load
from raysharded.testing.processes import fit

NAME = "report"
STEPS, QUICK_STEPS = 1_000_000, 50_000
_STEPS_OF_A_SEGMENT = 28
_STEP_S = 0.07
_REAL_STEPS = 3


def run(effort: Effort) -> list[Line]:
    """All lines: about three minutes, most of them for making the journal; of a shorter run when quick."""
    rounds, steps = effort.pick(quick=1, hour=1, full=5), effort.pick(quick=QUICK_STEPS, hour=STEPS, full=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        size = make_journal(folder, steps)
        seconds, pages = [], []
        before = reset_peak()
        for _ in range(rounds):
            began = time.perf_counter()
            report = load(folder)
            page = report.as_html()
            seconds.append(time.perf_counter() - began)
            pages.append(len(page.encode()) / 1e6)
            assert report.ok
            assert report.ledger is not None
            assert report.ledger.steps_checked == steps
        peak = (peak_bytes() - before) / 1e9
    what = f"report of {steps:,} steps"
    ours = "raysharded"

    def line(of: str, unit: str, values: list[float], asked: str | None = None) -> Line:
        return Line(benchmark=NAME, what=f"{what}: {of}", subject=ours, unit=unit, values=values, asked=asked)

    return [
        line("read, checked and drawn", "s", seconds, None if steps < STEPS else "under 10"),
        line("its page", "MB", pages, "under 5"),
        line("its journal", "MB", [size / 1e6]),
        line("memory of the caller beyond what it had before", "GB", [peak]),
    ]


def make_journal(url: str, steps: int) -> int:
    """Write the journal of a run of so many steps; its size in bytes."""
    first, step, last = _real_entries()
    storage, number, size = open_storage(url), 0, 0
    began, numbers = float(step["at"]), np.arange(1, steps + 1)
    segment: list[dict[str, Any]] = first

    def put() -> None:
        nonlocal number, size
        number += 1
        entries = [{"kind": "segment", "writer": "benchmark"}, *segment]
        size += _put(storage, number, entries)
        segment.clear()

    put()
    for rows, (low, high) in expected_digests(numbers, BATCH, NUM_SAMPLES, 0):
        for index, words in zip(numbers[rows].tolist(), zip(low.tolist(), high.tolist(), strict=True), strict=True):
            digest = [f"{word:016x}" for word in words]
            loss = 2.0 + 6.0 * math.exp(-index / 2e5) + 0.1 * math.sin(index)
            segment.append(step | {"step": index, "at": began + index * _STEP_S, "digest": digest, "loss": loss})
            if len(segment) == _STEPS_OF_A_SEGMENT:
                put()
    segment += [one | {"at": began + (steps + 1) * _STEP_S} | {"step": steps} for one in last]
    put()
    return size


def _put(storage: Storage, number: int, entries: list[dict[str, Any]]) -> int:
    data = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries).encode()
    storage.write(log.segment_key(number), [data])
    return len(data)


def _real_entries() -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Entries of a run of a few steps: those before the first step, the last step, and those that end the run."""
    with tempfile.TemporaryDirectory() as folder:
        job = trainer("report", 2, folder, steps=_REAL_STEPS)
        fit(job)
        entries = [entry for entry in log.read(open_storage(job.url)) if entry["kind"] not in ("event", "recording")]
    at = [index for index, entry in enumerate(entries) if entry["kind"] == "step"]
    before, ended = entries[: at[0]], [entry for entry in entries if entry["kind"] == "finished"]
    return [entry | ({"max_steps": STEPS} if "max_steps" in entry else {}) for entry in before], entries[at[-1]], ended
