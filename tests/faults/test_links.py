"""Workers on two nodes of which one cannot send to the other any more, while the driver reaches both."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from raysharded.actors.process import environment
from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.ids import WorkerId
from raysharded.testing.processes import ProcessLauncher
from tests import patches
from tests.faults.namespaces import Host, Segment, segment, why_not
from tests.training.harness import Collector, Outcome, Tokens, files_of, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS, MICROBATCHES = 40, 4
CUT_AFTER_STEP = 3
HANG_S = 2.0
NODES = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
WAIT_S = 180.0
WITHIN_S = 60.0
"""Far more than on an idle machine; before, each of six generations took half as long to fail."""


@pytest.fixture(scope="module")
def network() -> Iterator[Segment]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with segment(2) as made:
        yield made


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES)


def be_on(node: str, host: Host) -> None:
    """In a worker's process: be in this network, and believe to be on this node."""
    host.enter()
    patches.replace(platform, "node", lambda: node)
    patches.replace(environment, "node_id", lambda: node)


def test_a_link_that_is_broken_one_way_leaves_a_node_out_until_it_is_mended(network: Segment, tmp_path: Path) -> None:
    a, b = network.hosts
    job = make_job(f"{tmp_path}/run", steps=STEPS, microbatches=MICROBATCHES, data=Tokens())
    limits = make_limits(
        job, 4, min_workers=1, max_worker_losses=None, hang_timeout_s=HANG_S, link_pause_s=0.5, prepare_within_s=0.0
    )
    collector, at = Collector(), dict[str, float]()

    def listen(kind: str, fields: dict[str, Any]) -> None:
        collector(kind, fields)
        if kind == "generation" and "excluded" in fields:
            at.setdefault("without", time.monotonic())
        if kind == "step" and fields["step"] == CUT_AFTER_STEP and "cut" not in at:
            a.cut_to(b)
            at["cut"] = time.monotonic()
        if kind == "step" and "without" in at:
            at.setdefault("progress", time.monotonic())
        if kind == "step" and fields["step"] == CUT_AFTER_STEP + 4:
            a.mend_to(b)
            at["mended"] = time.monotonic()

    prepare = {WorkerId(one): partial(be_on, node, a if node == "node-a" else b) for one, node in NODES.items()}
    files = files_of(job)
    launcher = ProcessLauncher(job, host=network.our_address, prepare=prepare)
    driver = Driver(limits, launcher, files, SystemClock(), listen)
    thread = threading.Thread(target=driver.run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()

    def of(kind: str) -> list[dict[str, Any]]:
        return [dict(fields) for name, fields in collector.entries if name == kind]

    assert at.keys() == {"cut", "without", "progress", "mended"}
    assert at["progress"] - at["cut"] < WITHIN_S
    assert of("worker_lost") == []
    (broken,) = of("links_broken")
    assert broken["pairs"] == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert broken["nodes"] == [["node-a", "node-b"]]
    assert len(of("links_mended")) == 1
    without, whole = [(one["members"], one["source"]) for one in of("generation")][-2:]
    assert without == ([0, 1], "memory")
    assert (sorted(whole[0]), whole[1]) == ([0, 1, 2, 3], "memory")
    (recovery,) = of("recovery")
    assert recovery["steps_redone"] <= 1  # a step whose mirrors were on their way
    numbers = tuple(collector.numbers[step] for step in range(1, STEPS + 1))
    assert (repr(numbers), driver.state.result_fingerprint) == undisturbed().bits
