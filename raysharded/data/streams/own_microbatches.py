"""The loader of microbatches that a session's function gives: read one step ahead, by streams that go back with a step.

All workers hold the states of all streams as of the newest complete step. A worker reads the streams of its
microbatches. At the end of a step each sends the states behind it to the others. By then it has read the
microbatches of the next step: so all know that a stream has ended before a step begins that it would be missing in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from blake3 import blake3

from raysharded.config import BatchConfig
from raysharded.data.access.prefetch import Prefetcher
from raysharded.data.access.reader import Reader
from raysharded.data.loader import Loader, Microbatch, MicrobatchKey
from raysharded.data.streams.numbered_microbatches import Given, MicrobatchFunction, MicrobatchStreams, Place
from raysharded.data.streams.source import not_restarting
from raysharded.display.quantities import size
from raysharded.errors import DataError, InexactError, TaskError
from raysharded.ids import derive_seed
from raysharded.overrides import Skips, WeightChanges

T = TypeVar("T")

MOST_BYTES = 1 << 22
"""Largest size of all states of a step as text, in bytes."""
_Key = tuple[int, int, int]
"""Number of the attempt, which a return to an earlier step begins, step and microbatch."""


@dataclass(frozen=True, slots=True)
class States:
    """The streams' states behind a step."""

    step: int
    states: tuple[str, ...]
    """By stream; empty at the beginning."""
    digest: str = ""
    """Digest of all microbatches up to this step, in their order."""


