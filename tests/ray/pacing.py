"""Data that sets the pace of a run, so that what happens beside it comes neither too early nor too late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engine.harness import Tokens

HELD_S = 240.0
"""What may be held for so long needs a `hang_timeout_s` above it: its workers read data and do not come to an end."""


class PacedTokens(Tokens):
    """Slow enough for a step to be hit in its middle. While it is `held`, no step is done."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._hold = folder / "hold"

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03)
        deadline = time.monotonic() + HELD_S
        while self._hold.exists():
            assert time.monotonic() < deadline, f"{self._hold} is still there"
            time.sleep(0.02)
        return super().__getitem__(index)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the run wait, for instance until workers are ready that are to join before its last step."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()
