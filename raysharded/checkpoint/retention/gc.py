"""Deletion of checkpoints that no rule keeps, and of the remains of broken saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.retention.best import numbers_of
from raysharded.checkpoint.retention.catalog import CheckpointRef, Survey, open_ref, survey
from raysharded.checkpoint.retention.forks.fork import drop_reference
from raysharded.checkpoint.retention.orphan_saves import LINKED, Left, find_debris, writes_of
from raysharded.checkpoint.retention.pins import list_pins
from raysharded.checkpoint.retention.policy import Candidate, Keep, to_delete
from raysharded.checkpoint.retention.two_phase_delete import is_full, remove, remove_unmarked, retire, why_not_removed
from raysharded.checkpoint.storage import Storage, Unfinished
from raysharded.checkpoint.storage.optional_operations import list_links
from raysharded.checkpoint.storage.small_objects import is_lost_on_disk
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER, Claim, list_numbers, lost_writes
from raysharded.errors import CheckpointError, RefusedCheckpoint, StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Result of a prune: prefixes of the saves concerned, oldest first."""

    retired: tuple[str, ...] = ()
    """Checkpoints made invisible. A later prune, after a further commit, deletes their data."""
    removed: tuple[str, ...] = ()
    """Retired checkpoints whose data was deleted."""
    debris: tuple[str, ...] = ()
    """Deleted saves that could never have been committed."""
    references: tuple[str, ...] = ()
    """References of a fork to its parent's checkpoint that were removed, with the pin that kept it there."""
    left: tuple[Left, ...] = ()
    """Saves that are not checkpoints and were left alone, with the reasons."""


@dataclass(frozen=True, slots=True)
class _Plan:
    found: Survey
    unfinished: Sequence[Unfinished]
    lost_claims: Sequence[Unfinished]
    remove: list[CheckpointRef]
    retire: list[CheckpointRef]
    drop: list[CheckpointRef]
    debris: Sequence[CheckpointRef]
    left: tuple[Left, ...]
    at_once: frozenset[str]
    """Prefixes of checkpoints whose data is deleted as soon as they are retired."""


def prune(
    storage: Storage,
    keep: Keep | None,
    *,
    in_flight: Collection[str] = (),
    abandoned: Collection[str] = (),
    keep_references: bool = False,
    may_go: Callable[[str], bool] = lambda _: True,
    now: bool = False,
    ended: bool = False,
    dry_run: bool = False,
    key: SigningKey | None = None,
    read_before: dict[int, Claim] | None = None,
) -> Pruned:
    """Delete checkpoints that no rule of `keep`, no pin and no reader needs, and debris; return what was done.

    Without `keep`, no committed checkpoint is deleted. `keep` does not count checkpoints that are marked for deletion
    but were pinned; these go when no pin holds them. Prefixes `in_flight` (being written or read) are left alone. Saves
    with the prefixes `abandoned` go: those that the one driver that could commit them never will. With
    `keep_references`, a fork keeps what it needs of its parent. `may_go(prefix)` decides just before a checkpoint
    is retired.

    With `now`, data is deleted at once, also of checkpoints retired now. Use it only when no one reads any of them. On
    a full disk, only this frees space. With `ended`, no further commit follows: data is deleted at once of all but the
    newest two, so that readers had the time from one commit to the next. With `dry_run`, nothing is done; the result is
    what would be. With a `key`, checkpoints that are not signed with it count as unusable, and stay. The call may be
    interrupted anywhere and made from several places: the next call continues. Raises CorruptCheckpoint, having deleted
    no checkpoint, if a pin cannot be read.

    `read_before`: for a caller that prunes repeatedly with one key; claims that are kept there are not read again.
    """
    found = survey(storage, key=key, read_before=read_before)
    plan = _plan(storage, found, keep, in_flight, abandoned, now, ended, key)
    plan = replace(plan, drop=[]) if keep_references else plan
    return _told(plan) if dry_run else _carry_out(storage, plan, now, may_go, key)


def _plan(
    storage: Storage,
    found: Survey,
    keep: Keep | None,
    in_flight: Collection[str],
    abandoned: Collection[str],
    now: bool,
    ended: bool,
    key: SigningKey | None,
) -> _Plan:
    unfinished = storage.unfinished(CHECKPOINTS_FOLDER)
    opened = _Opened(storage, found.refs, key)
    debris = find_debris(found, unfinished, in_flight, abandoned)
    newest = found.history.newest_commit()  # always stays: without it the run would look lost
    linked = {ref.prefix for ref in found.refs if ref.linked}
    pinned = {pin.prefix for pin in list_pins(storage, key=key)}
    spared = {*in_flight, *linked, *pinned, *([newest.prefix] if newest else ())}
    own = [ref for ref in found.refs if ref.state == "committed" and not ref.marked]
    marked = [ref for ref in found.refs if ref.state == "committed" and ref.marked and ref.prefix not in spared]
    references = [ref for ref in found.refs if ref.state == "reference" and ref.prefix not in {*in_flight, *linked}]
    going = [*marked, *_unwanted(own, keep, spared, opened)] if keep is not None else []
    steps = [ref.step for ref in found.refs if ref.state in ("committed", "retired")]
    at_once = frozenset(
        ref.prefix for ref in found.refs if now or (ended and sum(step > ref.step for step in steps) >= 2)
    )
    waiting = {
        ref.prefix: _why_waiting(storage, ref, found, in_flight, at_once, key)
        for ref in found.refs
        if ref.state == "retired"
    }
    claim_writes = [] if CLAIMS_FOLDER in list_links(storage) else storage.unfinished(CLAIMS_FOLDER)
    return _Plan(
        found=found,
        unfinished=unfinished,
        lost_claims=lost_writes(claim_writes, found.history.newest_number),
        remove=[ref for ref in found.refs if ref.prefix in waiting and waiting[ref.prefix] is None],
        retire=going,
        drop=references if references and any(opened.usable(ref.prefix) for ref in reversed(own)) else [],
        debris=debris.refs,
        left=(*(Left(prefix, reason) for prefix, reason in waiting.items() if reason is not None), *debris.left),
        at_once=at_once,
    )


