"""Workers of these tests are forked from a server that has imported transformers, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests import forked

PRELOADED = "tests.adapters.preloaded"


@pytest.fixture(scope="package", autouse=True)
def _server_with_transformers() -> Iterator[None]:
    """A server of this package's own, in place of the one that the other tests share."""
    forked.PRELOADED.append(PRELOADED)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next one to fork a process starts it again
    yield
    forked.PRELOADED.remove(PRELOADED)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
