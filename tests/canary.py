"""The connections that code opens, as CPython reports them: https://docs.python.org/3/library/audit_events.html."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "subprocess.Popen")
_found: list[list[str]] = []
_is_installed = False


@contextmanager
def connections() -> Iterator[list[str]]:
    """A context with the list of connections, look-ups of names and new processes, of any thread, within it."""
    global _is_installed
    if not _is_installed:  # a hook can never be removed
        sys.addaudithook(_note)
        _is_installed = True
    noted: list[str] = []
    _found.append(noted)
    try:
        yield noted
    finally:
        _found.remove(noted)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _found and event in _EVENTS:
        for noted in _found:
            noted.append(f"{event} {arguments[1:] if event.startswith('socket.c') else arguments}")
