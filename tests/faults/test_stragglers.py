"""A worker that is slower than its peers is named, with the phase, by the real thing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from tests.training.harness import Collector, Tokens, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]


class SlowInOneWorker(Tokens):
    """The first worker to read its 10th sample takes its time from then on."""

    def __init__(self, folder: Path, seconds: float = 0.08) -> None:
        super().__init__()
        self._marker, self._reads, self._seconds = folder / "slow", 0, seconds

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if self._reads == 10:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                self._marker.write_text(str(os.getpid()))
            except FileExistsError:
                pass
        if self._reads >= 10 and self._marker.read_text() == str(os.getpid()):
            time.sleep(self._seconds)
        return super().__getitem__(index)


def test_a_worker_whose_data_is_slow_is_named_with_the_phase(tmp_path: Path) -> None:
    engine = rs.EngineConfig(prefetch=False)  # read by the worker itself, whose process it can name
    job = make_job(f"{tmp_path}/run", data=SlowInOneWorker(tmp_path), steps=25, engine=engine)
    limits, listener = make_limits(job, 3, look_around_s=0.5), Collector()
    make_driver(job, limits, listener).run()
    slow_pid = int((tmp_path / "slow").read_text())
    (slow,) = [f["worker"] for kind, f in listener.entries if kind == "worker_ready" and f["pid"] == slow_pid]
    found = [fields for kind, fields in listener.entries if kind == "straggler"]
    assert {fields["worker"] for fields in found} == {slow}
    assert found[0]["phase"] == "data"
    assert found[0]["score"] > 1.25
    assert listener.entries[-1][0] == "finished"


def test_a_slow_worker_is_replaced_when_that_is_requested_and_nothing_is_computed_again(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", data=SlowInOneWorker(tmp_path, seconds=0.2), steps=30)
    limits = make_limits(job, 3, min_workers=2, look_around_s=0.5, evict_slower_than=3.0)
    listener = Collector()
    state = make_driver(job, limits, listener).run()
    (leaving,) = [fields for kind, fields in listener.entries if kind == "worker_leaving"]
    assert "slower than its peers" in leaving["reason"]
    assert [kind for kind, _ in listener.entries if kind in ("worker_lost", "recovery")] == []
    assert leaving["worker"] not in state.members
    assert state.result_fingerprint == train(2, steps=30).fingerprint
