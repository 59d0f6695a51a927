"""A dataset of several named sources, whose item p is the sample at position p of a run."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from raysharded.data.dataset import Dataset, TokenDataset
from raysharded.data.mixtures.pattern import PARTS, Int64s, in_parts
from raysharded.data.mixtures.schedule import Ended, Part, Schedule
from raysharded.data.packed.packed_dataset import PackedDataset
from raysharded.data.parts import DatasetPart, whole
from raysharded.errors import ConfigError, DataError
from raysharded.ids import derive_seed

Weights = Mapping[str, float]
_LEAST_AHEAD = 4096
"""Positions whose samples are computed at once: for few of them most of the time goes to calls."""
_ANNOUNCEMENTS = 3
_RUN = 256
"""Consecutive positions computed at once where nothing was announced: they take about twice as long as one."""


class Mixture:
    """Samples of several sources, mixed by weights.

    The sample at a position is a function of the sources (their names, order, lengths, blocks and limits), of the
    weights and of `seed`. It does not depend on the number of workers. Any 1,000 positions in a row under the same
    weights have each source as often as in the weights, to within 1. A million of them, from the first, have the
    weights exactly, in millionths. Each source has separate epochs, each in another order.

    Item p is the sample at position p, so a run reads its items in order. Any thread may read it, if that holds for the
    sources.
    """

    def __init__(
        self,
        sources: Mapping[str, Dataset],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        seed: int = 0,
        max_epochs: Mapping[str, float] | None = None,
        at_limit: Literal["stop", "reweight"] = "stop",
    ) -> None:
        """`weights`: samples of each source, in any unit; a source that is left out has none. Or a list of (first
        position, weights), ascending, from position 0 on: a position is a sample, counted over the whole run.

        `max_epochs`: how often a source may be read, such as 4 or 0.5; without a limit it is repeated. At the first
        limit the mixture ends (`at_limit="stop"`), or the other sources continue in their proportions ("reweight"),
        until none with a weight at that position is left.

        Raises ConfigError; reads nothing.
        """
        if not sources or not all(isinstance(name, str) and name for name in sources):
            raise ConfigError("Mixture.sources: give a dict of names and datasets, with at least one.")
        self.sources = dict(sources)
        self.weights = self._own_weights = self._checked(weights)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"Mixture.seed={seed!r}: give a whole number.")
        if at_limit not in ("stop", "reweight"):
            raise ConfigError(f"Mixture.at_limit={at_limit!r}: give 'stop' or 'reweight'.")
        self.seed, self.at_limit, self.max_epochs = seed, at_limit, dict(max_epochs or {})
        _require_known(self.sources, "Mixture.max_epochs", self.max_epochs)
        for name, limit in self.max_epochs.items():
            if not _is_number(limit) or limit <= 0:
                raise ConfigError(f"Mixture.max_epochs[{name!r}]={limit!r}: give a number above 0, or leave it out.")
        self._schedule: Schedule | None = None
        self._announced: list[dict[int, tuple[int, int]]] = []
        self._run: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def _checked(self, weights: Weights | Sequence[tuple[int, Weights]]) -> tuple[tuple[int, dict[str, float]], ...]:
        changes: Sequence[Any] = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        before = -1
        found = []
        for change in changes:
            if not (isinstance(change, tuple | list) and len(change) == 2 and isinstance(change[1], Mapping)):
                raise ConfigError(f"Mixture.weights: {change!r} is no pair of a position and a dict of weights.")
            start, given = change
            if not isinstance(start, int) or isinstance(start, bool) or start <= before or (before < 0 < start):
                raise ConfigError(
                    f"Mixture.weights: {start!r} is no position after {max(before, 0)}: begin at 0, and ascend."
                )
            before = start
            found.append((start, checked_weights(self.sources, f"Mixture.weights from position {start} on", given)))
        if not found:
            raise ConfigError("Mixture.weights is empty: give each source a weight.")
        return tuple(found)

    def with_changes(self, changes: Sequence[tuple[int, Weights]]) -> Mixture:
        """This mixture, with the same sources, as a run reads it whose weights were changed while it trained.

        `changes`: (first position, weights), ascending. They hold from their position on, until the next of them, or of
        this mixture's own list. Raises ConfigError as the constructor.
        """
        checked = {start: checked_weights(self.sources, "Mixture.with_changes", given) for start, given in changes}
        other = copy.copy(self)
        other.weights = tuple(sorted({**dict(self._own_weights), **checked}.items(), key=lambda change: change[0]))
        other._schedule = None
        return other

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.sources)})"

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample, if that is the same for all sources; else None."""
        found = {getattr(source, "seq_len", None) for source in self.sources.values()}
        return found.pop() if len(found) == 1 else None

    @property
    def ended(self) -> tuple[Ended, ...]:
        """The sources that reach their limit, in order, each with the position."""
        return tuple(self._opened().ended)

    @property
    def order_text(self) -> str:
        """All that the order of samples depends on, without later changes, as JSON."""
        schedule = self._opened()
        about = {
            "parts": [[part.name, part.num_samples, part.samples_per_block, part.limit] for part in schedule.parts],
            "weights": [[start, sorted(given.items())] for start, given in self._own_weights],
            "at_limit": self.at_limit,
            "seed": self.seed,
        }
        return json.dumps(about)

    @property
    def order_digest(self) -> int:
        """Digest of all that the order of samples depends on, without later changes; above 1."""
        return 2 + derive_seed("mixture", self.order_text) // 4

    @property
    def contents_digest(self) -> str:
        """Digest of those of the sources; empty if no source has one."""
        return _digest_of(self.sources, "contents_digest")

    @property
    def stores_digest(self) -> str:
        """As `contents_digest`, of what `TokenDataset.stores_digest` covers."""
        return _digest_of(self.sources, "stores_digest")

    def __len__(self) -> int:
        """Number of positions; 2^60 without an end."""
        return self._opened().length

    def __getitem__(self, position: int, /) -> Any:
        """The sample at a position. Raises DataError for one after the end, and what the source raises."""
        number, index = self._place(int(position))
        return list(self.sources.values())[number][index]

    def origin(self, position: int) -> tuple[str, int]:
        """(name of the source, id of the sample in it) at a position. Raises DataError for one after the end."""
        number, index = self._place(position)
        return list(self.sources)[number], index

    def counts(self, position: int) -> dict[str, int]:
        """Samples of each source at the positions below this one. Raises DataError for more than there are."""
        schedule = self._opened()
        self._require(schedule, position - 1 if position else 0)
        return schedule.counts(position)

    def validate(self) -> None:
        """Check the sources, and that token datasets have one tokenizer. Raises DataError."""
        for source in self.sources.values():
            check = getattr(source, "validate", None)
            if callable(check):
                check()
        self._opened()
        found = {name: whole(source) for name, source in self.sources.items()}
        tokens = [(name, one) for name, one in found.items() if isinstance(one, TokenDataset | PackedDataset)]
        for name, one in tokens[1:]:
            first_name, first = tokens[0]
            for what in ("tokenizer", "vocab_size", "seq_len"):
                mine, other = getattr(first, what), getattr(one, what)
                if mine != other:
                    raise DataError(
                        f"source {name!r} has {what} {other!r}, but {first_name!r} has {mine!r}. Pack all sources with "
                        "one tokenizer, and give them one seq_len."
                    )

    def require_local_files(self) -> None:
        """Raise DataError if a token dataset has a path of this machine without data."""
        for source in self.sources.values():
            if isinstance(source, TokenDataset | PackedDataset | DatasetPart):
                source.require_local_files()

    @property
    def num_read_ahead(self) -> int:
        """Number of samples that `read_ahead` is worth."""
        return max(_LEAST_AHEAD, *(getattr(source, "num_read_ahead", 0) for source in self.sources.values()))

    def read_ahead(self, ids: Int64s, *, anew: bool = False) -> None:
        """Announce the positions that are read next to the sources that read ahead."""
        schedule = self._opened()
        inside = np.asarray(ids, dtype=np.int64)
        inside = inside[inside < schedule.length]
        numbers, indexes = schedule.at(inside)
        known = _places(inside, numbers, indexes)
        with self._lock:
            self._announced = [*([] if anew else self._announced[1 - _ANNOUNCEMENTS :]), known]
        for number, source in enumerate(self.sources.values()):
            if callable(announce := getattr(source, "read_ahead", None)):
                announce(indexes[numbers == number], anew=anew)

    def close(self) -> None:
        """End the threads of the sources that read ahead."""
        for source in self.sources.values():
            if callable(getattr(source, "read_ahead", None)) and callable(end := getattr(source, "close", None)):
                end()

    def _place(self, position: int) -> tuple[int, int]:
        with self._lock:
            found = next((known[position] for known in (self._run, *self._announced) if position in known), None)
        if found is not None:
            return found
        schedule = self._opened()
        self._require(schedule, position)
        first = position - position % _RUN
        run = np.arange(first, min(first + _RUN, schedule.length), dtype=np.int64)
        places = _places(run, *schedule.at(run))
        with self._lock:
            self._run = places
        return places[position]

    def _require(self, schedule: Schedule, position: int) -> None:
        if position < 0:
            raise IndexError(f"position {position} is negative: positions count from 0")
        if position >= schedule.length:
            last = schedule.ended[-1].name
            way = "" if self.at_limit == "reweight" else ', or choose at_limit="reweight"'
            raise DataError(
                f"the sample at position {position} is not there: the mixture ends after {schedule.length} samples, as "
                f"source {last!r} has then been read {self.max_epochs[last]:g} times. Train for fewer steps, raise "
                f"max_epochs[{last!r}]{way}."
            )

    def _opened(self) -> Schedule:
        with self._lock:
            if self._schedule is None:
                parts = [self._part(name, source) for name, source in self.sources.items()]
                self._schedule = Schedule(parts, self.weights, seed=self.seed, reweight=self.at_limit == "reweight")
            return self._schedule

    def _part(self, name: str, source: Dataset) -> Part:
        if hasattr(source, "order_digest") and not isinstance(source, Mixture):
            raise ConfigError(
                f"source {name!r} is a {type(source).__name__}, which decides the order of its samples, as the mixture "
                "does. Give the dataset that it reads."
            )
        if isinstance(source, Mixture):
            raise ConfigError(
                f"source {name!r} is a mixture itself. Give its sources, with the product of the weights."
            )
        length, limit = len(source), self.max_epochs.get(name)
        if length < 1:
            raise DataError(f"source {name!r} has no samples. Give it data, or leave it out of the mixture.")
        samples = None if limit is None else int(limit * length)
        if samples == 0:
            raise DataError(
                f"source {name!r} has {length} samples, and max_epochs[{name!r}]={limit:g} is less than one of them."
            )
        per_block = int(getattr(source, "samples_per_block", 1))
        return Part(name=name, num_samples=length, samples_per_block=per_block, limit=samples)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_announced", "_run", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _announced=[], _run={}, _lock=threading.Lock())


