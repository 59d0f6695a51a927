"""Files of an S3 bucket as fsspec gives them, for reading, through the storage layer that checkpoints use.

s3fs is not needed, its pins exclude newer versions of boto3, and it does not know the options of our URLs.
"""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from raysharded.checkpoint.storage import NoSuchKey, open_storage
from raysharded.checkpoint.storage.optional_operations import list_sizes


class S3Files(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The objects of one bucket; paths are `bucket/key`. Raises StorageError, and FileNotFoundError."""

    protocol = "s3"

    def __init__(self, url: str, **settings: Any) -> None:
        """`url`: `s3://bucket` with the options of the connection."""
        super().__init__(**settings)
        self._bucket, mark, options = url.removeprefix("s3://").partition("?")
        self._options = mark + options
        self._storage = open_storage(url)

    def unstrip_protocol(self, name: str) -> str:
        """The URL, with the options of the connection: two servers may have objects of equal names."""
        return f"s3://{str(name).removeprefix('s3://')}{self._options}"

    def _key(self, path: str) -> str:
        return str(path).removeprefix("s3://").strip("/").removeprefix(self._bucket).strip("/")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._key(path)
        try:
            if key:
                return {"name": f"{self._bucket}/{key}", "size": self._storage.size(key), "type": "file"}
        except NoSuchKey:
            pass
        if not self._storage.list(key):
            raise FileNotFoundError(path)
        return {"name": f"{self._bucket}/{key}".rstrip("/"), "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = self.find(path, maxdepth=1, withdirs=True, detail=True)
        return list(found.values()) if detail else list(found)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        folder = self._key(path)
        found: dict[str, dict[str, Any]] = {}
        for key, size in list_sizes(self._storage, folder).items():
            *above, _name = parts = key[len(folder) :].strip("/").split("/")
            begin = "/".join(filter(None, (self._bucket, folder)))
            if withdirs:
                for depth in range(1, 1 + min(len(above), maxdepth or len(above))):
                    name = "/".join((begin, *parts[:depth]))
                    found[name] = {"name": name, "size": 0, "type": "directory"}
            if maxdepth is None or len(parts) <= maxdepth:
                name = f"{self._bucket}/{key}"
                found[name] = {"name": name, "size": size, "type": "file"}
        if not found and folder and self.isfile(path):
            found = {(one := self.info(path))["name"]: one}
        ordered = dict(sorted(found.items()))
        return ordered if detail else list(ordered)

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> AbstractBufferedFile:
        if mode != "rb":
            raise NotImplementedError("these files are read, not written")
        return _S3File(self, path, mode, **settings)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes of an object from `start` to `stop`, or to its end."""
        data = bytearray(max(0, stop - start))
        try:
            count = self._storage.read_into(self._key(path), start, [memoryview(data)]) if data else 0
        except NoSuchKey:
            raise FileNotFoundError(path) from None
        return bytes(data[:count])


class _S3File(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.read_range(self.path, start, end)
        return found
