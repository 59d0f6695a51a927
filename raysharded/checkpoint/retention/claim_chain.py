"""Claims that count, read from the newest back: every signed claim names the signed claim before it. Pure.

The chain distinguishes three kinds of claims that the key did not sign. Those below the first signed claim are of the
time when the run's claims were not signed, or signed with another key: they point to manifests, which are checked.
Those between two signed claims that follow each other are of no holder of the key: both were put while it was there, or
later. One in the place of a claim that a later one names was put there in its stead: as with a claim that is lost, it
may have committed anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from raysharded.checkpoint.stored_claims import Claim
from raysharded.errors import CorruptCheckpoint, RefusedCheckpoint

Found = Claim | CorruptCheckpoint
"""A claim, or the error in one."""


@dataclass(slots=True)
class ClaimChain:
    """The chain as far as it was read. Without a key, `add` returns every claim and error as it is."""

    damaged: list[CorruptCheckpoint] = field(default_factory=list)
    """Errors of claims that may commit anything."""
    foreign: list[CorruptCheckpoint] = field(default_factory=list)
    """Errors of claims that no holder of the key made."""
    _follows: list[tuple[int, str] | None] = field(default_factory=list)
    """Predecessor of the oldest signed claim read so far; empty if none was read."""
    _waiting: list[tuple[Claim | None, CorruptCheckpoint]] = field(default_factory=list)
    """Claims above the newest signed one, without a check, with their errors."""

    def add(self, number: int, found: Found, unchecked: Claim | None) -> Iterator[Claim]:
        """The claims that count, from the newest back, after the next older number.

        `unchecked`: the claim without a check of its signature, if the key refuses it.
        """
        if isinstance(found, Claim) and found.seal:
            yield from self._signed(found)
        elif isinstance(found, Claim):  # there is no key
            yield found
        elif not isinstance(found, RefusedCheckpoint):
            self.damaged.append(found)
        elif not self._follows:
            self._waiting.append((unchecked, found))
        elif self._follows[-1] is None:
            if unchecked is not None:
                yield unchecked
            else:
                self.foreign.append(found)
        elif number > self._follows[-1][0]:
            self.foreign.append(found)
        else:
            self.damaged.append(found)

    def _signed(self, claim: Claim) -> Iterator[Claim]:
        if not self._follows:  # those above it may stand in the place of signed ones
            self.damaged += [error for _, error in self._waiting]
            self._waiting = []
        elif (follows := self._follows[-1]) is None or claim.number > follows[0]:
            self.foreign.append(_replayed(claim))
            return
        elif claim.number == follows[0] and claim.seal != follows[1]:
            self.damaged.append(_replayed(claim))
            return
        self._follows.append(claim.after)
        yield claim

    def end(self) -> Iterator[Claim]:
        """The further claims that count once all have been read: those of a run in which the key signed none."""
        waiting, self._waiting = self._waiting, []
        for claim, error in waiting:
            if claim is not None:
                yield claim
            else:
                self.foreign.append(error)


def _replayed(claim: Claim) -> CorruptCheckpoint:
    return RefusedCheckpoint(
        f"claim {claim.number} is signed, but the claims after it do not follow it: it is refused. It was put back "
        "from an older copy of the run; restore all of claims/ from one time."
    )
