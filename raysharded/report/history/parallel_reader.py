"""Parallel parsing of a long journal in other processes, on all cores: Python parses on one core at a time.

Each process gets some runs of segments, and returns their contents in order: columns for consecutive steps, and every
other segment unchanged. The processes run this module. They are no forks of the caller, which may have threads, and do
not import its `__main__`, which may be a script or a notebook.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

from raysharded.checkpoint import Storage, open_storage
from raysharded.journal.log import DAMAGE
from raysharded.journal.reader import read_some, steps_of
from raysharded.report.history.step_table import Columns

Part: TypeAlias = tuple[str, bytes] | tuple[str, int, Columns]
"""A segment with its key; or the columns of steps, with the last segment's key and its last line."""
FEWEST = 4000
"""Number of segments from which the start of processes is worth its cost."""
_OF_A_RUN = 64
_MOST_PROCESSES = 4


class Unavailable(Exception):
    """The other processes failed: their storage differs from the caller's, for example, or they were killed."""


def parts_of(url: str, keys: Sequence[str]) -> Iterator[Part]:
    """The contents of these segments, in order. May raise Unavailable after some of them."""
    runs = [keys[start : start + _OF_A_RUN] for start in range(0, len(keys), _OF_A_RUN)]
    count = min(_MOST_PROCESSES, os.cpu_count() or 1, len(runs))
    with ExitStack() as stack:
        try:
            processes = [_start(stack) for _ in range(count)]
            for number, process in enumerate(processes):
                _ask(process, url, runs[number::count])
            for number in range(len(runs)):
                answers = processes[number % count].stdout
                assert answers is not None
                yield from pickle.load(answers)  # noqa: S301 - from a process that this one started
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise Unavailable from error


def _start(stack: ExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(process.stdout.close)
    return process


def _ask(process: subprocess.Popen[bytes], url: str, runs: Sequence[Sequence[str]]) -> None:
    """Send the request. Returns when the process has begun, if the request is more than a pipe holds."""
    assert process.stdin is not None
    with process.stdin as asked:
        pickle.dump((url, runs), asked)


def main() -> None:
    gc.disable()  # it would scan all entries repeatedly; none is in a cycle
    url, runs = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    storage = open_storage(url)
    for run in runs:
        pickle.dump(_parsed(storage, run), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


def _parsed(storage: Storage, run: Sequence[str]) -> list[Part]:
    parts: list[Part] = []
    waiting: list[tuple[str, bytes]] = []
    steps: list[dict[str, Any]] = []

    def give() -> None:
        if waiting:
            parts.extend(_columns(waiting, steps))
        waiting.clear()
        steps.clear()

    for key, segment in read_some(storage, run):
        found = steps_of(segment)
        if found:
            waiting.append((key, segment))
            steps.extend(found)
        else:
            give()
            parts.append((key, segment))
    give()
    return parts


def _columns(segments: Sequence[tuple[str, bytes]], steps: Sequence[dict[str, Any]]) -> list[Part]:
    try:
        key, last = segments[-1]
        return [(key, last.count(b"\n"), Columns.of(steps))]
    except DAMAGE:
        return list(segments)  # the reader of single segments finds the damaged one


if __name__ == "__main__":
    main()
