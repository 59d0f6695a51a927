"""The data that a run has read, by source: `raysharded data audit`.

It follows from the run's journal alone. The entry `data` describes the mixture that every worker found. Other entries
have the changes of its weights and the samples that were skipped. The ledger proves the positions that were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raysharded.data.ledger import LedgerReport
from raysharded.data.mixtures.schedule import ENDLESS, Counted, Ended, Part, Schedule, position_of
from raysharded.errors import StorageError
from raysharded.journal.log import read
from raysharded.overrides import Decisions, decided, skipped_before
from raysharded.report.loader import load, open_run
from raysharded.report.run_report import RunReport

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
    """The number by the weights that held; a source at its limit has none."""
    skipped: int
    epochs: tuple[EpochRead, ...]
    """The newest ones, oldest first."""
    unproven: int = 0
    """Samples of steps whose record in the ledger is missing, or is not the expected one."""
    tokens: int | None = None
    """Tokens that were read: `read` times the length of a sample; None if the journal does not have the length."""
    wanted_tokens: float | None = None
    """The number by the weights that held."""


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


class _Alone:
    """Data that are no mixture."""

    def counts(self, position: int) -> dict[str, int]:
        return {ALONE: position}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The entries of a run's journal that decide what it reads."""

    report: RunReport
    entries: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]
    """The newest entry of the kind `data`."""
    decisions: Decisions
    batch: int
    """Samples per step."""
    last_step: int


def read_data(run_url: str) -> RunData:
    """The data of the run in a folder or under a URL. Raises StorageError as `load`, and if nothing was read."""
    storage, report = open_run(run_url), load(run_url)
    entries = tuple(entry for entry in read(storage) if entry["kind"] in _KINDS)  # few: steps are left out
    data = next((entry for entry in reversed(entries) if entry["kind"] == "data"), None)
    batch = next((span.batch for span in report.summary.spans if span.batch is not None), None)
    last = report.summary.last_step
    if data is None or batch is None or last < 1:
        raise StorageError(f"{storage.url}: the run has not read any data yet: there is no step in its journal.")
    return RunData(
        report=report,
        entries=entries,
        data=data,
        decisions=decided(entries),
        batch=batch["global_batch_size"],
        last_step=last,
    )


def audit(run_url: str) -> DataAudit:
    """The data that a run has read, by source. Raises StorageError as `read_data`."""
    run = read_data(run_url)
    skipped = skipped_ranges(run.decisions, run.last_step, run.batch, reasons(run.entries))
    ledger = run.report.ledger
    unproven = () if ledger is None else (*ledger.steps_missing, *ledger.steps_wrong)
    sources = sources_read(run.data, run.decisions, run.last_step, run.batch, skipped, unproven)
    seq_len = next((entry.get("seq_len") for entry in reversed(run.entries) if entry["kind"] == "started"), None)
    if isinstance(seq_len, int):
        sources = tuple(replace(one, tokens=one.read * seq_len, wanted_tokens=one.wanted * seq_len) for one in sources)
    return DataAudit(
        last_step=run.last_step, read=run.last_step * run.batch, sources=sources, skipped=skipped, ledger=ledger
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
    data: Mapping[str, Any],
    decisions: Decisions,
    last_step: int,
    batch: int,
    skipped: Sequence[SkippedRange],
    unproven: Sequence[int] = (),
) -> tuple[SourceRead, ...]:
    """The sources of the entry `data`, and what the steps up to `last_step` have read of them. `unproven`: steps."""
    end = last_step * batch + skipped_before(decisions.skips, last_step)
    mixture = data.get("mixture")
    if mixture is None:
        has_order = int(data.get("samples_per_block", 1)) < 0
        sizes: dict[str, int | None] = {ALONE: None if has_order else int(data["num_samples"])}
        weights = [(0, {ALONE: 1.0})]
        counted: Counted = _Alone()
    else:
        sizes = {str(part[0]): int(part[1]) for part in mixture["parts"]}
        schedule = schedule_of(mixture, weights_of(mixture, decisions))
        weights, counted = _as_held(weights_of(mixture, decisions), schedule.ended), schedule
    passed = [(one.first_position, one.first_position + one.samples) for one in skipped]
    borders = [0, *(border for pair in passed for border in pair), end]
    starts = [(step - 1) * batch + skipped_before(decisions.skips, step) for step in unproven if step <= last_step]
    doubtful = [(start, start + batch) for start in starts]
    parts = list(zip(borders[::2], borders[1::2], strict=True))  # ranges of positions that were read
    total, left_out = counted.counts(end), {name: _sum(counted, passed, name) for name in sizes}
    return tuple(
        SourceRead(
            name=name,
            num_samples=size,
            read=total[name] - left_out[name],
            wanted=sum(_wanted(weights, first, stop, name) for first, stop in parts),
            skipped=left_out[name],
            unproven=_sum(counted, doubtful, name),
            epochs=() if size is None else _epochs(counted, name, size, end, decisions, last_step, batch),
        )
        for name, size in sizes.items()
    )


