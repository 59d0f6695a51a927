"""The plan against the real engine at up to 1,024 workers, of which one exists: every byte, and each phase's peak."""

from __future__ import annotations

from functools import cache

import pytest

import raysharded as rs
from raysharded.planning.memory.footprint import Setting, worker_memory
from raysharded.planning.models.shapes import ModelShapes
from raysharded.planning.trace import Trace
from raysharded.planning.tracing.measurement import measure
from raysharded.planning.traffic.worker_traffic import worker_traffic
from tests.forked import in_a_fork
from tests.planning.one_of_many import LAYERS, RANK, ROUNDS, WideTask, each_observed, engine_of, layout_of, samples

SOME = ("64:8:bfloat16:4+2",)
ALL = tuple(
    f"{workers}:{node}:{dtype}"
    for workers in (8, 64, 256, 1024)
    for node in (0, 8)
    for dtype in ("float32", "bfloat16", "bfloat16:4+1")
)
"""With mirrors, or with parity; `test_truth.py` has mirrors at each landing."""


@cache
def measured(engine: rs.EngineConfig) -> tuple[ModelShapes, Trace]:
    """The shapes and the trace of the model."""
    return measure(WideTask(), engine, samples()[:2], degree=1)


@pytest.mark.procs
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.long)])
def test_bytes_are_equal_and_peaks_are_within_2_percent(cases: tuple[str, ...]) -> None:
    seen = in_a_fork(each_observed, cases, timeout_s=3000.0)
    assert [each["case"] for each in seen] == list(cases)
    for each in seen:
        numbers, settings = each["case"].split(":")[:2], each["case"].split(":")[2:]
        (workers, per_node), engine = map(int, numbers), engine_of(*settings)
        shapes, trace = measured(engine)
        setting = Setting(shapes=shapes, num_microbatches=ROUNDS * workers, engine=engine, trace=trace)
        layout, is_adding = layout_of(workers, per_node, engine), 1 < per_node < workers
        traffic = worker_traffic(setting, layout, rank=RANK, workers_per_node=per_node or 1)
        assert each["sent"] == {kind: sent for kind, sent in traffic.sent.items() if sent}, each["case"]
        assert each["calls"] == {
            "exchanges": ROUNDS * (LAYERS + 1) * (1 + is_adding),
            "all-gathers": ROUNDS * ((LAYERS + 1) + LAYERS),  # the root's stays for backward
            "agreements": 1,
        }
        memory = worker_memory(setting, layout, rank=RANK, workers_per_node=per_node or 1)
        peaks = {
            "forward": each["peaks"]["forward"],
            "backward": max(each["peaks"]["backward"], each["peaks"]["reduce"]),
            "the gradient's norm": each["peaks"]["norm"],
            "the optimizer's step": each["peaks"]["apply"],
        }
        assert max(each["peaks"].values()) == pytest.approx(memory.total, rel=0.02), each["case"]
        assert peaks == pytest.approx(dict(memory.phases), rel=0.02), each["case"]
