"""A long journal parsed by other processes, on all cores: Python parses on one at a time.

Each process is given some runs of segments, and says of each in turn what is in it: the columns of steps that follow
each other, and every other segment as it is. They are processes of this module: no forks of the caller, who may have
threads, nor of its `__main__`, which may be a script or a notebook.
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
from raysharded.journal.reader import read_some, steps_of
from raysharded.report.history.step_table import Columns

Part: TypeAlias = tuple[str, bytes] | tuple[str, int, Columns]
"""A segment with its key; or the columns of steps, with the last segment's key and its last line."""
FEWEST = 4000
"""Segments for which this is worth the start of processes."""
_OF_A_RUN = 64
_MOST_PROCESSES = 4
_DAMAGE = (ValueError, KeyError, TypeError)


class Unavailable(Exception):
    """The other processes cannot do it: their storage is not the caller's, say, or they were killed."""


def parts_of(url: str, keys: Sequence[str]) -> Iterator[Part]:
    """What is in these segments, in order. Raises Unavailable, whatever was given until then."""
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
                yield from pickle.load(answers)  # noqa: S301 - of our own process
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
    """Returns when it has begun, if that is more than a pipe holds."""
    assert process.stdin is not None
    with process.stdin as asked:
        pickle.dump((url, runs), asked)


def main() -> None:
    gc.disable()  # it would look at all entries, again and again; none is in a cycle
    url, runs = pickle.load(sys.stdin.buffer)  # noqa: S301 - of who started this
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
    except _DAMAGE:
        return list(segments)  # whoever reads them one by one finds which it is


if __name__ == "__main__":
    main()
