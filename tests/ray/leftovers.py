"""Checks for things that a run left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import ray

NUM_SLOTS = 8
"""CPU slots of the shared Ray."""


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 300.0) -> None:
    """Return when the condition holds; fail with `what` if it does not within the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {what() if callable(what) else what}")
        time.sleep(0.05)


def assert_no_slot_is_leaked() -> None:
    """Every CPU slot of the shared Ray is free again, and no actor is alive."""
    wait_until(lambda: ray.available_resources().get("CPU", 0) == NUM_SLOTS, "all CPU slots free")


def processes_marked(marker: str) -> list[str]:
    """The command lines of the living processes that inherited `marker` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and marker.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            except OSError:
                continue
    return found
