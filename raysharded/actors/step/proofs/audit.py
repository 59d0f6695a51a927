"""The audit of a step: workers compute each other's gradients again and compare copies of the state, bit for bit.

It runs before Apply, in the steps that are audited. Each worker notes a digest of every microbatch's gradient that it
computes. The step is then computed a second time with the microbatches moved by one worker, and the digests are
exchanged. Where they differ the step is computed twice more, moved further each time, and `audit_verdict` decides who
is wrong.

An audit finds wrong gradients (compute, memory), wrong sums (exchange, addition) and differing copies of the state. It
does not find a wrong optimizer step, nor a shard that was wrong before it was copied: one worker alone computes each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.numerics.bit_digest import combined, tensor_digest
from raysharded.actors.shards.device_state import DeviceState
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.forward_backward import Results
from raysharded.actors.step.gradient import Batches, StepGradient
from raysharded.actors.step.proofs.audit_verdict import differing, is_unreproducible, judge, wrong_copies
from raysharded.actors.step.proofs.repeated_pass import Pass
from raysharded.errors import CorruptNumbers, InexactError
from raysharded.layout import keeper_of
from raysharded.protocol.messages import Corruption

_FURTHER_SHIFTS = (2, 3)
"""Shifts of the further passes. With the first two passes four workers compute; of three or two, some twice."""


@dataclass(slots=True)
class _Audited(Pass):
    """One computation of the whole step."""

    sums: int = 0
    """Digest of this worker's shards of the summed gradient."""


class Audit:
    """Audits of one generation's steps. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        every_steps: int | None,
        gradient: StepGradient,
        live: DeviceState,
        store: ShardStore,
        place: RankPosition,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._every_steps, self._gradient, self._live, self._store = every_steps, gradient, live, store
        self._place, self._sum = place, sum_over_workers
        self._first: _Audited | None = None
        self.seconds: float | None = None
        """Seconds that the newest step's audit took; None if it was not audited."""
        self.corruption: Corruption | None = None
        """Finding of the audit, set before it raises."""

    def begin(self, step: int) -> None:
        """Call before a step is computed."""
        due = self._every_steps is not None and step % self._every_steps == 0
        self.seconds = None
        self._first = _Audited(shift=0) if due else None

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Note one unit's gradient of a microbatch, as this worker computed it and before it is exchanged."""
        if self._first is not None:
            self._first.note(index, gradient)

    @property
    def is_due(self) -> bool:
        return self._first is not None

    def check(self, step: int, results: Results) -> Batches[None]:
        """Compute the newest step again and compare; the gradient is the same afterwards.

        Needs the previous step's mirrors. Raises CorruptNumbers, the same on every worker, with `corruption` set.
        Raises InexactError if no worker computes the same twice.
        """
        assert self._first is not None
        started = time.perf_counter()
        first, self._first = self._first, None
        first.results, first.sums = results, self._digest_of_sums()
        passes = [first, (yield from self._again(step, shift=1))]
        mesh = self._place.mesh
        times, wrong_sums, copies = self._exchange(passes, step)
        if differing(times):
            for shift in _FURTHER_SHIFTS:
                passes += [(yield from self._again(step, shift))]
            times, _, _ = self._exchange(passes, step)
            judgement = judge(times)
            microbatches = tuple(sorted({key // mesh.tensor for key in judgement.microbatches}))
            if is_unreproducible(judgement, range(mesh.world_size)):
                raise not_reproducible(step, microbatches)
            self._found(step, "gradient", judgement.culprits, judgement.involved, microbatches)
        if wrong_sums:
            self._found(step, "sum", wrong_sums, wrong_sums)
        culprits = wrong_copies(copies)
        if culprits:
            self._found(step, "state", culprits, culprits)
        self.seconds = time.perf_counter() - started

    def _again(self, step: int, shift: int) -> Batches[_Audited]:
        again = _Audited(shift=shift)
        again.results = (yield from self._gradient.compute_again(step, shift, again.note)).results
        again.sums = self._digest_of_sums()
        return again

    def _digest_of_sums(self) -> int:
        return combined(numbers_of(map(tensor_digest, self._gradient.local_gradients())))

    def _exchange(
        self, passes: list[_Audited], step: int
    ) -> tuple[dict[int, list[tuple[int, int]]], frozenset[int], dict[int, dict[int, int]]]:
        """Results by key, ranks whose sums differ, and copies by shard; the same on all workers.

        A key is microbatch * tensor parallel degree + tensor rank. Its results are (rank, digest), one for each pass.
        """
        mesh, rank = self._place.mesh, self._place.rank
        count, world = self._gradient.rounds.num_microbatches * mesh.tensor, mesh.world_size
        table = torch.zeros(len(passes) * 2 * count + 4 * world, dtype=torch.int64)
        by_pass = table[: len(passes) * 2 * count].view(len(passes), 2, count)
        for row, one in zip(by_pass, passes, strict=True):
            for index, digest in one.digests().items():
                key = index * mesh.tensor + self._place.tensor_rank
                row[0, key], row[1, key] = rank, digest
        wrong, live, snapshot, mirror = table[len(passes) * 2 * count :].view(4, world)
        wrong[rank] = int(any(one.sums != passes[0].sums for one in passes))
        self._digest_state(step - 1, live, snapshot, mirror)
        self._sum(table)
        times = {key: [(int(row[0, key]), int(row[1, key])) for row in by_pass] for key in range(count)}
        copies = {
            shard: {rank: int(live[rank]) for rank in mesh.holders(shard)}
            | {~rank: int(snapshot[rank]) for rank in mesh.holders(shard)}
            | ({keeper_of(shard, world, mesh.apart): int(mirror[shard])} if self._place.has_mirror else {})
            for shard in range(mesh.shards)
        }
        return times, frozenset(index for index in range(world) if wrong[index]), copies

    def _digest_state(self, step: int, live: torch.Tensor, snapshot: torch.Tensor, mirror: torch.Tensor) -> None:
        """Fill in the digests of this worker's copies: its own shard twice, and the mirror that it holds."""
        rank, generation = self._place.rank, self._place.spec.generation
        own = self._store.find(step, generation, "snapshot")
        snapshot[rank] = self._live.digest_of_copy(own)
        live[rank] = self._live.digest(own.spec, own.pieces)
        if self._place.has_mirror:
            kept = self._store.find(step, generation, "mirror")
            mirror[kept.rank] = self._live.digest_of_copy(kept)

    def _found(
        self,
        step: int,
        what: str,
        culprits: frozenset[int],
        involved: frozenset[int],
        microbatches: tuple[int, ...] = (),
    ) -> None:
        members = self._place.spec.members
        self.corruption = Corruption(
            step=step,
            what=what,
            culprits=tuple(members[rank] for rank in sorted(culprits)),
            workers=tuple(members[rank] for rank in sorted(involved)),
            microbatches=microbatches,
        )
        raise CorruptNumbers(self.corruption.text())


def not_reproducible(step: int, microbatches: Sequence[int], what: str = "gradient") -> InexactError:
    """Error that ends a run in which no worker gets the same result twice."""
    return InexactError(
        f"step {step}: no worker got the same {what} twice (microbatches "
        f"{', '.join(map(str, microbatches))}): the task's computation is not reproducible. Look for "
        "randomness that torch.manual_seed does not set, for time, and for state that forward changes; or accept "
        'results without identical bits with EngineConfig(reduction="fast").'
    )