def _why_waiting(
    storage: Storage,
    ref: CheckpointRef,
    found: Survey,
    in_flight: Collection[str],
    at_once: Collection[str],
    key: SigningKey | None,
) -> str | None:
    if ref.linked:
        return LINKED
    if ref.prefix in in_flight:
        return "it is being read"
    return None if ref.prefix in at_once else why_not_removed(storage, ref, found.history, key=key)


def _unwanted(
    refs: Sequence[CheckpointRef], keep: Keep, spared: Collection[str], opened: _Opened
) -> list[CheckpointRef]:
    candidates = {ref.prefix: ref for ref in refs}
    gone = to_delete(
        [Candidate(ref.prefix, ref.step) for ref in candidates.values()],
        keep,
        pinned=spared,
        usable=opened.usable,
        metrics=opened.metrics,
    )
    return [candidates[candidate.prefix] for candidate in gone if not opened.refused(candidate.prefix)]


@dataclass(frozen=True, slots=True)
class _Opened:
    """Checkpoints, each opened once, when first needed."""

    storage: Storage
    refs: Sequence[CheckpointRef]
    key: SigningKey | None
    _found: dict[str, Checkpoint | None] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)

    def usable(self, prefix: str) -> bool:
        return self._open(prefix) is not None

    def refused(self, prefix: str) -> bool:
        """Whether the checkpoint may be good: only the key rejects it, or a disk does not give its bytes now."""
        return self._open(prefix) is None and prefix in self._refused

    def metrics(self, prefix: str) -> Mapping[str, Any]:
        checkpoint = self._open(prefix)
        return numbers_of(checkpoint) if checkpoint is not None else {}

    def _open(self, prefix: str) -> Checkpoint | None:
        if prefix not in self._found:
            [ref] = [ref for ref in self.refs if ref.prefix == prefix]
            try:
                self._found[prefix] = open_ref(self.storage, ref, key=self.key) if ref.complete else None
            except RefusedCheckpoint:
                self._found[prefix] = None
                self._refused.add(prefix)
            except CheckpointError as error:
                self._found[prefix] = None  # `newest_complete` and `verify` report why
                if is_lost_on_disk(error):
                    self._refused.add(prefix)
        return self._found[prefix]


def _told(plan: _Plan) -> Pruned:
    """The result as if all of the plan had been carried out."""
    retired = _prefixes(plan.retire)
    return Pruned(
        retired=tuple(prefix for prefix in retired if prefix not in plan.at_once),
        removed=_prefixes(plan.remove) + tuple(prefix for prefix in retired if prefix in plan.at_once),
        debris=_prefixes(plan.debris),
        references=_prefixes(plan.drop),
        left=plan.left,
    )


def _carry_out(
    storage: Storage, plan: _Plan, now: bool, may_go: Callable[[str], bool], key: SigningKey | None
) -> Pruned:
    left = list(plan.left)
    for ref in [*plan.remove, *plan.debris]:
        remove(storage, ref, writes_of(ref, plan.unfinished))
    storage.discard(plan.lost_claims)
    dropped = [ref for ref in plan.drop if _dropped(storage, ref, left, key)]
    numbers = list_numbers(storage) if plan.retire else []  # current: claims made meanwhile give readers no time
    newest = max(numbers, default=0)
    retired = [ref for ref in plan.retire if may_go(ref.prefix) and _retired(storage, ref, newest, now, key)]
    for ref in retired:
        if ref.prefix in plan.at_once:
            remove(storage, ref, writes_of(ref, plan.unfinished))
    return replace(_told(replace(plan, retire=retired, drop=dropped)), left=tuple(left))


def _retired(storage: Storage, ref: CheckpointRef, number: int, now: bool, key: SigningKey | None) -> bool:
    try:
        return retire(storage, ref, number=number, key=key)
    except StorageError as error:
        if not is_full(error):
            raise
        if not now:
            raise StorageError(
                f"{error} Marking a checkpoint for deletion needs a little space. If no one is reading checkpoints of "
                "this run, run `raysharded checkpoint gc` with --keep-last and --now: that needs none."
            ) from error
        return remove_unmarked(storage, ref)


def _dropped(storage: Storage, ref: CheckpointRef, left: list[Left], key: SigningKey | None) -> bool:
    try:
        drop_reference(storage, ref, key=key)
    except (CheckpointError, StorageError) as error:
        left.append(Left(ref.prefix, f"its pin in the parent could not be removed: {error}"))
        return False
    return True


def _prefixes(refs: Sequence[CheckpointRef]) -> tuple[str, ...]:
    return tuple(ref.prefix for ref in refs)
