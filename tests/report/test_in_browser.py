"""The report's page in a real browser: it draws correctly, and requests nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from raysharded.report import RunReport, load
from raysharded.report.notebook import run_html
from tests.cases import tried_each_time
from tests.report.browser import PACKAGE, Browser, program
from tests.report.entries import data, generation, run_with_a_loss, started, step, with_times, write_run
from tests.report.standing import Stands
from tests.report.test_page import HOSTILE, hostile_run, long_run

pytestmark = [pytest.mark.browser, pytest.mark.procs]
JOURNALS = Path(__file__).parent / "journals"
CUT = """
[...document.querySelectorAll("td, dd, dt, figcaption, #charts svg, .legend li, p, fieldset label, .scroll")]
  .filter((one) => {
    const box = one.getBoundingClientRect();
    return box.left < -0.5 || box.right > innerWidth + 0.5 || one.scrollWidth > Math.ceil(box.width);
  }).map((one) => one.outerHTML.slice(0, 200))
"""
"""Elements outside the window, or wider than their place, which only scrolling would show."""
TILES = """
[...document.querySelectorAll(".tiles dd, .tiles dt, .tiles small")].map((one) =>
  [getComputedStyle(one).color, getComputedStyle(one.closest("div")).backgroundColor])
"""
"""The colours of the texts in the tiles, and of what is behind them."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = program()
    if found is None:
        pytest.skip(f"needs a Chromium: apt-get install {PACKAGE}, which `make test` does")
    with Browser(found, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def recorded(name: str, folder: Path) -> RunReport:
    (folder / name / "journal").mkdir(parents=True)
    shutil.copy(JOURNALS / f"{name}.jsonl", folder / name / "journal" / "00000001.jsonl")
    return load(str(folder / name))


def page_of(report: RunReport, folder: Path) -> Path:
    page = folder / "report.html"
    page.write_text(report.as_html(), encoding="utf-8")
    return page


def points(browser: Browser, chart: str, kind: str = ".line:not(.gone)") -> int:
    """Number of points of the line, as drawn: each command but the horizontal halves of steps ends at a point."""
    path = browser.evaluate(f"document.querySelector('svg[data-chart=\"{chart}\"] {kind}')?.getAttribute('d') ?? ''")
    return len(re.findall("[MLV]", path))


def readout(browser: Browser) -> str:
    return str(browser.evaluate("document.getElementById('readout').textContent"))


def check_quiet(browser: Browser, page: Path) -> None:
    """Assert that there were no complaints, and no requests but for the page itself."""
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


def test_every_step_is_drawn_and_every_incident_is_marked(browser: Browser, tmp_path: Path) -> None:
    report = recorded("losses", tmp_path)
    page = page_of(report, tmp_path)
    browser.open(page)
    assert {chart: points(browser, chart) for chart in ("loss", "lr", "rate")} == {"loss": 10, "lr": 10, "rate": 10}
    assert points(browser, "workers") >= 3
    labels = browser.evaluate("[...document.querySelectorAll('.mark')].map((mark) => mark.getAttribute('aria-label'))")
    assert len(labels) == 4
    for incident in report.summary.incidents:
        assert any(incident.text in label for label in labels)
    label = browser.evaluate("document.querySelector('svg[data-chart=loss]').getAttribute('aria-label')")
    assert label == "Loss over step: from 13.96 to 8.725, lowest 7.975, highest 13.96."
    check_quiet(browser, page)


def test_the_first_and_the_last_point_are_where_they_belong(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(recorded("losses", tmp_path), tmp_path))
    path = browser.evaluate("document.querySelector('svg[data-chart=loss] .line').getAttribute('d')")
    width = float(browser.evaluate("document.querySelector('svg[data-chart=loss]').viewBox.baseVal.width"))
    numbers = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert (numbers[0][0], numbers[-1][0]) == (62.0, width - 12)
    assert min(y for _, y in numbers) == numbers[0][1]  # the highest loss is the first
    assert max(y for _, y in numbers) == numbers[8][1]  # the lowest is that of step 9


def test_the_axis_can_be_time(browser: Browser, tmp_path: Path) -> None:
    page = page_of(recorded("losses", tmp_path), tmp_path)
    browser.open(page)
    over_steps = browser.evaluate("document.querySelector('svg[data-chart=loss] .line').getAttribute('d')")
    assert browser.evaluate("document.querySelectorAll('#lane rect').length") == 0
    browser.click("input[value=t] + span")
    over_time = browser.evaluate("document.querySelector('svg[data-chart=loss] .line').getAttribute('d')")
    assert over_time != over_steps
    assert over_time.count("M") == 3  # and one step by itself, a dot: nothing was computed during the three losses
    assert browser.evaluate("document.querySelectorAll('svg[data-chart=loss] .dot').length") == 1
    assert browser.evaluate("document.querySelectorAll('#lane rect').length") >= 7
    browser.click("input[value=step] + span")
    assert browser.evaluate("document.querySelector('svg[data-chart=loss] .line').getAttribute('d')") == over_steps
    check_quiet(browser, page)


def test_values_are_shown_where_the_pointer_is(browser: Browser, tmp_path: Path) -> None:
    page = page_of(recorded("losses", tmp_path), tmp_path)
    browser.open(page)
    assert readout(browser) == ""
    browser.hover("svg[data-chart=loss]")
    assert re.match(
        r"step 5 · 4\.92 s \(2026-11-21 21:05:27 UTC\) · loss 9\.517 · metric: accuracy 0\.01563 · "
        r"metric: logit 0\.6989 · learning rate 0\.007222 · tokens per second ",
        readout(browser),
    )
    assert readout(browser).endswith("workers 2")
    browser.hover(".mark")
    assert "Worker 1 was lost in step 2 (process 31294 ended with exit code -9)" in readout(browser)
    assert browser.evaluate("document.querySelector('tr.on').dataset.incident") == "0"
    check_quiet(browser, page)


def test_all_of_it_is_available_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    page = page_of(recorded("losses", tmp_path), tmp_path)
    browser.open(page)
    browser.evaluate("document.querySelector('svg[data-chart=rate]').focus()")
    for key, step_number in (("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 10)):
        browser.key(key)
        assert readout(browser).startswith(f"step {step_number} ·")
    browser.evaluate("document.querySelector('.mark[tabindex=\"0\"]').focus()")
    browser.key("ArrowRight")
    assert "Checkpoint not written: worker 2 was lost" in readout(browser)
    browser.key("ArrowRight")
    assert "Worker 2 was lost in step 4" in readout(browser)
    assert browser.evaluate("document.querySelectorAll('.mark[tabindex=\"0\"]').length") == 1
    check_quiet(browser, page)


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    page = page_of(load(write_run(tmp_path / "run", hostile_run())), tmp_path)
    browser.open(page)
    browser.hover(".mark")
    browser.click("input[value=t] + span")
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    assert browser.evaluate("document.querySelectorAll('img, iframe, [onerror]').length") == 0
    assert HOSTILE[:60] in browser.evaluate("document.querySelector('h1').textContent")
    labels = browser.evaluate("[...document.querySelectorAll('.mark')].map((mark) => mark.getAttribute('aria-label'))")
    assert any(HOSTILE[:60] in label for label in labels)
    check_quiet(browser, page)


def test_the_page_itself_forbids_what_is_not_its_own(browser: Browser, tmp_path: Path) -> None:
    """The second line of defence: if a tag were ever let through, it could not run, nor request anything."""
    page = page_of(load(write_run(tmp_path / "run", run_with_a_loss())), tmp_path)
    holes = "<script>hacked=1</script><img src='http://127.0.0.1:9/x' onerror='hacked=1'>"
    page.write_text(page.read_text(encoding="utf-8").replace("<main", f"{holes}<main"), encoding="utf-8")
    browser.open(page)
    assert browser.evaluate("typeof hacked") == "undefined"
    refused = [problem for problem in browser.problems if "Content Security Policy" in problem]
    assert len(refused) == len(browser.problems) >= 2
    assert points(browser, "loss") == 6


def test_it_fits_on_a_phone_in_the_dark_and_on_paper(browser: Browser, tmp_path: Path) -> None:
    page = page_of(recorded("losses", tmp_path), tmp_path)
    for width, dark, media in ((360, False, ""), (360, True, ""), (1200, True, ""), (800, False, "print")):
        browser.open(page, width=width, dark=dark, media=media)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = browser.evaluate(
            "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
        )
        assert contrast(ink, paper) >= 7
        soft = browser.evaluate("getComputedStyle(document.querySelector('.lead')).color")
        assert contrast(soft, paper) >= 4.5
        assert (luminance(paper) < 0.1) == dark
        assert points(browser, "loss") == 10
        check_quiet(browser, page)


@pytest.mark.parametrize(
    ("width", "dark"), tried_each_time([(1280, False), (390, True)], of=product([1280, 390], [False, True]))
)
def test_nothing_is_cut_or_wider_than_the_screen(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    for name, report in (("pictured", recorded("pictured", tmp_path)), ("hostile", hostile(tmp_path))):
        page = page_of(report, tmp_path)
        browser.open(page, width=width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
        assert browser.evaluate(CUT) == [], name
        for ink, paper in browser.evaluate(TILES):
            assert contrast(ink, paper) >= 4.5, name
        assert (
            browser.evaluate(
                "Math.min(...[...document.querySelectorAll('.tiles > div')].map((one) => one.clientWidth))"
            )
            >= 140
        )
        check_quiet(browser, page)


def hostile(folder: Path) -> RunReport:
    return load(write_run(folder / "hostile", hostile_run()))


def test_every_chart_has_its_title_and_evaluations_are_drawn_with_their_points(
    browser: Browser, tmp_path: Path
) -> None:
    page = page_of(recorded("pictured", tmp_path), tmp_path)
    browser.open(page)
    titles = browser.evaluate("[...document.querySelectorAll('figcaption')].map((one) => one.firstChild.textContent)")
    assert titles == [
        "Incidents",
        "Loss",
        "Evaluation: loss",
        "Evaluation: accuracy",
        "Metric: accuracy",
        "Learning rate",
        "Tokens per second",
        "Workers",
    ]
    assert points(browser, "evaluation/loss") == points(browser, "evaluation/accuracy") == 12
    assert (
        browser.evaluate("document.querySelectorAll('svg[data-chart=\"evaluation/loss\"] .dot:not(.gone)').length")
        == 12
    )
    assert points(browser, "metrics/accuracy") == points(browser, "loss") == 60
    browser.hover("svg[data-chart='evaluation/loss']")
    assert re.search(r"step 29 · .* · evaluation: loss 3\.5\d* \(step 30\) · ", readout(browser))
    check_quiet(browser, page)


def test_the_scale_of_values_can_be_logarithmic(browser: Browser, tmp_path: Path) -> None:
    page = page_of(recorded("pictured", tmp_path), tmp_path)
    browser.open(page)

    def lines() -> dict[str, str]:
        found: dict[str, str] = browser.evaluate(
            "Object.fromEntries([...document.querySelectorAll('svg[data-chart]')].map((one) =>"
            " [one.dataset.chart, one.querySelector('.line:not(.gone)').getAttribute('d')]))"
        )
        return found

    linear = lines()
    browser.evaluate("document.querySelector('input[name=scale]').focus()")
    browser.key("ArrowRight")
    logarithmic = lines()
    assert {name for name in linear if linear[name] == logarithmic[name]} == {"rate", "workers"}
    heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", logarithmic["loss"])]
    losses = [record.loss for record in recorded("pictured", tmp_path / "again").summary.steps]
    low, high = min(losses), max(losses)
    for loss, height in zip(losses, heights, strict=True):
        share = (math.log(loss / low) / math.log(high / low)) if high > low else 0.0
        assert height == pytest.approx(max(heights) + (min(heights) - max(heights)) * share, abs=0.11)
    caption = browser.evaluate("document.querySelectorAll('figcaption')[1].textContent")
    assert caption == "Losslogarithmic · last 3.186"
    browser.click("input[value=linear] + span")
    assert lines() == linear
    check_quiet(browser, page)


def test_there_is_no_scale_to_choose_where_no_value_can_have_a_logarithm(browser: Browser, tmp_path: Path) -> None:
    steps = [step(number, 1, loss=1.0 - number, lr=0.0) for number in (1, 2, 3)]
    page = page_of(load(write_run(tmp_path / "run", [started(), data(), *generation(1, [0], 0), *steps])), tmp_path)
    browser.open(page)
    assert points(browser, "loss") == 3
    assert browser.evaluate("document.getElementById('scale')") is None
    check_quiet(browser, page)


def test_steps_that_were_lost_apart_are_not_connected(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(recorded("pictured", tmp_path), tmp_path))
    gone = browser.evaluate("document.querySelector('svg[data-chart=loss] .line.gone').getAttribute('d')")
    assert (gone.count("M"), gone.count("L")) == (1, 9)  # the ten steps after the newest checkpoint
    assert browser.evaluate("document.querySelectorAll('svg[data-chart=loss] .dot.gone').length") == 2


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG 2.2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio, as WCAG 2.2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_long_run_is_drawn_with_all_the_points_that_it_was_thinned_to(browser: Browser, tmp_path: Path) -> None:
    page = page_of(long_run(20_000), tmp_path)
    browser.open(page)
    data = json.loads(browser.evaluate("document.getElementById('data').textContent"))
    assert points(browser, "loss") == len(data["charts"][0]["counted"]["y"]) > 2000
    assert browser.evaluate("document.querySelectorAll('.mark').length") == 66
    check_quiet(browser, page)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_hardly_anything_has_a_page_that_works(steps: int, browser: Browser, tmp_path: Path) -> None:
    story = [started(), data(), *generation(1, [0], 0), *[step(number, 1) for number in range(1, steps + 1)]]
    page = page_of(load(write_run(tmp_path / "run", story)), tmp_path)
    browser.open(page)
    hidden = browser.evaluate("document.getElementById('course-section').hidden")
    assert hidden == (steps == 0)
    assert browser.evaluate("document.querySelectorAll('svg[data-chart] .dot').length") == 4 * steps
    check_quiet(browser, page)


@pytest.mark.parametrize("dark", [False, True])
def test_what_a_notebook_shows_is_readable_on_white_and_on_black_and_loads_nothing(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    ink, paper = ("#e6e6e6", "#111111") if dark else ("#1a1a1a", "#ffffff")
    shown = run_html(Stands(), recorded("losses", tmp_path).summary)
    page = tmp_path / "cell.html"
    page.write_text(f"<meta charset=utf-8><body style='color:{ink};background:{paper}'>{shown}", encoding="utf-8")
    browser.open(page, width=760, height=520, dark=dark)
    ground = "rgb(17, 17, 17)" if dark else "rgb(255, 255, 255)"
    colours = browser.evaluate(
        "[...document.querySelectorAll('strong, span, td, svg text')].map((one) => one.closest('svg')"
        " ? getComputedStyle(one).fill : getComputedStyle(one).color)"
    )
    assert len(colours) > 20
    assert min(contrast(colour, ground) for colour in set(colours)) >= 3
    assert browser.evaluate("document.querySelectorAll('svg g title').length") == 4
    assert browser.evaluate("document.documentElement.scrollWidth") <= 760
    inside = "[...document.querySelectorAll('svg path')].every((one) => one.getBBox().width <= 640)"
    assert browser.evaluate(inside)
    check_quiet(browser, page)


def test_hostile_names_are_text_in_a_notebook(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "cell.html"
    standing = Stands(name=HOSTILE, driver=HOSTILE, nodes={0: HOSTILE}, doing={2: HOSTILE}, phase=HOSTILE)
    page.write_text(f"<meta charset=utf-8><body>{run_html(standing, with_times(hostile_run()))}", encoding="utf-8")
    browser.open(page)
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("document.querySelectorAll('script, img, [onerror]').length") == 0
    assert HOSTILE[:60] in browser.evaluate("document.querySelector('strong').textContent")
    check_quiet(browser, page)