def weights_of(mixture: Mapping[str, Any], decisions: Decisions) -> list[tuple[int, dict[str, float]]]:
    """(First position, weights), ascending: the mixture's, and those that were changed while the run trained."""
    own = {int(start): {str(name): float(weight) for name, weight in given} for start, given in mixture["weights"]}
    by_hand = {position: dict(given) for _, position, given in decisions.weights}
    return sorted({**own, **by_hand}.items(), key=lambda change: change[0])


def schedule_of(mixture: Mapping[str, Any], weights: Sequence[tuple[int, Mapping[str, float]]]) -> Schedule:
    """The samples by position of a mixture as the entry `data` describes it."""
    parts = [
        Part(name=name, num_samples=number, samples_per_block=per_block, limit=limit)
        for name, number, per_block, limit in mixture["parts"]
    ]
    return Schedule(parts, weights, seed=int(mixture["seed"]), reweight=mixture["at_limit"] == "reweight")


def _sum(counted: Counted, ranges: Sequence[tuple[int, int]], name: str) -> int:
    return sum(counted.counts(stop)[name] - counted.counts(first)[name] for first, stop in ranges)


def _as_held(
    weights: Sequence[tuple[int, Mapping[str, float]]], ended: Sequence[Ended]
) -> list[tuple[int, dict[str, float]]]:
    """The weights without the sources that had reached their limits: the others keep their proportions."""
    found = []
    for start in sorted({*(start for start, _ in weights), *(one.position for one in ended)}):
        given = next(given for begin, given in reversed(weights) if begin <= start)
        gone = {one.name for one in ended if one.position <= start}
        found.append((start, {name: weight for name, weight in given.items() if name not in gone}))
    return found


def _wanted(weights: Sequence[tuple[int, Mapping[str, float]]], first: int, stop: int, name: str) -> float:
    """The number of samples of a source between two positions, by the weights."""
    found = 0.0
    for (begin, given), (end, _) in pairwise([*weights, (ENDLESS, {})]):
        length = min(end, stop) - max(begin, first)
        if length > 0:
            found += length * given.get(name, 0.0) / sum(given.values())
    return found


def _epochs(
    counted: Counted, name: str, size: int, end: int, decisions: Decisions, last_step: int, batch: int
) -> tuple[EpochRead, ...]:
    total = counted.counts(end)[name]
    number = -(-total // size)
    found = []
    for epoch in range(max(0, number - _EPOCHS), number):
        first, last = epoch * size, min((epoch + 1) * size, total) - 1
        steps = [_step(position_of(counted, name, rank, end), decisions, last_step, batch) for rank in (first, last)]
        found.append(EpochRead(number=epoch + 1, samples=last - first + 1, first_step=steps[0], last_step=steps[1]))
    return tuple(found)


def _step(position: int, decisions: Decisions, last_step: int, batch: int) -> int:
    """The step that has a position; for a skipped one the step after it."""
    low, high = 0, last_step
    while high - low > 1:
        middle = (low + high) // 2
        done = middle * batch + skipped_before(decisions.skips, middle)
        low, high = (middle, high) if done <= position else (low, middle)
    return high
