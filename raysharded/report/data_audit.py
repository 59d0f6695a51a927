"""The data that a run has read, by source: `raysharded data audit`.

It follows from the run's journal alone. The entry `data` describes the mixture that every worker found. Other entries
have the changes of its weights and the samples that were skipped. The ledger proves the positions that were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from raysharded.data.ledger import LedgerReport
from raysharded.data.mixtures.schedule import ENDLESS, Part, Schedule
from raysharded.errors import StorageError
from raysharded.journal.log import read
from raysharded.overrides import Decisions, decided, skipped_before
from raysharded.report.loader import load, open_run

_EPOCHS = 8
"""Newest epochs of a source that are listed."""
_KINDS = ("data", "started", "rewind", "learning_rate", "mixture_weights")
"""Kinds of entries that decide what is read."""
ALONE = "data"
"""Name of data that are no mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRead:
    """An epoch of a source, as far as it was read."""

    number: int
    """From 1 on."""
    samples: int
    """Samples of it up to the run's newest step, with skipped ones."""
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRead:
    """A source, and what was read of it."""

    name: str
    num_samples: int | None
    """Samples of one epoch; None for data whose order the journal has only as a digest."""
    read: int
    """Samples that were read, over all epochs."""
    wanted: float
    """The number by the weights that held."""
    skipped: int
    epochs: tuple[EpochRead, ...]
    """The newest ones, oldest first."""
    tokens: int | None = None
    """Tokens that were read: `read` times the length of a sample; None if the journal does not have the length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRange:
    """Consecutive positions that no step has read."""

    after_step: int
    first_position: int
    samples: int
    reason: str
    """`asked` by a person, `not finite` for a rewind of the run itself, or `checkpoint` if only a checkpoint has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataAudit:
    """The data of a run up to its newest step."""

    last_step: int
    read: int
    """Samples."""
    sources: tuple[SourceRead, ...]
    skipped: tuple[SkippedRange, ...]
    ledger: LedgerReport | None
    """None: the journal does not have the expected samples."""

    @property
    def ok(self) -> bool:
        """True if the ledger proves that every sample was read once."""
        return self.ledger is not None and self.ledger.ok


class _Counts(Protocol):
    def counts(self, position: int) -> dict[str, int]:
        """Samples of each source at the positions below this one."""
        ...


class _Alone:
    """Data that are no mixture."""

    def counts(self, position: int) -> dict[str, int]:
        return {ALONE: position}


def audit(run_url: str) -> DataAudit:
    """The data of the run in a folder or under a URL. Raises StorageError as `load`, and if nothing was read."""
    storage, report = open_run(run_url), load(run_url)
    entries = [entry for entry in read(storage) if entry["kind"] in _KINDS]  # few: steps are left out
    data = next((entry for entry in reversed(entries) if entry["kind"] == "data"), None)
    batch = next((span.batch for span in report.summary.spans if span.batch is not None), None)
    last = report.summary.last_step
    if data is None or batch is None or last < 1:
        raise StorageError(f"{storage.url}: the run has not read any data yet: there is no step in its journal.")
    decisions = decided(entries)
    skipped = skipped_ranges(decisions, last, batch["global_batch_size"], reasons(entries))
    sources = sources_read(data, decisions, last, batch["global_batch_size"], skipped)
    seq_len = next((entry.get("seq_len") for entry in reversed(entries) if entry["kind"] == "started"), None)
    if isinstance(seq_len, int):
        sources = tuple(replace(one, tokens=one.read * seq_len) for one in sources)
    return DataAudit(
        last_step=last,
        read=last * batch["global_batch_size"],
        sources=sources,
        skipped=skipped,
        ledger=report.ledger,
    )


