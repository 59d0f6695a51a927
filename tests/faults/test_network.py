"""A worker behind a real link that is cut, without a reset, and mended again later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.ids import WorkerId
from raysharded.testing.processes import ProcessLauncher
from tests.faults.namespaces import Network, network, why_not
from tests.ray.leftovers import wait_until
from tests.training.harness import Collector, Outcome, Tokens, files_of, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 10
MICROBATCHES = 4
WORKERS = 3
CUT_OFF = WorkerId(1)
CUT_AFTER_STEP, HOLD_AFTER_STEP = 3, 8
WAIT_S = 240.0
HEARS_WITHIN_S = 150.0
"""TCP repeats lost packets after as long again as the link was cut."""
ESTABLISHED = "01"


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with network() as made:
        yield made


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES, save_every=5)


@dataclass(slots=True)
class Listener:
    """Collects the journal, and acts when the run reaches a step; called by the driver's thread."""

    act_at: Mapping[int, Callable[[], object]]
    done: set[int] = field(default_factory=set)
    collector: Collector = field(default_factory=Collector)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.collector(kind, fields)
        step = fields.get("step", 0)
        if kind == "step" and step in self.act_at and step not in self.done:
            self.done.add(step)
            self.act_at[step]()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(fields) for name, fields in self.collector.entries if name == kind]


def connections(pid: int) -> int:
    """Number of established TCP connections in the network that a process lives in."""
    lines = (
        Path(f"/proc/{pid}/net/tcp").read_text().splitlines() + Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()
    )
    return sum(line.split()[3] == ESTABLISHED for line in lines)


def test_a_worker_behind_a_cut_link_is_abandoned_and_disturbs_nobody_when_it_is_mended(
    link: Network, tmp_path: Path
) -> None:
    job = make_job(f"{tmp_path}/run", steps=STEPS, microbatches=MICROBATCHES, save_every=5, data=Tokens())
    limits = make_limits(
        job,
        WORKERS,
        min_workers=1,
        max_worker_losses=None,
        hang_timeout_s=2.0,
    )
    launcher = ProcessLauncher(job, host=link.our_address, prepare={CUT_OFF: link.enter})
    pids: list[int] = []

    def cut() -> None:
        pids.append(launcher.pid(CUT_OFF))
        assert connections(pids[0]) > 0  # it really communicates through the link
        link.cut()
        launcher.cut(CUT_OFF)

    mended = threading.Event()
    listener = Listener({CUT_AFTER_STEP: cut, HOLD_AFTER_STEP: lambda: mended.wait(HEARS_WITHIN_S)})
    files = files_of(job)
    driver = Driver(limits, launcher, files, SystemClock(), listener)
    thread = threading.Thread(target=driver.run, daemon=True)
    thread.start()
    wait_until(lambda: bool(listener.of("recovery")), "a recovery", WAIT_S)
    generation = listener.of("generation")[-1]["generation"]
    assert Path(f"/proc/{pids[0]}").exists()
    assert connections(pids[0]) > 0  # it does not know yet: it still waits for the others
    link.mend()
    wait_until(lambda: connections(pids[0]) == 0, "the worker hears that its generation is over", HEARS_WITHIN_S)
    assert Path(f"/proc/{pids[0]}").exists()
    mended.set()
    thread.join(180)
    assert not thread.is_alive()
    assert [fields["worker"] for fields in listener.of("worker_lost")] == [CUT_OFF]
    assert len(listener.of("recovery")) == 1
    members = [fields["members"] for fields in listener.of("generation") if fields["generation"] >= generation]
    assert all(CUT_OFF not in those for those in members)
    assert not Path(f"/proc/{pids[0]}").exists()  # closing ended it
    numbers = tuple(listener.collector.numbers[step] for step in range(1, STEPS + 1))
    assert (repr(numbers), driver.state.result_fingerprint) == undisturbed().bits
