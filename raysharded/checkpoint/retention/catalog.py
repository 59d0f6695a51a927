"""A run's checkpoints, and the newest that can be used.

A save is committed if its manifest exists and a claim names the manifest's folder and digest. A manifest of format
version 1 needs no claim, as there were none. A manifest without a claim was never committed if the claims have no gap
and name its writer as an owner: the save ended between the two, or was rejected. Otherwise the claim may be lost. A
fork's reference stands for its parent's checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME, key_of, save_folder_of, save_prefix
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.removal_mark import text_of_removed
from raysharded.checkpoint.retention.claim_history import History
from raysharded.checkpoint.retention.fork_reference import REFERENCE_NAME, open_reference
from raysharded.checkpoint.retention.tombstone import read_tombstone, tombstone_key
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.local import size_of_listed
from raysharded.checkpoint.storage.optional_operations import list_links, list_sizes
from raysharded.checkpoint.stored_claims import Claim, claim_key
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, RefusedCheckpoint
from raysharded.locations import join_url

_MOST_SURVEYS = 3
"""Listings at most. Another is made if listed saves were deleted before they could be opened."""

State = Literal["committed", "reference", "damaged", "unclaimed", "unfinished", "lost", "retired"]

_AT_ONCE = 8
_OF_GENERATION = re.compile(r"g([0-9]{6,})(?:_[A-Za-z0-9_]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """A save found in storage. Of a committed one only the claim has been read."""

    step: int
    """Optimizer step of the save."""
    save_id: str
    """Id that distinguishes the save from others of the step."""
    prefix: str
    """Folder of the save in the storage."""
    state: State
    """State of the save.

    `committed`, and `reference` (a fork's, to its parent's checkpoint), can be loaded. `damaged`: its manifest or its
    claim cannot be used. `lost`: it was committed, and has no manifest any more. `retired`: its deletion has begun.
    Never committed are `unclaimed`, a manifest without a claim, and `unfinished`, data without a manifest.
    """
    reason: str = ""
    """Reason why the save is not committed, if so."""
    keys: tuple[str, ...]
    """Keys of all files of the save."""
    sizes: Mapping[str, int | None] = field(default_factory=dict, compare=False, repr=False)
    """Bytes of files, as far as the listing has them."""
    claim: Claim | None = None
    """Claim that commits the save; None if it is not committed, a reference, or of format version 1."""
    generation: int | None = None
    """Generation of the manifest's claim, or else of the save's name or manifest, if known."""
    forged_mark: bool = False
    """Whether the save has a tombstone that the signing key did not sign: it marks nothing."""
    linked: bool = False
    """Whether the save's folder, or `checkpoints` above it, is a link. It can be loaded, and is never deleted."""

    @property
    def complete(self) -> bool:
        """Whether the save is committed: a checkpoint, or a fork's reference to one."""
        return self.state in ("committed", "reference")

    @property
    def digest(self) -> str | None:
        """Digest of the manifest, if a claim names it."""
        return self.claim.digest if self.claim else None

    @property
    def marked(self) -> bool:
        """Whether the deletion of the save has begun."""
        return tombstone_key(self.prefix) in self.keys and not self.forged_mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A save that was skipped, and the reason."""

    ref: CheckpointRef
    reason: str
    damaged: bool
    """Whether the save was, or may have been, committed but cannot be used; otherwise it never was a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """The newest usable checkpoint, and the newer saves that were skipped, newest first."""

    checkpoint: Checkpoint | None
    """Checkpoint; None if none can be used."""
    skipped: tuple[Skipped, ...]
    """Skipped saves, each with the reason."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A run's saves, oldest first, and the claims that determine their states."""

    refs: list[CheckpointRef]
    history: History


def list_checkpoints(storage: Storage, *, key: SigningKey | None = None) -> list[CheckpointRef]:
    """All saves under the run's `checkpoints/`, committed or not, oldest step first, then in order of commit.

    With a key, claims and tombstones count only if the key signed them, as in `survey`.
    """
    return survey(storage, key=key).refs


