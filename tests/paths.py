"""The places in the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "raysharded"
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
