"""A storage in this process's memory: every operation happens at once and whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raysharded.checkpoint import NoSuchKey
from raysharded.checkpoint.storage import BytesLike, Keys, Traits, Unfinished


class MemoryStorage:
    """As `raysharded.checkpoint.storage.Storage`; used by one thread."""

    url = "memory://run"
    traits = Traits(span_bytes=1, num_readers=1, partitioned=False)
    retries = 0

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        self._files[key] = b"".join(parts)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if key not in self._files:
            raise NoSuchKey(f"there is no {key}")
        return self._files[key][offset : None if size is None else offset + size]

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        raise NotImplementedError("nothing but manifests, claims and the journal is kept here")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key in self._files:
            return False
        self._files[key] = data
        return True

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._files.pop(key, None)

    def size(self, key: str) -> int:
        return len(self.read(key))

    def list(self, prefix: str = "") -> Keys:
        return sorted(key for key in self._files if key.startswith(f"{prefix}/" if prefix else ""))

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        return []

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        pass
