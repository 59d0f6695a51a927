"""The links at the top level show the project's parts, and nothing more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.parametrize("room", ["actors", "checkpoint"])
def test_the_link_is_relative_and_points_at_its_package(room: str) -> None:
    link = ROOT / room
    assert link.is_symlink()
    assert link.readlink() == Path("raysharded", room)
    assert link.samefile(ROOT / "raysharded" / room)


@pytest.mark.parametrize("room", ["actors", "checkpoint"])
def test_importing_the_link_is_refused_with_the_remedy(room: str) -> None:
    command = [sys.executable, "-c", f"import {room}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode != 0
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert f"raysharded.{room}" in last_line
