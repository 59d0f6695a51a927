"""Saves that a driver has begun, and those of them that it has abandoned: nobody can commit these any more.

A driver's saves have its name in their prefixes, so no other driver commits them. Generations and steps in which it
begins saves never become smaller. So a save is abandoned if a later one was begun and it is not in progress. A save
that was given to a commit is not: storage may have it, even if the commit failed.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from raysharded.ids import GenerationId
from raysharded.protocol.messages import save_prefix


class BegunSaves:
    """The saves of one driver since its newest commit. Any thread: changes of a dict are atomic."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._open: dict[str, tuple[GenerationId, int]] = {}
        """Begun and not given to a commit: prefix -> generation and step."""
        self._given: dict[str, tuple[GenerationId, int]] = {}
        self._newest = (GenerationId(0), 0)

    def begin(self, generation: GenerationId, step: int) -> None:
        """Note that workers begin to write a save, or write one once more."""
        prefix = save_prefix(step, generation, self._driver)
        self._newest = generation, step
        if prefix not in self._given:
            self._open[prefix] = generation, step

    def give(self, generation: GenerationId, step: int) -> None:
        """Note that a save is to be committed."""
        prefix = save_prefix(step, generation, self._driver)
        self._given[prefix] = generation, step
        self._open.pop(prefix, None)

    def committed(self, generation: GenerationId, step: int) -> None:
        """Forget the saves that this commit overtakes: retention deletes them."""
        for saves in (self._open, self._given):
            for prefix, at in saves.copy().items():
                if at < (generation, step):
                    saves.pop(prefix, None)

    def abandoned(self, in_progress: AbstractSet[str]) -> set[str]:
        """Prefixes of abandoned saves. `in_progress`: prefixes of the driver's state, read before this call."""
        return {prefix for prefix, at in self._open.copy().items() if at < self._newest} - in_progress
