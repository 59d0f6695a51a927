"""Reading of one logical microbatch's samples, with a digest of the reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from raysharded.config import BatchConfig
from raysharded.data.access.collation import Collation, Wish
from raysharded.data.access.prefetch import Prefetcher, num_ahead
from raysharded.data.access.reader import Reader, Reads
from raysharded.data.access.reader_process import CollatingReader
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.ledger import Digest, ReadRecorder, digest_of_reads, digests
from raysharded.data.order import NO_BLOCKS, Blocks, Int64s, positions_of_microbatch, sample_ids
from raysharded.errors import DataError
from raysharded.ids import derive_seed
from raysharded.overrides import Skips, WeightChanges, consumed, skipped_before

if TYPE_CHECKING:
    from raysharded.data.dataset import Dataset

MicrobatchKey: TypeAlias = tuple[int, int]
"""The pair (step, microbatch): the step from 1 on, the logical microbatch from 0 on."""
_LEAST_IDS = 4096  # computed at once: for few of them most of the time goes to calls


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """All that decides which samples a microbatch has. One object until one of them changes: it is compared often."""

    skips: Skips = ()
    order: int = 1
    """Number of the rule `order`."""
    blocks: Blocks = NO_BLOCKS
    weights: WeightChanges = ()
    """Changed weights of a mixture."""


_Place: TypeAlias = tuple[int, int, _Rules]
"""The tuple (step, microbatch, rules)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatch:
    """The samples of one logical microbatch, before collation, and the digest of their reading."""

    step: int
    """The optimizer step, from 1 on."""
    index: int
    """Number of the microbatch in the step, from 0 on."""
    ids: Int64s
    """Ids of the samples actually read, in order."""
    samples: list[Any]
    """The samples in order, as the dataset returned them; empty if a batch was made of them ahead."""
    digest: Digest
    """Digest of the actual reads. The digests of a step's microbatches add up to `expected_digest`."""
    num_reads: int
    """Number of reads that the digest covers."""
    batch: Any = None
    """The batch that a worker made of the samples ahead of its use; None if it made none."""

    @property
    def num_samples(self) -> int:
        """Number of samples, also of those that are in a batch."""
        return len(self.samples) or len(self.ids)

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
        """A microbatch with the digest of everything that `recorder` saw, so that a loader reports what it did."""
        positions = positions_of_microbatch(step, index, batch.global_batch_size, batch.microbatch_size, skipped)
        ids = recorder.ids
        return _microbatch(step, index, Reads(samples, ids.tolist()), ids, digest_of_reads(step, positions, ids))


def _microbatch(step: int, index: int, reads: Reads, ids: Int64s, proof: Digest) -> Microbatch:
    return Microbatch(
        step=step, index=index, ids=ids, samples=reads.samples, digest=proof, num_reads=len(ids), batch=reads.batch
    )


