"""The rules by which bits are computed, as text, and the workers that may compute under each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from raysharded import numerics
from raysharded.actors.model.modes import HOLDS_AHEAD_OF_EVALUATION, KEEPS_PARTS
from raysharded.actors.numerics.column_sums import LAYOUTS
from raysharded.actors.step.forward_backward import DRAWS
from raysharded.actors.step.parameter_use import LEAVES_ALONE
from raysharded.actors.task_calls.process_state import STAYS_CHANGED
from raysharded.actors.task_calls.task_numbers import TENSORS
from raysharded.data.order import ORDERS

NAMES = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
NUMBERS = st.sets(st.integers(1, 99), min_size=1, max_size=3).map(lambda found: tuple(sorted(found)))
ALL_ONE = "build 1, compile 1, draws 1, modes 1, numbers 1, order 1, reduce 1, unused 1"
NEWEST = ALL_ONE
for _rule in ("build", "compile", "draws", "modes", "numbers", "order", "unused"):
    NEWEST = NEWEST.replace(f"{_rule} 1", f"{_rule} {3 if _rule in ('compile', 'draws', 'modes', 'numbers') else 2}")
PROGRAM = {"exact": True, "compiles": False}


@pytest.fixture
def first_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version has the first number of each rule, and no other."""
    for name, rule in numerics.RULES.items():
        monkeypatch.setitem(numerics.RULES, name, replace(rule, listed=(1,)))


@pytest.fixture
def two_orders(first_rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(1, 2)))


@pytest.fixture
def second_order_alone(first_rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(2,)))


@given(st.dictionaries(NAMES, NUMBERS, max_size=4))
def test_what_a_text_of_rules_means_is_what_was_written(numbers: dict[str, tuple[int, ...]]) -> None:
    assert numerics.parse(numerics.text_of(numbers)) == numbers


@pytest.mark.parametrize("text", ["order", "order 1,draws 1", "order one", "order 1, order 1", " 1", "order  1", ", "])
def test_a_text_that_no_version_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        numerics.parse(text)


@pytest.mark.usefixtures("first_rules")
def test_what_is_not_named_is_at_the_first_number() -> None:
    assert numerics.listed() == numerics.newest() == numerics.whole("") == ALL_ONE


def test_a_new_run_takes_the_last_number_of_each_rule() -> None:
    assert numerics.newest() == NEWEST
    assert numerics.whole("") == ALL_ONE
    for name, numbers in numerics.parse(numerics.newest()).items():
        assert numbers == (max(numerics.RULES[name].listed),)


def test_there_is_code_for_each_number_that_is_listed_and_for_no_other() -> None:
    assert tuple(sorted(ORDERS)) == numerics.RULES["order"].listed
    assert tuple(sorted(DRAWS)) == numerics.RULES["draws"].listed
    assert tuple(sorted(TENSORS)) == tuple(sorted(LAYOUTS)) == numerics.RULES["numbers"].listed
    assert numerics.RULES["compile"].listed == (2, numerics.COMPILES_ALL_CODE)
    assert tuple(sorted(LEAVES_ALONE)) == numerics.RULES["unused"].listed
    assert KEEPS_PARTS.keys() == HOLDS_AHEAD_OF_EVALUATION.keys()
    assert tuple(sorted(KEEPS_PARTS)) == tuple(sorted(STAYS_CHANGED)) == numerics.RULES["modes"].listed


@pytest.mark.usefixtures("two_orders")
def test_a_version_with_two_numbers_continues_under_the_first_and_begins_under_the_second() -> None:
    assert numerics.kept(ALL_ONE) == numerics.kept("") == ALL_ONE
    assert numerics.newest() == ALL_ONE.replace("order 1", "order 2")
    assert numerics.lacking("", numerics.listed(), **PROGRAM) == {}
    assert numerics.lacking("order 2", "", **PROGRAM) == {"order": ("2", "1")}  # a worker of an older version
    assert numerics.lacking("order 3", numerics.listed(), **PROGRAM) == {"order": ("3", "1 or 2")}


@pytest.mark.usefixtures("second_order_alone")
def test_a_dropped_rule_gives_way_to_the_newest() -> None:
    assert numerics.kept(ALL_ONE) == ALL_ONE.replace("order 1", "order 2")
    assert numerics.newest() == ALL_ONE.replace("order 1", "order 2")


def test_a_rule_that_only_a_later_version_has_is_lacking_here_unless_it_has_its_first_number() -> None:
    assert numerics.lacking("rounding 2", numerics.listed(), **PROGRAM) == {"rounding": ("2", "1")}
    assert numerics.lacking("rounding 1", numerics.listed(), **PROGRAM) == {}


@pytest.mark.usefixtures("first_rules")
@pytest.mark.parametrize(
    ("exact", "compiles", "unused"),
    [(True, True, set()), (True, False, {"compile"}), (False, True, set(numerics.RULES) - {"numbers", "order"})],
)
def test_only_a_rule_that_the_program_uses_can_be_lacking(exact: bool, compiles: bool, unused: set[str]) -> None:
    later = numerics.text_of({name: (rule.listed[-1] + 1,) for name, rule in numerics.RULES.items()})
    found = numerics.lacking(later, numerics.listed(), exact=exact, compiles=compiles)
    assert found.keys() == numerics.RULES.keys() - unused


def test_blocks_are_under_the_first_two_numbers_of_compilation_and_all_code_under_the_others() -> None:
    for run, there, blocks, others in (("1", "2 3", True, False), ("2", "3", True, False), ("3", "2", True, True)):
        for compiles, is_lacking in ((True, blocks), (False, others)):
            found = numerics.lacking(f"compile {run}", f"compile {there}", exact=True, compiles=compiles)
            assert bool(found) is is_lacking
        assert not numerics.lacking(f"compile {run}", f"compile {there}", exact=False, compiles=True)
    assert "compile 2" in numerics.kept("compile 1")  # without blocks, code of the program is compiled as under 1


def test_differences_of_machines_are_listed_by_name() -> None:
    found = numerics.changes(
        {"torch": "2.13", "cpu": "a", "threads": "1"}, {"torch": "2.14", "gpu": "b", "threads": "1"}
    )
    assert list(found.items()) == [("cpu", ("a", "None")), ("gpu", ("None", "b")), ("torch", ("2.13", "2.14"))]
    assert numerics.describe({"torch": ("1", "2"), "cpu": ("a", "b")}) == (
        "cpu: a in this run, b there; torch: 1 in this run, 2 there"
    )


def test_rules_that_are_lacking_are_listed_by_name() -> None:
    assert list(numerics.lacking("draws 90, build 90", numerics.listed(), **PROGRAM)) == ["build", "draws"]
