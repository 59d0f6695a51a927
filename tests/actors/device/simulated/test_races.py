"""The real engine on simulated streams, in real worker processes: ordered, but not without a wait."""

from __future__ import annotations

import re

import pytest

from tests.actors.device.simulated.removals import removals
from tests.actors.device.simulated.runs import RUNS, findings
from tests.cases import tried_each_time

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("name", tried_each_time(["shards"], RUNS))
def test_the_engine_orders_all_that_it_and_fsdp2_do(name: str) -> None:
    assert findings(name).problems == ()


FEW = {"steps": 2, "microbatches": 2}
WAITS: dict[str, tuple[str, str, str, str, dict[str, int]]] = {
    "memory that is kept": (
        "local",
        "tree_reducer",
        "accelerator().keep_for_current_stream(gradient)",
        "reused while in use",
        {},
    ),
    "snapshot": ("shards", "async_copy", "stream.wait_stream(accelerator().current_stream(device))", "race", FEW),
    "exchange": ("shards", "_fsdp_collectives", "reduce_scatter_stream.wait_stream(current_stream)", "race", FEW),
    "copy ahead": (
        "one worker",
        "collation",
        "accelerator().current_stream(self._device).wait_event(self._done)",
        "race",
        FEW,
    ),
    "state through the device": (
        "a loss",
        "host_group",
        "wait_for(accelerator().record(accelerator().current_stream(device)))",
        "race",
        {},
    ),
}
"""Name -> the run, the module, the call that is removed, the kind of problem, and settings of the run."""


@pytest.mark.parametrize("wait", tried_each_time(["exchange"], WAITS))
def test_a_wait_that_is_removed_is_found(wait: str) -> None:
    """A missing wait leaves one stream unordered with others, so all problems have that stream in common.

    It may also show as a reuse: memory that the stream allocates may still be in use by another one. That depends on
    when the host last waited for the other stream, hence on the speed of the threads that send mirrors.
    """
    name, module, text, kind, settings = WAITS[wait]
    (removal,) = (one for one in removals() if one.module.endswith(f".{module}") and one.text == text)
    problems = findings(name, removal, **settings).problems
    assert kind in {problem.partition(": ")[0] for problem in problems}
    assert set.intersection(*({*re.findall(r"stream \d+|the host", problem)} for problem in problems)), problems
