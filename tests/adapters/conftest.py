"""Workers of these tests are forked from a server that has imported transformers, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver

import pytest

from tests import forked


@contextmanager
def server_with(*modules: str) -> Iterator[None]:
    """A context with a server that has imported these modules, in place of the one that the other tests share.

    The imports take longer than workers may take to start, on a busy machine: no run begins before they are done.
    """
    forked.PRELOADED.extend(modules)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next one to fork a process starts it again
    try:
        forked.in_a_fork(int, timeout_s=240.0)
        yield
    finally:
        del forked.PRELOADED[-len(modules) :]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


_OPEN: list[ExitStack] = []
"""The server with transformers, while tests of this folder follow each other."""


@pytest.fixture(scope="module", autouse=True)
def _server_with_transformers() -> None:
    if not _OPEN:
        with ExitStack() as stack:
            stack.enter_context(server_with("tests.adapters.preloaded"))
            _OPEN.append(stack.pop_all())


@pytest.hookimpl(trylast=True)  # behind the ends of fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the server where other tests follow. A fixture of a package would not: this folder is none."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _OPEN:
            _OPEN.pop().close()


@pytest.fixture(scope="module")
def server_with_trl() -> Iterator[None]:
    """A server that has also imported TRL."""
    with server_with("tests.adapters.preloaded_trl"):
        yield
