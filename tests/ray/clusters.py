"""Scripts with a separate Ray cluster, in a separate process."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ray.leftovers import processes_marked, wait_until

WITHIN_S = 240
ATTACH = "import sys, raysharded; raysharded.attach('gpt', sys.argv[1])"


@pytest.fixture
def own_cluster() -> Iterator[dict[str, str]]:
    """As `separate`, for one test."""
    with separate() as environment:
        yield environment


@contextmanager
def separate() -> Iterator[dict[str, str]]:
    """The environment of a cluster that no other program finds, as Ray notes the newest one's address in its folder. It
    alone is ended: `ray stop` would end every Ray of this machine."""
    marker = uuid.uuid4().hex
    inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        try:
            yield {
                **inherited,
                "RAYSHARDED_TEST": marker,
                "RAY_TMPDIR": folder,
                "RAY_AUTH_MODE": "disabled",
                "RAY_worker_niceness": "0",  # Ray's own 15 gives all other programs on the machine priority
            }
        finally:
            end(f"RAYSHARDED_TEST={marker}")


def refused(address: str, home: Path, **settings: str) -> str:
    """The message that ends a script which attaches to the cluster with these settings of Ray."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**inherited, "HOME": str(home), **settings}
    command = [sys.executable, "-c", ATTACH, address]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=home)
    assert ended.returncode == 1
    (last,) = (line for line in ended.stderr.splitlines() if line.startswith("ClusterError: "))
    return last


def with_token(environment: dict[str, str], home: Path) -> dict[str, str]:
    """The environment with this folder as the home, and Ray's usual mode with a new token in it."""
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    return {**{name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}, "HOME": str(home)}


def run_script(script: str, *arguments: str, environment: dict[str, str], quiet: bool = False) -> dict[str, Any]:
    """The script's last output, as JSON; `quiet`: it writes nothing else, and Ray logs nothing."""
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    if quiet:
        assert len(process.stdout.splitlines()) == 1, process.stdout[:4000]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def end(marker: str) -> None:
    """End the processes that inherited the marker."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if marker.encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue
    wait_until(lambda: not processes_marked(marker), "all processes gone")
