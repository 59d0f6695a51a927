"""The commit log of a run, with fencing: claims that determine the run's owner and its committed saves.

Each claim is put once if absent, as in Delta Lake's _delta_log.

    claims/0000000001.json   driver a owns the run from generation 1 on
    claims/0000000002.json   a commits step 500 of generation 1
    claims/0000000003.json   driver b owns the run from generation 4 on: from here on a commits nothing

Put-if-absent gives every number to exactly one claimer. A claimer puts the number after the newest claim that it knows.
If that number is taken, it reads the claim there and decides again. Therefore the newest claim alone determines who
owns the run, since which generation, and how far it is committed; no older claim need be read. A claim is never deleted
or replaced, unless the whole run is removed (`removal_mark`). The number may be taken by the claimer's own claim, whose
reply was lost; it compares the ids first.

With a signing key every claim is signed, and states the number and digest of the signed claim before it. A claim that
the key did not sign for its place is passed over, except in a run in which it signed none.

Laws: a number is claimed once. Once another claimer owns the run, no claim of an older owner is made. A claim that was
reported as made is in the sequence; a rejected claim is not.

`Claimer` decides (pure: it yields the operations that it needs); `Claims` executes them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.stored_claims import Claim, claim_key, encode_claim, find_newest, read_claim
from raysharded.checkpoint.writer import commit
from raysharded.errors import CheckpointError, CorruptCheckpoint, RefusedCheckpoint, RunOwnedElsewhere, StaleGeneration
from raysharded.locations import join_url

T = TypeVar("T")


_log = logging.getLogger("raysharded.checkpoint")


@dataclass(frozen=True, slots=True)
class FindNewest:
    """Request: (the newest number taken, the newest readable claim); (0, None) if no claim exists."""


@dataclass(frozen=True, slots=True)
class Put:
    """Request: whether the claim was put under its number."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Get:
    """Request: the claim of this number, which is taken, or the error if it cannot be read."""

    number: int


Steps = Generator[FindNewest | Put | Get, Any, T]
"""Generator that yields requests and is sent their outcomes. It may be abandoned at any request and begun again."""


class NotOwner(StaleGeneration, RunOwnedElsewhere):
    """A claim was rejected because another driver has claimed the run."""


def refusal(newest: Claim | None, wanted: Claim) -> StaleGeneration | None:
    """The error if `wanted` must not come after `newest`; None if it may. Pure."""
    if newest is None or wanted.kind == "owner":
        return None
    what = f"{wanted.writer!r} cannot commit step {wanted.step} of generation {wanted.generation}"
    if newest.id != wanted.id:
        return NotOwner(
            f"{what}: another driver, {newest.writer!r}, owns the run (claim {newest.number}, generation "
            f"{newest.generation}). End this one."
        )
    if newest.generation > wanted.generation:
        return StaleGeneration(f"{what}: claim {newest.number} is of generation {newest.generation}.")
    if newest.generation == wanted.generation and newest.step > wanted.step:
        return StaleGeneration(f"{what}: step {newest.step} of it was committed before, as claim {newest.number}.")
    return None


class Claimer:
    """One claimer's view of the sequence, and its decisions. Does no storage operations."""

    def __init__(
        self,
        writer: str,
        claimer_id: str,
        wall: Callable[[], float],
        seal_of: Callable[[Claim], str] = lambda _: "",
    ) -> None:
        """`seal_of` returns the digest of a claim as the claimer signs it; empty if it has no key."""
        self._writer, self._id, self._wall, self._seal_of = writer, claimer_id, wall, seal_of
        self._number: int | None = None
        """Newest number known to be taken."""
        self._newest: Claim | None = None
        """Newest readable claim known."""
        self._has_owned = False
        self._commits: dict[tuple[str, str], Claim] = {}
        """The claimer's own commits by prefix and digest, because a call may be repeated."""

    def own(self, generation: int, instead_of: Claim | Literal["anyone"] | None = "anyone") -> Steps[int]:
        """The generation since which the claimer owns the run: `generation`, or the next after all claimed so far.

        Unreadable claims are skipped, because the number after them is this claimer's. Raises as `Claims.own`.
        """
        if self._number is None:
            self._number, self._newest = yield FindNewest()
        while True:
            if instead_of != "anyone" and self._newest is not None:
                rival = self._newest.id not in (self._id, instead_of.id if instead_of else "")
                if rival:
                    faster, self._number = self._newest, None  # to be found anew
                    raise NotOwner(f"{faster.writer!r} has claimed the run (claim {faster.number}).")
            above = self._newest.generation + 1 if self._newest is not None else 0
            wanted = self._claim("owner", max(generation, above))
            made = yield from self._try(wanted)
            if isinstance(made, Claim):
                self._has_owned = True
                return made.generation
            if made is not None:
                _log.warning("passing over a claim that cannot be read: %s", made)

    def commit(self, generation: int, step: int, prefix: str, digest: str) -> Steps[int]:
        """Number of the commit's claim. Raises as `Claims.commit`."""
        done = self._commits.get((prefix, digest))
        if done is not None:
            return done.number
        if not self._has_owned:
            raise CheckpointError(f"{self._writer!r} has not claimed the run: call own() before commit().")
        if self._number is None:
            self._number, self._newest = yield FindNewest()
        while True:
            wanted = self._claim("commit", generation, step=step, prefix=prefix, digest=digest)
            refused = refusal(self._newest, wanted)
            if refused is not None:
                raise refused
            made = yield from self._try(wanted)
            if isinstance(made, Claim):
                return made.number
            if isinstance(made, RefusedCheckpoint):  # no holder of the key made it
                _log.warning("passing over a claim: %s", made)
            elif made is not None:
                raise made

    @property
    def number(self) -> int:
        """Newest number known to be taken."""
        return self._number or 0

    def _claim(self, kind: Literal["owner", "commit"], generation: int, **commit: Any) -> Claim:
        return Claim(
            number=(self._number or 0) + 1,
            id=self._id,
            kind=kind,
            generation=generation,
            writer=self._writer,
            created_at=self._wall(),
            after=(self._newest.number, self._newest.seal) if self._newest is not None and self._newest.seal else None,
            **commit,
        )

    def _try(self, wanted: Claim) -> Steps[Claim | CorruptCheckpoint | None]:
        """The claim as made, None if another claimer took the number, or the error if that claim is unreadable.

        The other's claim is then known.
        """
        if (yield Put(wanted)):
            wanted = replace(wanted, seal=self._seal_of(wanted))
            self._learn(wanted)
            return wanted
        found = yield Get(wanted.number)
        if isinstance(found, Claim):
            self._learn(found)
            return found if found.is_same(wanted) else None
        if wanted.kind == "owner" or isinstance(found, RefusedCheckpoint):
            self._number = wanted.number
        return found  # type: ignore[no-any-return]  # what is sent in has no type

    def _learn(self, claim: Claim) -> None:
        self._number, self._newest = claim.number, claim
        if claim.id == self._id and claim.kind == "commit":
            self._commits[claim.prefix, claim.digest] = claim


