"""The samples of each source that some steps of a run have read: `raysharded data audit RUN --steps A:B`.

They follow from the run's journal alone, as the order of samples is a function of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from raysharded.data.order import Blocks, Int64s, positions_of_step, sample_ids
from raysharded.errors import ConfigError
from raysharded.journal.records import Span
from raysharded.overrides import Decisions, skipped_before
from raysharded.report.data_audit import ALONE, read_data, schedule_of, weights_of

Ids: TypeAlias = Callable[[int, Int64s], Int64s | None]
"""(step, positions) -> ids of the samples at them, of data that are no mixture; None if the journal lacks the order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRange:
    """Consecutive samples of a source, in the order of one epoch."""

    epoch: int | None
    """From 1 on; None for data whose order the journal has only as a digest."""
    first: int
    """Place of the first one in the epoch's order, from 0 on."""
    samples: int
    first_step: int
    last_step: int
    """Steps that have read them."""
    ids: tuple[int, ...]
    """Ids of the samples in the source, in this order; none if the journal lacks the order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesRead:
    """A source, and what the steps have read of it."""

    name: str
    samples: int
    ranges: tuple[ReadRange, ...]


def samples_read(run_url: str, first_step: int, last_step: int) -> tuple[SamplesRead, ...]:
    """The samples of each source that these steps of a run have read, in the order of reading.

    Raises ConfigError for steps that the run does not have, StorageError as `audit`.
    """
    run = read_data(run_url)
    if not 1 <= first_step <= last_step <= run.last_step:
        raise ConfigError(
            f"steps {first_step}:{last_step}: the run has steps 1 to {run.last_step}. Give a range of these."
        )
    spans = run.report.summary.spans
    return samples_of(run.data, run.decisions, run.batch, range(first_step, last_step + 1), _ids_of(spans))


def samples_of(
    data: Mapping[str, Any], decisions: Decisions, batch: int, steps: range, alone: Ids
) -> tuple[SamplesRead, ...]:
    """The samples of each source in steps, by the entry `data`. `batch`: samples per step. `alone`: for other data."""
    mixture = data.get("mixture")
    if mixture is None:
        size = None if int(data.get("samples_per_block", 1)) < 0 else int(data["num_samples"])
        found = tuple(_ranges_alone(size, decisions, batch, steps, alone))
        return (SamplesRead(name=ALONE, samples=len(steps) * batch, ranges=found),)
    schedule = schedule_of(mixture, weights_of(mixture, decisions))
    rows: dict[str, list[tuple[int, int, int]]] = {part.name: [] for part in schedule.parts}
    for step in steps:
        positions = _positions(step, batch, decisions)
        sources, ids = schedule.at(positions)
        before = schedule.counts(int(positions[0]))
        for number, part in enumerate(schedule.parts):
            own = ids[sources == number].tolist()
            rows[part.name] += [(step, before[part.name] + rank, index) for rank, index in enumerate(own)]
    sizes = {part.name: part.num_samples for part in schedule.parts}
    return tuple(
        SamplesRead(name=name, samples=len(own), ranges=tuple(_ranges(own, sizes[name]))) for name, own in rows.items()
    )


def _ranges_alone(size: int | None, decisions: Decisions, batch: int, steps: range, alone: Ids) -> Iterator[ReadRange]:
    rows: list[tuple[int, int, int | None]] = []
    for step in steps:
        positions = _positions(step, batch, decisions)
        ids = None if size is None else alone(step, positions)
        of_step = [None] * batch if ids is None else ids.tolist()
        rows += [(step, position, index) for position, index in zip(positions.tolist(), of_step, strict=True)]
    yield from _ranges(rows, size)


def _ranges(rows: Sequence[tuple[int, int, int | None]], size: int | None) -> Iterator[ReadRange]:
    """The ranges of (step, rank over all epochs, id), ascending by rank."""
    begin = 0
    for end in range(1, len(rows) + 1):
        first = rows[begin][1]
        if end < len(rows) and rows[end][1] == first + end - begin and (size is None or rows[end][1] % size):
            continue
        yield ReadRange(
            epoch=None if size is None else first // size + 1,
            first=first if size is None else first % size,
            samples=end - begin,
            first_step=rows[begin][0],
            last_step=rows[end - 1][0],
            ids=tuple(index for _, _, index in rows[begin:end] if index is not None),
        )
        begin = end


def _positions(step: int, batch: int, decisions: Decisions) -> Int64s:
    return positions_of_step(step, batch, skipped_before(decisions.skips, step))


def _ids_of(spans: Sequence[Span]) -> Ids:
    def of(step: int, positions: Int64s) -> Int64s | None:
        for span in spans:
            if span.first_step <= step <= span.last_step and span.batch is not None and span.num_samples is not None:
                blocks = Blocks(*span.blocks)
                return sample_ids(span.batch["seed"], positions, span.num_samples, span.order, blocks)
        return None  # a step of a fork's parent

    return of
