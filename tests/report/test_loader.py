"""Errors and notices of `load` where no run is, or an incomplete one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from raysharded.checkpoint import open_storage
from raysharded.errors import StorageError
from raysharded.journal.log import segment_keys
from raysharded.report import load
from raysharded.report.history import parallel_reader
from tests.cases import tried_each_time
from tests.report.entries import checkpoint, data, finished, generation, run_with_a_loss, started, step, write_run


def test_a_name_that_is_nearly_that_of_a_run_is_suggested(tmp_path: Path) -> None:
    for name in ("gpt-5m", "gpt-7b", "bytes"):
        write_run(tmp_path / name, [started()])
    with pytest.raises(StorageError, match=f"Did you mean {tmp_path}/gpt-5m, {tmp_path}/gpt-7b\\?$"):
        load(str(tmp_path / "gpt-5n"))


def test_where_no_name_is_near_the_runs_are_listed_but_not_all_of_very_many(tmp_path: Path) -> None:
    for number in range(7):
        write_run(tmp_path / f"run{number}", [started()])
    with pytest.raises(StorageError, match=f"Runs in {tmp_path}: run0, .*run4 and 2 more\\.$"):
        load(str(tmp_path / "zzzzzz"))


def test_a_folder_of_runs_is_taken_for_what_it_is(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "mine", [started()])
    with pytest.raises(StorageError, match=f"It holds runs: give one of them, {tmp_path}/runs/mine\\."):
        load(f"file://{tmp_path}/runs")


def test_where_nothing_is_near_the_error_names_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no run at .*Give the folder of one run"):
        load(str(tmp_path / "no" / "where"))


@pytest.mark.parametrize("content", [b"", b'{"kind":"segment","writer":"d"}\n'])
def test_a_journal_without_an_entry_is_not_taken_for_no_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000001.jsonl").write_bytes(content)
    with pytest.raises(StorageError, match=f"the journal of the run at {tmp_path} is empty"):
        load(str(tmp_path))


def test_checkpoints_whose_folders_are_gone_are_marked_as_deleted(tmp_path: Path) -> None:
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), checkpoint(1), step(2), checkpoint(2)]
    url = write_run(tmp_path, entries)
    assert [one.deleted for one in load(url).summary.checkpoints] == [False, False]  # none is there: a copied journal
    open_storage(url).write(f"{checkpoint(2)[1]['prefix']}/manifest.json", [b"{}"])
    report = load(url)
    assert [one.deleted for one in report.summary.checkpoints] == [True, False]
    assert f"<code>{checkpoint(1)[1]['prefix']}</code> (deleted)" in report.as_html()
    assert report.as_html().count("(deleted)") == 1
    assert [one["deleted"] for one in report.as_dict()["checkpoints"]] == [True, False]
    with (console := Console(width=120)).capture() as out:
        console.print(report)
    assert sum("  deleted  " in line for line in out.get().splitlines()) == 1


DAMAGE = [b"{not json\n", b'{"kind":"step","at":1.0}\n', b'{"at":1.0}\n', b"\xff\n", b"[]\n"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_comes_before_the_damage_is_reported_and_the_damage_too(tmp_path: Path, damage: bytes) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    whole = load(url)
    (tmp_path / "journal" / "99999999.jsonl").write_bytes(damage)
    report = load(url)
    assert report.summary == whole.summary
    assert "cannot be read" in report.damage
    assert "cannot be read" in str(report.as_dict()["damage"])
    assert "The journal is damaged" in report.as_html()
    assert (whole.damage, whole.as_dict()["damage"]) == ("", None)


def test_after_damage_in_the_middle_nothing_is_guessed(tmp_path: Path) -> None:
    url = write_run(tmp_path, [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), finished(2)])
    segments = sorted((tmp_path / "journal").iterdir())
    segments[-2].write_bytes(segments[-2].read_bytes().replace(b'"kind"', b'"kin', 2))
    report = load(url)
    assert report.damage
    assert (report.summary.status, report.summary.fingerprint) == ("unfinished", "")


@pytest.mark.parametrize("damage", DAMAGE[:1])
def test_a_journal_that_is_damaged_from_its_beginning_is_one_clear_error(tmp_path: Path, damage: bytes) -> None:
    write_run(tmp_path, [started(), data()])
    (tmp_path / "journal" / "00000001.jsonl").write_bytes(damage)
    with pytest.raises(StorageError, match=f"journal of the run at {tmp_path} is damaged from its beginning"):
        load(str(tmp_path))


def test_a_last_line_that_is_torn_off_is_a_run_in_progress(tmp_path: Path) -> None:
    url = write_run(tmp_path, [started(), data(), *generation(1, [0, 1], 0), step(1)])
    newest = max((tmp_path / "journal").iterdir())
    newest.write_bytes(newest.read_bytes() + b'{"kind":"st')
    report = load(url)
    assert (report.damage, report.summary.status, report.summary.last_step) == ("", "unfinished", 1)


def journal_of_many_segments(folder: Path, damage: bytes = b"") -> str:
    """Most of them with nothing but steps, of which some have a number by another name; `damage` in the last."""
    url = write_run(folder, [started(), data(), *generation(1, [0, 1], 0)])
    head = b'{"kind":"segment","writer":"d"}\n'
    for first in range(1, 60, 3):
        lines = [
            json.dumps({"kind": kind, "at": 100.0 + fields["step"], **fields})
            for kind, fields in map(step, range(first, first + 3))
        ]
        if first == 31:
            lines[1] = lines[1].replace('"forward"', '"elsewhere"')
        if first == 40:
            lines.insert(1, json.dumps({"kind": "remark", "at": 142.0}))
        segment = head + "".join(f"{line}\n" for line in lines).encode() + (damage if first == 58 else b"")
        (folder / "journal" / f"{first + 1000:08d}.jsonl").write_bytes(segment)
    return url


@pytest.mark.parametrize("damage", tried_each_time([b"\xff\n"], of=[b"", *DAMAGE]))
def test_a_long_journal_is_read_by_several_processes_and_is_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    url = journal_of_many_segments(tmp_path, damage)
    alone = load(url)
    assert alone.summary.last_step == (57 if damage == b"\xff\n" else 60)  # no line of such a segment is read
    monkeypatch.setattr(parallel_reader, "_OF_A_RUN", 3)
    keys = segment_keys(open_storage(url))
    assert any(len(part) == 3 for part in parallel_reader.parts_of(url, keys))  # they were there
    monkeypatch.setattr(parallel_reader, "FEWEST", 1)
    assert load(url) == alone


def test_where_no_other_process_can_read_it_a_long_journal_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = journal_of_many_segments(tmp_path)
    alone = load(url)
    monkeypatch.setattr(parallel_reader, "FEWEST", 1)
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert load(url) == alone
