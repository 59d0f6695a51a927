"""Paths of a checkpoint's files, as keys relative to the run's storage. Pure, except for `new_save_id`.

    checkpoints/step-0000000500-<save id>/<writer>.safetensors         data, one file per writer
    checkpoints/<hh>/step-0000000500-<save id>/<writer>.safetensors    the same, on partitioned storage
    checkpoints/step-0000000500-<save id>/manifest.json                written last

Every save has an id and therefore its own folder: no file of an older save is ever overwritten. On S3, keys that begin
alike share one partition's throughput until it is split. The two hexadecimal digits <hh>, a hash of folder and writer,
spread the writers over prefixes that stay the same from save to save
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html).
"""

from __future__ import annotations

import re
import secrets

from blake3 import blake3

from raysharded.checkpoint.format.limits import MAX_PATH_BYTES, MAX_PATH_PART_BYTES
from raysharded.errors import CheckpointError

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_NAME = "manifest.json"

_REPLACED = re.compile(r"replaced-[0-9a-f]{16}\.json")

_SUBFOLDER = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SAVE_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_SPREAD = re.compile(r"\.\./[0-9a-f]{2}/(step-[0-9]{10,}-[A-Za-z0-9_]{1,64})/([^/]+)")
_SPREAD_DIGITS = re.compile(r"[0-9a-f]{2}")
_SAVE_FOLDER = re.compile(r"step-([0-9]{10,})-([A-Za-z0-9_]{1,64})")


def new_save_id() -> str:
    """Id that no other save has: 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def save_prefix(step: int, save_id: str) -> str:
    """Folder of one save. Raises CheckpointError for a negative step or an invalid id."""
    if step < 0 or _SAVE_ID.fullmatch(save_id) is None:
        raise CheckpointError(
            f"step={step}, save_id={save_id!r} do not name a save: give a step of 0 or more and an id of 1 to 64 "
            "letters, digits or '_', for example from new_save_id()."
        )
    return f"{CHECKPOINTS_FOLDER}/{save_folder(step, save_id)}"


def save_folder(step: int, save_id: str) -> str:
    """Name of a save's folder."""
    return f"step-{step:010d}-{save_id}"


def parse_save_folder(folder: str) -> tuple[int, str] | None:
    """(step, save id) of the last part of a save's prefix; None if it does not name a save."""
    match = _SAVE_FOLDER.fullmatch(folder)
    return (int(match[1]), match[2]) if match else None


def replaced_name(digest: str) -> str:
    """Name of the copy of the manifest with this digest, beside the one that has replaced it or is about to."""
    return f"replaced-{digest[:16]}.json"


def is_replaced(name: str) -> bool:
    """Whether a file in a checkpoint's folder is named like such a copy."""
    return _REPLACED.fullmatch(name) is not None


def is_data(key: str, prefix: str) -> bool:
    """Whether a key is named like a file of a checkpoint in the folder `prefix`, other than its manifest."""
    *folders, name = key.removeprefix(f"{prefix}/").split("/")
    if not folders and is_replaced(name):
        return True
    if len(folders) == 2 and _SPREAD_DIGITS.fullmatch(folders[0]):
        del folders[0]
    own = not folders or (len(folders) == 1 and _SUBFOLDER.fullmatch(folders[0]) is not None)
    return own and name.endswith((".safetensors", ".safetensors.b3"))


def data_path(prefix: str, writer: str, *, partitioned: bool = False, subfolder: str = "") -> str:
    """Path of a writer's data file, relative to the save's folder `prefix`. Raises CheckpointError for a bad name."""
    if _NAME.fullmatch(writer) is None:
        raise CheckpointError(
            f"writer={writer!r} cannot name a file: use 1 to 128 letters, digits, '.', '_' or '-', starting with a "
            "letter or a digit, different for every worker of one save."
        )
    name = f"{writer}.safetensors"
    folder = prefix.rsplit("/", 1)[-1]
    if subfolder:
        return f"{_spread_digits(subfolder, writer)}/{subfolder}/{name}" if partitioned else f"{subfolder}/{name}"
    if partitioned and parse_save_folder(folder) is not None:
        return f"../{_spread_digits(folder, writer)}/{folder}/{name}"
    return name


def _spread_digits(folder: str, writer: str) -> str:
    return blake3(f"{folder}/{writer}".encode()).hexdigest()[:2]


def key_of(prefix: str, path: str) -> str:
    """Storage key of a path in the manifest of the folder `prefix`. The path must have been checked (`is_own`)."""
    if not path.startswith("../"):
        return f"{prefix}/{path}" if prefix else path
    above = prefix.rpartition("/")[0]
    return f"{above}/{path[3:]}" if above else path[3:]


def save_folder_of(key: str) -> tuple[int, str] | None:
    """(step, save id) of the save that a key below `checkpoints/` belongs to; None if to none.

    Files in other folders, such as `checkpoints/best/step-...`, belong to the user who put them there.
    """
    _, *parts = key.split("/")
    if len(parts) > 2 and _SPREAD_DIGITS.fullmatch(parts[0]):
        del parts[0]
    return parse_save_folder(parts[0]) if len(parts) > 1 else None


def is_own(path: str, folder: str) -> bool:
    """Whether a manifest of the save folder `folder` may name a file: one inside it, or one spread over prefixes."""
    spread = _SPREAD.fullmatch(path)
    return is_inside(path) if spread is None else spread[1] == folder and is_inside(spread[2])


def is_usable(path: str) -> bool:
    """Whether every kind of storage accepts a path: it is printable Unicode, and not too long."""
    if not path.isprintable():  # nor is half of a surrogate pair
        return False
    data = path.encode()
    return len(data) <= MAX_PATH_BYTES and max(map(len, data.split(b"/"))) <= MAX_PATH_PART_BYTES


def is_inside(path: str) -> bool:
    """Whether a relative path stays below its base folder on every kind of storage."""
    return is_below(path) and "\\" not in path and ":" not in path.split("/", maxsplit=1)[0]


def is_below(path: str) -> bool:
    """Whether a relative path can be one here, and stays below its base folder."""
    try:
        path.encode(errors="surrogateescape")  # bytes of a file's name that are no text are permitted
    except UnicodeEncodeError:
        return False
    return "\0" not in path and not any(part in ("", ".", "..") for part in path.split("/"))