class Claims:
    """Claims of a run, made by one writer (a driver). Thread-safe; one object per writer and start.

    After a StorageError the claim may or may not have been made. Repeat the same call to find out.
    """

    def __init__(
        self,
        storage: Storage,
        writer: str,
        *,
        wall: Callable[[], float] = time.time,
        key: SigningKey | None = None,
    ) -> None:
        """Claims by the name `writer`, in claims, errors and committed manifests. No other claimer has this name.

        `key` signs the claims, and those that it did not sign are passed over.
        """
        self.writer = writer
        self.id = secrets.token_hex(16)
        """Random id that distinguishes this claimer's claims from all others."""
        self._storage, self._key = storage, key
        self._claimer = Claimer(writer, self.id, wall, self._seal_of)
        self._lock = threading.Lock()

    def own(self, generation: int, instead_of: Claim | Literal["anyone"] | None = "anyone") -> int:
        """Own the run from now on: all other owners are rejected. Return the generation that the ownership begins with.

        The generation is `generation`, or a higher one that is above all claimed before. `instead_of` is a claim of the
        owner that is superseded (None: nobody). Raises NotOwner if the newest claim is by now another claimer's.
        """
        return self._perform(self._claimer.own(generation, instead_of))

    def find_rival(self) -> Claim | None:
        """The first claim of another claimer after all those that this claimer knows; None if there is none.

        Usually one small read. Raises StorageError.
        """
        number = self._claimer.number + 1
        while True:
            try:
                claim = read_claim(self._storage, number, key=self._key)
            except NoSuchKey:
                return None
            except CorruptCheckpoint:
                number += 1
                continue
            if claim.id != self.id:
                return claim
            number += 1

    def commit(self, generation: int, step: int, prefix: str, manifest_digest: str) -> int:
        """Claim that the save in the folder `prefix` is committed; return the claim's number.

        Within a generation steps are committed in order. Raises NotOwner if another claimer owns the run by now.
        Raises another StaleGeneration if a newer generation was claimed, or a later step of this one committed. Raises
        CorruptCheckpoint if a claim made since cannot be read, CheckpointError if `own` was not called before.
        """
        return self._perform(self._claimer.commit(generation, step, prefix, manifest_digest))

    def _perform(self, steps: Steps[T]) -> T:
        with self._lock:
            outcome: Any = None
            while True:
                try:
                    wanted = steps.send(outcome)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]  # Steps declares a T
                outcome = self._do(wanted)

    def _do(self, wanted: FindNewest | Put | Get) -> Any:
        match wanted:
            case FindNewest():
                return find_newest(self._storage, key=self._key)
            case Put(claim=claim):
                return self._storage.put_if_absent(claim_key(claim.number), self._encoded(claim))
            case Get(number=number):
                try:
                    return read_claim(self._storage, number, key=self._key)
                except CorruptCheckpoint as error:
                    return error

    def _encoded(self, claim: Claim) -> bytes:
        return encode_claim(claim, key=self._key, place=place_of(self._storage.url, claim_key(claim.number)))

    def _seal_of(self, claim: Claim) -> str:
        return signed_json.digest_of(self._encoded(claim)) if self._key is not None else ""


def commit_claimed(
    storage: Storage, claims: Claims, prefix: str, manifest: Manifest, *, key: SigningKey | None = None
) -> str:
    """Commit the save in `prefix`: put its manifest, signed if a key is given, then its claim. Return the digest.

    All data files must be durable. The manifest's `writer` must be that of `claims`: it identifies an unclaimed
    manifest as this run's. Raises StaleGeneration if another writer has committed in its place or owns the run by now;
    otherwise as `writer.commit` and `Claims.commit`. After a StorageError, repeat the same call to find out.
    """
    digest = commit(storage, prefix, manifest, key=key)
    if digest is None:
        where = join_url(storage.url, prefix)
        raise StaleGeneration(f"{where} has the manifest of another writer; this one's was not put.")
    claims.commit(manifest.generation, manifest.step, prefix, digest)
    return digest
