"""Samples of similar lengths in each microbatch, so that padding them costs little."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from raysharded.data.dataset import Dataset
from raysharded.data.mixtures.schedule import ENDLESS
from raysharded.data.order import sample_ids
from raysharded.errors import ConfigError
from raysharded.ids import derive_seed

Int64s: TypeAlias = npt.NDArray[np.int64]
_ORDER = 1
"""The rule `order` of the permutations: of samples, and of microbatches."""
_WINDOWS = 4
"""Windows in memory."""


class Bucketed:
    """A dataset whose item p is the sample at position p of a run, with samples of similar lengths in a microbatch.

    Every epoch is a permutation of the samples. The samples before its first whole microbatch complete the one that the
    previous epoch has begun. The others are cut into windows of `window` microbatches. The samples of a
    window are sorted by their lengths and cut into microbatches, which are then permuted. So a microbatch has
    neighbours in length among `window * microbatch_size` random samples. The sample at a position is a function of the
    lengths and of the arguments: it does not depend on the number of workers. A microbatch with the end of an epoch
    and the beginning of the next one has samples of any lengths.

    Memory: 4 bytes for the length of each sample. Any thread may read it, if that holds for the dataset.
    """

    def __init__(
        self, dataset: Dataset, lengths: Sequence[int], *, microbatch_size: int, window: int = 128, seed: int = 0
    ) -> None:
        """`lengths`: of all samples, in their order, in any unit. `microbatch_size`: that of the run's `BatchConfig`.

        Raises ConfigError for arguments that cannot work, and if there are not as many lengths as samples.
        """
        self.dataset, self.microbatch_size, self.window, self.seed = dataset, microbatch_size, window, seed
        for name, value in (("microbatch_size", microbatch_size), ("window", window)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Bucketed.{name}={value!r}: give a whole number of 1 or more.")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"Bucketed.seed={seed!r}: give a whole number.")
        found = np.asarray(lengths)
        if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 0:
            raise ConfigError("Bucketed.lengths: give a whole number of 0 or more for each sample.")
        if len(found) != len(dataset):
            raise ConfigError(f"Bucketed.lengths: {len(found)} lengths for {len(dataset)} samples. Give one for each.")
        self._lengths = found.astype(np.uint32)
        self._windows: OrderedDict[tuple[int, int], Int64s] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Bucketed({type(self.dataset).__name__}, microbatch_size={self.microbatch_size})"

    @property
    def order_digest(self) -> int:
        """Digest of all that the order of samples depends on; above 1."""
        lengths = blake3(self._lengths.tobytes()).hexdigest()
        return (
            2
            + derive_seed("bucketed from whole microbatches", lengths, self.microbatch_size, self.window, self.seed)
            // 4
        )

    def __len__(self) -> int:
        """2^60: the dataset is repeated."""
        return ENDLESS

    def __getitem__(self, position: int, /) -> Any:
        """The sample at a position; raises what the dataset raises."""
        return self.dataset[self.origin(position)]

    def origin(self, position: int) -> int:
        """The dataset's number of the sample at a position."""
        if position < 0:
            raise IndexError(f"position {position} is negative: positions count from 0")
        epoch, offset = divmod(position, len(self._lengths))
        head = self._head(epoch)
        number, place = divmod(offset - head, self.window * self.microbatch_size)
        if offset < head:
            number, place = -1, offset
        with self._lock:
            ids = self._windows.get((epoch, number))
            if ids is None:
                ids = self._windows[epoch, number] = self._arranged(epoch, number)
                if len(self._windows) > _WINDOWS:
                    self._windows.popitem(last=False)
        return int(ids[place])

    def _head(self, epoch: int) -> int:
        """The number of an epoch's samples before its first whole microbatch."""
        total = len(self._lengths)
        return min(-epoch * total % self.microbatch_size, total)

    def _arranged(self, epoch: int, number: int) -> Int64s:
        """The samples of a window of an epoch, in order; window -1 has those before the first whole microbatch."""
        total, size, head = len(self._lengths), self.microbatch_size, self._head(epoch)
        first = head + number * self.window * size
        offsets = np.arange(first, min(first + self.window * size, total)) if number >= 0 else np.arange(head)
        drawn = sample_ids(derive_seed("bucketed samples", self.seed), epoch * total + offsets, total, _ORDER)
        if number < 0:
            return drawn
        by_length = drawn[np.argsort(self._lengths[drawn], kind="stable")]
        whole = len(by_length) // size  # a rest of the epoch comes last
        if not whole:
            return by_length
        seed = derive_seed("bucketed microbatches", self.seed, epoch, number)
        order = sample_ids(seed, np.arange(whole), whole, _ORDER)
        return np.concatenate(
            [by_length[: whole * size].reshape(whole, size)[order].reshape(-1), by_length[whole * size :]]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_windows", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _windows=OrderedDict(), _lock=threading.Lock())


def padded(
    samples: Sequence[Mapping[str, npt.ArrayLike]], values: Mapping[str, int], *, multiple_of: int = 1
) -> dict[str, Int64s]:
    """Arrays of integers, one row per sample, padded at the end: for `Task.collate`.

    `values`: the padding of each key, such as `{"input_ids": 0, "labels": -100}`; a sample has these keys, all of one
    length. The longest sample's length is rounded up to `multiple_of`. Raises ConfigError for samples that do not fit.
    """
    rows = [{key: np.asarray(sample[key]) for key in values if key in sample} for sample in samples]
    sizes = [{array.shape for array in row.values()} for row in rows]
    for number, (row, shapes) in enumerate(zip(rows, sizes, strict=True)):
        if len(row) < len(values) or len(shapes) != 1 or any(len(shape) != 1 for shape in shapes):
            found = ", ".join(f"{key} {array.shape}" for key, array in row.items())
            raise ConfigError(
                f"padded: sample {number} of the microbatch has {found or 'none of the keys'}: give it one-dimensional "
                f"arrays of one length for {', '.join(values)}."
            )
    longest = max(len(next(iter(row.values()))) for row in rows)
    length = max(1, -(-longest // multiple_of)) * multiple_of
    found_all = {key: np.full((len(rows), length), value, dtype=np.int64) for key, value in values.items()}
    for key, whole in found_all.items():
        for number, row in enumerate(rows):
            if row[key].size and row[key].dtype.kind not in "iub":
                raise ConfigError(
                    f"padded: {key} of sample {number} of the microbatch has dtype {row[key].dtype}: give integers."
                )
            whole[number, : len(row[key])] = row[key]
    return found_all
