"""Which checkpoints a run has, the newest that can be used, and which may be deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raysharded.checkpoint.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME, parse_save_folder
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage import Storage
from raysharded.errors import CheckpointError, IncompleteCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """A save found in storage; nothing of it has been read."""

    step: int
    save_id: str
    prefix: str
    complete: bool
    """Whether its manifest exists."""
    keys: tuple[str, ...]
    """Every file below its prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A save that was passed over, and why."""

    ref: CheckpointRef
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """The newest usable checkpoint, and the newer saves that were passed over, newest first."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


def list_checkpoints(storage: Storage) -> list[CheckpointRef]:
    """All saves under the run's `checkpoints/`, committed or not, oldest step first."""
    found: dict[tuple[int, str], list[str]] = {}
    for key in storage.list(CHECKPOINTS_FOLDER):
        parts = key.split("/")
        named = parse_save_folder(parts[1]) if len(parts) > 2 else None
        if named is not None:
            found.setdefault((*named,), []).append(key)
    return [_ref(step, save_id, keys) for (step, save_id), keys in sorted(found.items())]


def newest_complete(storage: Storage, *, skip_damaged: bool = False) -> Newest:
    """The newest committed checkpoint, opened; its manifest is valid and its files exist.

    Saves without a manifest are passed over. A committed one with a damaged manifest or missing files raises
    CorruptCheckpoint or IncompleteCheckpoint, because going on would silently lose steps; with `skip_damaged` it is
    passed over too. Either way `skipped` says which and why.
    """
    skipped: list[Skipped] = []
    for ref in reversed(list_checkpoints(storage)):
        if not ref.complete:
            reason = f"step {ref.step} under {storage.url}/{ref.prefix} was never committed: it has no {MANIFEST_NAME}."
            skipped.append(Skipped(ref=ref, reason=reason))
            continue
        try:
            return Newest(checkpoint=_open_whole(storage, ref), skipped=tuple(skipped))
        except CheckpointError as error:
            if not skip_damaged:
                raise
            skipped.append(Skipped(ref=ref, reason=str(error)))
    return Newest(checkpoint=None, skipped=tuple(skipped))


def prune(storage: Storage, keep_last: int, in_flight: Collection[str] = ()) -> list[str]:
    """Deletes what is no longer needed; returns the prefixes deleted, oldest first.

    Kept are the newest `keep_last` (1 or more) checkpoints that can be opened and have all their files, and
    whatever is newer than the oldest of them, usable or not. Uncommitted saves are deleted only if their step is
    below the newest usable checkpoint's. Prefixes `in_flight` (being written or read) are left alone. Manifests go
    first: a deletion that is interrupted leaves an uncommitted save, which the next call removes. Without a usable
    checkpoint nothing is deleted. Call it from one place at a time.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last}: the newest complete checkpoint is always kept; give 1 or more.")
    refs = list_checkpoints(storage)
    kept = _newest_usable(storage, [ref for ref in refs if ref.complete], keep_last)
    if not kept:
        return []
    newest_step, oldest_kept = kept[0].step, (kept[-1].step, kept[-1].save_id)
    doomed = [
        ref
        for ref in refs
        if ref.prefix not in in_flight
        and (
            (len(kept) == keep_last and (ref.step, ref.save_id) < oldest_kept)
            if ref.complete
            else ref.step < newest_step
        )
    ]
    for ref in doomed:
        manifest = f"{ref.prefix}/{MANIFEST_NAME}"
        storage.delete([manifest] if ref.complete else [])
        storage.delete(key for key in ref.keys if key != manifest)
    return [ref.prefix for ref in doomed]


def _ref(step: int, save_id: str, keys: Iterable[str]) -> CheckpointRef:
    ordered = tuple(sorted(keys))
    prefix = "/".join(ordered[0].split("/")[:2])
    complete = f"{prefix}/{MANIFEST_NAME}" in ordered
    return CheckpointRef(step=step, save_id=save_id, prefix=prefix, complete=complete, keys=ordered)


def _open_whole(storage: Storage, ref: CheckpointRef) -> Checkpoint:
    checkpoint = open_checkpoint(storage, ref.prefix)
    missing = [f.path for f in checkpoint.manifest.files if f"{ref.prefix}/{f.path}" not in ref.keys]
    if missing:
        raise IncompleteCheckpoint(
            f"step {ref.step}: {len(missing)} of {len(checkpoint.manifest.files)} data files are missing under "
            f"{storage.url}/{ref.prefix}; first: {missing[0]}. Put them back, or resume from an older checkpoint."
        )
    return checkpoint


def _newest_usable(storage: Storage, complete: list[CheckpointRef], count: int) -> list[CheckpointRef]:
    """Newest first; at most `count`."""
    usable: list[CheckpointRef] = []
    for ref in reversed(complete):
        if len(usable) == count:
            break
        try:
            _open_whole(storage, ref)
        except CheckpointError:
            continue  # left in place: `newest_complete` reports it
        usable.append(ref)
    return usable
