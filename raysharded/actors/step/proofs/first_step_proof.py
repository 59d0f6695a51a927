"""The proof of a generation's first step with newcomers: workers that have computed nothing before.

Before Apply, each worker's neighbour computes the worker's first microbatch of the step a second time. Digests of
losses, metrics and gradients are exchanged. A single worker computes its own microbatch twice more. Memory that is
allocated next is made to hold other numbers first. Where two results differ each worker computes its own microbatch
again, and its second neighbour's. `audit_verdict` then decides who is wrong; newcomers are presumed wrong.

The proof costs one round. It finds programs that do not compute the same twice, and workers whose processor or memory
computes differently. It is no audit: it does not check the sums, the state and the other microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import torch

from raysharded.actors.numerics.bit_digest import combined
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.step.forward_backward import Results
from raysharded.actors.step.gradient import Batches, StepGradient
from raysharded.actors.step.proofs.audit import not_reproducible
from raysharded.actors.step.proofs.audit_verdict import differing, is_unreproducible, judge_newcomers
from raysharded.actors.step.proofs.repeated_pass import NOT_FINITE, PARTS, Pass, stir_memory
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.telemetry.phases import Phases
from raysharded.errors import CorruptNumbers, InexactError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Corruption

_SHIFTS, _FURTHER_SHIFTS = (1,), (0, 2)
"""Shifts of the first and the further passes. With all of them each worker has computed its own microbatch twice, and
three workers have computed it, if there are as many."""
_SHIFTS_ALONE = (0, 0)

_JOINER_DIFFERS = (
    "a worker that joins computes other numbers than those that were there: the training function may have state that "
    "is not registered, such as a counter or its own generator, which a joiner has as at the start. Register it "
    "in session.shard, or compute it from step.number. Otherwise the joiner's memory or device is at fault."
)

_Found: TypeAlias = dict[int, list[tuple[int, tuple[int, ...]]]]
"""Microbatch * tensor parallel degree + tensor rank -> (rank, digests of the parts) of each computation, on all
workers."""


class Proof:
    """The proof of one generation. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        gradient: StepGradient,
        place: RankPosition,
        phases: Phases,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        audits: bool,
        say_of_loop: Say | None = None,
    ) -> None:
        """`audits`: True if steps of the run are audited, too. `say_of_loop`: reports remarks on a user's own loop,
        which may come to depend on the worker: the steps 2, 4, 8, ... are proven, too, unless steps are audited. None:
        there is no such loop."""
        self._gradient, self._place, self._in_phase, self._sum = gradient, place, phases, sum_over_workers
        self._device, self._audits, self._say = device, audits, say_of_loop
        self._newcomers = frozenset(place.spec.newcomers)
        self._first: Pass | None = None
        self.is_due = bool(self._newcomers)
        """True if the next step is to be proven."""
        self.corruption: Corruption | None = None
        """Finding of the proof, set before it raises."""

    def begin(self, step: int) -> None:
        """Call before a step is computed."""
        self._newcomers = self._newcomers if self.is_due else frozenset()
        self.is_due = self.is_due or (self._say is not None and not self._audits and step & (step - 1) == 0)
        self._first = Pass(looks_for_not_finite=True) if self.is_due else None

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Note one unit's gradient of a microbatch, as this worker computed it and before it is exchanged."""
        if self._first is not None and self._gradient.rounds.index == 0:
            self._first.note(index, gradient)

    def check(self, step: int, results: Results) -> Batches[None]:
        """Compute the first round of the newest step again and compare; the step's gradient stays.

        Raises CorruptNumbers, the same on every worker, with `corruption` set. Raises InexactError if none of several
        workers computes the same twice. If a loss or a gradient is not finite, the next step is to be proven, too.
        """
        assert self._first is not None
        first, self._first = self._first, None
        first.results = results
        with self._in_phase.apart("prove"):
            alone = self._gradient.rounds.mesh.world_size == 1
            passes = [first]
            for shift in _SHIFTS_ALONE if alone else _SHIFTS:
                passes += [(yield from self._again(step, shift))]
            found = self._exchange(passes)
            if differing(_times(found)):
                if not alone:
                    for shift in _FURTHER_SHIFTS:
                        passes += [(yield from self._again(step, shift))]
                    found = self._exchange(passes)
                self._raise(step, found)
        self.is_due = any(parts[0] == NOT_FINITE for of_it in found.values() for _, parts in of_it)

    def _again(self, step: int, shift: int) -> Batches[Pass]:
        again = Pass(shift=shift, looks_for_not_finite=True)
        stir_memory(self._device)
        again.results = yield from self._gradient.compute_first_round_again(step, shift, again.note)
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
        if not newcomers:
            raise _came_to_depend(step, microbatches, what, [members[rank] for rank in sorted(judgement.involved)])
        if self._say is not None and len(newcomers) < len(members):
            self._say("proof of a joiner", _JOINER_DIFFERS)
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


def _came_to_depend(step: int, microbatches: Sequence[int], what: str, workers: Sequence[WorkerId]) -> InexactError:
    return InexactError(
        f"step {step}: microbatches {', '.join(map(str, microbatches))} have another {what} when another worker "
        f"computes them (workers {', '.join(map(str, workers))}), though they agreed in earlier steps. The training "
        "function, the model or the loss has come to depend on the worker or on the past: on the rank, or on a counter "
        "or generator that is not registered. Compute it from step.number and step.microbatch, or register it in "
        "session.shard. If nothing does, a worker computes wrong numbers: EngineConfig(audit_every_steps=...) finds it."
    )


def _times(found: _Found) -> dict[int, list[tuple[int, int]]]:
    return {key: [(rank, combined(parts)) for rank, parts in of_it] for key, of_it in found.items()}


def _what_differs(found: _Found) -> str:
    """Name of the first part whose results differ."""
    compared = [list(zip(*(parts for _, parts in of_it), strict=True)) for of_it in found.values()]
    return next(name for place, name in enumerate(PARTS) if any(len(set(parts[place])) > 1 for parts in compared))


def _who_computed_twice(times: dict[int, list[tuple[int, int]]]) -> frozenset[int]:
    return frozenset(
        rank for of_it in times.values() for rank, times_ in Counter(rank for rank, _ in of_it).items() if times_ > 1
    )
