"""A minute of chaos on real Ray: the short form of benchmarks.soak, which lists its promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

NUM_KINDS = 3
"""Least number of kinds, of nine, that have struck in a minute."""


def test_a_minute_of_faults_of_every_kind_changes_no_bit_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "1", "--workers", "4", "--every", "6"]
    soak = subprocess.run(
        [*command, "--json", str(found)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.exists(), soak.stdout[-4000:] + soak.stderr[-4000:]
    outcome = json.loads(found.read_text())
    assert outcome["problems"] == [], soak.stdout[-4000:]
    assert soak.returncode == 0
    assert sum(count > 0 for count in outcome["faults"].values()) >= NUM_KINDS
    assert outcome["recoveries"] >= 1
