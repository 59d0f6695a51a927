"""Remains of broken saves, found only where certainly no one can commit them any more.

A save is overtaken when a later claim is of a newer generation, or commits a later step of the same one: then its own
commit would be rejected (`claims.refusal`). A save that is not overtaken may still be written, however slowly, unless
the driver that would commit it has abandoned it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from raysharded.checkpoint.format.paths import save_folder_of
from raysharded.checkpoint.retention.catalog import CheckpointRef, Survey, unresolved
from raysharded.checkpoint.storage import Unfinished
from raysharded.checkpoint.stored_claims import Claim, claim_key

LINKED = "its folder is a link to a folder elsewhere: delete that folder, and the link, by hand"


@dataclass(frozen=True, slots=True)
class Left:
    """A save that is not a checkpoint, and stays nevertheless."""

    prefix: str
    reason: str


@dataclass(frozen=True, slots=True)
class Debris:
    """Saves that can be removed, and saves that cannot, oldest first."""

    refs: tuple[CheckpointRef, ...]
    left: tuple[Left, ...]


def is_overtaken(generation: int, step: int, newest: Claim | None) -> bool:
    """Whether no one can commit a save of this generation and step after the newest claim. Pure."""
    if newest is None or newest.generation < generation:
        return False
    return newest.generation > generation or (newest.kind == "commit" and newest.step > step)


def find_debris(
    found: Survey, unfinished: Iterable[Unfinished], in_flight: Collection[str] = (), abandoned: Collection[str] = ()
) -> Debris:
    """Debris in a survey, and among the unfinished writes found after it, and saves that only may be debris."""
    known = {ref.prefix for ref in found.refs}
    begun = {unresolved(*named, {}) for write in unfinished if (named := save_folder_of(write.key)) is not None}
    refs: list[CheckpointRef] = []
    left: list[Left] = []
    suspects = [ref for ref in found.refs if ref.state in ("unclaimed", "unfinished", "lost", "damaged")]
    suspects += (ref for ref in begun if ref.prefix not in known)
    for ref in sorted(suspects, key=lambda ref: (ref.step, ref.save_id)):
        reason = _why_left(ref, found, in_flight, abandoned)
        if reason is None:
            refs.append(ref)
        else:
            left.append(Left(ref.prefix, reason))
    return Debris(tuple(refs), tuple(left))


def writes_of(ref: CheckpointRef, unfinished: Iterable[Unfinished]) -> Sequence[Unfinished]:
    """Unfinished writes of one save."""
    return [write for write in unfinished if save_folder_of(write.key) == (ref.step, ref.save_id)]


def _why_left(ref: CheckpointRef, found: Survey, in_flight: Collection[str], abandoned: Collection[str]) -> str | None:
    """Reason why a save stays; None if it is debris."""
    if ref.state in ("lost", "damaged"):
        return ref.reason
    if ref.linked:
        return LINKED
    if ref.prefix in in_flight:
        return "it is being written"
    if ref.generation is None:
        return "it may still be written: neither its name nor a manifest states its generation"
    newest = found.history.newest()
    if ref.prefix not in abandoned and not is_overtaken(ref.generation, ref.step, newest):
        since = f"nothing newer than {claim_key(newest.number)}" if newest else "no claim at all"
        return f"it may still be written: it is of generation {ref.generation}, and there is {since}"
    claim = found.history.commits_of({ref.prefix: ref.generation}).get(ref.prefix)
    if claim is not None and ref.claim is None:
        return f"{claim_key(claim.number)} commits it: its manifest was lost, or put there just now"
    if found.history.damaged:
        return f"a claim that cannot be read may commit it: {found.history.damaged[0]}"
    return None
