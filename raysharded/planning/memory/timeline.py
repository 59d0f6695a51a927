"""The moments of one round at which a worker's memory may peak. Pure.

Follows FSDP2's order (torch 2.13, `_fsdp_param_group.py`). In forward a unit's all-gather buffer lives until the
parameters of the next unit are whole. In backward the preceding unit is gathered during the computation. A unit's
gradients are copied into the reducer's input, which lives until the next unit reduces. The root is gathered from
forward to the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.planning.memory.units import UnitBytes
from raysharded.planning.trace import OUTSIDE, Trace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """Columns of bytes, one entry per moment. Sums are added on top: `done` and `rest` give their units."""

    labels: tuple[tuple[str, int], ...]
    """(event, unit)"""
    num_forward: int
    """Moments before the first of backward."""
    activations: NDArray[np.int64]
    gathered: NDArray[np.int64]
    exchange: NDArray[np.int64]
    gradients: NDArray[np.int64]
    done: NDArray[np.int64]
    """One sum of every unit that this round has already reduced."""
    rest: NDArray[np.int64]
    """One sum of every unit that it has not reduced, except the current one."""
    own: NDArray[np.int64]
    """One sum of the current unit, while it is reduced; otherwise 0."""
    arriving: NDArray[np.int64]
    """One chunk of the current unit as it arrives; otherwise 0."""
    done_whole: NDArray[np.int64]
    """As `done`, for replicated units, which `done` excludes."""
    rest_whole: NDArray[np.int64]
    """As `rest`, for replicated units."""
    retained: NDArray[np.int64]
    """The part of `exchange` that is the reducer's input of a finished unit."""
    unit: NDArray[np.int64]
    """The current unit."""


def moments_of(trace: Trace, units: UnitBytes, sums: NDArray[np.int64], *, kept: frozenset[int]) -> Moments:
    """Build the moments. `sums`: bytes of one sum per unit. `kept`: units that forward leaves gathered, besides the
    root."""
    walk = _Walk(units, sums, kept=kept, order=_forward_order(trace))
    num_forward: int | None = None
    for phase in trace.phases:
        if phase.backward:
            num_forward = len(walk.rows) if num_forward is None else num_forward
            walk.backward(phase.unit, phase.start, phase.peak, phase.end, ends=phase.ends_unit)
        else:
            walk.forward(phase.unit, phase.start, phase.peak)
    num_forward = len(walk.rows) if num_forward is None else num_forward
    walk.finish(trace.phases[-1].end if trace.phases else 0)
    columns = np.array(walk.rows, np.int64).reshape(-1, 12).T
    names = (
        *("activations", "gathered", "exchange", "gradients", "done", "rest", "done_whole", "rest_whole"),
        *("own", "arriving", "retained", "unit"),
    )
    return Moments(labels=tuple(walk.labels), num_forward=num_forward, **dict(zip(names, columns, strict=True)))


def _forward_order(trace: Trace) -> list[int]:
    return list(dict.fromkeys(phase.unit for phase in trace.phases if not phase.backward and phase.unit != OUTSIDE))


