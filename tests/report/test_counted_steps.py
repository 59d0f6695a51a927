"""The steps that count are found as in a dictionary, for all numbers that a journal may have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raysharded.report.history.counted_steps import CountedSteps

NUMBERS = st.one_of(st.integers(0, 40), st.sampled_from([-3, 70_000, 140_001, 1 << 62]))


class SameAsADictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.found, self.should, self.next_index = CountedSteps(), dict[int, int](), 0

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        self.found.put(number, self.next_index)
        self.should[number] = self.next_index
        self.next_index += 1

    @rule(number=NUMBERS, many=st.integers(1, 5))
    def put_row(self, number: int, many: int) -> None:
        if self.should.keys() & set(range(number, number + many)):
            return
        indices = range(self.next_index, self.next_index + many)
        self.found.put_row(number, indices)
        self.should |= dict(zip(range(number, number + many), indices, strict=True))
        self.next_index += many

    @precondition(lambda self: self.should)
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.should)))
        assert self.found.take(number) == self.should.pop(number)

    @invariant()
    def are_the_same(self) -> None:
        assert len(self.found) == len(self.should)
        numbers, indices = self.found.columns()
        assert dict(zip(numbers.tolist(), indices.tolist(), strict=True)) == self.should
        assert numbers.tolist() == sorted(self.should)
        for number in (-3, 0, 20, 70_000, 1 << 62):
            assert self.found.get(number) == self.should.get(number)
            assert self.found.after(number) == sorted(one for one in self.should if one > number)


class Often(SameAsADictionary):
    pass


TestCountedSteps = SameAsADictionary.TestCase
TestCountedSteps.settings = settings(max_examples=30)
TestCountedStepsOften = pytest.mark.long(Often.TestCase)
TestCountedStepsOften.settings = settings(max_examples=200)


@given(st.integers(-(1 << 62), 1 << 62))
def test_a_step_that_does_not_count_is_no_key(number: int) -> None:
    assert number not in CountedSteps()
