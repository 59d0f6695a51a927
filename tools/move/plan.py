"""The map of the library's layout, read from `moves.txt`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.move.rewrite import ROOT_PACKAGE

FILE = Path(__file__).with_name("moves.txt")


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Old dotted names of modules -> new ones, and what each new package is for."""

    moves: dict[str, str]
    packages: dict[str, str]


def read(text: str) -> LayoutPlan:
    """Raises ValueError for an invalid line, an old name that stands twice, or a new one."""
    moves: dict[str, str] = {}
    packages: dict[str, str] = {}
    package = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            package, _, purpose = line.partition(":")
            if purpose:
                packages[f"{ROOT_PACKAGE}.{package}"] = purpose.strip()
            continue
        new, arrow, old = line.partition("<-")
        if not arrow:
            raise ValueError(f"line {number}: {line!r}")
        folder = ROOT_PACKAGE if package == ROOT_PACKAGE else f"{ROOT_PACKAGE}.{package}"
        source, target = f"{ROOT_PACKAGE}.{old.strip()}", f"{folder}.{new.strip()}"
        if source in moves or target in moves.values():
            raise ValueError(f"line {number}: {line.strip()!r} names a module a second time")
        moves[source] = target
    return LayoutPlan(moves=moves, packages=packages)
