"""Commands on run folders that a stranger filled: no escape sequence, forged line or bidi mark reaches the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from raysharded import checkpoint
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.fork_reference import Reference, encode_reference
from raysharded.checkpoint.storage import retry
from tests.cli.processes import on_terminal
from tests.cli.test_commands import fail, invoke
from tests.report.entries import data, generation, lost, recovery, started, step, write_run

HARM = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FORGED = "error: all is lost"
TEXT = f"t\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\r\b{chr(0x2028)}\n{FORGED}\nx"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs whose journals hold escape sequences wherever a text may stand."""
    folder = tmp_path_factory.mktemp("runs")
    entries = [
        started(driver=TEXT, run=TEXT, versions={"python": TEXT, TEXT: TEXT}),
        data(),
        ("worker_ready", {"worker": 0, "node": TEXT, "pid": 7}),
        *generation(1, [0, 1], 0),
        step(1, metrics={TEXT: 1.0}, evaluation={TEXT: 2.0}),
        ("worker_lost", {**lost(1, 1)[1], "reason": TEXT}),
        ("recovery", {**recovery(1, 1)[1], "reasons": [TEXT]}),
        *generation(2, [0], 1, source=TEXT),
        step(2, workers=1, gen=2),
        ("failed", {"step": 2, "error": TEXT}),
    ]
    write_run(folder / "gpt", entries)
    return folder


COMMANDS = [["status", "gpt"], ["report", "gpt"], ["runs", "."], ["checkpoint", "ls", "gpt"]]


def assert_harmless(told: str) -> None:
    assert HARM.findall(told) == []
    assert [line for line in told.splitlines() if line.startswith((FORGED, "x"))] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_in_a_journal_reaches_a_pipe_harmlessly(
    command: list[str], hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    told = invoke(*command)
    assert_harmless(told.stdout + told.stderr)
    assert FORGED in told.stdout or command[0] in ("runs", "checkpoint")


def test_what_is_in_a_journal_reaches_a_terminal_harmlessly(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    commands = [command for command in COMMANDS if command[0] != "report"]  # which exits with 1
    for told in on_terminal(commands, columns=200):  # without rich's own codes
        assert_harmless(told)
        assert "\ufffd" in told or "folder" in told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = {"w": torch.full((2,), value), "only" + name: torch.zeros(1)}
        checkpoint.save(folder / name, state, step=1, run=TEXT, metadata={TEXT: TEXT, "deep": {TEXT: TEXT}})
    return folder


def test_what_is_in_a_manifest_is_shown_harmlessly(saved: Path) -> None:
    for command in (["checkpoint", "show", saved / "a"], ["checkpoint", "diff", saved / "a", saved / "b"]):
        told = invoke(*command)
        assert_harmless(told.stdout + told.stderr)
    told = invoke("checkpoint", "show", saved / "a", "--json")
    assert HARM.findall(told.stdout) == []
    assert json.loads(told.stdout)["run"] == TEXT


def test_the_parent_in_a_reference_is_shown_harmlessly(tmp_path: Path) -> None:
    storage = open_storage(write_run(tmp_path / "run", [started(), data()]))
    reference = Reference(parent=f"/{TEXT}", prefix=TEXT, step=9, manifest_digest="0" * 64, pin=TEXT)
    storage.write(f"{reference.folder}/reference.json", [encode_reference(reference)])
    told = invoke("checkpoint", "ls", storage.url)
    assert_harmless(told.stdout + told.stderr)
    assert "owned" in told.stdout, "its parent is shown"
    error = invoke("checkpoint", "show", storage.url, "--step", "9")
    assert_harmless(error.stdout + error.stderr)


@pytest.mark.parametrize("command", ["status", "report", "replay", "runs"])
def test_the_name_of_a_folder_in_an_error_is_harmless(command: str, tmp_path: Path) -> None:
    folder = tmp_path / TEXT
    folder.mkdir()
    told = invoke(command, folder / "nothing")
    assert told.exit_code == 1
    assert_harmless(told.stderr)
    assert told.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@127.0.0.1:1/run",
        "sftp://me:hunter2@127.0.0.1:1/run",
        "ftp://me:hunter2@127.0.0.1:1/run",
        "s3://me:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "s3://bucket/run?endpoint_url=http://me:hunter2@127.0.0.1:1",
        "s3://bucket/run?endpoint_url=http%3A%2F%2Fme%3Ahunter2%40127.0.0.1%3A1",
    ],
)
@pytest.mark.parametrize("command", [["status"], ["checkpoint", "ls"], ["runs"]], ids=lambda command: command[-1])
def test_no_password_of_a_url_is_in_an_error(url: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.01)
    error = fail(*command, url)
    assert "hunter2" not in error
    if url.startswith("s3"):
        assert error.startswith("an s3:// URL has credentials in it")
        assert "AWS_PROFILE" in error
