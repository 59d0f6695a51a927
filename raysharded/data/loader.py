"""Reading the samples of one logical microbatch, and proving which ones were read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from raysharded.config import BatchConfig
from raysharded.data.access.prefetch import Prefetcher
from raysharded.data.access.sample_reader import DatasetReader, Reader
from raysharded.data.ledger import Digest, ReadRecorder, digest_of_reads
from raysharded.data.order import Int64s, positions_of_microbatch, sample_ids
from raysharded.errors import DataError
from raysharded.ids import derive_seed
from raysharded.overrides import Skips, skipped_before

if TYPE_CHECKING:
    from raysharded.data.dataset import Dataset

MicrobatchKey: TypeAlias = tuple[int, int]
"""(step, microbatch): the step from 1 on, the logical microbatch from 0 on."""
_Place: TypeAlias = tuple[int, int, int, int]
"""(step, microbatch, samples passed over before, number of the rule `order`)"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatch:
    """The samples of one logical microbatch, before collation, and the proof of their reading."""

    step: int
    """The optimizer step, from 1 on."""
    index: int
    """Which microbatch of the step, from 0 on."""
    ids: Int64s
    """The ids that were really read, in order."""
    samples: list[Any]
    """In order, as the dataset gave them."""
    digest: Digest
    """Over what was really read; the digests of a step's microbatches add up to `expected_digest`."""
    num_reads: int
    """How many reads the digest covers."""

    @classmethod
    def from_reads(
        cls,
        step: int,
        index: int,
        samples: list[Any],
        *,
        recorder: ReadRecorder,
        batch: BatchConfig,
        skipped: int = 0,
    ) -> Microbatch:
        """With the digest of all that `recorder` saw: for loaders, so that what they report is what they did."""
        positions = positions_of_microbatch(step, index, batch.global_batch_size, batch.microbatch_size, skipped)
        return _proved(step, index, samples, recorder.ids, positions)


def _proved(step: int, index: int, samples: list[Any], ids: Int64s, positions: Int64s) -> Microbatch:
    proof = digest_of_reads(step, positions, ids)
    return Microbatch(step=step, index=index, ids=ids, samples=samples, digest=proof, num_reads=len(ids))


class Loader(Protocol):
    """What the engine needs of a loader. `load` must give the same samples for the same key and skips every time."""

    def skip(self, skips: Skips, order: int = 1) -> None:
        """The data that the run has passed over, and the number of its rule `order`, from now on; not beside `load`."""
        ...

    def load(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch; raises TaskError for the user's dataset, DataError for damaged files."""
        ...

    def plan(self, upcoming: Sequence[MicrobatchKey]) -> None:
        """A hint: these will be loaded next, in this order. Replaces the previous hint."""
        ...

    def load_range(self, start: int, stop: int) -> list[Any]:
        """The samples start .. stop-1 in the dataset's own order, unrecorded: for evaluation."""
        ...

    def close(self) -> None:
        """Let go of threads. May be called from any thread, more than once."""
        ...


class MicrobatchLoader:
    """Reads a map-style dataset in the order of `raysharded.data.order`.

    The dataset is read by one thread at a time. With `prefetch` a background thread reads what `plan` announced,
    at most two microbatches ahead; what `load` gives is the same with and without.
    """

    def __init__(
        self,
        dataset: Dataset | Reader,
        batch: BatchConfig,
        *,
        prefetch: bool = False,
        lock: threading.Lock | None = None,
    ) -> None:
        """`dataset`: or what reads it. `lock`: of another loader, whose dataset may stand on the same things as this
        one."""
        self._reader = dataset if isinstance(dataset, Reader) else DatasetReader(dataset, lock=lock)
        self.lock = self._reader.lock if isinstance(self._reader, DatasetReader) else threading.Lock()
        """Held by whoever reads the dataset in this process."""
        self._batch = batch
        self._num_samples: int | None = None
        self._skips: Skips = ()
        self._order = 1
        self._prefetcher: Prefetcher[_Place, Microbatch] | None = Prefetcher(self._read) if prefetch else None

    @property
    def num_samples(self) -> int:
        """The dataset's length. Raises DataError if it is empty, TaskError if asking for it fails."""
        if self._num_samples is None:
            self._num_samples = self._reader.num_samples()
        return self._num_samples

    def skip(self, skips: Skips, order: int = 1) -> None:
        """Take the samples at the positions that follow from these decisions, in this order, from now on; not beside
        `load`."""
        self._skips, self._order = skips, order

    def _place(self, key: MicrobatchKey) -> _Place:
        return *key, skipped_before(self._skips, key[0]), self._order

    def load(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch with its samples in order; raises ValueError for one that no step has.

        Raises TaskError with the user's traceback if the dataset does, DataError for damaged files, and
        RuntimeError after `close`.
        """
        place = self._place((step, microbatch))
        outcome = self._prefetcher.take(place) if self._prefetcher is not None else None
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        return self._read(place) if outcome is None or outcome.value is None else outcome.value

    def plan(self, upcoming: Iterable[MicrobatchKey]) -> None:
        """Prefetch these, in order, in place of what was planned before; without `prefetch`, nothing."""
        if self._prefetcher is not None:
            self._prefetcher.plan(self._place(key) for key in upcoming)

    def load_range(self, start: int, stop: int) -> list[Any]:
        """The samples start .. stop-1 in the dataset's own order, unrecorded.

        Raises DataError if the dataset has not so many; otherwise as `load`.
        """
        length = self.num_samples
        if not 0 <= start <= stop <= length:
            raise DataError(
                f"{self._reader.name} has {length} samples, not {start} .. {stop - 1}. "
                "Ask for fewer, or give more data."
            )
        number = derive_seed(self._batch.seed, "samples of an evaluation", start)
        return self._reader.read_samples(range(start, stop), "in evaluation", number).samples

    def close(self) -> None:
        """End the background thread, between two samples. Wakes whoever waits in `load`."""
        self._reader.close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _read(self, place: _Place) -> Microbatch:
        step, index, skipped, order = place
        batch = self._batch
        positions = positions_of_microbatch(step, index, batch.global_batch_size, batch.microbatch_size, skipped)
        ids = sample_ids(batch.seed, positions, self.num_samples, order)
        number = derive_seed(batch.seed, "samples", step, index)
        reads = self._reader.read_samples(ids.tolist(), f"in step {step}, microbatch {index}", number)
        return _proved(step, index, reads.samples, np.asarray(reads.ids, dtype=np.int64), positions)
