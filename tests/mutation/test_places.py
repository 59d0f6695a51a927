"""Mutants are changes of one place, found in the syntax tree and drawn by a seed."""

from __future__ import annotations

import pytest

from tests.mutation.places import KINDS, MODULES, Mutant, drawn, mutants_of, of_module, table
from tests.paths import ROOT

SOURCE = '''
def f(a, b, seed):
    """é == è in a text is none."""
    if a == b:
        return sorted(a)
    for one in reversed(b):
        if one not in a:
            continue
    return derive_seed(seed, "é", a), a < b < seed
'''


def test_each_kind_of_place_is_found_and_changed_by_itself() -> None:
    found = mutants_of("m.py", SOURCE)
    assert [(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in found] == [
        (4, "comparison", "a == b", "a != b"),
        (4, "skip", "a == b", "not (a == b)"),
        (5, "order", "sorted(a)", "sorted(a)[::-1]"),
        (6, "order", "reversed(b)", "iter(b)"),
        (7, "comparison", "one not in a", "one in a"),
        (7, "skip", "one not in a", "not (one not in a)"),
        (9, "seed", 'derive_seed(seed, "é", a)', 'derive_seed(seed, "é")'),
    ]
    lines = found[-1].applied(SOURCE).splitlines()
    assert lines[8] == '    return derive_seed(seed, "é"), a < b < seed'
    assert lines[:8] == SOURCE.splitlines()[:8]


def test_a_change_of_other_code_is_refused() -> None:
    (mutant, *_) = mutants_of("m.py", SOURCE)
    with pytest.raises(ValueError, match="'a == b' is not there"):
        mutant.applied(SOURCE.replace("a == b", "b == a"))


def test_the_same_are_drawn_for_the_same_code_of_all_kinds_and_each_can_be_compiled() -> None:
    found = drawn(ROOT, 1, 60)
    assert found == drawn(ROOT, 1, 60)
    assert found != drawn(ROOT, 2, 60)
    assert len(set(found)) == 60
    assert {mutant.kind for mutant in found} == set(KINDS)
    for mutant in found:
        compile(mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8")), mutant.path, "exec")


def test_every_module_that_is_named_is_there() -> None:
    assert [path for path in MODULES if not (ROOT / path).is_file()] == []


def test_the_table_names_what_was_not_found() -> None:
    one = Mutant(kind="skip", path="m.py", line=3, column=4, before="a", after="not (a)")
    text = table([(one, "survived"), (one, "hung")])
    assert "all                   2      1   50.0 %" in text
    assert "not found: m.py:3:4 skip: 'a' -> 'not (a)'" in text


def test_the_tests_of_a_module_import_it_or_have_its_name() -> None:
    found = of_module("raysharded/actors/shards/erasure.py", ROOT, ["tests/actors", "tests/data"])
    assert found == ["tests/actors/shards/test_erasure.py"]
    assert "tests/test_numerics.py" in of_module(
        "raysharded/numerics.py", ROOT, ["tests/test_numerics.py", "tests/data"]
    )
    of_package = of_module("raysharded/actors/optimizer/kept_state.py", ROOT, ["tests/actors"])
    assert "tests/actors/optimizer/test_shard_optimizer.py" in of_package, of_package