def checked_weights(sources: Collection[str], what: str, given: Weights) -> dict[str, float]:
    """The weights as floats. Raises ConfigError, which begins with `what`, if a mixture of these cannot have them."""
    _require_known(sources, what, given)
    for name, weight in given.items():
        if not _is_number(weight) or weight < 0:
            raise ConfigError(f"{what}: {weight!r} for {name!r}: give a finite number of 0 or more.")
    if not 0 < sum(given.values()) < math.inf:
        raise ConfigError(f"{what}: they add up to {sum(given.values())}: give a source a weight above 0.")
    for name, part in zip(given, in_parts(list(given.values())), strict=True):
        if given[name] and not part:
            raise ConfigError(f"{what}: {name!r} has less than a {PARTS:,}th of the samples: give it more, or 0.")
    return {name: float(weight) for name, weight in given.items()}


def _digest_of(sources: Mapping[str, Dataset], name: str) -> str:
    found = {key: str(getattr(source, name, "")) for key, source in sources.items()}
    return blake3(json.dumps(found).encode()).hexdigest() if any(found.values()) else ""


def _require_known(sources: Collection[str], what: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in sources:
            raise ConfigError(f"{what}: {name!r} is none of the sources {', '.join(sources)}.")


def _places(positions: Int64s, numbers: Int64s, indexes: Int64s) -> dict[int, tuple[int, int]]:
    """Position -> (number of the source, id of the sample in it)."""
    return dict(zip(positions.tolist(), zip(numbers.tolist(), indexes.tolist(), strict=True), strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
