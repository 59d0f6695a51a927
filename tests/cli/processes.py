"""The command as a separate process: in a shell, and on a terminal."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.forked import in_a_fork
from tests.paths import ROOT

COMMAND = f"{sys.executable} -m raysharded"
_TIMEOUT_S = 60.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, without what would change output, and with the variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "PYTHONUTF8")}
    return kept | {"PYTHONPATH": str(ROOT), **variables}


def shell(script: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a script of bash, in which `raysharded` is this checkout's."""
    function = f'raysharded() {{ {COMMAND} "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", function + script],
        capture_output=True,
        env=environment(**variables),
        timeout=_TIMEOUT_S,
        check=False,
    )


_ONE_BY_ONE = """
import json, os, sys
from raysharded.cli import main
import raysharded.cli.runs.ls, raysharded.cli.runs.status, raysharded.report.loader

commands, folder, leaves = json.loads(sys.argv.pop())
for number, words in enumerate(commands):
    places = [os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    ours, theirs = os.pipe() if leaves else (0, places[0])
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 1)
        os.dup2(places[1], 2)
        os.closerange(3, 256)
        sys.argv = ["raysharded", *words]
        main()
    if leaves:
        os.close(theirs)
        with open(ours, "rb") as reader:
            reader.readline()
    with open(f"{folder}/{number}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


def one_by_one(
    commands: list[list[str]], folder: Path, *, reader_leaves: bool = False, **variables: str
) -> list[subprocess.CompletedProcess[bytes]]:
    """The commands in forks of one fresh interpreter, with standard streams as it made them. `folder`: an empty one.

    `reader_leaves`: the standard output is a pipe, as that of `| head -1`.
    """
    given = json.dumps([commands, str(folder), reader_leaves])
    subprocess.run(
        [sys.executable, "-c", _ONE_BY_ONE, given],
        capture_output=True,
        env=environment(**variables),
        timeout=_TIMEOUT_S,
        check=True,
    )

    def ended(number: int) -> subprocess.CompletedProcess[bytes]:
        status, out, err = (Path(folder, f"{number}.{name}").read_bytes() for name in ("status", "out", "err"))
        return subprocess.CompletedProcess(commands[number], int(status), out, err)

    return [ended(number) for number in range(len(commands))]


def in_a_folder(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in another current folder, with its output in files. Its process is a fork of the server that has
    imported torch already."""
    status, out, err = in_a_fork(_ended, arguments, str(folder), environment(**variables), timeout_s=_TIMEOUT_S)
    return subprocess.CompletedProcess(arguments, status, out, err)


def _ended(arguments: list[str], folder: str, variables: dict[str, str]) -> tuple[int, str, str]:
    """The exit status and the output, also of its children, in a process that has no other task."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv, sys.path[0] = ["raysharded", *arguments], folder
    from raysharded.cli import main

    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    sys.stdout.flush()
    sys.stderr.flush()
    found = []
    for file in files:
        file.seek(0)
        found.append(file.read().decode())
    return status, found[0], found[1]


def on_terminal(commands: list[list[str]], *, columns: int, **variables: str) -> list[str]:
    """The output of each command on a terminal of a width, without escape sequences. One process runs them all: a fork
    of the server that has imported torch already."""
    given = environment(**{"COLUMNS": str(columns), "TERM": "xterm", **variables})
    told = in_a_fork(_told_on_terminal, commands, given, timeout_s=4 * _TIMEOUT_S)
    return told.split(_NEXT)[1:]


_NEXT = "=== next\n"
"""Precedes the output of each command."""


def _told_on_terminal(commands: list[list[str]], variables: dict[str, str]) -> str:
    process, outside = pty.fork()
    if process == 0:
        status = 1
        try:
            os.environ.clear()
            os.environ.update(variables)
            _run_here(commands)
            status = 0
        except BaseException:  # noqa: BLE001 - the boundary of the process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    told = _everything(outside)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, told
    return told


def _run_here(commands: list[list[str]]) -> None:
    """Run them on the terminal of file descriptors 0 to 2."""
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
    from raysharded.cli import app

    for command in commands:
        sys.stdout.write(_NEXT)
        sys.stdout.flush()
        app(command, prog_name="raysharded", standalone_mode=False)


def _everything(terminal: int) -> str:
    """All output to a terminal until it is closed."""
    found = b""
    while True:
        try:
            some = os.read(terminal, 65536)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            some = b""
        if not some:
            os.close(terminal)
            return _CODES.sub("", found.decode().replace("\r\n", "\n"))
        found += some


def everything_below(folder: Path) -> set[str]:
    """The paths of all files and folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
