"""The report as a page, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysharded.report import RunReport, load
from raysharded.report.history.step_table import StepLog
from raysharded.report.history.summary import summarise
from raysharded.report.history.wall_time import Session, partition
from tests.cases import tried_each_time
from tests.report.entries import (
    Entry,
    avoided,
    checkpoint,
    data,
    failed_save,
    finished,
    generation,
    recovery,
    run_with_a_loss,
    started,
    step,
    with_times,
    write_run,
)

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>\"'`${1}<!--&lt;\x00\ud800\u2028\u202e]]>"
"""A name that nobody should give a run, and that somebody will."""


class Parsed(HTMLParser):
    """Tags, attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def text(self) -> str:
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))


def hostile_run() -> list[Entry]:
    """Everything that is a name, a reason or an error is hostile."""
    slow: Entry = (
        "straggler",
        {"worker": 0, "node": HOSTILE, "score": 2.0, "lost_s": 1.0, "phase": HOSTILE, "step": 1},
    )
    node = avoided(2)
    return [
        started(run=HOSTILE, versions={HOSTILE: HOSTILE}, because=HOSTILE),
        data(),
        *generation(1, [0, 1], 0, HOSTILE),
        step(1, metrics={HOSTILE: 1.0}, evaluation={HOSTILE: 1.0}, seconds={HOSTILE: 1.0}),
        slow,
        ("worker_leaving", {"worker": 0, "step": 1, "reason": HOSTILE, "notice_s": 1.0}),
        ("worker_lost", {"worker": 1, "step": 1, "reason": HOSTILE}),
        (node[0], {**node[1], "host": HOSTILE, "node": HOSTILE, "reasons": [HOSTILE]}),
        *generation(2, [0], 1, HOSTILE),
        step(2, 1, 2, metrics={HOSTILE: float("nan")}),
        recovery(1, 1, reasons=[HOSTILE], source=HOSTILE),
        ("checkpoint", {"step": 2, "prefix": HOSTILE, "fingerprint": HOSTILE}),
        ("checkpoint_failed", {"step": 2, "error": HOSTILE}),
        ("failed", {"step": 2, "fingerprint": HOSTILE, "error": HOSTILE}),
    ]


def data_of(page: str) -> dict[str, Any]:
    (found,) = [data for tag, data in Parsed(page).texts if tag == "script" and data.startswith("{")]
    parsed: dict[str, Any] = json.loads(found)
    return parsed


