"""Bounds that keep the layout readable: few tiny modules, none too long, few in a folder, one name for one thing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from raysharded.deprecation import MOVED_MODULES
from tests.paths import PACKAGE

MAX_TINY, TINY_LINES = 30, 60
MAX_LINES, LONGER = 400, {"config.py"}
MAX_CLASS_LINES, LONGER_CLASSES = 250, {"Worker", "Engine", "Groups", "Driver", "Fold"}
MAX_IN_A_FOLDER = 15
DISTINCT_WITHIN = ("driver", "actors", "protocol", "journal")


def modules(folder: Path = PACKAGE) -> Iterator[Path]:
    """The modules with code: no package's own file, no old name of a module."""
    old = {PACKAGE.parent / Path(*name.split(".")).with_suffix(".py") for name in MOVED_MODULES}
    return (
        path for path in sorted(folder.rglob("*.py")) if path.stem not in ("__init__", "__main__") and path not in old
    )


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_few_modules_are_tiny() -> None:
    tiny = [str(path.relative_to(PACKAGE)) for path in modules() if num_lines(path) < TINY_LINES]
    assert len(tiny) <= MAX_TINY, f"join some of {', '.join(tiny)}"


def test_no_module_is_too_long() -> None:
    long = {str(path.relative_to(PACKAGE)): num_lines(path) for path in modules() if num_lines(path) > MAX_LINES}
    assert long.keys() <= LONGER, f"cut {long} at a concern of its own"


def test_no_class_is_too_long() -> None:
    long = {
        f"{path.relative_to(PACKAGE)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules()
        if num_lines(path) > MAX_CLASS_LINES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name not in LONGER_CLASSES
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_CLASS_LINES
    }
    assert long == {}


def test_no_folder_has_too_many_modules() -> None:
    crowded = {
        folder: count for folder, count in Counter(path.parent for path in modules()).items() if count > MAX_IN_A_FOLDER
    }
    assert crowded == {}, "make a package of those that belong together"


def test_a_base_name_stands_for_one_thing() -> None:
    names = Counter(path.stem for package in DISTINCT_WITHIN for path in modules(PACKAGE / package))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
