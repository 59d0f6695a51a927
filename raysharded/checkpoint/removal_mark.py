"""The mark of a run that is being removed: as long as it exists, what is left of the run is not a run.

    claims/removal.json    put before anything is deleted, deleted after everything else

A removal may race with a driver, a pin or a fork. The removal puts the mark, and then checks for claims and pins. The
others put their claim or pin, and then check for the mark. In any order, one of them sees the other (Dekker's rule),
and the one that does gives way. Only then is the mark rewritten as `begun`, and files are deleted.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.storage import NoSuchKey, NotAFile, Storage
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER
from raysharded.errors import CorruptCheckpoint, RayshardedError
from raysharded.locations import join_url

REMOVAL_KEY = f"{CLAIMS_FOLDER}/removal.json"

_FORMAT = "raysharded-removal"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalMark:
    """A removal of a run."""

    id: str
    """Random id of the process's removal; empty if the mark is damaged."""
    host: str
    pid: int
    created_at: float
    """Time in seconds since the Unix epoch, for people."""
    begun: bool
    """Whether files may have been deleted: then the run cannot be used any more."""

    def __str__(self) -> str:
        if not self.id:
            return "a process that ended while it wrote the mark"
        since = datetime.fromtimestamp(self.created_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {since}"


def new_mark(wall: Callable[[], float]) -> RemovalMark:
    """A mark of this process, before anything is deleted."""
    return RemovalMark(id=secrets.token_hex(16), host=platform.node(), pid=os.getpid(), created_at=wall(), begun=False)


def encode_mark(mark: RemovalMark, *, key: SigningKey | None = None, url: str = "") -> bytes:
    """The mark in its stored form, signed if a key is given. `url`: that of the run's storage."""
    return signed_json.seal(asdict(mark), _FORMAT, key=key, place=place_of(url, REMOVAL_KEY))


def read_mark(storage: Storage, *, key: SigningKey | None = None) -> RemovalMark | None:
    """The run's mark; None if it is not being removed.

    One that was torn, or that the key did not sign, is as before its deletion began.
    """
    where = join_url(storage.url, REMOVAL_KEY)
    try:
        data, place = read_small(storage, REMOVAL_KEY), place_of(storage.url, REMOVAL_KEY)
        body = signed_json.unseal(data, _FORMAT, where, key=key, place=place)
        return RemovalMark(
            id=signed_json.text(body, "id", where),
            host=signed_json.text(body, "host", where),
            pid=signed_json.whole(body, "pid", where),
            created_at=signed_json.seconds(body, "created_at", where),
            begun=body.get("begun") is True,
        )
    except NoSuchKey:
        return None
    except CorruptCheckpoint:
        return RemovalMark(id="", host="", pid=0, created_at=0.0, begun=False)


def is_marked(storage: Storage) -> bool:
    """Whether the run is being removed, or its removal was interrupted. One small request.

    Raises StorageError, also if a file has the name of a folder above the mark: then there is no run at all.
    """
    try:
        storage.size(REMOVAL_KEY)
    except NoSuchKey:
        return False
    except NotAFile as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise
    return True


def refuse_removed(storage: Storage, error: type[RayshardedError]) -> None:
    """Raise this error if the run is being removed, or its removal was interrupted. One small request."""
    if is_marked(storage):
        raise error(text_of_removed(storage.url))


def text_of_removed(url: str) -> str:
    """The message about what is left of a run."""
    return (
        f"the run at {url} is being removed, or its removal was interrupted: what is left is no run. Run `raysharded "
        f"rm {url}` again to finish it."
    )
