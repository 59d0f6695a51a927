"""Remarks on a run's numbers that are as the task made them, and may not be as it meant them: a line of a worker's log.

Every worker finds the same; the first of the generation says it. The others know from then on that it was said, so that
it is not said again when one of them becomes the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

_log = logging.getLogger("raysharded.worker")

Say: TypeAlias = Callable[[str, str], None]
"""Called with what a remark is about and its sentence; the second time that it is about the same nothing is said."""


def say_nothing(about: str, sentence: str) -> None:
    """A `Say` where nobody listens."""


class Notes:
    """Of one worker, for as long as its process lives. Training thread only."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, about: str, sentence: str, *, aloud: bool) -> None:
        """Log the sentence, unless there was one about the same before; `aloud`: this worker is the one to do it."""
        if about in self._said:
            return
        self._said.add(about)
        if aloud:
            _log.warning("%s", sentence)
