"""No generator waits for threads when it is ended.

The garbage collector may end an abandoned generator at any moment, in any thread, also while that thread holds a lock
of `threading` itself: to join the pool's threads then would wait for ever.
"""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.interop import slabs
from raysharded.clock import SystemClock
from raysharded.journal.log import Journal, read, segment_keys
from raysharded.journal.reader import read_some
from tests.paths import PACKAGE

_POOLS = ("ThreadPoolExecutor", "Threads")


def _holds_a_pool(node: ast.AST) -> bool:
    calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(isinstance(call, ast.Call) and getattr(call.func, "id", "") in _POOLS for call in calls)


def test_no_generator_yields_within_a_pool_of_threads() -> None:
    pools, found = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not any(f"{pool}(" in text for pool in _POOLS):
            continue  # to parse all files would take seconds
        for node in filter(_holds_a_pool, ast.walk(ast.parse(text))):
            pools += 1
            if any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node)):
                found.append(f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}")
    assert pools > 10
    assert found == []


@pytest.mark.parametrize("slow", [False, True])
def test_an_abandoned_reader_of_a_journal_holds_no_thread(tmp_path: Path, slow: bool) -> None:
    storage = open_storage(str(tmp_path))
    journal = Journal(storage, SystemClock(), "driver")
    for step in range(20):
        journal.append("step", {"step": step}, durable=True)
    times = iter([0.0, 9.0])
    reading = read_some(storage, segment_keys(storage), now=lambda: next(times)) if slow else read(storage)
    for _ in range(10):
        next(reading)
    assert [one.name for one in threading.enumerate() if one.name.startswith("raysharded-journal")] == []


def test_an_abandoned_reader_of_slabs_does_not_wait_for_the_one_that_is_being_read() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def read(slab: int) -> int:
        if slab == 2:
            begun.set()
            ended.set() if may_end.wait(60.0) else None
        return slab

    reading = slabs._ahead(read, [1, 2, 3])
    assert next(reading) == 1
    assert begun.wait(60.0)
    del reading
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60.0)
