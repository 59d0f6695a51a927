"""The proof of a generation's first step, where it has members that have computed nothing before: before Apply.

Each worker's first microbatch of the step is computed a second time, by its neighbour; digests of losses, metrics and
gradients are exchanged. One worker alone computes its own twice more. What memory happens to hold is made another one
first. Where two differ each computes its own again, and its second neighbour's, and `audit_verdict` says who is wrong:
who comes to others is presumed. Costs one round, and finds programs that do not compute the same twice, and workers
whose processor or memory computes otherwise. It is no audit: of the sums, the state and the other microbatches it says
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch

from raysharded.actors.numerics.bit_digest import combined
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.step.audit import not_reproducible
from raysharded.actors.step.audit_verdict import differing, is_unreproducible, judge_newcomers
from raysharded.actors.step.forward_backward import Results
from raysharded.actors.step.gradient import StepGradient
from raysharded.actors.step.pass_digests import NOT_FINITE, PARTS, Pass
from raysharded.actors.telemetry.phases import Phases
from raysharded.errors import CorruptNumbers
from raysharded.protocol.messages import Corruption

_SHIFTS, _FURTHER_SHIFTS = (1,), (0, 2)
"""Then each has computed its own microbatch twice, and three workers have, where there are as many."""
_SHIFTS_ALONE = (0, 0)
_SMALLEST, _LARGEST, _OF_EACH_SIZE = 6, 20, 4
"""Powers of two: the sizes, in bytes, of what is allocated and freed before a microbatch is computed again."""

_Found: TypeAlias = dict[int, list[tuple[int, tuple[int, ...]]]]
"""Microbatch * tensor parallel degree + tensor rank -> (rank, digests of its parts) of each time that it was computed;
the same on all workers."""


class Proof:
    """Of one generation. Training thread only; all workers do the same together."""

    def __init__(
        self,
        gradient: StepGradient,
        place: RankPosition,
        phases: Phases,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        audits: bool,
    ) -> None:
        """`audits`: steps of the run are audited, too."""
        self._gradient, self._place, self._in_phase, self._sum = gradient, place, phases, sum_over_workers
        self._device, self._audits = device, audits
        self._newcomers = frozenset(place.spec.newcomers)
        self._first: Pass | None = None
        self.is_due = bool(self._newcomers)
        """Whether the next step is to be proven."""
        self.corruption: Corruption | None = None
        """What was found, before it was raised."""

    def begin(self) -> None:
        """Call before a step is computed."""
        self._first = Pass(looks_for_not_finite=True) if self.is_due else None

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """One unit's gradient of a microbatch, as this worker computed it and before it is exchanged."""
        if self._first is not None and self._gradient.rounds.index == 0:
            self._first.note(index, gradient)

    def check(self, step: int, results: Results) -> None:
        """Compute the first round of the step that was just computed again, and compare; its gradient stays.

        Raises CorruptNumbers, the same on every worker, with `corruption` set; InexactError if none of several workers
        computes the same twice. Where a loss or a gradient is not finite, the next step is to be proven, too.
        """
        assert self._first is not None
        first, self._first = self._first, None
        first.results = results
        with self._in_phase.apart("prove"):
            alone = self._gradient.rounds.mesh.world_size == 1
            passes = [first, *(self._again(step, shift) for shift in (_SHIFTS_ALONE if alone else _SHIFTS))]
            found = self._exchange(passes)
            if differing(_times(found)):
                if not alone:
                    passes += [self._again(step, shift) for shift in _FURTHER_SHIFTS]
                    found = self._exchange(passes)
                self._raise(step, found)
        self.is_due = any(parts[0] == NOT_FINITE for of_it in found.values() for _, parts in of_it)

    def _again(self, step: int, shift: int) -> Pass:
        again = Pass(shift=shift, looks_for_not_finite=True)
        stir_memory(self._device)
        again.results = self._gradient.compute_first_round_again(step, shift, again.note)
        return again

    def _exchange(self, passes: list[Pass]) -> _Found:
        mesh, rank = self._place.mesh, self._place.rank
        count = self._gradient.rounds.num_microbatches * mesh.tensor
        table = torch.zeros((len(passes), count, 1 + len(PARTS)), dtype=torch.int64)
        for rows, one in zip(table, passes, strict=True):
            for index, parts in one.parts().items():
                rows[index * mesh.tensor + self._place.tensor_rank] = torch.tensor([rank + 1, *parts])
        self._sum(table.view(-1))
        found: _Found = {}
        for rows in table.tolist():
            for key, (number, *parts) in enumerate(rows):
                if number:
                    found.setdefault(key, []).append((number - 1, tuple(parts)))
        return found

    def _raise(self, step: int, found: _Found) -> NoReturn:
        members, tensor, times = self._place.spec.members, self._place.mesh.tensor, _times(found)
        newcomers = frozenset(rank for rank, worker in enumerate(members) if worker in self._newcomers)
        judgement = judge_newcomers(times, newcomers)
        what = _what_differs(found)
        microbatches = tuple(sorted({key // tensor for key in judgement.microbatches}))
        if is_unreproducible(judgement, _who_computed_twice(times)):
            raise not_reproducible(step, microbatches, what)
        self.corruption = Corruption(
            step=step,
            what=what,
            culprits=tuple(members[rank] for rank in sorted(judgement.culprits)),
            workers=tuple(members[rank] for rank in sorted(judgement.involved)),
            microbatches=microbatches,
            by_proof=True,
            takes_back=self._audits and not judgement.culprits <= newcomers,
        )
        raise CorruptNumbers(self.corruption.text())


def _times(found: _Found) -> dict[int, list[tuple[int, int]]]:
    return {key: [(rank, combined(parts)) for rank, parts in of_it] for key, of_it in found.items()}


def _what_differs(found: _Found) -> str:
    """The first of the parts of which there is more than one."""
    compared = [list(zip(*(parts for _, parts in of_it), strict=True)) for of_it in found.values()]
    return next(name for place, name in enumerate(PARTS) if any(len(set(parts[place])) > 1 for parts in compared))


def _who_computed_twice(times: dict[int, list[tuple[int, int]]]) -> frozenset[int]:
    return frozenset(
        rank for of_it in times.values() for rank, times_ in Counter(rank for rank, _ in of_it).items() if times_ > 1
    )


def stir_memory(device: torch.device) -> None:
    """Let much of what is allocated next hold other numbers than when it was last allocated. Takes milliseconds."""
    held = [
        torch.full((1 << power,), 0x5B, dtype=torch.uint8, device=device)
        for power in range(_LARGEST, _SMALLEST - 1, -1)
        for _ in range(_OF_EACH_SIZE)
    ]
    held.clear()