def reasons(entries: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Total number of skipped samples -> the reason for which they became so many."""
    found: dict[int, str] = {}
    for entry in entries:
        if entry["kind"] == "rewind" and entry.get("skips") and entry.get("skip_samples"):
            found[int(entry["skips"][-1][1])] = "asked" if entry.get("who") == "asked" else "not finite"
    return found


def skipped_ranges(
    decisions: Decisions, last_step: int, batch: int, why: Mapping[int, str]
) -> tuple[SkippedRange, ...]:
    """The positions between those of the steps up to `last_step`."""
    ranges, before = [], 0
    for step, total in decisions.skips:
        if step < last_step and total != before:
            ranges.append(
                SkippedRange(
                    after_step=step,
                    first_position=step * batch + before,
                    samples=total - before,
                    reason=why.get(total, "checkpoint"),
                )
            )
        before = total
    return tuple(ranges)


def sources_read(
    data: Mapping[str, Any], decisions: Decisions, last_step: int, batch: int, skipped: Sequence[SkippedRange]
) -> tuple[SourceRead, ...]:
    """The sources of the entry `data`, and what the steps up to `last_step` have read of them."""
    end = last_step * batch + skipped_before(decisions.skips, last_step)
    mixture = data.get("mixture")
    if mixture is None:
        has_order = int(data.get("samples_per_block", 1)) < 0
        sizes: dict[str, int | None] = {ALONE: None if has_order else int(data["num_samples"])}
        weights = [(0, {ALONE: 1.0})]
        counted: _Counts = _Alone()
    else:
        sizes = {str(part[0]): int(part[1]) for part in mixture["parts"]}
        weights = _weights(mixture, decisions)
        counted = _schedule(mixture, weights)
    passed = [(one.first_position, one.first_position + one.samples) for one in skipped]
    borders = [0, *(border for pair in passed for border in pair), end]
    parts = list(zip(borders[::2], borders[1::2], strict=True))  # ranges of positions that were read
    total, left_out = counted.counts(end), {name: _sum(counted, passed, name) for name in sizes}
    return tuple(
        SourceRead(
            name=name,
            num_samples=size,
            read=total[name] - left_out[name],
            wanted=sum(_wanted(weights, first, stop, name) for first, stop in parts),
            skipped=left_out[name],
            epochs=() if size is None else _epochs(counted, name, size, end, decisions, last_step, batch),
        )
        for name, size in sizes.items()
    )


def _weights(mixture: Mapping[str, Any], decisions: Decisions) -> list[tuple[int, dict[str, float]]]:
    own = {int(start): {str(name): float(weight) for name, weight in given} for start, given in mixture["weights"]}
    by_hand = {position: dict(given) for _, position, given in decisions.weights}
    return sorted({**own, **by_hand}.items(), key=lambda change: change[0])


def _schedule(mixture: Mapping[str, Any], weights: Sequence[tuple[int, Mapping[str, float]]]) -> Schedule:
    parts = [
        Part(name=name, num_samples=number, samples_per_block=per_block, limit=limit)
        for name, number, per_block, limit in mixture["parts"]
    ]
    return Schedule(parts, weights, seed=int(mixture["seed"]), reweight=mixture["at_limit"] == "reweight")


def _sum(counted: _Counts, ranges: Sequence[tuple[int, int]], name: str) -> int:
    return sum(counted.counts(stop)[name] - counted.counts(first)[name] for first, stop in ranges)


def _wanted(weights: Sequence[tuple[int, Mapping[str, float]]], first: int, stop: int, name: str) -> float:
    """The number of samples of a source between two positions, by the weights."""
    found = 0.0
    for (begin, given), (end, _) in pairwise([*weights, (ENDLESS, {})]):
        length = min(end, stop) - max(begin, first)
        if length > 0:
            found += length * given.get(name, 0.0) / sum(given.values())
    return found


def _epochs(
    counted: _Counts, name: str, size: int, end: int, decisions: Decisions, last_step: int, batch: int
) -> tuple[EpochRead, ...]:
    total = counted.counts(end)[name]
    number = -(-total // size)
    found = []
    for epoch in range(max(0, number - _EPOCHS), number):
        first, last = epoch * size, min((epoch + 1) * size, total) - 1
        steps = [_step(_position(counted, name, rank, end), decisions, last_step, batch) for rank in (first, last)]
        found.append(EpochRead(number=epoch + 1, samples=last - first + 1, first_step=steps[0], last_step=steps[1]))
    return tuple(found)


def _position(counted: _Counts, name: str, rank: int, end: int) -> int:
    """The position of a source's sample, counted over all epochs."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted.counts(middle)[name] <= rank else (low, middle)
    return low


def _step(position: int, decisions: Decisions, last_step: int, batch: int) -> int:
    """The step that has a position; for a skipped one the step after it."""
    low, high = 0, last_step
    while high - low > 1:
        middle = (low + high) // 2
        done = middle * batch + skipped_before(decisions.skips, middle)
        low, high = (middle, high) if done <= position else (low, middle)
    return high
