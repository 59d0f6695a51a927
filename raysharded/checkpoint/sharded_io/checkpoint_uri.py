"""Checkpoint URIs: split into the storage above the folder and the folder's name; checks that a folder is free."""

from __future__ import annotations

import os
import re

from raysharded.checkpoint.format.encoding import digest, digest_of
from raysharded.checkpoint.format.limits import MAX_MANIFEST_BYTES
from raysharded.checkpoint.format.paths import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    key_of,
    parse_save_folder,
    replaced_name,
)
from raysharded.checkpoint.format.signing import SigningKey, signing_key_from_environment
from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage.optional_operations import require_swaps
from raysharded.errors import CheckpointError, ConfigError
from raysharded.locations import join_url, local_path, scheme_of

Uri = str | os.PathLike[str]


def key_or_default(key: SigningKey | None, *, require_signed: bool = False) -> SigningKey | None:
    """The given key, or else the one in the environment, if any. Raises ConfigError for an invalid key.

    With `require_signed`, raises CheckpointError if there is no key.
    """
    require_key(key)
    return key if key is not None else signing_key_from_environment(require_signed=require_signed)


def require_key(key: SigningKey | None) -> None:
    """Raise ConfigError for an invalid key."""
    if key is not None and not isinstance(key, SigningKey):
        raise ConfigError(
            f"key is a {type(key).__qualname__}, not a SigningKey. Give SigningKey(secret), its secret as bytes, or "
            "SigningKey.from_file(path)."
        )


def text_of(uri: Uri) -> str:
    """The URI as text. Raises ConfigError for a value that is neither text nor a path."""
    text = os.fspath(uri) if isinstance(uri, (str, os.PathLike)) else None
    if not isinstance(text, str) or text == "":
        raise ConfigError(f"uri={uri!r}: give the checkpoint's folder, as text or a path.")
    return text


def storage_above(uri: Uri) -> tuple[Storage, str]:
    """The pair (storage above the folder, folder's name). Storage is not accessed. Raises as `split`."""
    above, name = split(uri)
    return open_storage(above), name


def split(uri: Uri) -> tuple[str, str]:
    """The pair (URL above the folder, folder's name). Options of an s3:// URL stay with the former.

    Raises ConfigError if there is nothing above, as for "s3://bucket", and as `text_of` and `local_path`.
    """
    text = join_url(text_of(uri))
    here = local_path(text)
    if here is not None:
        above, _, name = here.rpartition("/")
        return above or "/", _named(name, text)
    path, mark, options = text.partition("?") if scheme_of(text) == "s3" else (text, "", "")
    above, _, name = path.rpartition("/")
    return above + mark + options, _named("" if above.endswith(("/", ":")) else name, text)


def _named(name: str, uri: str) -> str:
    if name in ("", ".", ".."):
        raise ConfigError(
            f"{uri!r} does not name a checkpoint's folder below another place. Give one, such as "
            f"{join_url(uri, 'my-checkpoint')!r}."
        )
    return name


_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")


def require_free(storage: Storage, prefix: str, step: int, uri: str, *, overwrite: bool = False) -> bytes | None:
    """Reject the folder `prefix` if it is a checkpoint already, holds checkpoints, or is named after another step.

    With `overwrite` an existing checkpoint is no obstacle, unless it may belong to a run. Its manifest is returned as
    stored, and remains readable by its digest after another takes its place. `uri` names the folder in the message.
    Raises CheckpointError, or StorageError if storage fails.
    """
    named = parse_save_folder(prefix.rpartition("/")[2])
    if named is not None and named[0] != step:
        raise CheckpointError(f"{uri} is named after step {named[0]}, but this is step {step}. Choose another uri.")
    older = _older(storage, prefix) if overwrite else None
    if not overwrite and _is_checkpoint(storage, prefix):
        raise CheckpointError(
            f"{uri} is a checkpoint already, and checkpoints are never overwritten by default. Choose a separate uri "
            "for each save, such as one that ends in the step; or give overwrite=True."
        )
    if older is not None and named is not None:
        raise CheckpointError(
            f"{uri} is a run's own checkpoint: the run knows it by its manifest, so it cannot be overwritten. Choose "
            "another uri."
        )
    below = next((one for one in storage.list(prefix) if _is_of_another(one, prefix)), None)
    if below is not None:
        raise CheckpointError(
            f"{uri} holds checkpoints, and is not one itself: it contains {below}. Give a new folder below it, "
            f"such as {join_url(uri, f'step-{step}')}."
        )
    if older is not None:
        require_swaps(storage)
        storage.write(key_of(prefix, replaced_name(_digest_of(older))), [older])
    return older


def _is_checkpoint(storage: Storage, prefix: str) -> bool:
    try:
        storage.size(key_of(prefix, MANIFEST_NAME))
    except NoSuchKey:
        return False
    return True


def _older(storage: Storage, prefix: str) -> bytes | None:
    try:
        return storage.read(key_of(prefix, MANIFEST_NAME), 0, MAX_MANIFEST_BYTES)
    except NoSuchKey:
        return None


def _digest_of(manifest: bytes) -> str:
    """The digest by which readers request the manifest.

    For a damaged manifest, which nobody requests, any digest is suitable.
    """
    said = digest_of(manifest)
    return said if _HEXADECIMAL.fullmatch(said) else digest(manifest)


def _is_of_another(key: str, prefix: str) -> bool:
    """Whether a key below a folder belongs to a run or a checkpoint there."""
    first, *rest = key.removeprefix(f"{prefix}/").split("/")
    return bool(rest) and (rest == [MANIFEST_NAME] or first in ("claims", CHECKPOINTS_FOLDER))