class Loader(Protocol):
    """Loader interface of the engine. `load` must give the same samples for the same key and skips every time."""

    def skip(self, skips: Skips, order: int = 1, blocks: tuple[int, int] = (1, 1), weights: WeightChanges = ()) -> None:
        """Set the skipped data of the run, the number of its rule `order`, its `Blocks`, and changed weights.

        Must not run concurrently with `load`.
        """
        ...

    def load(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch. Raises TaskError for the user's dataset, DataError for damaged files."""
        ...

    def plan(self, upcoming: Sequence[MicrobatchKey]) -> None:
        """A hint: these will be loaded next, in this order. Replaces the previous hint."""
        ...

    def load_range(self, start: int, stop: int) -> list[Any]:
        """The samples start .. stop-1 in the dataset's own order, unrecorded: for evaluation."""
        ...

    def plan_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """A hint: `load_range` is called with these (start, stop) next, in this order. Replaces the previous hint."""
        ...

    def close(self) -> None:
        """Release threads. Any thread may call it, more than once."""
        ...


class MicrobatchLoader:
    """Loader of a map-style dataset in the order of `raysharded.data.order`.

    One thread at a time reads the dataset. With `prefetch` a background thread reads what `plan` announced, at most two
    microbatches ahead. `load` returns the same samples with and without.
    """

    def __init__(
        self,
        dataset: Dataset | Reader,
        batch: BatchConfig,
        *,
        prefetch: bool = False,
        lock: threading.Lock | None = None,
        num_threads: int = 1,
        collation: Collation | None = None,
    ) -> None:
        """`dataset`: a dataset, or a reader of it.

        `lock`: the lock of another loader whose dataset may share objects with this one. `num_threads`: of those that
        read ahead, for a reader that several may call at once. `collation`: requests batches from the reader.
        """
        self._reader = dataset if isinstance(dataset, Reader) else DatasetReader(dataset, lock=lock)
        own = self._reader
        self.lock = own.lock if isinstance(own, (DatasetReader, CollatingReader)) else threading.Lock()
        """Held by the thread that reads the dataset in this process."""
        self.lends_memory = isinstance(own, (DatasetReader, CollatingReader)) and own.is_read_anywhere()
        """Whether samples may be the dataset's own memory, and are read again where that is needed."""
        self._batch = batch
        self._num_samples: int | None = None
        self._samples_per_block: int | None = None
        self._rules = _Rules()
        self.collation = collation
        """Whether batches are made where samples are read; None: they are not."""
        self.ahead: Callable[[Microbatch], Microbatch] = lambda microbatch: microbatch
        """Called with each microbatch that is read ahead, in the thread that reads; must not raise."""
        self._prefetcher: Prefetcher[_Place, Microbatch] | None = None
        if prefetch:
            self._prefetcher = Prefetcher(self._read_ahead, depth=num_ahead(num_threads), num_threads=num_threads)
        self._ranges: Prefetcher[tuple[int, int], list[Any]] | None = None
        if prefetch:
            self._ranges = Prefetcher(lambda range_: self._read_range(*range_))
        self._upcoming = _Upcoming(self._reader, batch.microbatch_size, self._reads_of)

    @property
    def num_samples(self) -> int:
        """Length of the dataset. Raises DataError if it is empty, TaskError if its `__len__` fails."""
        if self._num_samples is None:
            self._num_samples = self._reader.num_samples()
        return self._num_samples

    @property
    def samples_per_block(self) -> int:
        """Consecutive samples that are read at once. Raises ConfigError for another number than a power of two."""
        if self._samples_per_block is None:
            self._samples_per_block = self._reader.samples_per_block()
        return self._samples_per_block

    @property
    def order_text(self) -> str:
        """All that the order of a mixture's samples depends on, as JSON; empty for other datasets."""
        return self._reader.order_text()

    @property
    def contents(self) -> str:
        """Digest of what the samples are made of; empty for data without one."""
        return self._reader.contents()

    def require_steps(self, last_step: int) -> None:
        """Raise DataError if a mixture ends before this step, by the decisions that `skip` was given."""
        if self.samples_per_block < 0:
            position = consumed(self._rules.skips, last_step, self._batch.global_batch_size) - 1
            self._reader.require_position(position, self._rules.weights)

    def skip(self, skips: Skips, order: int = 1, blocks: tuple[int, int] = (1, 1), weights: WeightChanges = ()) -> None:
        """Take the samples at the positions that follow from these decisions, in this order, from now on.

        Must not run concurrently with `load`.
        """
        rules = _Rules(skips, order, Blocks(*blocks), weights)
        if astuple(rules) != astuple(self._rules):  # otherwise what was read ahead stays
            self._rules = rules
        self._upcoming.restart(weights)
        if self.collation is not None:
            self.collation.restart()

    def load(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch with its samples in order. Raises ValueError for one that no step has.

        Raises TaskError with the user's traceback if the dataset fails, DataError for damaged files, and RuntimeError
        after `close`.
        """
        place = (step, microbatch, self._rules)
        outcome = self._prefetcher.take(place) if self._prefetcher is not None else None
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        return self._read(place) if outcome is None or outcome.value is None else outcome.value

    def samples_again(self, step: int, microbatch: int) -> list[Any]:
        """The samples of a microbatch, read once more. Raises as `load`."""
        return self._read((step, microbatch, self._rules)).samples

    def plan(self, upcoming: Iterable[MicrobatchKey]) -> None:
        """Prefetch these, in order, instead of the previous plan. Does nothing without `prefetch`."""
        if self._prefetcher is not None:
            keys = list(upcoming)
            self._upcoming.plan(keys)
            self._prefetcher.plan((step, index, self._rules) for step, index in keys)

    def load_range(self, start: int, stop: int) -> list[Any]:
        """The samples start .. stop-1 in the dataset's own order, unrecorded.

        Raises DataError if the dataset has fewer samples; otherwise as `load`.
        """
        length = self.num_samples
        if not 0 <= start <= stop <= length:
            raise DataError(
                f"{self._reader.name} has {length} samples, not {start} .. {stop - 1}. "
                "Request fewer, or give more data."
            )
        outcome = self._ranges.take((start, stop)) if self._ranges is not None else None
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        return self._read_range(start, stop) if outcome is None or outcome.value is None else outcome.value

    def plan_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these for `load_range` in the background, at most two ahead. Does nothing without `prefetch`."""
        if self._ranges is not None:
            self._ranges.plan(ranges)

    def _read_range(self, start: int, stop: int) -> list[Any]:
        number = derive_seed(self._batch.seed, "samples of an evaluation", start)
        return self._reader.read_samples(range(start, stop), "in evaluation", number).samples

    def close(self) -> None:
        """End the background thread between two samples, and wake threads that wait in `load`."""
        self._reader.close()
        for prefetcher in (self._prefetcher, self._ranges):
            if prefetcher is not None:
                prefetcher.close()

    def _reads_of(self, steps: range, microbatches: Sequence[int]) -> tuple[Int64s, Int64s]:
        """Positions and ids that these microbatches of these steps read, in this order."""
        size = self._batch.microbatch_size
        within = np.concatenate([np.arange(index * size, (index + 1) * size) for index in microbatches])
        rules = self._rules
        firsts = [(step - 1) * self._batch.global_batch_size + skipped_before(rules.skips, step) for step in steps]
        positions = (np.asarray(firsts, dtype=np.int64)[:, None] + within).reshape(-1)
        return positions, sample_ids(self._batch.seed, positions, self.num_samples, rules.order, rules.blocks)

    def _read_ahead(self, place: _Place) -> Microbatch:
        wish = None if self.collation is None else self.collation.wish(place[0], place[1])
        found = self._read(place, wish)
        if self.collation is not None and wish is not None and found.batch is None:
            self.collation.refuse("it fails in the process that reads the samples, or its batch cannot be pickled")
        return self.ahead(found)

    def _read(self, place: _Place, wish: Wish | None = None) -> Microbatch:
        step, index, rules = place
        batch = self._batch

        def positions() -> Int64s:
            skipped = skipped_before(rules.skips, step)
            return positions_of_microbatch(step, index, batch.global_batch_size, batch.microbatch_size, skipped)

        known = self._upcoming.find(step, index) if rules is self._rules else None
        if known is None:
            ids = sample_ids(batch.seed, positions(), self.num_samples, rules.order, rules.blocks)
        else:
            ids = known[0]
        number = derive_seed(batch.seed, "samples", step, index)
        wanted = ids.tolist()
        reads = self._reader.read_samples(wanted, f"in step {step}, microbatch {index}", number, rules.weights, wish)
        if known is not None and reads.ids == wanted:
            return _microbatch(step, index, reads, ids, known[1])
        ids = np.asarray(reads.ids, dtype=np.int64)
        return _microbatch(step, index, reads, ids, digest_of_reads(step, positions(), ids))


class _Upcoming:
    """Ids of the samples that a worker reads next, with the digests of their reads, computed for many steps at once,
    and announced to a dataset that reads ahead.

    The order is known exactly, and a worker's microbatches are the same in every step of a generation.
    """

    def __init__(
        self, reader: Reader, size: int, reads_of: Callable[[range, Sequence[int]], tuple[Int64s, Int64s]]
    ) -> None:
        """`size`: samples per microbatch. `reads_of`: positions and ids of microbatches of steps."""
        self._reader, self._size, self._reads_of = reader, size, reads_of
        self._num_ahead: int | None = None
        self._weights: WeightChanges = ()
        self._computed: tuple[list[int], tuple[tuple[range, Int64s, list[Digest]], ...]] = ([], ())
        """Microbatches, and for parts of consecutive steps their ids, [steps * microbatches, size], and digests."""

    def restart(self, weights: WeightChanges) -> None:
        """The order is another one from now on, and a mixture has these changed weights."""
        self._computed, self._weights = ([], ()), weights

    def plan(self, keys: Sequence[MicrobatchKey]) -> None:
        """These are loaded next, and then the same microbatches of the steps that follow."""
        if not keys:
            return
        if self._num_ahead is None:
            self._num_ahead = self._reader.num_read_ahead()
        step = keys[0][0]
        microbatches = [index for at, index in keys if at == step]
        before, known = self._computed
        parts = tuple(part for part in known if step < part[0].stop)
        if microbatches != before or not parts or step < parts[0][0].start:
            parts = ()
        next_step = parts[-1][0].stop if parts else step
        num_steps = max(self._num_ahead, _LEAST_IDS) // (self._size * len(microbatches)) + 1
        if next_step - step <= num_steps // 2:
            steps = range(next_step, step + num_steps)
            positions, ids = self._reads_of(steps, microbatches)
            if self._num_ahead:
                self._reader.read_ahead(ids, anew=not parts, weights=self._weights)
            positions, ids = positions.reshape(-1, self._size), ids.reshape(-1, self._size)
            of_rows = np.repeat(np.asarray(steps, dtype=np.int64), len(microbatches))
            parts = (*parts, (steps, ids, digests(of_rows, positions, ids)))
        self._computed = microbatches, parts

    def find(self, step: int, microbatch: int) -> tuple[Int64s, Digest] | None:
        """The ids of a microbatch and the digest of reading them once, if they were computed. Any thread."""
        microbatches, parts = self._computed
        for steps, ids, proofs in parts:
            if step in steps and microbatch in microbatches:
                row = (step - steps.start) * len(microbatches) + microbatches.index(microbatch)
                return ids[row], proofs[row]
        return None
