"""The pictures of docs/images, made anew by `python -m tests.report.pictures`: the page of a recorded run in a browser,
wide and narrow, light and dark."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from raysharded.report import RunReport, check_ledger
from raysharded.report.history.summary import summarise
from tests.report.browser import PACKAGE, Browser, program
from tests.report.pictured_run import JOURNAL

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PICTURES = (
    ("report", 1280, 2350, False, "body"),
    ("report-dark", 1280, 2350, True, "body"),
    ("report-phone", 390, 1900, False, "body"),
    ("report-phone-dark", 390, 1900, True, "#incidents"),
)
"""(name, width and height in pixels, whether dark, the element at the top)."""


def page() -> str:
    """The page of the recorded run."""
    summary = summarise(map(json.loads, JOURNAL.read_text(encoding="utf-8").splitlines()))
    return RunReport(url="/srv/runs/gpt-bytes", summary=summary, ledger=check_ledger(summary)).as_html()


def draw(folder: Path, browser: Browser, at: Path) -> None:
    """Write the pictures to `folder`; the page is written to `at`. Needs Pillow, which matplotlib brings."""
    from PIL import Image

    at.write_text(page(), encoding="utf-8")
    for name, width, height, dark, first in PICTURES:
        browser.open(at, width=width, height=height, dark=dark)
        top = int(browser.evaluate(f"document.querySelector('{first}').getBoundingClientRect().top"))
        browser.screenshot(at.with_suffix(".png"))
        whole = Image.open(at.with_suffix(".png")).convert("RGB")
        picture = whole.crop((0, top, width, min(top + height, whole.height)))
        palette = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE)  # every colour of a legend is kept
        palette.save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    found = program()
    if found is None:
        raise SystemExit(f"needs a Chromium: apt-get install {PACKAGE}")
    with tempfile.TemporaryDirectory() as name, Browser(found, Path(name) / "profile") as browser:
        draw(FOLDER, browser, Path(name) / "report.html")
