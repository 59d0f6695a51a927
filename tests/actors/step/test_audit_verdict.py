"""The worker to blame for wrong numbers, and digests that see every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.bit_digest import combined, flip_bit, tensor_digest
from raysharded.actors.step.proofs.audit_verdict import is_unreproducible, judge, judge_newcomers, wrong_copies

GOOD, BAD, WORSE = 7, 8, 9


def test_who_is_outvoted_is_to_blame() -> None:
    judgement = judge({0: [(0, GOOD), (1, GOOD), (2, BAD), (3, GOOD)], 1: [(1, GOOD), (2, GOOD), (3, GOOD), (0, GOOD)]})
    assert judgement.culprits == {2}
    assert judgement.microbatches == (0,)
    assert judgement.involved == {0, 1, 2, 3}


def test_who_does_not_get_the_same_twice_is_to_blame() -> None:
    assert judge({0: [(0, BAD), (1, GOOD), (0, GOOD), (1, GOOD)]}).culprits == {0}
    assert judge({0: [(0, BAD), (0, GOOD), (0, GOOD), (0, GOOD)]}).culprits == {0}


def test_of_two_that_stand_by_their_own_both_are_named_unless_another_microbatch_decides() -> None:
    each_stands = [(0, BAD), (1, GOOD), (0, BAD), (1, GOOD)]
    assert judge({0: each_stands}).culprits == {0, 1}
    assert judge({0: each_stands, 1: [(1, GOOD), (0, BAD), (1, GOOD), (0, WORSE)]}).culprits == {0}


def test_when_nobody_gets_the_same_twice_it_is_the_computation() -> None:
    judgement = judge({0: [(0, 1), (1, 2), (0, 3), (1, 4)]})
    assert is_unreproducible(judgement, range(2))
    assert not is_unreproducible(judge({0: [(0, 1), (1, 2), (0, 3), (1, 2)]}), range(2))


def test_a_newcomer_is_presumed_wrong_against_one_that_was_there() -> None:
    each_stands = [(0, GOOD), (1, BAD), (0, GOOD), (1, BAD)]
    assert judge_newcomers({0: each_stands}, {1}).culprits == {1}
    assert judge_newcomers({0: each_stands}, {0}).culprits == {0}
    most_are_new = [(0, GOOD), (1, BAD), (2, BAD)]
    assert judge({0: most_are_new}).culprits == {0}
    assert judge_newcomers({0: most_are_new}, {1, 2}).culprits == {1, 2}
    assert judge_newcomers({0: [(0, GOOD), (1, GOOD)], 1: [(1, GOOD), (2, BAD)]}, {1, 2}).culprits == {1, 2}
    assert judge_newcomers({0: [(0, GOOD), (2, BAD)], 1: [(1, GOOD), (2, BAD)]}, {1, 2}).culprits == {2}


def test_against_nobody_or_where_those_that_were_there_differ_a_newcomer_is_judged_as_any() -> None:
    for newcomers in (set(), {0, 1}):
        assert judge_newcomers({0: [(0, GOOD), (1, BAD)]}, newcomers).culprits == {0, 1}
    inconsistent = {0: [(0, GOOD), (1, BAD), (0, BAD)]}
    assert judge_newcomers(inconsistent, {1}).culprits == {0}
    contradicting = {0: [(0, BAD), (1, GOOD), (2, GOOD)], 1: [(1, GOOD), (2, GOOD), (0, BAD)]}
    assert judge_newcomers(contradicting, {2}).culprits == {0}


def test_a_wrong_copy_is_distinguished_from_two_right_ones() -> None:
    right = {0: GOOD, ~0: GOOD, 1: GOOD}  # on the device of 0, in its host memory, and as a mirror at 1
    assert wrong_copies({0: right, 1: right}) == frozenset()
    assert wrong_copies({0: {**right, 1: BAD}}) == {1}
    assert wrong_copies({0: {**right, ~0: BAD}}) == {0}
    assert wrong_copies({0: {**right, 0: BAD}}) == {0}
    assert wrong_copies({0: {0: 1, ~0: 2, 1: 3}}) == {0, 1}
    assert wrong_copies({0: {0: GOOD, ~0: BAD}}) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_one_flipped_bit_is_seen_and_flipped_back_it_is_not(dtype: torch.dtype) -> None:
    values = torch.randn(100_003, dtype=torch.float32).to(dtype)
    before = int(tensor_digest(values))
    flip_bit(values)
    assert int(tensor_digest(values)) != before
    flip_bit(values)
    assert int(tensor_digest(values)) == before


def test_zeros_of_either_sign_and_orders_are_distinguished() -> None:
    assert int(tensor_digest(torch.tensor([0.0]))) != int(tensor_digest(torch.tensor([-0.0])))
    assert int(tensor_digest(torch.tensor([1.0, 2.0]))) != int(tensor_digest(torch.tensor([2.0, 1.0])))
    assert combined([1, 2]) != combined([2, 1])


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_digests_travel_in_a_signed_word_and_are_never_nothing(digests: list[int]) -> None:
    assert -(2**63) <= combined(digests) < 2**63
    assert combined(digests) != 0
