"""Steps as columns: many at once give the same values as one by one, and make a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from raysharded.checkpoint import open_storage
from raysharded.journal.log import segment_keys
from raysharded.journal.reader import entries_of, parse_line, read_some, steps_of
from raysharded.report import load, load_metrics
from raysharded.report.history.metrics_table import COLUMNS, metrics_table
from raysharded.report.history.step_table import StepLog
from raysharded.report.history.summary import Fold, summarise
from raysharded.report.loader import read_fold
from tests.report.entries import (
    Entry,
    data,
    generation,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
    with_times,
    write_run,
)

STORIES: list[list[Entry]] = [
    [step(number) for number in range(1, 5)],
    [step(number, gen=2) for number in range(3, 9)],
    [step(2, seconds={"compute": 5.0, "save": 3.0}), step(3, metrics={"accuracy": 0.5}), step(4, 1, 2)],
    [step(7), step(9), step(8)],
    generation(2, [0], 2),
    generation(3, [0, 1], 4),
    [started(2)],
    [lost(1, 2)],
    [recovery(1, 2)],
    [("rewind", {"step": 4, "to_step": 2, "skip_samples": 8, "reason": "nan", "skips": [[2, 8]]})],
]


@given(st.lists(st.sampled_from(STORIES), max_size=12), st.lists(st.floats(-3, 60), min_size=1, max_size=5))
def test_steps_that_are_folded_together_give_the_same_as_one_by_one(
    stories: list[list[Entry]], seconds: list[float]
) -> None:
    told = [started(), data(), *generation(1, [0, 1], 0), *[entry for story in stories for entry in story]]
    entries, at = [], 1e9
    for number, (kind, fields) in enumerate(told):
        at += seconds[number % len(seconds)]
        entries.append({"kind": kind, "at": at, **fields})
    together, steps = Fold(), list[dict[str, Any]]()
    for entry in [*entries, {"kind": "end", "at": at}]:
        if entry["kind"] == "step":
            steps.append(entry)
            continue
        together.add_steps(steps)
        steps.clear()
        together.add(entry)
    assert together.summary() == summarise([*entries, {"kind": "end", "at": at}])


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "much"},
        {"digest": ["00"]},
        {"digest": ["0" * 17 + "f" * 17, "0"]},
        {"step": None},
        {"at": "nan"},
        {"seconds": [1.0]},
        {"metrics": {"accuracy": None}},
        {"step": 1 << 70},
    ],
)
def test_a_wrong_step_among_others_adds_nothing(wrong: dict[str, Any]) -> None:
    (good, bad) = with_times([step(1), step(2)])
    log = StepLog()
    with pytest.raises((KeyError, TypeError, ValueError)):
        log.extend([good, {**bad, **wrong}])
    assert len(log) == 0
    log.extend([good])
    assert (log.record(0).loss, log.record(0).seconds) == (5.0, {"compute": 0.75, "apply": 0.25})


def test_damage_is_found_at_its_line_with_all_steps_before_it(tmp_path: Path) -> None:
    url = write_run(
        tmp_path,
        [started(), data(), *generation(1, [0], 0), *[step(number, 1) for number in range(1, 9)]],
        seconds_between=0.1,
    )
    newest = max((tmp_path / "journal").iterdir())
    lines = newest.read_text().splitlines(keepends=True)
    assert len(lines) == 9  # its head and eight steps
    lines[6] = lines[6].replace('"loss":', '"loss":"much","was":')
    newest.write_text("".join(lines))
    report = load(url)
    assert report.summary.last_step == 5
    assert report.damage.startswith(f"what follows line 6 of journal/{newest.name} cannot be read (ValueError: ")
    assert load_metrics(url)["step"].to_pylist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "line", ['{"a":"\\ud800"}', '{"a":NaN}', '{"a":1e999}', "{}", '{"a":1}', "nothing", '{"a":1,}']
)
def test_a_line_is_read_exactly_as_json_reads_it(line: str) -> None:
    assert read_by(parse_line, line.encode()) == read_by(json.loads, line)


def read_by(read: Callable[[Any], Any], line: object) -> str:
    """The result of `read`, or its error."""
    try:
        return repr(read(line))
    except ValueError as error:
        return repr((type(error), str(error)))


def test_a_segment_that_is_not_utf_8_has_no_entry() -> None:
    with pytest.raises(UnicodeDecodeError):
        list(entries_of(b'{"kind":"data"}\n{"kind":"\xff"}\n'))


@pytest.mark.parametrize("slow", [False, True])
def test_segments_come_in_order_however_far_away_storage_is(tmp_path: Path, slow: bool) -> None:
    (tmp_path / "journal").mkdir()
    for number in range(1, 40):
        (tmp_path / "journal" / f"{number:08d}.jsonl").write_text(str(number))
    storage, times = open_storage(str(tmp_path)), iter(range(1000))
    found = list(read_some(storage, segment_keys(storage), now=lambda: float(next(times)) if slow else 0.0))
    assert [segment for _, segment in found] == [str(number).encode() for number in range(1, 40)]
    assert [key for key, _ in found] == [f"journal/{number:08d}.jsonl" for number in range(1, 40)]


def test_the_table_has_the_last_word_on_every_step(tmp_path: Path) -> None:
    entries = run_with_a_loss()
    table = metrics_table(with_times(entries))
    assert table.column_names[: len(COLUMNS)] == list(COLUMNS)
    assert table.column_names[len(COLUMNS) :] == [
        "seconds/compute",
        "seconds/apply",
        "metrics/accuracy",
        "evaluation/loss",
    ]
    assert table["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert table["generation"].to_pylist() == [1, 1, 2, 2, 3, 3]  # step 3 was computed again
    assert table["metrics/accuracy"].to_pylist() == [None, None, None, None, 0.5, None]
    assert table["evaluation/loss"].to_pylist() == [None, None, None, None, 1.5, None]
    assert table["seconds"].to_pylist() == [1.0] * 6
    assert table.schema.field("at").type == pa.timestamp("us", tz="UTC")
    assert load_metrics(write_run(tmp_path, entries)).drop_columns("at").equals(table.drop_columns("at"))


def test_a_run_without_a_step_has_an_empty_table_and_what_is_not_finite_stays_so() -> None:
    assert (metrics_table([]).num_rows, metrics_table([]).column_names) == (0, list(COLUMNS))
    (loss,) = metrics_table(with_times([started(), step(1, loss="nan")]))["loss"].to_pylist()
    assert math.isnan(loss)


def test_the_journal_of_a_run_is_read_as_its_entries_are(tmp_path: Path) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    fold, damage = read_fold(open_storage(url))
    assert (fold.summary(), damage) == (load(url).summary, "")


@pytest.mark.parametrize(
    "segment",
    [
        b"",
        b'{"kind":"segment"}\n{"kind":"step"}\n{"kind":"st',
        b'{"kind":"segment"}\n{"kind":"step"}\n{"kind":"data"}\n',
        b'{"kind":"step"}\n{"kind":"step"}\n',
        b'{"kind":"segment"}\n{"kind":"step"}\n3\n',
        b'{"kind":"segment"}\n{"kind":"step"}\n{}\n',
        b'{"kind":"segment"}\n{"kind":"step"}\n{\n',
        b'{"kind":"segment"}\n{"kind":"step","x":"\xc3\xa4"}\n',
    ],
)
def test_only_a_whole_segment_of_nothing_but_steps_is_taken_at_once(segment: bytes) -> None:
    assert steps_of(segment) is None


def test_a_segment_of_steps_taken_at_once_is_what_it_is_entry_by_entry() -> None:
    segment = b'{"kind":"segment"}\n{"kind":"step","step":1}\n{"kind":"step","step":2}\n'
    assert list(enumerate(steps_of(segment) or [], 2)) == list(entries_of(segment))
