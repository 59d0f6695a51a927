"""Standard streams in a process that uses Ray: all open, and without Ray's paragraphs about dead workers and nodes.

raysharded reports those itself.

Ray prints them from a thread of every process that is connected to a cluster, to `sys.stdout`, regardless of its
logging settings: for a lost node these are dozens of lines. They are also in the logs of the node's raylet. Commands
promise that standard output has their own lines alone, for scripts that read them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

_PREFIX = "(raylet"
"""Begins the text; the address of another machine may follow."""
_WITHIN = 40
"""Characters in which it is searched: the codes of a colour come before it."""


def open_null_device() -> None:
    """Open the null device where a standard stream is closed: the next file to be opened would take its place."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def open_closed_streams() -> None:
    """Give Python a stream in place of a closed one, as `>&-` and `2>&-` leave it. Ray needs both."""
    open_null_device()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process


@contextlib.contextmanager
def quiet_raylet() -> Iterator[None]:
    """A context in which standard output drops what Ray prints under the name of its raylet.

    Output of actors and of the autoscaler stays. So does all that this process prints.
    """
    outside = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRaylet(outside))
    try:
        yield
    finally:
        sys.stdout = outside


class _WithoutRaylet:
    """A text stream that drops Ray's output under the name of its raylet. Any thread.

    `print` writes a text and the end of its line separately, and other threads may print in between. So each thread has
    its own state.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._of_thread = threading.local()
        """`dropped`: the text that the thread wrote last, if it was dropped; empty otherwise."""

    def write(self, text: str) -> int:
        before: str = getattr(self._of_thread, "dropped", "")
        begins = _PREFIX in text[:_WITHIN]
        is_rest = bool(before) and (text == "\n" or not before.endswith("\n"))
        self._of_thread.dropped = text if begins or (is_rest and "\n" not in text) else ""
        if begins or is_rest:
            return len(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