def long_run(steps: int) -> RunReport:
    """The report of a run of so many steps, with an incident or a checkpoint every few hundred."""

    def entries() -> Any:  # an iterator of entries
        at = 1e9
        yield {"kind": "started", "at": at, **started(max_steps=steps)[1]}
        for kind, fields in generation(1, list(range(64)), 0):
            yield {"kind": kind, "at": at, **fields}
        fixed = step(1)[1]
        for number in range(1, steps + 1):
            at += 1.0 + number % 7 / 10
            yield {"kind": "step", "at": at, **fixed, "step": number, "loss": 9.0 / number + number % 11 / 100}
            if number % 300 == 0:
                yield {"kind": checkpoint(number)[0], "at": at, **checkpoint(number)[1]}
                yield {"kind": failed_save(number)[0], "at": at, **failed_save(number)[1]}

    return RunReport(url="/runs/long", summary=summarise(entries()), ledger=None)


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page = load(write_run(tmp_path, run_with_a_loss())).as_html()
    parsed = Parsed(page)
    assert not [attributes for _, attributes in parsed.tags if {"src", "srcset", "style", "action"} & set(attributes)]
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"link", "iframe", "object", "embed", "base", "form", "img"})
    links = [attributes["href"] for tag, attributes in parsed.tags if "href" in attributes]
    assert links == ["#main"]
    urls = set(re.findall(r"https?://[^\"'\s)]*", page))
    assert urls == {"http://www.w3.org/2000/svg"}  # a name, which is not fetched
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|importScripts|eval\(", page)


def test_only_this_style_and_this_script_may_be_used(tmp_path: Path) -> None:
    parsed = Parsed(load(write_run(tmp_path, run_with_a_loss())).as_html())
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in parsed.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["base-uri"], rules["form-action"]) == ("'none'", "'none'", "'none'")
    assert set(rules) == {"default-src", "style-src", "script-src", "base-uri", "form-action"}
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        content = [data for name, data in parsed.texts if name == tag and len(data) > 1][-1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_everything_in_a_journal_is_text_and_nothing_else(tmp_path: Path) -> None:
    page = load(
        write_run(tmp_path / HOSTILE.replace("/", "").replace("\x00", "").replace("\ud800", ""), hostile_run())
    ).as_html()
    page.encode()
    parsed, harmless = Parsed(page), Parsed(load(write_run(tmp_path / "x", run_with_a_loss())).as_html())
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert {tag for tag, _ in parsed.tags} <= {tag for tag, _ in harmless.tags} | {"br"}
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    assert "<script>hacked=1" in parsed.text()  # it is shown
    assert "\x00" not in page
    assert HOSTILE.split("\x00", maxsplit=1)[0] in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"')


def test_all_of_the_text_is_on_the_page(tmp_path: Path) -> None:
    slow: Entry = ("straggler", {"worker": 2, "node": "n", "score": 1.5, "lost_s": 2.0, "phase": "forward", "step": 6})
    entries = run_with_a_loss()
    report = load(write_run(tmp_path, [*entries[:-2], slow, avoided(6), failed_save(6), *entries[-2:]]))
    said = " ".join(Parsed(report.as_html()).text().split())
    for text in (
        "tiny",
        "finished",
        "6 of 6 steps",
        "Worker 1 was lost in step 3 (the process died)",
        "1.50 times as long per step as its peers",
        "trainer-7 (4f6ad2aa)",
        "disk full",
        "checkpoints/step-0000000003-g000001",
        "✓ 0",
        "f" * 32,
        "python 3.11.9",
        *[f"{incident.text}" for incident in report.summary.incidents],
    ):
        assert text in said, text


def test_the_charts_have_every_step_that_was_computed(tmp_path: Path) -> None:
    found = data_of(load(write_run(tmp_path, run_with_a_loss())).as_html())
    charts = {chart["name"]: chart for chart in found["charts"]}
    assert charts["loss"]["counted"]["step"] == [1, 2, None, 3, 4, None, 5, 6]  # nothing was computed in between
    assert charts["loss"]["counted"]["y"] == [5.0, 2.5, None, 1.666667, 1.25, None, 1.0, 0.8333333]
    assert (charts["loss"]["lost"]["step"], charts["loss"]["lost"]["y"]) == ([3], [1.666667])
    assert charts["workers"]["counted"]["y"] == [3, 3, None, 2, 2, None, 3, 3]
    assert charts["rate"]["counted"]["y"][1] == 16.0  # 32 tokens in 2 seconds
    assert [mark["letter"] for mark in found["marks"]] == ["R", "M"]


def with_numbers(names: int, steps: int = 20) -> list[Entry]:
    """A run with evaluations every five steps, and metrics in each."""
    told: list[Entry] = []
    for number in range(1, steps + 1):
        evaluation = {"loss": 4.0 / number, "accuracy": number / 100} if number % 5 == 0 else {}
        metrics = {f"metric {name}": number / (name + 1) for name in range(names)}
        told.append(step(number, 1, evaluation=evaluation, metrics=metrics))
    return [started(max_steps=steps), data(), *generation(1, [0], 0), *told]


def page_of(entries: list[Entry]) -> str:
    return RunReport(url="/x", summary=summarise(with_times(entries)), ledger=None).as_html()


def test_evaluations_and_metrics_have_charts_and_tiles() -> None:
    page = page_of(with_numbers(2))
    charts = {chart["name"]: chart for chart in data_of(page)["charts"]}
    named = {name: chart["title"] for name, chart in charts.items() if "/" in name}
    assert named == {
        "evaluation/loss": "Evaluation: loss",
        "evaluation/accuracy": "Evaluation: accuracy",
        "metrics/metric 0": "Metric: metric 0",
        "metrics/metric 1": "Metric: metric 1",
    }
    assert charts["evaluation/loss"]["counted"]["step"] == [5, 10, 15, 20]
    assert charts["evaluation/loss"]["counted"]["y"] == [0.8, 0.4, 0.2666667, 0.2]
    assert len(charts["metrics/metric 1"]["counted"]["y"]) == 20
    assert [charts[name]["sparse"] for name in ("evaluation/loss", "metrics/metric 1", "loss")] == [True, False, False]
    said = " ".join(Parsed(page).text().split())
    assert "Evaluation: accuracy 0.2 in step 20; from 0.05 to 0.2" in said
    assert "Metric: metric 1 10 in step 20; from 0.5 to 10" in said


def test_of_very_many_metrics_some_are_drawn_and_the_page_says_so() -> None:
    page = page_of(with_numbers(40))
    assert len(data_of(page)["charts"]) == 4 + 12
    assert "30 more evaluations and metrics are not drawn." in Parsed(page).text()
    assert "not drawn" not in Parsed(page_of(with_numbers(2))).text()


@pytest.mark.parametrize(("weight", "unit", "other"), [(32.0, "Tokens", "Samples"), (4.0, "Samples", "Tokens")])
def test_what_is_counted_is_named(weight: float, unit: str, other: str) -> None:
    page = page_of([started(), data(), *generation(1, [0], 0), step(1, weight=weight), step(2, weight=weight)])
    assert data_of(page)["charts"][2]["title"] == f"{unit} per second"
    said = Parsed(page).text()
    assert f"{unit} per second" in said
    assert f"{2 * weight:.0f} {unit.lower()} in all" in said
    assert f"{other} per second" not in said
    assert "or samples" not in page


def test_a_legend_has_only_what_is_there() -> None:
    quiet = [started(), data(), *generation(1, [0], 0), step(1), step(2)]
    said = Parsed(page_of(quiet)).text()
    for words in ("Pale lines", "marks above", "computed again:", "found:"):
        assert words not in said, words
    assert '<ul class="legend">' not in page_of([*quiet, avoided(2)])
    told = Parsed(page_of(run_with_a_loss())).text()
    assert "Pale lines are steps whose results were lost." in told
    assert "marks above" in told
    assert "built" not in told  # no part of these costs
    back: Entry = ("rewind", {"step": 2, "to_step": 1, "who": "asked", "skip_samples": 0, "skips": [], "reason": "x"})
    undone = page_of([*quiet, back, *generation(2, [0], 1), step(2, 2, 2)])
    assert "Pale lines are steps whose results were undone on request." in Parsed(undone).text()


def test_steps_that_were_lost_apart_from_each_other_are_not_one_line() -> None:
    """Not even in a run that is so long that the time between them is nothing."""
    many = [step(number) for number in range(1, 2501)]
    entries = [started(), data(), *generation(1, [0, 1], 0), *many]
    entries += [*generation(2, [0], 2499), *[step(number, 1, 2) for number in (2500, 2501, 2502)]]
    entries += [*generation(3, [0], 2500), step(2501, 1, 3), step(2502, 1, 3)]
    (loss, *_) = data_of(page_of(entries))["charts"]
    assert loss["lost"]["step"] == [2500, None, 2501, 2502]
    assert loss["lost"]["t"][1] is loss["lost"]["y"][1] is None


def test_a_loss_that_is_not_finite_is_a_hole_in_the_line() -> None:
    entries = [started(), *generation(1, [0], 0), step(1), step(2, loss="nan"), step(3, loss="inf"), step(4)]
    report = RunReport(url="/x", summary=summarise(with_times(entries)), ledger=None)
    (loss, *_) = data_of(report.as_html())["charts"]
    assert [value is None for value in loss["counted"]["y"]] == [False, True, True, False]
    assert "lowest" in report.as_html()


@pytest.mark.parametrize("story", [[started()], [started(), data(), *generation(1, [0], 0)], [started(), finished(0)]])
def test_a_run_without_a_step_has_a_page(story: list[Entry], tmp_path: Path) -> None:
    parsed = Parsed(load(write_run(tmp_path, story)).as_html())
    assert "Nothing happened to this run" in parsed.text()


def test_a_run_in_progress_shows_how_old_its_newest_entry_is(tmp_path: Path) -> None:
    said = Parsed(load(write_run(tmp_path, [started(), data(), *generation(1, [0], 0), step(1, 1)])).as_html()).text()
    assert "unfinished" in said
    assert "newest entry 2023-11-14 22:15:0" in said


def test_what_is_wrong_stands_first(tmp_path: Path) -> None:
    wrong = step(2, digest=["00", "01"], reads=5)
    page = load(write_run(tmp_path, [started(), data(), *generation(1, [0, 1], 0), step(1), wrong])).as_html()
    assert page.index("did not hold") < page.index("Where the time went")
    assert "✗ at least 1" in Parsed(page).text()


def test_a_long_run_has_a_small_page_and_its_worst_steps_are_on_it() -> None:
    report = long_run(6_000)
    page = report.as_html()
    loss = data_of(page)["charts"][0]["counted"]
    assert 2000 <= len(loss["y"]) <= 3002
    assert max(loss["y"]) == max(record.loss for record in report.summary.steps)
    assert len(page.encode()) < 1e6
    assert len(data_of(page)["marks"]) == 20


@pytest.mark.parametrize("steps", tried_each_time([100_000], of=[100_000, 1_000_000]))
def test_a_run_of_very_many_steps_has_a_page_of_less_than_2_mb(steps: int) -> None:
    short = long_run(600)  # with its incidents and checkpoints; the steps are made without a journal of half a gigabyte
    session, log = Session(begin=0, end=steps * 1_500_000), StepLog()
    metrics = {f"metric {number}": number / 7 for number in range(12)}
    like = {"at": 1e9, **step(1, metrics=metrics)[1]}
    for first in range(1, steps + 1, 2000):
        log.extend([{**like, "step": number, "loss": 9.0 / number} for number in range(first, first + 2000)])
    for index in range(steps):
        session.step(index + 1, 1, (index + 1) * 1_500_000)
    times, track = partition([session], log, np.arange(steps))
    summary = replace(short.summary, steps=log.all(), times=times, track=track, last_step=steps)
    page = replace(short, summary=summary).as_html()
    assert len(page.encode()) < 2e6
    loss = data_of(page)["charts"][0]["counted"]
    assert (loss["step"][0], loss["step"][-1]) == (1, steps)
    assert len(loss["step"]) <= 3002