def newest_complete(
    storage: Storage, *, skip_damaged: bool = False, key: SigningKey | None = None, without: Collection[str] = ()
) -> Newest:
    """The newest committed checkpoint, opened. Its manifest is valid (signed, if a key is given), its files exist.

    Saves that were never committed are skipped. So are checkpoints that are marked for deletion and kept by a pin,
    unless there is no other. A committed one that cannot be used raises CorruptCheckpoint or IncompleteCheckpoint,
    because continuing would silently lose steps. With `skip_damaged` it is skipped too, unless the key rejects it.
    `skipped` lists all of these with the reasons. Saves in the folders `without` are ignored. In a fork the checkpoint
    may be the parent's: its `storage` is then the parent's.
    """
    for _ in range(_MOST_SURVEYS - 1):
        refs = _listed(storage, without, key)
        try:
            found = _newest_of(storage, refs, skip_damaged, key)
        except CheckpointError:
            if _have_gone(storage, refs, key):
                continue
            raise
        if not any(skipped.damaged for skipped in found.skipped) or not _have_gone(storage, refs, key):
            return found
    return _newest_of(storage, _listed(storage, without, key), skip_damaged, key)


def _listed(storage: Storage, without: Collection[str], key: SigningKey | None) -> list[CheckpointRef]:
    return [ref for ref in list_checkpoints(storage, key=key) if ref.prefix not in without]


def _have_gone(storage: Storage, refs: Sequence[CheckpointRef], key: SigningKey | None) -> bool:
    """Whether listed checkpoints have been deleted since: then newer ones exist."""
    still = {ref.prefix for ref in list_checkpoints(storage, key=key) if ref.complete}
    return any(ref.complete and ref.prefix not in still for ref in refs)


def _newest_of(storage: Storage, refs: Sequence[CheckpointRef], skip_damaged: bool, key: SigningKey | None) -> Newest:
    skipped: list[Skipped] = []
    if any(ref.complete and not ref.marked for ref in refs):
        refs = [_passed_over(ref) if ref.complete and ref.marked else ref for ref in refs]
    for ref in reversed(refs):
        try:
            if ref.complete:
                return Newest(checkpoint=open_ref(storage, ref, key=key), skipped=tuple(skipped))
            if ref.state == "damaged":
                raise CorruptCheckpoint(ref.reason)
            if ref.state == "lost":
                raise IncompleteCheckpoint(ref.reason)
            skipped.append(Skipped(ref=ref, reason=ref.reason, damaged=False))
        except RefusedCheckpoint:
            raise  # perhaps the key is wrong, not the checkpoint
        except CheckpointError as error:
            if not skip_damaged:
                raise
            skipped.append(Skipped(ref=ref, reason=str(error), damaged=True))
    return Newest(checkpoint=None, skipped=tuple(skipped))


def last_unmarked(refs: Sequence[CheckpointRef]) -> CheckpointRef:
    """The last of these saves, one or more, that is not marked for deletion; the last one if all are."""
    return next((ref for ref in reversed(refs) if not ref.marked), refs[-1])


def _passed_over(ref: CheckpointRef) -> CheckpointRef:
    reason = f"step {ref.step} under {ref.prefix} is marked for deletion, and exists only because it is pinned."
    return replace(ref, state="retired", reason=reason)


def open_ref(
    storage: Storage, ref: CheckpointRef, *, key: SigningKey | None = None, check_files: bool = True
) -> Checkpoint:
    """A committed checkpoint, opened. With `check_files`, the files are compared with the storage's listing.

    They must exist and, where the listing shows it, have their sizes. Raises as `open_checkpoint` and `open_reference`;
    CorruptCheckpoint if its claim names another manifest.
    """
    if ref.state == "reference":
        return open_reference(storage, ref.prefix, key=key)
    checkpoint = open_checkpoint(storage, ref.prefix, key=key)
    if ref.claim is not None and checkpoint.digest != ref.claim.digest:
        raise CorruptCheckpoint(
            f"{join_url(storage.url, ref.prefix, MANIFEST_NAME)} has digest {checkpoint.digest!r}, but "
            f"{claim_key(ref.claim.number)} committed {ref.claim.digest!r}. One of the two was replaced; use another "
            "checkpoint."
        )
    if check_files:
        _require_files(storage, ref, checkpoint)
    return checkpoint


