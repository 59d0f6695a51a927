"""requirements/locked.txt: a set of versions within pyproject's bounds, each with the hashes of its files."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.paths import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKED = (ROOT / "requirements" / "locked.txt").read_text(encoding="utf-8")
EXTRAS = ("s3", "jobs", "tokenizers", "tensorboard")
FIXED = {
    "urllib3": "2.7.0",
    "orjson": "3.11.6",
    "fsspec": "2026.6.0",
    "ray": "2.54.0",
    "aiohttp": "3.14.3",
    "setuptools": "78.1.1",
    "pyarrow": "14.0.1",
    "torch": "2.6.0",
}
"""The first release without the known holes of those before it: docs/security.md names them."""


def requirements() -> list[Requirement]:
    """The requirements of a run, with the extras that are locked."""
    extras = PROJECT["project"]["optional-dependencies"]
    return [
        Requirement(text) for text in (*PROJECT["project"]["dependencies"], *(e for x in EXTRAS for e in extras[x]))
    ]


def locked() -> dict[str, tuple[Version, list[str]]]:
    """Every locked package: its version, and the hashes of its files."""
    found = {}
    for block in re.split(r"\n(?=[a-z])", LOCKED):
        match = re.match(r"([a-z0-9-]+)(?:\[[^]]*\])?==([^ \\\n]+)", block)
        if match:
            found[match[1]] = Version(match[2]), re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
    return found


def test_every_locked_package_has_hashes_and_comes_from_no_other_place() -> None:
    packages = locked()
    assert len(packages) > 60
    assert [name for name, (_, hashes) in packages.items() if not hashes] == []
    others = [
        line for line in LOCKED.splitlines() if not re.match(r"#|    (--hash=sha256:|#)|[a-z0-9-]+(\[.*\])?==", line)
    ]
    assert others == []


def test_what_a_run_needs_is_locked_within_its_bounds() -> None:
    packages = locked()
    for requirement in requirements():
        version, _ = packages[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{requirement} and locked {version}: run `make lock`"


@pytest.mark.parametrize("name", FIXED)
def test_no_bound_allows_a_release_with_a_known_hole(name: str) -> None:
    everywhere = [
        *requirements(),
        *map(Requirement, PROJECT["build-system"]["requires"]),
        *map(Requirement, PROJECT["project"]["optional-dependencies"]["dev"]),
    ]
    bounds = [requirement for requirement in everywhere if requirement.name == name]
    assert bounds
    for requirement in bounds:
        lowest = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        assert lowest, f"{requirement} has no lower bound"
        assert lowest[0] >= Version(FIXED[name]), requirement
    assert f"| {name} | {FIXED[name].removesuffix('.0')}" in (DOCS / "security.md").read_text(encoding="utf-8")


def test_the_build_requires_nothing_without_an_upper_bound() -> None:
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert {one.operator for one in requirement.specifier} == {">=", "<"}, requirement
