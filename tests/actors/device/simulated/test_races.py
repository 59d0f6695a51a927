"""The real engine on simulated streams, in real worker processes: ordered, but not without a wait."""

from __future__ import annotations

import pytest

from tests.actors.device.simulated.removals import removals
from tests.actors.device.simulated.runs import RUNS, findings
from tests.cases import tried_each_time

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("name", tried_each_time(["shards"], RUNS))
def test_the_engine_orders_all_that_it_and_fsdp2_do(name: str) -> None:
    assert findings(name).problems == ()


@pytest.mark.parametrize(
    ("name", "module", "text", "kind"),
    [
        ("local", "tree_reducer", "accelerator().keep_for_current_stream(gradient)", "reused while in use"),
        ("shards", "async_copy", "stream.wait_stream(accelerator().current_stream(device))", "race"),
        ("shards", "_fsdp_collectives", "reduce_scatter_stream.wait_stream(current_stream)", "race"),
        ("one worker", "collation", "accelerator().current_stream(self._device).wait_event(self._done)", "race"),
    ],
    ids=["memory that is kept", "snapshot", "exchange", "copy ahead"],
)
def test_a_wait_that_is_removed_is_found(name: str, module: str, text: str, kind: str) -> None:
    (removal,) = (one for one in removals() if one.module.endswith(f".{module}") and one.text == text)
    kinds = {problem.partition(": ")[0] for problem in findings(name, removal).problems}
    assert kind in kinds
