"""Where a checkpoint's files are, as keys relative to the run's storage. Pure, but for `new_save_id`.

    checkpoints/step-0000000500-<save id>/<writer>.safetensors    data, one file per writer
    checkpoints/step-0000000500-<save id>/manifest.json           written last

Every save has an id and thus a folder of its own: no file of an older save is ever overwritten.
"""

from __future__ import annotations

import re
import secrets

from raysharded.errors import CheckpointError

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_NAME = "manifest.json"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SAVE_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_SAVE_FOLDER = re.compile(r"step-([0-9]{10,})-([A-Za-z0-9_]{1,64})")


def new_save_id() -> str:
    """An id that no other save has: 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def save_prefix(step: int, save_id: str) -> str:
    """The folder of one save. Raises CheckpointError for a negative step or an unusable id."""
    if step < 0 or _SAVE_ID.fullmatch(save_id) is None:
        raise CheckpointError(
            f"step={step}, save_id={save_id!r} do not name a save: give a step of 0 or more and an id of 1 to 64 "
            "letters, digits or '_', for example from new_save_id()."
        )
    return f"{CHECKPOINTS_FOLDER}/step-{step:010d}-{save_id}"


def parse_save_folder(folder: str) -> tuple[int, str] | None:
    """(step, save id) of the last part of a save's prefix; None if it is not named like one."""
    match = _SAVE_FOLDER.fullmatch(folder)
    return (int(match[1]), match[2]) if match else None


def data_file_name(writer: str) -> str:
    """The data file of one writer, relative to the save's prefix. Raises CheckpointError for an unusable name."""
    if _NAME.fullmatch(writer) is None:
        raise CheckpointError(
            f"writer={writer!r} cannot name a file: use 1 to 128 letters, digits, '.', '_' or '-', starting with a "
            "letter or a digit, different for every worker of one save."
        )
    return f"{writer}.safetensors"


def is_inside(path: str) -> bool:
    """Whether a relative path stays below the folder that it is relative to, on every kind of storage."""
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts)
    return not bad and "\\" not in path and "\0" not in path and ":" not in parts[0]
