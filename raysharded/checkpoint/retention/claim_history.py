"""A run's claims, read from the newest back, as far as a question needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysharded.checkpoint.claims import Claim, claim_key, list_numbers, read_claim
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CorruptCheckpoint
from raysharded.locations import join_url

_AT_ONCE = 16


class History:
    """The claims as they were when this was made. Not thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._unread = _with_missing(list_numbers(storage))
        self.newest_number = self._unread[-1] if self._unread else 0
        """Whatever that claim says; 0 if there is none."""
        self._newest: Claim | None = None
        self._oldest_generation: int | None = None
        """Of the claims read; generations never go down from one claim to the next."""
        self._commits: dict[str, Claim] = {}
        self._owners: list[Claim] = []
        self.damaged: list[CorruptCheckpoint] = []
        """Claims that were met and could not be read, or are missing in the sequence: they may commit anything."""

    def newest(self) -> Claim | None:
        """The newest claim that can be read."""
        while self._newest is None and self._unread:
            self._read_more()
        return self._newest

    def commits_of(self, prefixes: Mapping[str, int | None]) -> dict[str, Claim]:
        """prefix -> the claim that commits it, for those of the prefixes that are committed.

        Each comes with its generation, if known: then nothing older is read for its sake.
        """
        while self._unread and any(self._may_come(prefix, generation) for prefix, generation in prefixes.items()):
            self._read_more()
        return {prefix: self._commits[prefix] for prefix in prefixes if prefix in self._commits}

    def newest_commit(self) -> Claim | None:
        """The newest claim that commits a save."""
        while not self._commits and self._unread:
            self._read_more()
        return max(self._commits.values(), key=lambda claim: claim.number, default=None)

    def has_owner(self, writer: str, generation: int) -> bool:
        """Whether a claimer of this name owned the run, from this generation on or before it."""
        while not (found := any(o.writer == writer and o.generation <= generation for o in self._owners)):
            if not self._unread:
                break
            self._read_more()
        return found

    def known(self, prefix: str) -> Claim | None:
        """The claim that commits the prefix, if it has been read already."""
        return self._commits.get(prefix)

    def has_commit_after(self, number: int) -> bool:
        """Whether a save was committed after the claim of this number."""
        while self._unread and self._unread[-1] > number and not self._newest_commit_number() > number:
            self._read_more()
        return self._newest_commit_number() > number

    def _newest_commit_number(self) -> int:
        return max((claim.number for claim in self._commits.values()), default=0)

    def _may_come(self, prefix: str, generation: int | None) -> bool:
        if prefix in self._commits:
            return False
        return generation is None or self._oldest_generation is None or self._oldest_generation >= generation

    def _read_more(self) -> None:
        numbers = self._unread[-_AT_ONCE:]
        del self._unread[-_AT_ONCE:]
        with Threads(len(numbers), thread_name_prefix="raysharded-claims") as pool:
            for found in reversed(list(pool.map(self._read, numbers))):
                if isinstance(found, Claim):
                    self._add(found)
                else:
                    self.damaged.append(found)

    def _read(self, number: int) -> Claim | CorruptCheckpoint:
        try:
            return read_claim(self._storage, number)
        except NoSuchKey:  # claims are never deleted: it was lost
            where = join_url(self._storage.url, claim_key(number))
            return CorruptCheckpoint(f"{where} is missing, and claims after it are there. Restore it from a copy.")
        except CorruptCheckpoint as error:
            return error

    def _add(self, claim: Claim) -> None:
        """`claim` is older than all before it."""
        self._newest = self._newest or claim
        self._oldest_generation = claim.generation
        if claim.kind == "commit":
            self._commits.setdefault(claim.prefix, claim)
        else:
            self._owners.append(claim)


def _with_missing(listed: Sequence[int]) -> list[int]:
    """The numbers listed and those missing between them; of a long gap the newest ones: one that is gone tells it."""
    pairs = zip([0, *listed], listed, strict=False)
    return [number for before, last in pairs for number in range(max(before, last - _AT_ONCE) + 1, last + 1)]