class _Walk:
    """One pass through a round with running totals: a model has hundreds of units, and a policy plans often."""

    def __init__(
        self, units: UnitBytes, sums: NDArray[np.int64], *, kept: frozenset[int], order: Sequence[int]
    ) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.labels: list[tuple[str, int]] = []
        self._order = order
        self._place = {unit: place for place, unit in enumerate(order)}
        self._root = len(sums) - 1
        self._stays = kept | {self._root}
        self._is_whole: list[bool] = units.is_replicated.tolist()
        self._sums: list[int] = sums.tolist()
        self._rest = _by_kind(self._sums, self._is_whole)
        """Bytes of one sum of every unit that is not reduced: of sharded units, and of replicated ones."""
        self._gathered_bytes: list[int] = units.gathered.tolist()
        self._ahead_bytes: list[int] = units.all_gather.tolist()
        self._cast: list[int] = units.cast.tolist()
        self._whole: list[int] = (units.whole_gradient - units.last_gradient).tolist()
        self._all_whole: list[int] = units.whole_gradient.tolist()
        self._input: list[int] = units.reduce_input.tolist()
        self._chunk: list[int] = units.chunk.tolist()
        self._gradient: list[int] = units.gradient.tolist()
        self._is_cast_back = units.is_cast_back
        self._gathered: dict[int, int] = {}
        """Unit -> bytes of its whole parameters, while they exist."""
        self._gathered_total = 0
        self._reduced: set[int] = set()
        self._begun: set[int] = set()
        """Units whose backward has begun."""
        self._done = [0, 0]
        self._gradients = 0
        self._in_flight = self._input_alive = 0
        """Live bytes of the all-gather's output and of the reducer's input."""

    def forward(self, unit: int, start: int, peak: int) -> None:
        if unit == OUTSIDE:
            self._in_flight = 0
        if unit not in self._gathered:
            self._free_resharded()
        if unit not in self._gathered and unit != OUTSIDE:
            self._note("gathering", unit, start, gathered=self._ahead_bytes[unit] + self._cast[unit])
            self._note("gathering", unit, start, gathered=self._ahead_bytes[unit] + self._gathered_bytes[unit])
            self._in_flight = self._ahead_bytes[unit]
            self._gather(unit)
        elif unit == self._root:
            self._free_resharded()
        self._note("forward", unit, peak)

    def backward(self, unit: int, start: int, peak: int, end: int, *, ends: bool) -> None:
        if unit == self._root and not self._reduced and not self._in_flight:
            self._gather_ahead(unit, start)
        elif unit not in (OUTSIDE, self._root) and unit not in self._gathered and unit not in self._reduced:
            self._note("gathering", unit, start, gathered=self._gathered_bytes[unit])
            self._gather(unit)
            self._in_flight = 0
            self._gather_ahead(unit, start)
        elif unit in self._stays and unit not in (self._root, *self._reduced, *self._begun):
            self._in_flight = 0
            self._gather_ahead(unit, start)
        self._begun.add(unit)
        self._note("backward", unit, peak)
        if ends:
            self._reduce(unit, end)

    def finish(self, end: int) -> None:
        """FSDP2's work after backward: the root, and units that no gradient passed through."""
        for unit in (self._root, *self._order):
            if unit not in self._reduced:
                self._reduce(unit, end)
                end = max(0, end - self._all_whole[unit])
        self._in_flight = self._input_alive = 0
        self._note("reduced", self._root, 0)

    def _gather(self, unit: int) -> None:
        self._gathered[unit] = self._gathered_bytes[unit]
        self._gathered_total += self._gathered_bytes[unit]

    def _free(self, unit: int) -> None:
        self._gathered_total -= self._gathered.pop(unit, 0)

    def _free_resharded(self) -> None:
        for unit in [unit for unit in self._gathered if unit not in self._stays]:
            self._free(unit)

    def _gather_ahead(self, unit: int, act: int) -> None:
        """Gather the preceding unit during this one's computation."""
        before = self._order[-1] if unit == self._root else self._order[self._place[unit] - 1]
        if before == self._root or before in self._gathered:
            return
        self._note("gathering", before, act, gathered=self._ahead_bytes[before] + self._cast[before])
        self._in_flight = self._ahead_bytes[before]

    def _reduce(self, unit: int, end: int) -> None:
        self._free(unit)
        self._input_alive = self._input[unit]
        self._reduced.add(unit)
        if not self._input[unit]:
            return
        self._note("reducing", unit, end)
        act = max(0, end - self._whole[unit])
        kind = self._is_whole[unit]
        self._rest[kind] -= self._sums[unit]
        self._note("reducing", unit, act, exchange=self._chunk[unit], own=unit)
        self._done[kind] += self._sums[unit]
        if self._is_cast_back:
            self._note("reducing", unit, act, exchange=self._chunk[unit] + self._gradient[unit])
        self._gradients += self._gradient[unit]

    def _note(self, what: str, unit: int, act: int, *, gathered: int = 0, exchange: int = 0, own: int = -1) -> None:
        self.rows.append(
            (
                act,
                gathered + self._gathered_total + self._in_flight,
                exchange + self._input_alive,
                self._gradients,
                self._done[0],
                self._rest[0],
                self._done[1],
                self._rest[1],
                self._sums[own] if own >= 0 else 0,
                self._chunk[own] if own >= 0 else 0,
                0 if what == "reducing" else self._input_alive,
                unit,
            )
        )
        self.labels.append((what, unit))


def _by_kind(sums: Sequence[int], is_whole: Sequence[bool]) -> list[int]:
    return [sum(size for size, whole in zip(sums, is_whole, strict=True) if whole == kind) for kind in (False, True)]
