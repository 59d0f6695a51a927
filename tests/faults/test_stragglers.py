"""A worker that is slower than its peers is named, with the phase, by the real thing; one that waits is not."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.driver.state import stragglers
from raysharded.ids import WorkerId
from raysharded.testing.processes import ProcessLauncher
from tests.faults import namespaces
from tests.faults.test_links import be_on
from tests.training.harness import Collector, Tokens, files_of, make_driver, make_job, make_limits, train

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


SLOWER = WorkerId(1)
NARROW_MBIT, LEAST_STEPS, MOST_STEPS = 1.0, 8, 60


class SlowerThere(Tokens):
    """Takes a little more time on one of the workers."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.008 if "RAYSHARDED_TEST_SLOWER" in os.environ else 0.0)
        return super().__getitem__(index)


def be_slower_on(node: str, host: namespaces.Host) -> None:
    """In a worker's process."""
    be_on(node, host)
    os.environ["RAYSHARDED_TEST_SLOWER"] = "yes"


def test_where_one_node_s_link_is_slow_no_worker_of_another_node_is_named(tmp_path: Path) -> None:
    """One of these takes longer than its peers in the little that they compute. All wait for the link.

    The run ends when that has lasted for the probes after which a worker is named. The link holds each step back.
    """
    if reason := namespaces.why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with namespaces.segment(2) as network:
        healthy, narrow = network.hosts
        narrow.limit(NARROW_MBIT)
        collector, held_back = Collector(), [0]
        found: dict[int, tuple[object, stragglers.StepTime]] = {}  # one of each probe of all

        def listen(kind: str, fields: dict[str, Any]) -> None:
            collector(kind, fields)
            if kind == "step":
                newest = driver.state.step_times.newest
                if (pace := stragglers.paces_of(newest).get(SLOWER)) is not None:
                    found[id(newest)] = (newest, pace)
                held_back.append(narrow.held_back())
                if len(held_back) > LEAST_STEPS and slow_in_a_row() >= stragglers._TIMES:
                    driver.stop()

        def slow_in_a_row() -> int:
            is_slow = [
                pace.score >= stragglers.SLOW and pace.lost_s >= stragglers._LEAST_S for _, pace in found.values()
            ]
            return max((len(list(run)) for slow, run in groupby(is_slow) if slow), default=0)

        engine = rs.EngineConfig(prefetch=False)  # read by the worker itself, whose process it can name
        job = make_job(f"{tmp_path}/run", data=SlowerThere(), steps=MOST_STEPS, engine=engine)
        prepare = {
            WorkerId(0): partial(be_on, "node-a", healthy),
            SLOWER: partial(be_slower_on, "node-a", healthy),
            WorkerId(2): partial(be_on, "node-b", narrow),
        }
        files = files_of(job)
        launcher = ProcessLauncher(job, host=network.our_address, prepare=prepare)
        driver = Driver(make_limits(job, 3, look_around_s=0.5), launcher, files, SystemClock(), listen)
        driver.run()
    assert min(after - before for before, after in pairwise(held_back)) > 100, "the link held back each step"
    assert slow_in_a_row() >= stragglers._TIMES, f"by itself it would have been named: {found}"
    assert [fields for kind, fields in collector.entries if kind == "straggler"] == []
