"""The entries of a run's journal that decide about its next steps: with a key, those that the key signed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from raysharded.checkpoint import SigningKey, Storage
from raysharded.journal.log import placed_of, read, read_segments
from raysharded.journal.signed_segments import Link, check
from raysharded.quantities import count

_log = logging.getLogger("raysharded.driver")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedJournal:
    """A run's journal, as far as it counts."""

    entries: list[dict[str, Any]]
    """The entries, oldest first."""
    link: Link = field(default_factory=Link)
    """Predecessor of the next signed segment."""
    is_unsigned: bool = False
    """Whether there is a key, it signed none of the entries, and nobody has accepted them."""


def read_verified(storage: Storage, key: SigningKey | None, *, accept_unsigned: bool = False) -> VerifiedJournal:
    """The journal of a run. With a key, entries that it did not sign are left out, with a warning.

    A journal without any signature counts as a whole: then `is_unsigned` is set. With `accept_unsigned` every entry
    counts. Raises RefusedCheckpoint if signed segments were removed or replaced, or are signed with another key.
    """
    if key is None:
        return VerifiedJournal(entries=list(read(storage)))
    found = check(read_segments(storage), key, storage.url, accept_unsigned=accept_unsigned)
    if found.ignored:
        _log.warning(
            "%s of the journal of %s, first %s, are not signed with the run's key, and are ignored",
            count(len(found.ignored), "segment"),
            storage.url,
            found.ignored[0],
        )
    entries = [placed.entry for placed in placed_of(found.segments, storage.url)]
    return VerifiedJournal(entries=entries, link=found.link, is_unsigned=found.is_unsigned and bool(entries))