def survey(storage: Storage, *, key: SigningKey | None = None, read_before: dict[int, Claim] | None = None) -> Survey:
    """The run's saves as they are now. With a key, claims and tombstones count only if the key signed them.

    `read_before`: claims, as for `History`.

    Reads claims from the newest back until the newest commit and every manifest's claim are found. Files are listed
    before claims, so that a save committed in between is not taken for debris, nor for lost. Raises CheckpointError if
    the run is being removed, or its removal was interrupted.
    """
    found: dict[tuple[int, str], dict[str, int | None]] = {}
    links = {link: save_folder_of(f"{link}/") for link in list_links(storage, CHECKPOINTS_FOLDER)}
    linked = {named: link for link, named in links.items() if named is not None}
    listed = [list_sizes(storage, folder) for folder in (CHECKPOINTS_FOLDER, *linked.values())]
    for at, size in chain.from_iterable(sizes.items() for sizes in listed):
        named = save_folder_of(at)
        if named is not None:
            found.setdefault(named, {})[at] = size
    history = History(storage, key=key, read_before=read_before)
    if history.is_of_removed_run:
        raise CheckpointError(text_of_removed(storage.url))
    every = CHECKPOINTS_FOLDER in list_links(storage)
    saves = [replace(unresolved(*named, sizes), linked=every or named in linked) for named, sizes in found.items()]
    if key is not None:
        saves = [_without_forged_mark(storage, ref, key) for ref in saves]
    refs = _resolved(storage, saves, history, key)
    return Survey(sorted(refs, key=_order), history)


def _order(ref: CheckpointRef) -> tuple[int, int, str]:
    return ref.step, ref.claim.number if ref.claim else 0, ref.save_id


def unresolved(step: int, save_id: str, sizes: Mapping[str, int | None]) -> CheckpointRef:
    """The save, with its state as its files alone show it."""
    prefix = save_prefix(step, save_id)
    by_name = _OF_GENERATION.fullmatch(save_id)
    ref = CheckpointRef(
        step=step,
        save_id=save_id,
        prefix=prefix,
        state="unclaimed",
        keys=tuple(sorted(sizes)),
        sizes=sizes,
        generation=int(by_name[1]) if by_name else None,
    )
    if f"{prefix}/{MANIFEST_NAME}" in sizes:
        return ref
    if f"{prefix}/{REFERENCE_NAME}" in sizes:
        return replace(ref, state="reference")
    if ref.marked:
        return replace(
            ref, state="retired", reason=f"step {step} under {prefix} has been deleted; its data goes later."
        )
    return replace(
        ref, state="unfinished", reason=f"step {step} under {prefix} was never committed: it has no {MANIFEST_NAME}."
    )


def _without_forged_mark(storage: Storage, ref: CheckpointRef, key: SigningKey) -> CheckpointRef:
    """The save as it is without a tombstone that the key did not sign."""
    if not ref.marked:
        return ref
    try:
        read_tombstone(storage, ref.prefix, key=key)
    except RefusedCheckpoint as error:
        found = replace(ref, forged_mark=True)
        return replace(found, state="unfinished", reason=str(error)) if ref.state == "retired" else found
    except (NoSuchKey, CorruptCheckpoint):  # removed just now; or damaged, which is no forgery
        pass
    return ref


def _resolved(
    storage: Storage, refs: list[CheckpointRef], history: History, key: SigningKey | None
) -> list[CheckpointRef]:
    with_manifest = {ref.prefix: ref.generation for ref in refs if ref.state == "unclaimed"}
    history.commits_of(with_manifest)
    refs = [*refs, *_vanished({ref.prefix for ref in refs}, history.newest_commit())]
    done = [_with_claim(storage, ref, history.known(ref.prefix)) for ref in refs]
    unclaimed = [ref for ref in done if ref.state == "unclaimed"]
    if not unclaimed:
        return done
    with Threads(_AT_ONCE, thread_name_prefix="raysharded-manifests") as pool:
        manifests = list(pool.map(lambda ref: _manifest_of(storage, ref, key), unclaimed))
    broken = [*history.damaged, *history.foreign][:1]  # as far as it matters here: those met below may be far older
    told = {
        ref.prefix: _with_manifest(ref, manifest, history, broken)
        for ref, manifest in zip(unclaimed, manifests, strict=True)
    }
    return [told.get(ref.prefix, ref) for ref in done]


