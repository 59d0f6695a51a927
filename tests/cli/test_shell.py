"""Features of all commands: JSON, suggestions, completion in a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from raysharded.cli import app
from tests.cases import tried_each_time
from tests.cli.test_commands import invoke, succeed
from tests.paths import ROOT


def commands(found: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path; groups are not commands."""
    found = typer.main.get_command(app) if found is None else found
    inner = getattr(found, "commands", None)
    if inner is None:
        yield path, found
        return
    for name, command in inner.items():
        yield from commands(command, (*path, name))


ALL = dict(commands())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_json(path: tuple[str, ...]) -> None:
    assert "--json" in [option for param in ALL[path].params for option in param.opts]


def test_the_tree_is_walked_to_its_leaves() -> None:
    assert {("run",), ("runs",), ("status",), ("doctor",), ("checkpoint", "ls"), ("data", "pack")} <= ALL.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["statsu"], "No such command 'statsu': did you mean 'status'?"),
        (["checkpoint", "verfy"], "No such command 'verfy': did you mean 'verify'?"),
        (["ls"], "No such command 'ls': did you mean 'checkpoint ls'?"),
        (["data", "pakc"], "No such command 'pakc': did you mean 'pack'?"),
        (["report", "x", "--jsn"], "No such option --jsn: did you mean --json?"),
        (["checkpoint", "verify", "x", "--stp", "3"], "No such option --stp: did you mean --step?"),
        (["--versoin"], "No such option --versoin: did you mean --version?"),
        (["quux"], "No such command 'quux'."),
    ],
)
def test_a_mistyped_name_gets_one_sentence_and_2(arguments: list[str], message: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert f"Error: {message}" in found.stderr.splitlines()


# -- completion --


@pytest.fixture
def shell_path(tmp_path: Path) -> str:
    """A PATH with a command `raysharded` that is this checkout."""
    command = tmp_path / "raysharded"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m raysharded "$@"\n')
    command.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.procs
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    tried_each_time(
        [("checkpoint ver", "verify"), ("status --fol", "--follow")],
        [("sta", "status"), ("checkpoint ver", "verify"), ("status --fol", "--follow"), ("completion z", "zsh")],
    ),
)
def test_bash_completes_commands_and_options(shell_path: str, words: str, completed: str) -> None:
    """As bash does it: the function that the script registers is called with COMP_WORDS and COMP_CWORD."""
    script = """
eval "$(raysharded completion bash)"
function=$(complete -p raysharded | sed 's/.*-F \\([^ ]*\\).*/\\1/')
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); $function "$1"; echo "${COMPREPLY[@]}"; }
"""
    ran = subprocess.run(
        ["bash", "--norc", "-c", f"{script}complete_words raysharded {words}\n"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": shell_path},
        check=True,
    )
    assert ran.stdout.splitlines() == [completed], ran.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_every_shell(shell: str) -> None:
    script = succeed("completion", shell)
    assert "_RAYSHARDED_COMPLETE" in script
    assert json.loads(succeed("completion", shell, "--json")) == {"shell": shell, "script": script.rstrip("\n")}
    assert invoke("completion", "tcsh").exit_code == 2
