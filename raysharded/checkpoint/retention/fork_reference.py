"""A fork's reference: a checkpoint in its parent's storage, named where the fork's own would be.

<fork>/checkpoints/step-0000000500-fork_<12 digits of the manifest's digest>/reference.json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.paths import save_prefix
from raysharded.checkpoint.format.signing import SigningKey, Unsigned, place_of
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage.named_places import url_named
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, RefusedCheckpoint
from raysharded.locations import join_url

REFERENCE_NAME = "reference.json"

_FORMAT = "raysharded-reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Place of the checkpoint that a fork began with."""

    parent: str
    """URL of the parent run's storage, as its writer knew it. It is opened through `parent_of` alone."""
    prefix: str
    """Folder of the checkpoint in the parent's storage."""
    step: int
    manifest_digest: str
    pin: str
    """Tag in the parent that keeps the checkpoint."""
    created_at: float = 0.0
    """Time in seconds since the Unix epoch, for people."""

    @property
    def folder(self) -> str:
        """Folder of the reference in the fork, derived from the checkpoint."""
        return save_prefix(self.step, f"fork_{self.manifest_digest[:12]}")

    def is_same(self, other: Reference) -> bool:
        """Whether both are equal except for the time."""
        return replace(self, created_at=0.0) == replace(other, created_at=0.0)


def encode_reference(reference: Reference, *, key: SigningKey | None = None, url: str = "") -> bytes:
    """The reference in its stored form, signed if a key is given. `url`: that of the fork's storage."""
    place = place_of(url, f"{reference.folder}/{REFERENCE_NAME}")
    return signed_json.seal(asdict(reference), _FORMAT, key=key, place=place)


def read_reference(storage: Storage, prefix: str, *, key: SigningKey | None = None) -> Reference:
    """The reference in a folder. Raises CorruptCheckpoint if it is damaged, NoSuchKey if it does not exist.

    With a key, raises RefusedCheckpoint if the key did not sign it for this run and folder.
    """
    at = f"{prefix}/{REFERENCE_NAME}"
    where = join_url(storage.url, at)
    data = read_small(storage, at)
    try:
        body = signed_json.unseal(data, _FORMAT, where, key=key, place=place_of(storage.url, at))
    except Unsigned as error:
        raise RefusedCheckpoint(
            f"{error} If this run is a fork that was made without the key, repeat `raysharded checkpoint fork` with it."
        ) from error
    return Reference(
        parent=signed_json.text(body, "parent", where),
        prefix=signed_json.folder(body, "prefix", where),
        step=signed_json.whole(body, "step", where),
        manifest_digest=signed_json.digest(body, "manifest_digest", where),
        pin=signed_json.text(body, "pin", where),
        created_at=signed_json.seconds(body, "created_at", where),
    )


def parent_of(storage: Storage, reference: Reference) -> Storage:
    """The parent of the fork at `storage`. Touches nothing yet.

    Raises RefusedCheckpoint if the reference names a place that is not allowed (`url_named`).
    """
    return open_storage(url_named(reference.parent, storage.url, f"a {REFERENCE_NAME} in {storage.url}"))


def open_reference(storage: Storage, prefix: str, *, key: SigningKey | None = None) -> Checkpoint:
    """The parent's checkpoint, in the parent's storage, identified by its manifest's digest.

    Raises IncompleteCheckpoint if it was deleted, CorruptCheckpoint if it or the reference is damaged, CheckpointError
    if it is itself a reference; as `parent_of`.
    """
    reference = read_reference(storage, prefix, key=key)
    where = join_url(storage.url, prefix, REFERENCE_NAME)
    parent = parent_of(storage, reference)
    if parent.url == storage.url:
        raise CheckpointError(f"{where} refers to its own run. Remove it, and fork from a checkpoint of another run.")
    try:
        return open_checkpoint(parent, reference.prefix, key=key, digest=reference.manifest_digest)
    except (IncompleteCheckpoint, CorruptCheckpoint) as error:
        refuse_chain(parent, reference.prefix, where)
        raise type(error)(f"{where} refers to a checkpoint that cannot be used: {error}") from error


def refuse_chain(storage: Storage, prefix: str, where: str) -> None:
    """Raise CheckpointError if the folder holds a reference instead of a checkpoint."""
    try:
        further = read_reference(storage, prefix)
    except (NoSuchKey, CorruptCheckpoint):
        return
    raise CheckpointError(
        f"{where}: {join_url(storage.url, prefix)} is itself a reference, to {further.prefix} of {further.parent}. "
        "A fork refers to a checkpoint, not to another fork's reference: fork that one."
    )
