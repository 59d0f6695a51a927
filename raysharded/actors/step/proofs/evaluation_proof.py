"""The proof of an evaluation: each worker's first microbatch is read and computed again by the worker's neighbour.

Numbers of an evaluation change no weights by themselves. But a loop may decide by them, and people do. So a loss that
depends on the worker, or on the past, is found as in training. The proof costs one round. It is due in a generation
with newcomers; and in a user's own loop, which may come to depend on the worker, at the evaluations 1, 2, 4, 8, ... of
each generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from raysharded.actors.shards.position import RankPosition
from raysharded.actors.step.proofs.repeated_pass import stir_memory
from raysharded.errors import InexactError
from raysharded.ids import WorkerId

Digests: TypeAlias = Mapping[int, int]
"""Microbatch -> digest of its results; empty on a worker without one."""
_ALONE = 2
"""Number of further computations on a single worker. Of several workers each computes one microbatch more."""


class EvaluationProof:
    """The proofs of one generation. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        place: RankPosition,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        is_exact: bool,
        is_of_loop: bool,
    ) -> None:
        """`is_exact`: False in fast mode, where nothing is proven. `is_of_loop`: True for a user's own loop."""
        self._place, self._sum, self._device = place, sum_over_workers, device
        self._is_exact, self._is_of_loop = is_exact, is_of_loop
        self._num_evaluations = 0

    def is_due(self) -> bool:
        """True if the evaluation that begins now is to be proven. Call it once for each."""
        self._num_evaluations += 1
        number = self._num_evaluations
        first = number == 1 and (self._is_of_loop or bool(self._place.spec.newcomers))
        return self._is_exact and (first or (self._is_of_loop and number & (number - 1) == 0))

    def check(self, what: str, first: Digests, again: Callable[[int], Digests]) -> None:
        """Raise InexactError, the same on every worker, if a microbatch of the first round has two results.

        `what`: what is computed, for errors. `again`: compute the first microbatch of the worker this many places
        further.
        """
        is_alone = self._place.mesh.data.world_size == 1
        passes = [first]
        for _ in range(_ALONE if is_alone else 1):
            stir_memory(self._device)
            passes.append(again(0 if is_alone else 1))
        different = {index: found for index, found in self._exchanged(passes).items() if len(set(found.values())) > 1}
        if different:
            members = self._place.spec.members
            ranks = sorted({rank for found in different.values() for rank, _ in found})
            raise _depends(what, sorted(different), [members[rank] for rank in ranks])

    def _exchanged(self, passes: list[Digests]) -> dict[int, dict[tuple[int, int], int]]:
        """Microbatch -> (rank, number of the pass) -> digest, on all workers."""
        mesh = self._place.mesh
        table = torch.zeros((len(passes), mesh.data.world_size, 2), dtype=torch.int64)
        if self._place.tensor_rank == 0:  # the others of its tensor parallel group computed the same
            for rows, digests in zip(table, passes, strict=True):
                for index, digest in digests.items():
                    rows[index] = torch.tensor([self._place.rank + 1, digest])
        self._sum(table.view(-1))
        found: dict[int, dict[tuple[int, int], int]] = {}
        for number, rows in enumerate(table.tolist()):
            for index, (rank, digest) in enumerate(rows):
                if rank:
                    found.setdefault(index, {})[rank - 1, number] = digest
        return found


def _depends(what: str, microbatches: list[int], workers: list[WorkerId]) -> InexactError:
    by = f"another worker computes them (workers {', '.join(map(str, workers))})"
    return InexactError(
        f"{what}: microbatches {', '.join(map(str, microbatches))} have other results when "
        f"{by if len(workers) > 1 else 'they are computed again'}. The results must depend on the batch and the model "
        "alone: not on the rank, a counter, a clock, a generator that is not seeded for each microbatch, or what was "
        "computed before. If they do, a worker computes wrong numbers: EngineConfig(audit_every_steps=...) finds it."
    )