class OwnMicrobatches:
    """A `Loader`, and the states of its streams. One thread at a time."""

    def __init__(
        self,
        source: MicrobatchStreams | MicrobatchFunction,
        reader: Reader,
        batch: BatchConfig,
        *,
        max_steps: int,
        prefetch: bool,
    ) -> None:
        """`reader`: of `source`, which may be in another process. `max_steps`: the run's last step. `prefetch`: read
        ahead in a thread."""
        self._source, self._reader, self._batch, self._max_steps = source, reader, batch, max_steps
        self._num = batch.num_microbatches
        self.has_states = isinstance(source, MicrobatchStreams)
        """True for streams, whose states the workers exchange."""
        self.kept = States(0, ("",) * self._num)
        """States behind the newest complete step."""
        self._numbers: Loader | None = None
        self._attempt = 0
        self._planned: dict[int, list[int]] = {}
        """This worker's microbatches of the newest steps."""
        self._held: dict[MicrobatchKey, Given] = {}
        """Read ahead of their step."""
        self._after: dict[MicrobatchKey, Given] = {}
        """Without their batches: of the newest two steps."""
        self._digests: dict[MicrobatchKey, str] = {}
        self._prefetcher: Prefetcher[_Key, Given] | None = Prefetcher(self._read, depth=self._num) if prefetch else None

    def over(self, numbers: Loader) -> OwnMicrobatches:
        """This loader, with that of the numbers of the run's samples, whose reading the ledger records."""
        self._numbers = numbers
        return self

    # -- reading --

    def check(self) -> None:
        """Read the first stream's first two microbatches twice. Raises DataError, InexactError or TaskError."""
        first = self._reading(1, 0, None)
        if first.has_ended:
            raise _missing(self._source.origin(0), 1)
        places = ((2, 0, first.state), (2, 0, first.state), (1, 0, None))
        second, again, anew = (self._reading(*place) for place in places)
        if (second.digest, first.digest) != (again.digest, anew.digest):
            raise self._changed(0)

    def _changed(self, index: int) -> Exception:
        if self.has_states:
            return not_restarting(self._source.origin(index))
        return InexactError(
            f"{self._source.origin(index)} gave other bytes when it was called a second time. It must be a function of "
            "the step and the index alone."
        )

    def _reading(self, step: int, index: int, state: str | None) -> Given:
        number = (step - 1) * self._num + index
        where = f"in step {step}, microbatch {index}"
        seed = derive_seed(self._batch.seed, "samples", step, index)
        (given,) = self._reader.read_samples([Place(number, state)], where, seed).samples
        return Given(*given)

    def _read(self, key: _Key) -> Given:
        _, step, index = key
        return self._reading(step, index, self._before(step, index))

    def _before(self, step: int, index: int) -> str | None:
        after = self._after.get((step - 1, index))
        if after is not None:
            return after.state
        return self.kept.states[index] if self.kept.step == step - 1 else None

    def load(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch, as its only sample. Raises what its source raises, and DataError if it gives other bytes than
        before, or none."""
        assert self._numbers is not None, "over comes first"
        counted = self._numbers.load(step, microbatch)
        given = self._held.pop((step, microbatch), None) or self._taken(step, microbatch)
        if given.has_ended:
            raise _missing(self._source.origin(microbatch), step)
        if self._digests.setdefault((step, microbatch), given.digest) != given.digest:
            raise self._changed(microbatch)
        self._after[step, microbatch] = given._replace(batch=None)
        self._read_ahead()
        return replace(counted, samples=[given.batch], batch=None)

    def _taken(self, step: int, index: int) -> Given:
        key = self._attempt, step, index
        outcome = self._prefetcher.take(key) if self._prefetcher is not None else None
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        return self._read(key) if outcome is None or outcome.value is None else outcome.value

    def _read_ahead(self) -> None:
        """Have the rest of what is planned read in the background, and then the next step of what was read."""
        if self._prefetcher is None:
            return
        own = [(step, index) for step in sorted(self._planned) for index in self._planned[step]]
        further = [(step + 1, index) for step, index in own if (step, index) in self._after]
        self._prefetcher.plan((self._attempt, *key) for key in [*own, *further] if self._may_read(*key))

    def _may_read(self, step: int, index: int) -> bool:
        """True for a microbatch of a step of the run that is not read yet, and whose stream's place is known."""
        key, is_known = (step, index), not self.has_states or self._before(step, index) is not None
        return is_known and step <= self._max_steps and key not in self._after and key not in self._held

    def plan(self, upcoming: Sequence[MicrobatchKey]) -> None:
        """These are loaded next: all of this worker's microbatches of a step, and perhaps of the next ones."""
        assert self._numbers is not None, "over comes first"
        self._numbers.plan(upcoming)
        first = upcoming[0][0]
        self._planned = {first - 1: self._planned.get(first - 1, [])}
        for step, index in upcoming:
            self._planned.setdefault(step, []).append(index)
        self._held, self._after = (_from(first - 1, one) for one in (self._held, self._after))
        self._digests = _from(first - 1, self._digests)
        self._read_ahead()

    # -- states --

    def own_part(self, step: int) -> bytes:
        """This worker's part of the states behind a step: for each of its microbatches digest, state, and whether the
        stream has no further one. Waits until that is known."""
        rows = {}
        for index in self._planned.get(step, ()):
            after, key, has_ended = self._after[step, index], (step + 1, index), False
            if step < self._max_steps:
                self._held[key] = self._held.get(key) or self._taken(*key)
                has_ended = self._held[key].has_ended
            rows[index] = [after.digest, after.state, has_ended]
        return json.dumps(rows, separators=(",", ":")).encode()

    def add(self, step: int, parts: Sequence[bytes]) -> str:
        """Take the states behind a step, of all workers. Returns a sentence about streams that have ended; or none."""
        rows: dict[int, list[Any]] = {}
        for part in parts:
            rows |= {int(index): row for index, row in json.loads(part).items()}
        assert rows.keys() == set(range(self._num)), f"step {step}: {len(rows)} of {self._num} streams are told"
        told = [rows[index] for index in range(self._num)]
        states = tuple(state for _, state, _ in told)
        self._require_size(states)
        digest = blake3("".join([self.kept.digest, *(digest for digest, _, _ in told)]).encode()).hexdigest()
        self.kept = States(step, states, digest)
        return _ended([index for index, (_, _, has_ended) in enumerate(told) if has_ended], self._num, step)

    def _require_size(self, states: Sequence[str]) -> None:
        total = sum(map(len, states))
        if total > MOST_BYTES:
            largest = max(range(self._num), key=lambda index: len(states[index]))
            raise TaskError(
                f"the states of {self._num} streams have {size(total)}, that of stream {largest} "
                f"{size(len(states[largest]))}; the limit is {size(MOST_BYTES)}, as every worker keeps them twice. "
                "Leave what was read ahead out of state_dict(), or give a function: session.reads(read)."
            )

    def place(self) -> dict[str, Any]:
        """The step, and the digest of all microbatches up to it."""
        return {"step": self.kept.step, "digest": self.kept.digest}

    def states_text(self) -> str:
        """The states as one line."""
        return json.dumps(self.kept.states, separators=(",", ":"))

    def go_to(self, place: Mapping[str, Any], states: str) -> None:
        """Continue behind another step. Raises TaskError for states of another number of streams."""
        told = tuple(json.loads(states))
        if len(told) != self._num:
            raise TaskError(
                f"the state that is to be loaded has {len(told)} streams, and a step of this run {self._num} "
                "microbatches. Resume with the same batch."
            )
        self.kept = States(int(place["step"]), told, str(place["digest"]))
        self._attempt += 1
        self._planned, self._held, self._after = {}, {}, {}

    # -- as any loader --

    def skip(self, skips: Skips, order: int = 1, blocks: tuple[int, int] = (1, 1), weights: WeightChanges = ()) -> None:
        """As `Loader.skip`, for the numbers that the ledger records: streams and functions go by the step."""
        assert self._numbers is not None, "over comes first"
        self._numbers.skip(skips, order, blocks, weights)

    def plan_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """As `load_range`: there are none."""

    def load_range(self, start: int, stop: int) -> list[Any]:
        """There are none. Raises DataError."""
        raise DataError(f"{self._source.origin(0)}: it has no samples {start} .. {stop - 1} for an evaluation.")

    def close(self) -> None:
        """End the threads, and the process that reads."""
        self._reader.close()
        if self._prefetcher is not None:
            self._prefetcher.close()


def _from(step: int, found: dict[MicrobatchKey, T]) -> dict[MicrobatchKey, T]:
    return {key: one for key, one in found.items() if key[0] >= step}


def _missing(origin: str, step: int) -> DataError:
    return DataError(
        f"{origin} has no microbatch for step {step}"
        + (". Give streams with at least one each." if step == 1 else ", though it had one when it was read before.")
    )


def _ended(ended: Sequence[int], num: int, step: int) -> str:
    if not ended:
        return ""
    if len(ended) == num:
        return f"all streams have ended: step {step} is the run's last one."
    which = f"stream {ended[0]} has" if len(ended) == 1 else f"streams {', '.join(map(str, ended))} have"
    return (
        f"{which} ended behind step {step}, and the other {num - len(ended)} of {num} have not: step {step} is the "
        "run's last one, and what the others still have is not read. Give streams of equal length, or endless ones."
    )
