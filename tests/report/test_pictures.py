"""The pictures of the page in the documentation."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from raysharded.report.page.charts import title_of
from tests.report.pictures import FOLDER, PICTURES, page
from tests.report.test_page import Parsed

ROOT = Path(__file__).parents[2]


def test_the_documentation_shows_every_picture_and_each_is_small() -> None:
    shown = {name for text in (ROOT / "README.md", ROOT / "docs" / "report.md") for name in pictures_in(text)}
    assert shown == {f"{name}.png" for name, *_ in PICTURES} == {path.name for path in FOLDER.iterdir()}
    for name, width, height, *_ in PICTURES:
        content = (FOLDER / f"{name}.png").read_bytes()
        assert len(content) < 100_000, name
        assert struct.unpack(">II", content[16:24]) == (width, height), name


def pictures_in(text: Path) -> list[str]:
    return re.findall(r"\]\((?:docs/)?images/([\w-]+\.png)\)", text.read_text(encoding="utf-8"))


def test_the_pictured_run_has_evaluations_metrics_and_losses_that_were_recovered() -> None:
    said = " ".join(Parsed(page()).text().split())
    for text in (title_of("evaluation", "loss"), title_of("metrics", "accuracy"), "0 lost", "Tokens per second"):
        assert text in said, text
    assert "Pale lines are steps whose results were lost." in said
    assert "each that was computed again came out the same" in said
