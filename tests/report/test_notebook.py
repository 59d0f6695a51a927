"""A run's view in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raysharded.report.history.summary import summarise
from raysharded.report.notebook import run_html
from tests.cases import tried_each_time
from tests.report.entries import Entry, data, generation, run_with_a_loss, started, step, with_times
from tests.report.standing import Stands
from tests.report.test_page import HOSTILE, Parsed, hostile_run, long_run

SVG = {"svg", "path", "text", "g", "title", "rect", "circle"}
HTML = {"div", "strong", "span", "table", "tr", "td"}


def told(entries: Sequence[Entry], standing: Stands | None = None) -> Parsed:
    return Parsed(run_html(standing, with_times(entries)))


def test_it_has_state_progress_curve_workers_and_incidents() -> None:
    html = run_html(Stands(), with_times(run_with_a_loss()[:-2]))
    said = " ".join(Parsed(html).text().split())
    for text in (
        "tiny",
        "● training",
        "1 x 2 · process 4700 on trainer-1",
        "step 6 of 6 · loss 0.83333 · 3 workers · 2.00 s a step · 16 tokens/s",
        "evaluation in step 5: loss 1.5",
        "metrics in step 5: accuracy 0.5",
        "rank 1 worker 2 trainer-2 process 4713 agree 0.25 s busy per step",
        "Worker 1 was lost in step 3 (the process died); 2 workers of 3 went on with step 3",
        "newest checkpoint: step 3",
    ):
        assert text in said, text
    assert html.count("<g><title>Worker 1 was lost in step 3") == 1
    assert html.count("M56.0") == 1


def test_nothing_is_run_or_loaded_and_names_are_text() -> None:
    standing = Stands(
        name=HOSTILE, url=HOSTILE, phase=HOSTILE, mesh=HOSTILE, driver=HOSTILE, nodes={0: HOSTILE}, doing={0: HOSTILE}
    )
    html = run_html(standing, with_times(hostile_run()))
    html.encode()
    parsed = Parsed(html)
    assert {tag for tag, _ in parsed.tags} <= SVG | HTML
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert not {"src", "href", "srcset", "class", "id"} & {name for _, attributes in parsed.tags for name in attributes}
    assert "url(" not in html
    assert "<script>hacked=1" in parsed.text()  # it is shown


@pytest.mark.parametrize("standing", [None, Stands(), Stands(workers=(), max_steps=0, step=0, name="", url="")])
@pytest.mark.parametrize(
    "entries",
    [
        [],
        [started(max_steps=None)],
        [started(), data(), *generation(1, [0], 0), step(1)],
        [started(), *generation(1, [0], 0), step(1, loss="nan")],
        [started(), *generation(1, [0], 0), step(1), step(2, loss="inf"), step(3)],
        [started(), ("failed", {"step": 0, "error": "TaskError: no"})],
    ],
)
def test_a_run_of_any_age_is_shown(entries: list[Entry], standing: Stands | None) -> None:
    assert told(entries, standing).tags


def test_a_hole_in_the_loss_is_a_hole_in_the_line() -> None:
    numbers: list[Any] = [1.0, 2.0, "nan", 2.0, 1.0]
    html = run_html(
        None,
        with_times([started(), *generation(1, [0], 0), *[step(n + 1, loss=loss) for n, loss in enumerate(numbers)]]),
    )
    assert html.count('d="M56.0 132.0L201.0 14.0M491.0 14.0L636.0 132.0"') == 1


def test_the_loss_of_evaluations_is_a_second_line_with_a_legend_if_there_is_one() -> None:
    plain = [started(), *generation(1, [0], 0), step(1), step(2)]
    assert "evaluation" not in told(plain).text()
    evaluated = [*plain, step(3, evaluation={"loss": 9.0}), step(4, evaluation={"loss": 7.0, "accuracy": 0.5})]
    html = run_html(None, with_times(evaluated))
    said = " ".join(Parsed(html).text().split())
    assert "● training ● evaluation" in said
    assert "evaluation in step 4: loss 7, accuracy 0.5" in said
    assert " 14.0L636.0 " in html  # the highest of all losses is the first evaluation's


@pytest.mark.parametrize("steps", tried_each_time([4_000], [4_000, 20_000]))
def test_very_many_steps_workers_and_incidents_are_a_small_piece(steps: int) -> None:
    many = tuple(range(1000))
    standing = Stands(workers=many, nodes=dict.fromkeys(many, HOSTILE * 9), doing=dict.fromkeys(many, HOSTILE * 9))
    summary = long_run(steps).summary
    html = run_html(standing, summary)
    assert len(html.encode()) < 60_000
    assert f"{max(record.loss for record in summary.steps):.3g}" in html
    assert "And 992 more" in html
    assert run_html(None, summarise(with_times(hostile_run() * 200))).count("<g>") == 30
    numbers = {f"{HOSTILE}{number}": 1.0 for number in range(100)}
    evaluated = [
        step(number, metrics=numbers, evaluation={"loss": number % 7, **numbers}) for number in range(1, steps // 5)
    ]
    assert len(run_html(standing, with_times([started(), *generation(1, [0], 0), *evaluated])).encode()) < 60_000


def test_a_report_shows_itself_as_its_run_does() -> None:
    report = long_run(30)
    assert report._repr_html_() == run_html(None, report.summary)
    assert "<svg" in report._repr_html_()
