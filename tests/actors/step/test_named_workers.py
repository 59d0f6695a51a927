"""Workers and microbatches that a proof or an audit names: all that are concerned, in ascending order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysharded.actors.shards.position import RankPosition
from raysharded.actors.step.proofs.audit import Audit
from raysharded.actors.step.proofs.audit_verdict import differing
from raysharded.actors.step.proofs.evaluation_proof import EvaluationProof
from raysharded.actors.step.proofs.first_step_proof import Proof
from raysharded.errors import CorruptNumbers, InexactError
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromStart, GenerationSpec

GOOD: tuple[int, ...] = (3, 3, 3)
BAD: tuple[int, ...] = (4, 3, 3)
CPU = torch.device("cpu")


def place(*members: int, newcomers: tuple[int, ...] = ()) -> RankPosition:
    """The first of these members."""
    spec = GenerationSpec(
        generation=GenerationId(1),
        members=tuple(map(WorkerId, members)),
        newcomers=tuple(map(WorkerId, newcomers)),
        source=FromStart(),
        host="",
        port=0,
        prefix="",
    )
    return RankPosition(spec=spec, worker=WorkerId(members[0]), mirrors=True)


def proof_at(where: RankPosition) -> Proof:
    unused: Any = None
    return Proof(unused, where, unused, unused, CPU, audits=False, say_of_loop=None)


def test_an_evaluation_that_depends_on_the_worker_names_all_who_computed_it() -> None:
    def sum_with_the_other(flat: torch.Tensor) -> torch.Tensor:
        table = flat.view(2, 2, 2)  # pass, microbatch, (rank + 1, digest)
        table[0, 1], table[1, 0] = torch.tensor([2, 5]), torch.tensor([2, 99])
        return flat

    proof = EvaluationProof(place(4, 7), sum_with_the_other, CPU, is_exact=True, is_of_loop=True)
    told = r"the evaluation: microbatches 0, 1 have other results .* \(workers 4, 7\)"
    with pytest.raises(InexactError, match=told):
        proof.check("the evaluation", {0: 7}, lambda _: {1: 6})


def test_a_step_that_came_to_depend_on_the_worker_names_all_who_computed_it() -> None:
    found = {2: [(2, GOOD), (0, BAD)], 0: [(0, GOOD), (1, BAD)]}
    with pytest.raises(InexactError, match=r"step 4: microbatches 0, 2 have another gradient .* \(workers 4, 7, 9\)"):
        proof_at(place(4, 7, 9))._raise(4, found)


def test_newcomers_that_compute_other_numbers_are_named_in_order() -> None:
    found = {0: [(0, GOOD), (2, BAD), (0, GOOD), (2, BAD)], 1: [(0, GOOD), (1, BAD), (0, GOOD), (1, BAD)]}
    proof = proof_at(place(4, 7, 9, newcomers=(7, 9)))
    with pytest.raises(CorruptNumbers):
        proof._raise(4, found)
    assert proof.corruption is not None
    assert proof.corruption.culprits == (7, 9)
    assert proof.corruption.workers == (4, 7, 9)
    assert proof.corruption.microbatches == (0, 1)


def test_an_audit_names_workers_in_order() -> None:
    unused: Any = None
    audit = Audit(1, unused, unused, unused, place(4, 7, 9), unused)
    with pytest.raises(CorruptNumbers):
        audit._found(3, "state", frozenset({2, 1}), frozenset({2, 0, 1}))
    assert audit.corruption is not None
    assert (audit.corruption.culprits, audit.corruption.workers) == ((7, 9), (4, 7, 9))


def test_differing_microbatches_are_in_order() -> None:
    assert differing({3: [(0, 1), (1, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 1), (1, 1)]}) == (1, 3)
