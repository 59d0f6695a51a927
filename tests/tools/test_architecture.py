"""docs/architecture.md shows the existing packages and modules."""

from __future__ import annotations

import re
import subprocess
from xml.etree import ElementTree

import pytest

from tests.paths import DOCS, ROOT
from tools.architecture import LOWEST, PICTURE, PLACES, SHOWN, arrows, picture, reduced

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_that_of_the_imports() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(ROOT), "run `python -m tools.architecture`"
    ElementTree.fromstring(PICTURE.read_text(encoding="utf-8"))


def test_the_picture_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "raysharded").glob("*/__init__.py")}
    assert packages | {"trainer"} == PLACES.keys() | set(LOWEST)


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
        here = [ROOT / "raysharded", ROOT]
        assert [each for each in modules if not any((root / each).exists() for root in here)] == []
    for heading, folder in (("In `driver/`", "driver"), ("In `actors/`", "actors")):
        table = PAGE.split(heading)[1].split("\n\n")[1]
        rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert named == {path.parent.name for path in (ROOT / "raysharded" / folder).glob("*/__init__.py")}


def test_every_module_that_any_page_names_by_its_folder_is_there() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        name for page in pages for name in re.findall(r"`([\w/]+/\w+\.py)(?:::\w+)?`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    bases = [ROOT / "raysharded", ROOT, ROOT / "tests", ROOT / "benchmarks"]
    assert sorted(name for name in named if not any((base / name).exists() for base in bases)) == []


def test_the_table_has_every_package_and_module_at_the_top_and_no_other() -> None:
    table = PAGE.split("| package or module |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    library = ROOT / "raysharded"
    packages = {f"{path.parent.name}/" for path in library.glob("*/__init__.py")}
    modules = {path.name for path in library.glob("*.py")} - {"__init__.py"}
    assert sorted(named) == sorted(packages | modules)


def test_every_folder_beside_the_library_is_named() -> None:
    text = PAGE.split("Beside the library:")[1].split("\n\n")[0]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert folders & {line.split("/")[0] for line in tracked.splitlines() if "/" in line} - {"raysharded"} <= set(
        re.findall(r"`(\w+)/?`", text)
    )
