"""The versions of torch and Ray that raysharded was tested with, from the lowest minor release to the newest."""

from __future__ import annotations

import re
from collections.abc import Mapping

TESTED = {"torch": ("2.13", "2.15"), "ray": ("2.54", "2.60")}
"""Package -> (lowest, newest). pyproject.toml has these bounds, but no upper bound for Ray."""
SELF_TEST = "raysharded doctor --self-test"


def untested(found: Mapping[str, str]) -> list[str]:
    """A sentence for each package whose version, by name in `found`, is outside the tested range."""
    return [
        f"raysharded was tested with {tested(name)}; this is {found[name]}: run `{SELF_TEST}`."
        for name in TESTED
        if name in found and not _is_tested(name, found[name])
    ]


def tested(name: str) -> str:
    """The tested range as text: `torch 2.13 to 2.15`."""
    lowest, newest = TESTED[name]
    return f"{name} {lowest} to {newest}"


def _is_tested(name: str, version: str) -> bool:
    lowest, newest = TESTED[name]
    return _minor(lowest) <= _minor(version) <= _minor(newest)


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers; an empty tuple, which is less than any, for an invalid version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
