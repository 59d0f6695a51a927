"""The folder of a run, as the run's own processes use it: nothing is written where the folder is not.

An unmounted share leaves an empty folder in its place, and a writer makes missing folders. It would divide the run
between two places. So the folder has an identity: a file that is made with the first claim, with a random name. From
then on every operation looks for that file first. If the file is missing, the operation fails, and changes nothing.

Other storages have no mounts, and no identity.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER
from raysharded.errors import StorageError

_NAME = re.compile(rf"{CLAIMS_FOLDER}/identity-([0-9a-f]{{32}})")


class RunFolder(LocalStorage):
    """A folder that has an identity, once `expect` or `identify` was called."""

    _identity: str = ""

    def expect(self, identity: str) -> None:
        """Fail from now on where the folder does not have this identity; empty: check nothing."""
        object.__setattr__(self, "_identity", identity)  # all else of a storage never changes

    def identify(self) -> str:
        """The folder's identity, which is made if there is none; expected from now on. Raises StorageError.

        Of several, which processes made at the same time, any one will do: the files stay.
        """
        if not self._identity:
            found = sorted(match[1] for key in self.list(CLAIMS_FOLDER) if (match := _NAME.fullmatch(key)))
            made = found[0] if found else secrets.token_hex(16)
            if not found:
                self.put_if_absent(_key(made), b"")
            self.expect(made)
        return self._identity

    @contextmanager
    def _explained(self, operation: str, key: str) -> Iterator[None]:
        if self._identity and not os.path.lexists(os.path.join(self.root, _key(self._identity))):
            raise StorageError(
                f"{operation} {self.url}/{key} failed: what is there is not the run's folder, because its file "
                f"{_key(self._identity)} is missing. Nothing was changed. "
                "Mount the file system, or move the folder back."
            )
        with LocalStorage._explained(self, operation, key):
            yield


def run_storage(url: str, identity: str = "") -> Storage:
    """The storage of a run, for the run's own processes. `identity`: the expected one, from `identify`; empty: none."""
    storage = open_storage(url)
    if not isinstance(storage, LocalStorage):
        return storage
    folder = RunFolder(storage.root)
    folder.expect(identity)
    return folder


def identify(storage: Storage) -> str:
    """The identity of a storage from `run_storage`, as `RunFolder.identify`; empty for a storage without one."""
    return storage.identify() if isinstance(storage, RunFolder) else ""


def _key(identity: str) -> str:
    return f"{CLAIMS_FOLDER}/identity-{identity}"
