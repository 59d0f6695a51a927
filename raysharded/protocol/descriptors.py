"""File descriptors of a process: how many it may have, what a worker of a run needs, and the error at the limit.

A connection to a peer is held twice, so that a thread that gloo keeps blocked can be freed. There are two groups of all
members, so a step needs 4 descriptors per peer. While a worker joins, the next generation connects beside the current
one: 8 per peer. At the usual soft limit of 1,024 that ends at 126 workers; the hard limit is usually far higher, and a
process may raise its own soft limit to it.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from contextlib import suppress

from raysharded.errors import text_of

_PER_PEER = 4
"""Descriptors of one generation's groups per peer."""
_OWN = 64
"""Descriptors of a process besides its connections to peers: data, storage, Ray, a checkpoint that is being written."""
_WHILE_CONNECTING = 24
_NEARLY = 64
"""An error about open files is believed if fewer than this are left."""
_TEXT = os.strerror(errno.EMFILE)


def limit() -> int:
    """Descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def hard_limit() -> int:
    """Descriptors that this process may have once it has raised its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> int:
    """Raise this process's soft limit to the hard one, as far as the system permits; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS has another limit below an unlimited one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def in_use() -> int | None:
    """Descriptors that this process has; None where the system does not show them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without that of the folder
    except OSError as error:
        return limit() if error.errno == errno.EMFILE else None


def left() -> int | None:
    """Descriptors that this process may still open; None where the system does not show those that it has."""
    now = in_use()
    return None if now is None else max(0, limit() - now)


def needed(workers: int) -> int:
    """Descriptors that a worker of a run of so many workers needs, while one of them joins."""
    return 2 * _PER_PEER * (workers - 1) + _OWN


def most_workers(descriptors: int) -> int:
    """The largest number of workers of a run whose processes may have so many descriptors."""
    return max(0, descriptors - _OWN) // (2 * _PER_PEER) + 1


def of_groups(workers: int) -> int:
    """Descriptors that the groups of one generation need, with those for the time in which they are connected."""
    return _PER_PEER * (workers - 1) + _WHILE_CONNECTING if workers > 1 else 0


def most_members(open_files: int) -> int:
    """The largest number of workers of a generation whose groups this many descriptors are enough for."""
    return 1 + max(0, open_files - _WHILE_CONNECTING) // _PER_PEER


def shortage(workers: int) -> str:
    """One sentence if processes with this one's hard limit are too small for a run of so many workers; else empty."""
    hard = hard_limit()
    if needed(workers) <= hard:
        return ""
    return (
        f"A worker of a run of {workers} workers needs up to {needed(workers)} open files, and processes here may have "
        f"{hard}, enough for {most_workers(hard)} workers. {way_out(needed(workers))}"
    )


def lacking(more: int) -> str:
    """One sentence if this process may not open `more` descriptors; empty if it may, or if that is unknown."""
    now = in_use()
    if now is None or now + more <= limit():
        return ""
    return (
        f"this process has {now} of the {limit()} open files that it may have, and needs {more} more to connect to its "
        f"peers. {way_out(now + more)}"
    )


def way_out(number: int) -> str:
    """The remedy, as one sentence."""
    return f"Raise the limit where processes start: `ulimit -Hn {number}` (limits.conf: nofile), or use fewer workers."


def exhausted(error: BaseException) -> str:
    """One sentence if the error is that this process has no descriptors left; empty for any other error.

    A peer's error has the same words: therefore the descriptors are counted, too.
    """
    now, seen = in_use(), set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        is_errno = isinstance(found, OSError) and found.errno in (errno.EMFILE, errno.ENFILE)
        if is_errno or _TEXT in text_of(found):
            if now is not None and now + _NEARLY < limit():
                return ""
            return (
                f"this process has no open file left of the {limit()} that it may have ({text_of(found)}); the task is "
                f"not to blame. {way_out(2 * limit())}"
            )
        found = found.__cause__ or found.__context__
    return ""
