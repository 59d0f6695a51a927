"""A run's claims, read from the newest back, as far as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.removal_mark import REMOVAL_KEY
from raysharded.checkpoint.retention.claim_chain import ClaimChain
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER, Claim, claim_key, numbers_of, read_claim
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CorruptCheckpoint, RefusedCheckpoint
from raysharded.locations import join_url

_AT_ONCE = 16


class History:
    """The claims as of construction. Not thread-safe."""

    def __init__(
        self, storage: Storage, *, key: SigningKey | None = None, read_before: dict[int, Claim] | None = None
    ) -> None:
        """With a key, only those claims count that it signed, and older ones from before any was signed.

        `read_before`: number -> claim, as read earlier from this storage with this key; gets those that are read now.
        Claims never change, but another run may have taken the folder: the newest are read again, and must be equal.
        """
        self._storage, self._key, self._chain = storage, key, ClaimChain()
        self._before = {} if read_before is None else read_before
        self._compares = True
        keys = storage.list(CLAIMS_FOLDER)
        self.is_of_removed_run = REMOVAL_KEY in keys
        """Whether the run is being removed, or its removal was interrupted."""
        self._unread = _with_missing(numbers_of(keys))
        self.newest_number = self._unread[-1] if self._unread else 0
        """Number of the newest claim, readable or not; 0 if there is none."""
        self._newest: Claim | None = None
        self._oldest_generation: int | None = None
        """Generation of the oldest claim read. Generations never decrease from one claim to the next."""
        self._commits: dict[str, Claim] = {}
        self._owners: list[Claim] = []

    @property
    def damaged(self) -> list[CorruptCheckpoint]:
        """Errors of claims that are unreadable, replaced, or missing in the sequence: they may commit anything."""
        return self._chain.damaged

    @property
    def foreign(self) -> list[CorruptCheckpoint]:
        """Errors of claims that no holder of the key made."""
        return self._chain.foreign

    def newest(self) -> Claim | None:
        """The newest readable claim."""
        while self._newest is None and self._unread:
            self._read_more()
        return self._newest

    def commits_of(self, prefixes: Mapping[str, int | None]) -> dict[str, Claim]:
        """Map from each prefix that is committed to the claim that commits it.

        Each prefix comes with its generation, if known: no older claim is read for it.
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
        """Whether a claimer of this name owned the run at this generation or before."""
        while not (found := any(o.writer == writer and o.generation <= generation for o in self._owners)):
            if not self._unread:
                break
            self._read_more()
        return found

    def known(self, prefix: str) -> Claim | None:
        """The claim that commits the prefix, if already read."""
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
        read = self._known_or_read(numbers)
        for number, (found, unchecked) in zip(reversed(numbers), reversed(read), strict=True):
            for claim in self._chain.add(number, found, unchecked):
                self._add(claim)
        if not self._unread:
            for claim in self._chain.end():
                self._add(claim)

    def _known_or_read(self, numbers: Sequence[int]) -> list[tuple[Claim | CorruptCheckpoint, Claim | None]]:
        """As `_read`, for each number; the first call compares with what was read before, and later ones use it."""
        now = [number for number in numbers if self._compares or number not in self._before]
        read: dict[int, tuple[Claim | CorruptCheckpoint, Claim | None]] = {}
        if now:
            with Threads(len(now), thread_name_prefix="raysharded-claims") as pool:
                read = dict(zip(now, pool.map(self._read, now), strict=True))
        if any(found != self._before.get(number, found) for number, (found, _) in read.items()):
            self._before.clear()
        self._compares = False
        self._before.update({number: found for number, (found, _) in read.items() if isinstance(found, Claim)})
        return [read[number] if number in read else (self._before[number], None) for number in numbers]

    def _read(self, number: int) -> tuple[Claim | CorruptCheckpoint, Claim | None]:
        """(the claim or the error in it, the claim without a check if only the key refuses it)."""
        try:
            return read_claim(self._storage, number, key=self._key), None
        except NoSuchKey:  # claims are never deleted: it was lost
            where = join_url(self._storage.url, claim_key(number))
            return CorruptCheckpoint(
                f"{where} is missing, and claims after it are there. Restore it from a copy."
            ), None
        except RefusedCheckpoint as error:
            try:
                return error, read_claim(self._storage, number)
            except CorruptCheckpoint as damage:
                return damage, None
        except CorruptCheckpoint as error:
            return error, None

    def _add(self, claim: Claim) -> None:
        """Add a claim that is older than all before it."""
        self._newest = self._newest or claim
        self._oldest_generation = claim.generation
        if claim.kind == "commit":
            self._commits.setdefault(claim.prefix, claim)
        else:
            self._owners.append(claim)


def _with_missing(listed: Sequence[int]) -> list[int]:
    """The listed numbers and those missing between them. Of a long gap only the newest: one shows it."""
    pairs = zip([0, *listed], listed, strict=False)
    return [number for before, last in pairs for number in range(max(before, last - _AT_ONCE) + 1, last + 1)]
