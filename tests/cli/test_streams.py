"""Standard streams that are closed, full, unread or ASCII: no command fails because of them, but for a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.checkpoint import open_storage
from raysharded.journal.log import segment_key
from raysharded.ownership.process_identity import this_process
from tests.cases import tried_each_time
from tests.cli.processes import COMMAND, environment, one_by_one, shell
from tests.cli.test_commands import succeed
from tests.cli.test_run import write as write_trainer
from tests.cli.test_runs import at_work, journal_now, own
from tests.report.entries import run_with_a_loss, started, step, write_run

pytestmark = pytest.mark.procs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of one finished run."""
    write_run(tmp_path / "runs" / "tiny", run_with_a_loss())
    return tmp_path / "runs"


CLOSED = [
    ("report {runs}/tiny --html {runs}/page.html >&- 2>&- <&-", b"0"),
    ("runs {runs} >&-", b"0"),
    ("--help >&-", b"0"),
    ("status {runs}/none 2>&-", b"1"),
    ("status 2>&-", b"2"),
]


@pytest.mark.parametrize(("command", "status"), tried_each_time([CLOSED[3]], CLOSED))
def test_closed_streams_change_neither_the_work_nor_the_exit_status(runs: Path, command: str, status: bytes) -> None:
    ran = shell(f"raysharded {command.format(runs=runs)}; echo $?")
    assert (ran.stdout.split(), ran.stderr) == ([status], b"")
    if "page" in command:
        assert (runs / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_file_that_a_command_opens_does_not_take_the_place_of_a_closed_stream(runs: Path) -> None:
    """A trainer's output must not get into its files."""
    file = runs.parent / "log"
    fit = f'log = open({str(file)!r}, "w"); os = __import__("os"); os.write(1, b"x"); os.write(2, b"x"); log.close(); '
    ran = shell(f"raysharded run {write_trainer(runs.parent, fit + _FINISHED)} >&- 2>&-")
    assert (ran.returncode, file.read_text()) == (0, "")


_FINISHED = 'return rs.Result(name="tiny", url="/runs/tiny", steps=6, fingerprint="f" * 32, checkpoint="")'


READ = ["report {runs}/tiny", "runs {runs}", "status {runs}/tiny", "--help", "completion bash"]


@pytest.mark.parametrize("commands", [READ[2:4], pytest.param([*READ[:2], READ[4]], marks=pytest.mark.long)])
def test_a_reader_that_leaves_is_no_error(runs: Path, commands: list[str]) -> None:
    folder = runs.parent / "told"
    folder.mkdir()
    given = [command.format(runs=runs).split() for command in commands]
    for ended in one_by_one(given, folder, reader_leaves=True):
        assert (ended.returncode, ended.stderr) == (0, b""), ended.args


def test_a_reader_that_leaves_before_the_end_of_much_output_is_no_error(runs: Path) -> None:
    lines: list[dict[str, object]] = [{"kind": "segment", "writer": "a"}]
    for at, (kind, fields) in enumerate([started(max_steps=2000), *(step(number) for number in range(1, 2000))]):
        lines.append({"kind": kind, "at": float(at), **fields})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    open_storage(str(runs / "long")).write(segment_key(1), [text.encode()])
    assert len(succeed("report", runs / "long", "--json")) > 1 << 16, "no more than a pipe holds"
    ran = shell(f"raysharded report {runs}/long --json | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}\n")
    assert (ran.stdout.split(), ran.stderr) == ([b"0"], b"")


def test_a_run_goes_on_without_its_console(runs: Path) -> None:
    """The driver prints more than a pipe holds after its reader has left, and does the rest of its work."""
    done = runs.parent / "done"
    fit = (
        "sys = __import__('sys'); "
        "[print('x' * 999, file=stream, flush=True) for stream in (sys.stdout, sys.stderr) for _ in range(200)]; "
        f"open({str(done)!r}, 'w').close(); "
    )
    command = f"raysharded run {write_trainer(runs.parent, fit + _FINISHED)}"
    ran = shell(f"{command} 2>&1 | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}")
    assert (ran.stdout, ran.stderr) == (b"0\n", b"")
    assert done.exists()


def test_a_command_goes_on_when_its_terminal_hangs_up(runs: Path) -> None:
    """As with `nohup`: writes to the terminal then fail with EIO."""
    script = (
        "import os, pty, sys\n"
        "outside, inside = pty.openpty()\n"
        "os.dup2(inside, 1); os.close(inside); os.close(outside)\n"
        "from raysharded.cli import main\n"
        "main()\n"
    )
    page = runs.parent / "page.html"
    command = [sys.executable, "-c", script, "report", str(runs / "tiny"), "--html", str(page), "--json"]
    ran = subprocess.run(command, capture_output=True, env=environment(), timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert page.exists()


def test_what_only_shows_ends_with_its_reader(tmp_path: Path) -> None:
    """The run continues without a new line: no write shows the command that its reader has left."""
    journal_now(tmp_path, at_work())
    own(tmp_path, "driver0", process=this_process())
    command = [*COMMAND.split(), "status", str(tmp_path), "--follow", "--every", "3600", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout is not None
            assert b'"state":"running"' in process.stdout.readline()
            assert process.poll() is None
            process.stdout.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_full_disk_is_one_error_and_1(runs: Path) -> None:
    ran = shell(f"raysharded runs {runs} >/dev/full; echo $?")
    assert ran.stdout.split() == [b"1"]
    assert ran.stderr.startswith(b"error: standard output cannot be written: No space left on device.")
    assert ran.stderr.count(b"\n") == 1


@pytest.mark.long  # a full disk of the standard output is tried above
def test_an_error_that_cannot_be_written_to_a_full_disk_ends_with_1(runs: Path) -> None:
    ran = shell(f"raysharded status {runs}/none 2>/dev/full; echo $?")
    assert (ran.stdout.split(), ran.stderr) == ([b"1"], b"")


@pytest.mark.parametrize("commands", [["status"], pytest.param(["report", "runs"], marks=pytest.mark.long)])
def test_an_ascii_stream_gets_ascii(runs: Path, commands: list[str]) -> None:
    (runs / "tiny").rename(runs / "s\u00fc\u00df")
    run = runs / "s\u00fc\u00df"
    given = [[command, str(runs if command == "runs" else run)] for command in commands]
    given += [[*words, "--json"] for words in given if words[0] == "report"]
    given += [["status", f"{run}/none"], ["report", str(run), "--html", "-"]]
    folder = runs.parent / "told"
    folder.mkdir()
    *ran, page = one_by_one(given, folder, PYTHONIOENCODING="ascii")
    told = b"".join(ended.stdout + ended.stderr for ended in ran)
    assert told.isascii()
    assert b"s\\xfc\\xdf" in told
    assert b"Traceback" not in told
    assert [ended.returncode for ended in ran] == [*[0] * (len(ran) - 1), 1]
    assert "s\u00fc\u00df" in page.stdout.decode()  # a page names its encoding, UTF-8


@pytest.mark.parametrize("utf8", tried_each_time(["0"], ["0", "1"]))
def test_the_c_locale_prints_names_as_they_are(utf8: str, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xc3\xbc"
    write_run(Path(os.fsdecode(name)), run_with_a_loss())
    script = f"raysharded status {os.fsdecode(name)}"
    variables = {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    ran = shell(script, **variables)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert name in ran.stdout
