"""A file system without exclusive create, as an fsspec backend."""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class CarelessFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Overwrites existing files on create, as some backends do; loses connections on request."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012  # fsspec's own way to share it between instances
    pseudo_dirs = [""]  # noqa: RUF012
    failures: list[Exception] = []  # noqa: RUF012
    effect_before_failure = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("careless://", "memory://")))

    def exists(self, path: str, **kwargs: Any) -> bool:
        found = bool(super().exists(path))
        time.sleep(0.0005)  # the window in which others may write
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.failures and not self.effect_before_failure:
            raise self.failures.pop()
        super().pipe_file(path, value)
        if self.failures:
            raise self.failures.pop()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return bytes(super().cat_file(path, start, end))


fsspec.register_implementation("careless", CarelessFileSystem, clobber=True)
