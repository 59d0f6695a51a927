"""A benchmark whose subject does nothing, for long."""

from __future__ import annotations

import time

from benchmarks.effort import Effort
from benchmarks.result import Line
from benchmarks.subjects import Session


def run(effort: Effort) -> list[Line]:
    with Session() as session:
        session.spawn(["sleep", "600"])
        print("sleeping", session.processes[0].pid, flush=True)  # noqa: T201 - the test reads it
        time.sleep(600)
    return []
