"""The command as a separate process: in a shell, and on a terminal."""

from __future__ import annotations

import errno
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

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


def on_terminal(commands: list[list[str]], *, columns: int, **variables: str) -> list[str]:
    """The output of each command on a terminal of a width, without escape sequences. One process runs them all."""
    script = (
        "import sys, shlex\n"
        "from raysharded.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    print('=== next', flush=True)\n"
        "    app(shlex.split(line), prog_name='raysharded', standalone_mode=False)\n"
    )
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(shlex.join, commands)],
        stdin=inside,
        stdout=inside,
        stderr=subprocess.STDOUT,
        env=environment(**{"COLUMNS": str(columns), "TERM": "xterm", **variables}),
    )
    os.close(inside)
    told = _everything(outside)
    assert process.wait(_TIMEOUT_S) == 0, told
    return told.split("=== next\n")[1:]


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
