"""The ledger: digests of the samples that a run actually consumed.

Every read of sample `id` for position `p` of step `s` has a hash of (s, p, id). A step's digest is the sum of its
reads' hashes, and therefore independent of who read what, or when. The driver's journal keeps one `StepReads` per
committed step; `check` compares them with the expected reads. (A sum modulo 2^64 of hashes is an additive multiset
hash: Bellare and Micciancio, "A New Paradigm for Collision-Free Hashing", EUROCRYPT 1997. Two words with independent
keys make 128 bits. It finds accidents, not forgers.)
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raysharded.config import BatchConfig
from raysharded.data.order import NO_BLOCKS, Blocks, Int64s, mix64, positions_of_step, sample_ids

if TYPE_CHECKING:
    from raysharded.data.dataset import Dataset

UInt64s: TypeAlias = npt.NDArray[np.uint64]
Digest: TypeAlias = tuple[int, int]
"""128 bits as two words in [0, 2^64)."""

ZERO: Digest = (0, 0)
"""The digest of no reads: add(ZERO, d) == d."""

_MASK = (1 << 64) - 1
_KEYS = (0x5C1D7B3A94E60F2D, 0xA3F10C86D2457B9E)
_STEPS_AT_A_TIME_READS = 1 << 16
_THREADS = 8
"""Maximum number of threads. numpy releases the GIL while it computes."""
_PARTS_FOR_THREADS = 8
_PARTS_AT_ONCE = 64


def add(a: Digest, b: Digest) -> Digest:
    """The digest of both collections of reads together. Commutative and associative; ZERO is neutral."""
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def total(digests: Iterable[Digest]) -> Digest:
    """The digest of all collections together."""
    return reduce(add, digests, ZERO)


def digest(step: int, positions: npt.ArrayLike, ids: npt.ArrayLike) -> Digest:
    """The digest of reads for `step`: sample `ids[i]` was read for position `positions[i]`; same lengths.

    Law: for any split of the pairs among workers, the parts' digests add up to the whole's, in any order.
    """
    positions, ids = np.asarray(positions, dtype=np.int64).reshape(-1), np.asarray(ids, dtype=np.int64).reshape(-1)
    if len(positions) != len(ids):
        raise ValueError(f"step {step}: {len(positions)} positions but {len(ids)} ids; use digest_of_reads")
    low, high = _digests(np.asarray([step], dtype=np.int64), positions[None, :], ids[None, :])
    return int(low[0]), int(high[0])


def digests(steps: Int64s, positions: Int64s, ids: Int64s) -> list[Digest]:
    """The `digest` of each row, at once; steps [S], positions and ids [S, R]."""
    low, high = _digests(steps, positions, ids)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def digest_of_reads(step: int, positions: Int64s, ids_read: Int64s) -> Digest:
    """The digest of reads in the order in which they happened: the i-th read counts for `positions[i]`.

    Reads beyond the positions count for positions that no sample has (-1, -2, ...). A position without a read counts
    for nothing. A read too many or too few therefore never gives the expected digest.
    """
    extra = len(ids_read) - len(positions)
    paired = np.concatenate([positions[: len(ids_read)], -1 - np.arange(max(0, extra), dtype=np.int64)])
    return digest(step, paired, ids_read)


def expected_digest(
    step: int, batch: BatchConfig, num_samples: int, skipped: int = 0, order: int = 1, blocks: Blocks = NO_BLOCKS
) -> Digest:
    """The digest of `step` when exactly the samples that belong to it are read, each once.

    `skipped`: samples that the run skipped earlier. `order`, `blocks`: as for `sample_ids`.
    """
    low, high = next(iter(expected_digests(np.asarray([step]), batch, num_samples, skipped, order, blocks)))[1]
    return int(low[0]), int(high[0])


def expected_digests(
    steps: Int64s, batch: BatchConfig, num_samples: int, skipped: int, order: int = 1, blocks: Blocks = NO_BLOCKS
) -> Iterator[tuple[slice, tuple[UInt64s, UInt64s]]]:
    """Rows of `steps`, a part at a time, and both words of their expected digests. For very many steps."""
    stride = max(1, _STEPS_AT_A_TIME_READS // batch.global_batch_size)

    def of(rows: slice) -> tuple[slice, tuple[UInt64s, UInt64s]]:
        some = steps[rows].astype(np.int64)
        firsts = (some - 1) * batch.global_batch_size + skipped
        positions = firsts[:, None] + np.arange(batch.global_batch_size)[None, :]
        return rows, _digests(some, positions, sample_ids(batch.seed, positions, num_samples, order, blocks))

    parts = [slice(start, start + stride) for start in range(0, len(steps), stride)]
    if len(parts) < _PARTS_FOR_THREADS:
        yield from map(of, parts)
        return
    for first in range(0, len(parts), _PARTS_AT_ONCE):
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "raysharded-ledger") as pool:
            found = list(pool.map(of, parts[first : first + _PARTS_AT_ONCE]))
        yield from found


def _digests(steps: Int64s, positions: Int64s, ids: Int64s) -> tuple[UInt64s, UInt64s]:
    """The words of one digest per row; steps [S], positions and ids [S, R]."""
    low, high = (_hashed(key, steps, positions, ids) for key in _KEYS)
    return low, high


def _hashed(key: int, steps: Int64s, positions: Int64s, ids: Int64s) -> UInt64s:
    hashes = mix64(steps.astype(np.uint64) + np.uint64(key))[:, None]
    hashes = mix64(hashes + positions.astype(np.uint64))
    hashes = mix64(hashes + ids.astype(np.uint64))
    words: UInt64s = hashes.sum(axis=1, dtype=np.uint64)
    return words


class ReadRecorder:
    """A dataset that records the index of every sample that is read through it: one collection of reads.

    Make one per microbatch; the cost is negligible. Any thread may read. A read counts when it has succeeded.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._ids: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # a sample may be anything
        sample = self._dataset[index]
        with self._lock:
            self._ids.append(int(index))
        return sample

    def read_rows(self, indexes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """The dataset's `read_rows`; None for one without it."""
        read = getattr(self._dataset, "read_rows", None)
        rows: npt.NDArray[np.int64] | None = None if read is None else read(indexes)
        if rows is not None:
            with self._lock:
                self._ids += indexes
        return rows

    @property
    def ids(self) -> Int64s:
        """The indexes read so far, in the order in which the reads ended."""
        with self._lock:
            return np.asarray(self._ids, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReads:
    """The journal's record of a committed step: the digest over all workers, and the number of reads it covers."""

    digest: Digest
    """Sum over the step's microbatches."""
    num_reads: int
    """Number of samples read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadColumns:
    """`StepReads` of very many steps: a row for each, no step twice."""

    steps: Int64s
    low: UInt64s
    high: UInt64s
    """Words of the digests."""
    num_reads: Int64s

    @classmethod
    def of(cls, records: Mapping[int, StepReads]) -> ReadColumns:
        return cls(
            steps=np.fromiter(records, dtype=np.int64),
            low=np.fromiter((record.digest[0] for record in records.values()), dtype=np.uint64),
            high=np.fromiter((record.digest[1] for record in records.values()), dtype=np.uint64),
            num_reads=np.fromiter((record.num_reads for record in records.values()), dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport:
    """Result of `check`."""

    steps_checked: int
    """Number of steps checked: 1 .. final_step, or from `first_step` on."""
    samples_lost: int
    """Expected reads that did not happen."""
    samples_repeated: int
    """Unexpected reads: a sample read again, or out of turn."""
    steps_missing: tuple[int, ...]
    """Steps without any record."""
    steps_wrong: tuple[int, ...]
    """Steps with another digest than expected, or beyond the final step."""
    exact: bool
    """False: the ids of some wrong step are unknown, and the two counts are lower bounds."""

    @property
    def ok(self) -> bool:
        """True if every sample of every step was read exactly once."""
        return not self.steps_missing and not self.steps_wrong


def compare(expected_ids: npt.ArrayLike, read_ids: npt.ArrayLike) -> tuple[int, int]:
    """The pair (lost, repeated): the numbers of missing and of unexpected reads, as multisets.

    Law: len(read_ids) == len(expected_ids) - lost + repeated.
    """
    expected, read = (Counter(np.asarray(ids, dtype=np.int64).reshape(-1).tolist()) for ids in (expected_ids, read_ids))
    return (expected - read).total(), (read - expected).total()


def check(
    records: Mapping[int, StepReads] | ReadColumns,
    *,
    final_step: int,
    batch: BatchConfig,
    num_samples: int,
    first_step: int = 1,
    skipped: int = 0,
    order: int = 1,
    blocks: Blocks = NO_BLOCKS,
    read_ids: Mapping[int, Sequence[int]] | None = None,
) -> LedgerReport:
    """Compare the committed steps' records with the expected reads up to `final_step`.

    `records`: by step, or as columns. `skipped`: samples that the run skipped before the first of these steps. `order`:
    as for `sample_ids`, of all these steps. `read_ids`: for any steps, the ids that were actually read (from
    `ReadRecorder.ids`, of all workers). For a wrong step they turn the bounds into exact counts. Without them its
    number of reads decides. Short by k, k reads were lost; over by k, k were repeated. If the number is right, at least
    one was lost and another was read instead.
    """
    found = records if isinstance(records, ReadColumns) else ReadColumns.of(records)
    steps = range(first_step, final_step + 1)
    among = (found.steps >= first_step) & (found.steps <= final_step)
    right = np.zeros(len(found.steps), dtype=np.bool_)
    inside = None if among.all() else np.flatnonzero(among)  # nearly always all: then without a copy
    of_steps = found.steps if inside is None else found.steps[inside]
    for rows, (low, high) in expected_digests(of_steps, batch, num_samples, skipped, order, blocks):
        these = rows if inside is None else inside[rows]
        right[these] = (found.low[these] == low) & (found.high[these] == high)
    right &= found.num_reads == batch.global_batch_size
    mismatches = sorted(found.steps[among & ~right].tolist())
    wrong = [*mismatches, *sorted(found.steps[~among].tolist())]
    is_there = np.zeros(max(0, final_step + 1 - first_step), dtype=np.bool_)
    is_there[found.steps[among] - first_step] = True
    missing = (np.flatnonzero(~is_there) + first_step).tolist()
    num_reads = dict(zip(found.steps[~right].tolist(), found.num_reads[~right].tolist(), strict=True))
    lost, repeated, exact = len(missing) * batch.global_batch_size, 0, True
    for step in wrong:
        should = batch.global_batch_size if step in steps else 0
        if read_ids is not None and step in read_ids:
            all_of_it = positions_of_step(step, batch.global_batch_size, skipped) if should else np.empty(0, np.int64)
            step_lost, step_repeated = compare(
                sample_ids(batch.seed, all_of_it, num_samples, order, blocks), read_ids[step]
            )
        else:
            short = should - num_reads[step]
            step_lost, step_repeated = (max(0, short), max(0, -short)) if short else (1, 1)
            exact = exact and should == 0
        lost, repeated = lost + step_lost, repeated + step_repeated
    return LedgerReport(
        steps_checked=len(steps),
        samples_lost=lost,
        samples_repeated=repeated,
        steps_missing=tuple(missing),
        steps_wrong=tuple(wrong),
        exact=exact,
    )
