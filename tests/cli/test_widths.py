"""Output at the width of a terminal, and complete in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from raysharded.checkpoint import open_storage
from raysharded.ownership.process_identity import this_process
from raysharded.report.history.row_table import RowTable
from tests.cases import tried_each_time
from tests.checkpoint.retention.runs import Run
from tests.cli.processes import environment, in_a_folder, on_terminal, shell
from tests.cli.test_runs import own
from tests.cli.test_shell import ALL
from tests.cli.test_usage import CONFIG
from tests.report.entries import avoided, data, generation, run_with_a_loss, started, step, write_run

EVERYTHING = sorted({path[:length] for path in ALL for length in range(len(path) + 1)})
NAME = "a-run-with-a-name-as-long-as-people-give-them-when-every-setting-is-to-be-in-it-lr3e-4-bs512"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with long names and large numbers, one with checkpoints, and a config."""
    folder = tmp_path_factory.mktemp("widths")
    entries = [started(run=NAME, max_steps=1_200_000), data(), *generation(1, [0, 1], 0), step(1), avoided(1)]
    entries += [step(number) for number in range(2, 4)] + [("failed", {"step": 3, "error": "no memory left, " * 8})]
    write_run(folder / "runs" / NAME, entries)
    write_run(folder / "runs" / "tiny", run_with_a_loss())
    own(folder / "runs" / NAME, "driver0", process=this_process())
    saved = Run(open_storage(str(folder / "saved" / NAME)))
    for number in (10, 1_000_000):
        saved.save(number, metrics={"loss": 1.0})
    saved.unfinished(1_000_001)
    (folder / "config.json").write_text(CONFIG)
    return folder


def commands(here: Path) -> list[list[str]]:
    """Every command with a table."""
    plan = ["plan", str(here / "config.json"), "--seq-len", "4096", "--global-batch-size", "1024"]
    saved = str(here / "saved" / NAME)
    return [
        ["runs", str(here / "runs")],
        ["status", str(here / "runs" / NAME)],
        ["status", str(here / "runs" / "tiny")],
        ["report", str(here / "runs" / NAME)],
        ["report", str(here / "runs" / "tiny")],
        ["checkpoint", "ls", saved],
        ["checkpoint", "show", saved],
        [*plan, "--workers", "64", "--device-memory", "80GiB", "--host-memory", "512GiB"],
    ]


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize("variables", tried_each_time([{}], [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}]), ids=str)
def test_tables_fit_a_terminal_of_80_columns_in_one_line_per_row(here: Path, variables: dict[str, str]) -> None:
    wanted = commands(here)
    outputs = on_terminal(wanted, columns=80, **variables)
    for command, told in zip(wanted, outputs, strict=True):
        lines = [line.rstrip() for line in told.splitlines() if "/" not in line or command[0] != "runs"]
        wide = [line for line in lines if len(line) > 80 and not line.startswith(str(here))]  # a URL alone stays whole
        assert wide == [], command
    (runs, *_) = outputs
    rows = [line for line in runs.splitlines() if "tiny" in line or line.startswith("a-run-")]
    assert len(rows) == 2
    assert any("\u2026" in row and "failed" in row for row in rows)  # the name is what is shortened
    ls = next(told for command, told in zip(wanted, outputs, strict=True) if command[:2] == ["checkpoint", "ls"])
    assert len([line for line in ls.splitlines() if re.match(r" *10\d* ", line)]) == 3, ls


@pytest.mark.procs
@pytest.mark.long
def test_the_doctors_table_fits_a_terminal_of_80_columns() -> None:
    (told,) = on_terminal([["doctor"]], columns=80)
    assert "gloo" in told
    assert [line for line in told.splitlines() if len(line.rstrip()) > 80] == []


@pytest.mark.procs
def test_a_wide_terminal_shows_tables_whole(here: Path) -> None:
    (runs, ls) = on_terminal([commands(here)[0], commands(here)[5]], columns=400)
    assert NAME in runs
    assert "\u2026" not in runs + ls


