"""The server of the tests leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.s3 import server
from tests.s3.server import ServerFailed, running_server

pytestmark = [pytest.mark.s3, pytest.mark.slow]

DEADLINE_S = 30.0


def _alive(pid: int) -> bool:
    """True for a living process, but not for a zombie: its parent may be slow to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def test_a_server_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.s3.server"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    line = owner.stdout.readline()
    pids = [int(pid) for pid in re.findall(r"\d+", line.split("pids=")[1])]
    assert len(pids) == 3
    assert all(_alive(pid) for pid in pids)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=DEADLINE_S)
    _wait_until_gone(pids)


def test_a_start_that_fails_leaves_neither_processes_nor_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    spawn = server._Start._spawn

    def spawning(self: Any, program: str, *words: str) -> subprocess.Popen[bytes]:
        if program == "ceph-osd":
            words = ("--id", "7")  # there is no such store: it ends at once
        started.append(spawn(self, program, *words))
        return started[-1]

    monkeypatch.setattr(server._Start, "_spawn", spawning)
    with pytest.raises(ServerFailed, match="object store"), running_server(tmp_path / "ceph"):
        pass
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert list(tmp_path.iterdir()) == []