def _vanished(found: Collection[str], newest: Claim | None) -> list[CheckpointRef]:
    """The save of the newest commit, if no file of it exists: that save is never deleted."""
    named = save_folder_of(f"{newest.prefix}/{MANIFEST_NAME}") if newest else None
    if newest is None or named is None or newest.prefix in found or save_prefix(*named) != newest.prefix:
        return []
    return [unresolved(*named, {})]


def _with_claim(storage: Storage, ref: CheckpointRef, claim: Claim | None) -> CheckpointRef:
    if claim is None or ref.state not in ("unclaimed", "unfinished"):
        return ref
    found = replace(ref, claim=claim, generation=claim.generation)
    if ref.state == "unclaimed":
        return replace(found, state="committed")
    where = f"step {ref.step} under {join_url(storage.url, ref.prefix)}"
    now = storage.list(ref.prefix)
    if f"{ref.prefix}/{MANIFEST_NAME}" in now or (tombstone_key(ref.prefix) in now and not ref.forged_mark):
        return replace(ref, reason=f"{where} was committed, or deleted, while the run was being listed. List it again.")
    reason = f"{where} was committed by {claim_key(claim.number)}, but has no {MANIFEST_NAME}: it was lost. Restore it."
    return replace(found, state="lost", reason=reason)


def _manifest_of(storage: Storage, ref: CheckpointRef, key: SigningKey | None) -> Manifest | CheckpointError | None:
    """The manifest, or the error in it; None if it was deleted since it was listed."""
    try:
        return open_checkpoint(storage, ref.prefix, key=key).manifest
    except CheckpointError as error:
        return error if f"{ref.prefix}/{MANIFEST_NAME}" in storage.list(ref.prefix) else None


def _with_manifest(
    ref: CheckpointRef,
    manifest: Manifest | CheckpointError | None,
    history: History,
    broken: Sequence[CorruptCheckpoint],
) -> CheckpointRef:
    """A save with a manifest and without a claim, resolved. `broken`: an unreadable claim that may be its own."""
    where = f"step {ref.step} under {ref.prefix}"
    if manifest is None:
        return replace(ref, state="unfinished", reason=f"{where} was never committed, and is being deleted.")
    if isinstance(manifest, CheckpointError):
        return replace(ref, state="damaged", reason=str(manifest))
    if manifest.version == 1:
        return replace(ref, state="committed", generation=manifest.generation)
    found = replace(ref, generation=manifest.generation)
    if broken:
        reason = f"{where} has no claim, unless it is the one that cannot be read: {broken[0]}"
        return replace(found, state="damaged", reason=reason)
    if not history.has_owner(manifest.writer, manifest.generation):
        reason = (
            f"{where} has a manifest, but is not of this run's claims: none commits it, and none is of its writer, "
            f"{manifest.writer!r} (generation {manifest.generation}). Either claims/ is missing or not complete: "
            "restore it; or the folder was copied here from another run: move it out of this one."
        )
        return replace(found, state="damaged", reason=reason)
    reason = f"{where} was never committed: it has a manifest, but no claim names it. Its writer ended, or was refused."
    return replace(found, reason=reason)


def _require_files(storage: Storage, ref: CheckpointRef, checkpoint: Checkpoint) -> None:
    files = checkpoint.manifest.files
    paths = [path for file in files for path in ([file.path, file.table_path] if file.digest_table else [file.path])]
    there = set(ref.keys)
    missing = [path for path in paths if key_of(ref.prefix, path) not in there]
    if missing:
        raise IncompleteCheckpoint(
            f"step {ref.step}: {len(missing)} of {len(paths)} data files are missing under "
            f"{join_url(storage.url, ref.prefix)}; first: {missing[0]}. Put them back, or resume from an older one."
        )
    for file in files:
        key = key_of(ref.prefix, file.path)
        size = size_of_listed(storage, key, ref.sizes.get(key))
        if size not in (None, file.size_bytes):
            raise IncompleteCheckpoint(
                f"step {ref.step}: {file.path} under {join_url(storage.url, ref.prefix)} has {size} bytes instead of "
                f"{file.size_bytes}. Put it back, or resume from an older one."
            )