@pytest.mark.procs
def test_a_pipe_gets_every_row_whole_on_one_line(here: Path) -> None:
    """Or a file. A terminal at the other end does not matter: `grep` finds the row."""
    listed = shell(f"raysharded runs {here}/runs | cat", COLUMNS="80").stdout.decode()
    (row,) = [line for line in listed.splitlines() if NAME in line]
    assert "3 of 1200000" in row
    assert "no memory left" in row or "driver driver0" in row
    told = in_a_folder(["report", f"{here}/runs/tiny"], here, COLUMNS="80").stdout
    (incident,) = [line for line in told.splitlines() if "Worker 1 was lost" in line]
    assert incident.endswith("computed again 1.00 s).")
    assert [line for line in (listed + told).splitlines() if line != line.rstrip()] == []
    rules = [line for line in (listed + told).splitlines() if set(line) == {"\u2500"}]
    assert len(rules) >= 3
    assert max(map(len, rules)) <= 160


@pytest.mark.parametrize(("columns", "every"), tried_each_time([(60, 4)], [(60, 4), (60, 1), (80, 1)]))
def test_help_fits_the_terminal(columns: int, every: int) -> None:
    lines = help_of(EVERYTHING[::every], columns).splitlines()
    assert [line for line in lines if len(line) > columns] == []


@pytest.mark.parametrize("paths", [[(), ("run",)], pytest.param(EVERYTHING, marks=pytest.mark.long)], ids=len)
def test_help_uses_a_wide_terminal_as_far_as_it_reads_well(paths: list[tuple[str, ...]]) -> None:
    lines = help_of(paths, 200).splitlines()
    assert 100 < max(map(len, lines)) <= 120


def help_of(paths: list[tuple[str, ...]], columns: int) -> str:
    """The help of the program, of groups and of commands."""
    script = (
        "from raysharded.cli import app\n"
        f"for path in {paths!r}:\n"
        "    app([*path, '--help'], prog_name='raysharded', standalone_mode=False)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(COLUMNS=str(columns)),
        timeout=60,
        check=True,
    )
    assert ran.stdout.count("Usage: ") == len(paths)
    return ran.stdout


# -- the table --


def drawn(width: int) -> list[str]:
    table = RowTable("title")
    table.add_column("name", long="shorten")
    table.add_column("number", right=True)
    table.add_column("often", right=True, rank=1)
    table.add_column("seldom", right=True, rank=2)
    table.add_column("what", long="wrap")
    table.add_row("n" * 40, "1234567", "12", "34", "one two three four five six seven")
    table.add_row("m", "8")
    out = StringIO()
    Console(file=out, width=width).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_with_room_is_whole() -> None:
    title, head, rule, first, second = drawn(200)
    assert title == "title"
    assert head.split() == ["name", "number", "often", "seldom", "what"]
    assert set(rule) == {"\u2500"}
    assert "n" * 40 in first
    assert first.endswith("seven")
    assert second.split() == ["m", "8"]


def test_a_narrow_table_omits_columns_by_their_rank_shortens_names_and_wraps_sentences() -> None:
    assert "seldom" in drawn(70)[1]
    assert ["seldom" in drawn(56)[1], "often" in drawn(56)[1]] == [False, True]
    narrow = drawn(50)
    assert "often" not in narrow[1]
    assert max(map(len, narrow)) <= 50
    (name,) = [line for line in narrow if "nnn" in line]
    assert re.search(r"n+\u2026 +1234567 ", name)
    assert " ".join(" ".join(narrow).split()).count("seven") == 1


def test_without_a_width_a_sentence_widens_no_rule_and_no_other_row() -> None:
    table = RowTable("title")
    table.add_column("what", long="wrap")
    table.add_column("number", right=True)
    table.add_row("a sentence " * 30, "12345678")
    table.add_row("short,\nbut two lines", "9")
    out = StringIO()
    Console(file=out, width=1 << 20).print(table)
    title, head, rule, first, second = [line.rstrip() for line in out.getvalue().splitlines()]
    assert (title, head.split(), set(rule)) == ("title", ["what", "number"], {"\u2500"})
    assert max(map(len, (head, rule, second))) <= 40
    assert first == f"{'a sentence ' * 30}  12345678"
    assert second.split("  ")[0] == "short, but two lines"


def test_a_number_is_never_wrapped() -> None:
    assert all(len(drawn(width)) <= 12 for width in (20, 30, 40))
