"""A dataset of shards whose items are read by their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from raysharded.errors import ConfigError


class ShardedItems:
    """A map-style dataset of "item i of shard s": the items of all shards, one shard after the other.

    A run reads it in the order of samples of any other dataset: each item once in an epoch, at any number of workers.
    The number of the sample decides the shard and the item. So a run keeps the numbers of items: with others it is
    refused. Any thread may read it, if that holds for `read`. For instance, of the rows of some files:

        counts = [pyarrow.parquet.read_metadata(path).num_rows for path in paths]
        data = ShardedItems(counts, partial(read_row, paths))

    `counts` are read once, where the run is started, and travel with the dataset.
    """

    def __init__(
        self, num_items: Sequence[int], read: Callable[[int, int], Any], *, samples_per_block: int = 1
    ) -> None:
        """`num_items`: of each shard. `read(shard, item)`: the sample, the same one every time.

        `samples_per_block`: consecutive items that are cheap to read together, a power of two. Raises ConfigError.
        """
        found = np.asarray(num_items)
        if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 0 or not found.sum():
            raise ConfigError("ShardedItems.num_items: give the number of items of each shard; one at least has some.")
        self.samples_per_block = samples_per_block
        self._read = read
        self._ends = np.cumsum(found, dtype=np.int64)

    def __repr__(self) -> str:
        return f"ShardedItems({len(self._ends)} shards, {len(self)} items)"

    @property
    def contents_digest(self) -> str:
        """Digest of the numbers of items."""
        return blake3(self._ends.tobytes()).hexdigest()

    def place(self, index: int) -> tuple[int, int]:
        """(shard, item) of a sample. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self!r}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        """The sample; raises what `read` raises."""
        return self._read(*self.place(int(index)))
