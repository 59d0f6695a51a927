"""Changed copies of frozen objects are those of `dataclasses.replace`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from raysharded.driver.state import changed
from raysharded.driver.state.state import State
from tests.driver.frozen import read_drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    first: int = 0
    second: int = field(default=2, init=False)


@dataclass(frozen=True, slots=True)
class Single:
    one: int


@dataclass
class Open:
    first: int = 0
    second: int = 1


def state() -> State:
    return read_drawn(0)[0].schedule.cluster().driver.state


def test_a_copy_of_the_drivers_state_differs_in_the_given_fields_alone() -> None:
    before = state()
    after = changed.replace(before, step=7, asked=(1, 2))
    assert (after.step, after.asked) == (7, (1, 2))
    assert after == dataclasses.replace(before, step=7, asked=(1, 2))
    assert before == state()
    others = [one.name for one in fields(State) if one.name not in ("step", "asked")]
    assert len(others) > 50
    assert all(getattr(after, name) is getattr(before, name) for name in others)


def test_the_state_takes_the_fast_way() -> None:
    assert changed._slots_of(State) is not None


def test_a_class_with_one_field_is_copied_too() -> None:
    assert changed.replace(Single(one=1), one=2) == Single(one=2)


def test_a_copy_is_as_frozen_as_its_original() -> None:
    after: Any = changed.replace(state(), step=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.step = 8


def test_a_field_that_there_is_not_is_an_error() -> None:
    unknown: dict[str, Any] = {"stepp": 7}
    with pytest.raises(TypeError, match="stepp"):
        changed.replace(state(), **unknown)


def test_a_constructor_that_checks_is_called() -> None:
    assert changed.replace(Checked(), low=1) == Checked(low=1)
    with pytest.raises(ValueError, match="low is above high"):
        changed.replace(Checked(), low=2)


def test_a_field_that_the_constructor_does_not_take_cannot_be_given() -> None:
    assert changed.replace(Counted(), first=5).first == 5
    with pytest.raises((TypeError, ValueError), match="second"):
        changed.replace(Counted(), second=5)


def test_a_class_without_slots_is_copied_too() -> None:
    before = Open(first=3)
    assert changed.replace(before, second=4) == Open(first=3, second=4)
    assert before == Open(first=3)
