"""docs/architecture.md shows the packages and modules that there are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.paths import DOCS, ROOT
from tools.architecture import PICTURE, PLACES, SHOWN, arrows, picture, reduced

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_that_of_the_imports() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(ROOT), "run `python -m tools.architecture`"
    ElementTree.fromstring(PICTURE.read_text(encoding="utf-8"))


def test_the_picture_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "raysharded").glob("*/__init__.py")}
    assert packages | {"trainer"} == PLACES.keys()


def test_every_arrow_leads_down_or_to_the_right_and_is_an_import() -> None:
    found = arrows(ROOT)
    assert set(SHOWN) <= found
    for one, other in found:
        (column, row, _), (to_column, to_row, _) = PLACES[one], PLACES[other]
        assert row < to_row or (row == to_row and column < to_column), f"{one} imports {other}"


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({("a", "b"), ("b", "c"), ("a", "c")}, {("a", "b"), ("b", "c")}),
        ({("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")}, {("a", "b"), ("b", "c"), ("c", "d")}),
        ({("a", "b"), ("a", "c")}, {("a", "b"), ("a", "c")}),
    ],
)
def test_arrows_that_follow_from_others_are_left_out(
    graph: set[tuple[str, str]], expected: set[tuple[str, str]]
) -> None:
    assert reduced(graph) == expected


def test_every_module_and_package_on_the_page_is_there() -> None:
    for page in (PAGE, (DOCS / "glossary.md").read_text(encoding="utf-8")):
        modules = re.findall(r"`([\w/]+\.py|[\w/]+/)`", page)
        assert len(modules) > 30
        assert [each for each in modules if not (ROOT / "raysharded" / each).exists()] == []
    for heading, folder in (("In `driver/`", "driver"), ("In `actors/`", "actors")):
        table = PAGE.split(heading)[1].split("\n\n")[1]
        rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert named == {path.parent.name for path in (ROOT / "raysharded" / folder).glob("*/__init__.py")}
