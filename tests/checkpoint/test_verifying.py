"""A verification lists all damage, also what happens while it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.errors import IncompleteCheckpoint
from raysharded.testing.storages import CountingStorage, save_rows


@dataclass(slots=True)
class GoneOnceSized(CountingStorage):
    """Deletes or cuts a file as soon as its size was queried."""

    file: str = ""
    left: int | None = None
    """Number of bytes that stay; None: the file is deleted."""

    def size(self, key: str) -> int:
        size = self.inner.size(key)
        if key.endswith(self.file):
            data = self.inner.read(key)
            self.inner.delete([key])
            if self.left is not None:
                self.inner.write(key, [data[: self.left]])
        return size


@pytest.mark.parametrize(("left", "said"), [(None, "w0000.* is missing"), (700, "w0000.* is cut off")])
def test_a_file_that_goes_while_it_is_verified_is_listed_and_the_others_are_verified(
    tmp_path: Path, left: int | None, said: str
) -> None:
    inner = open_storage(str(tmp_path))
    prefix = save_rows(inner, {"w": np.arange(2000.0)}, step=1, save_id="a", num_writers=3, chunk_size_bytes=1024)
    data = bytearray(inner.read(f"{prefix}/w0002.safetensors"))
    data[-1] ^= 1
    inner.write(f"{prefix}/w0002.safetensors", [data])
    storage = GoneOnceSized(inner, file="w0000.safetensors", left=left)
    progress: list[int] = []
    first, second = open_checkpoint(storage, prefix).find_damage(progress.append)
    assert isinstance(first, IncompleteCheckpoint)
    assert re.search(said, str(first))
    assert "w0002" in str(second)
