"""Remarks on what may not be as the task's author intended: in a worker's log, and in the journal.

Every worker makes the same remarks; the first of the generation logs them. The others record that they were logged, so
that none is repeated when another worker becomes the first. The report of the next step has them for the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

_log = logging.getLogger("raysharded.worker")

Say: TypeAlias = Callable[[str, str], None]
"""Called with a remark's subject and its sentence; a second remark on one subject is not logged."""


def say_nothing(about: str, sentence: str) -> None:
    """A `Say` that discards remarks."""


class Notes:
    """Remarks of one worker, as long as its process lives. Training thread only."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        """`words`: function from a sentence about a task to the one that is logged."""
        self._words = words
        self._said: set[str] = set()
        self._unreported: list[str] = []

    def say(self, about: str, sentence: str, *, aloud: bool) -> None:
        """Log the sentence, unless its subject had one before. `aloud`: True on the worker that logs."""
        if about in self._said:
            return
        self._said.add(about)
        sentence = self._words(sentence)
        self._unreported.append(sentence)
        if aloud:
            _log.warning("%s", sentence)

    def take(self) -> tuple[str, ...]:
        """The sentences since the last call, in order."""
        taken, self._unreported = tuple(self._unreported), []
        return taken
