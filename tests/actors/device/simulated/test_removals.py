"""The calls that order streams: all are found, and each can be removed."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.actors.device.simulated import removals
from tests.actors.device.simulated.removals import FSDP, MODULES, Removal
from tests.paths import PACKAGE


def test_all_modules_with_such_calls_are_listed() -> None:
    fsdp = importlib.import_module(FSDP)
    with_calls = [module for module in _modules(PACKAGE / "actors", "raysharded.actors") if _has_calls(module)]
    with_calls += [module for module in _modules(Path(str(fsdp.__file__)).parent, FSDP) if _has_calls(module)]
    assert set(with_calls) <= set(MODULES)


def _modules(folder: Path, package: str) -> list[str]:
    paths = [path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    return [".".join([package, *path.parts]) for path in paths if path.name != "__init__"]


def _has_calls(module: str) -> bool:
    return bool(removals.removals_in(module))


def test_calls_without_an_effect_are_among_them() -> None:
    assert {one.why_not_found for one in removals.removals()} - {""} == set(removals.WITHOUT_EFFECT.values())


def test_calls_that_no_run_reaches_are_among_them_and_a_further_one_is_noticed() -> None:
    known = Counter(key for keys in removals.NOT_REACHED.values() for key in keys)
    every = removals.removals()
    assert known <= Counter(one.key for one in every)
    known_ones = [one for one in every if one.key in known]
    assert set(removals.newly_unreached(known_ones)) <= known.keys(), "the same call in another place, if any"
    further = next(one for one in every if one.key not in known)
    assert further.key in removals.newly_unreached([*known_ones, further])


def test_there_are_at_least_thirty() -> None:
    assert len(removals.removals()) >= 30


@pytest.mark.parametrize("removal", removals.removals(), ids=lambda one: one.name)
def test_each_call_can_be_removed(removal: Removal) -> None:
    function, code = removals.without(removal)
    assert code.co_qualname == function.__qualname__
    assert code.co_freevars == function.__code__.co_freevars
    assert code.co_code != function.__code__.co_code
