"""Workers and drivers of raysharded 0.1 that are alive when this version starts: nothing of their state is lost.

Each test takes half a minute: it starts four programs or more, of both versions, which load torch and Ray, and workers
wait some seconds for a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raysharded.protocol.version import PROTOCOL
from raysharded.run.hosted.registry import host_name, host_of
from raysharded.run.hosted.submission import read_greeting
from raysharded.testing.processes import fit
from tests.paths import ROOT
from tests.ray.leftovers import assert_no_slot_is_leaked, wait_until
from tests.ray.upgrading_program import STEPS, trainer

pytestmark = pytest.mark.ray

WHEEL = ROOT / "tests" / "golden" / "wheels" / "raysharded-0.1.0-py3-none-any.whl"
PROGRAM = Path(__file__).with_name("upgrading_program.py")
Entry = dict[str, Any]


class Program:
    """The program with the version in a folder, and its messages."""

    def __init__(self, version: Path, folder: Path, how: str, *more: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(version),
            "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address),
        }
        self._errors = (folder / f"{how}-{version.name}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), how, *more],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.entries: list[Entry] = []
        self._changed = threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.entries.append(json.loads(line) if line.startswith("{") else {"kind": "line", "text": line})
                self._changed.notify_all()

    def wait_for(self, what: Callable[[Entry], bool], timeout_s: float = 120.0) -> Entry:
        """The first entry for which `what` holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(what, self.entries)), timeout_s), self.entries
            return next(filter(what, self.entries))

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda entry: entry["kind"] == "step" and entry["step"] >= step)

    def ended(self) -> tuple[dict[str, list[Entry]], str]:
        """All of its messages, by kind, and its standard error."""
        self.process.wait(180)
        self._listening.join(60)
        self._errors.seek(0)
        by_kind: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_kind.setdefault(entry["kind"], []).append(entry)
        return by_kind, self._errors.read()


Start = Callable[..., Program]


@pytest.fixture
def start(cluster: None, tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def one(version: Path, how: str, *more: str) -> Program:
        started.append(Program(version, tmp_path, how, *more))
        return started[-1]

    yield one
    for program in started:
        program.process.kill()
        program.process.wait()
    host = host_of(host_name("upgraded", str(tmp_path / "upgraded")))
    if host is not None:  # it would stay for a minute
        ray.kill(host, no_restart=True)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with raysharded 0.1."""
    folder = tmp_path / "installed"
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


def replace_in_place(installed: Path) -> None:
    """Put this version where the other one was, whose processes live on."""
    shutil.rmtree(installed / "raysharded")
    shutil.copytree(ROOT / "raysharded", installed / "raysharded", ignore=shutil.ignore_patterns("__pycache__"))


def claims(folder: Path) -> list[tuple[str, str]]:
    """Kind and writer of each claim, in order."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "upgraded" / "claims").glob("*.json"))]
    return [(claim["kind"], claim["writer"]) for claim in found]


def leases(folder: Path) -> set[str]:
    return {path.name for path in (folder / "upgraded" / "lease").iterdir()}


def host_processes(installed: Path) -> list[int]:
    """The driver actors that run this installed version, and no others of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::Host") and f"PYTHONPATH={installed}".encode() in environment.split(b"\0"):
            found.append(int(folder.name))
    return found


def undisturbed(folder: Path) -> str:
    """The fingerprint of the same run of this version alone."""
    alone = folder / "undisturbed"
    alone.mkdir()
    (alone / "hurry").touch()
    return fit(trainer(alone)).fingerprint


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.long), True])
def test_no_step_of_workers_of_the_version_before_is_lost(
    in_place: bool, tmp_path: Path, installed: Path, start: Start
) -> None:
    old = start(installed, "fit")
    old.wait_for_step(3)
    before, shown = claims(tmp_path), leases(tmp_path)
    for program in [start(ROOT, how) for how in ("fit", "take_over")]:  # while the old driver lives
        refused, errors = program.ended()
        assert refused.get("raised", [{}])[0].get("error") == "RunOwnedElsewhere", (refused, errors)
        assert "Traceback" not in errors
    assert (claims(tmp_path), leases(tmp_path)) == (before, shown)
    old.wait_for_step(max(entry["step"] for entry in old.entries if entry["kind"] == "step") + 1)  # undisturbed
    new = start(installed if in_place else ROOT, "fit", "later")  # so that it comes while the workers wait for a driver
    new.wait_for(lambda entry: entry["kind"] == "ready")
    old.process.kill()
    old.process.wait()
    told = max(entry["step"] for entry in old.entries if entry["kind"] == "step")
    if in_place:
        replace_in_place(installed)
    (tmp_path / "go").touch()
    waiting = new.wait_for(lambda entry: entry["kind"] == "waiting_for_workers")
    assert (waiting["workers"], waiting["version"].partition(";")[0]) == (2, "raysharded 0.1 (protocol 1")
    (tmp_path / "hurry").touch()
    entries, errors = new.ended()
    assert "Traceback" not in errors, errors
    assert told <= entries["started"][0]["resumed_after_step"] < STEPS
    assert "checkpoint" in entries["started"][0]["source"]
    assert entries["result"][0]["steps"] == STEPS
    new_driver, after = entries["started"][0]["driver"], claims(tmp_path)[len(before) :]
    assert [kind for kind, _ in after[:3]] == ["owner", "commit", "owner"]  # theirs, their checkpoint, and then ours
    assert [writer == new_driver for _, writer in after[:3]] == [False, False, True]
    assert entries["result"][0]["fingerprint"] == undisturbed(tmp_path)
    assert_no_slot_is_leaked()


@pytest.mark.long
def test_a_detached_driver_of_the_version_before_is_left_alone_and_named(
    tmp_path: Path, installed: Path, start: Start
) -> None:
    begun, errors = start(installed, "start").ended()
    assert begun["began"], errors
    attached, errors = start(ROOT, "attach").ended()
    assert attached["status"][0]["step"] >= 0, (attached, errors)
    (raised,) = attached["raised"]
    assert raised["error"] == "ClusterError", (attached, errors)
    assert "raysharded 0.1 (protocol 1; this is" in raised["text"]
    assert f"protocol {PROTOCOL})" in raised["text"]
    for program in [start(ROOT, how) for how in ("start", "job")]:
        again, errors = program.ended()
        assert again["raised"][0]["error"] == "RunOwnedElsewhere", (again, errors)
        assert "Traceback" not in errors
    (tmp_path / "hurry").touch()
    stopped, errors = start(installed, "stop").ended()
    assert "raised" not in stopped, (stopped, errors)


@pytest.mark.long
def test_a_run_that_was_stopped_in_the_version_before_is_started_when_its_driver_has_gone(
    tmp_path: Path, installed: Path, start: Start
) -> None:
    begun, errors = start(installed, "start").ended()
    assert begun["began"], errors
    stopped, errors = start(installed, "stop").ended()
    assert "raised" not in stopped, (stopped, errors)
    (tmp_path / "hurry").touch()
    again, errors = start(ROOT, "start").ended()  # waits: the old driver stays a minute for readers of the result
    assert again["began"], (again, errors)
    assert start(ROOT, "wait").ended()[0]["result"][0]["steps"] == STEPS


@pytest.mark.long
def test_a_detached_driver_that_is_started_again_in_another_version_leaves_the_run_to_the_next_one(
    tmp_path: Path, installed: Path, start: Start
) -> None:
    begun, errors = start(installed, "start").ended()
    assert begun["began"], errors
    journal = tmp_path / "upgraded" / "journal"
    wait_until(lambda: any('"kind":"step"' in path.read_text() for path in journal.glob("*.jsonl")), "a step")
    replace_in_place(installed)
    host = host_of(host_name("upgraded", str(tmp_path / "upgraded")))
    (pid,) = host_processes(installed)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_greeting(host._actor_id.hex()) is not None, "the driver in its new version")
    waited, errors = start(installed, "wait").ended()
    assert waited["raised"][0]["error"] == "RunFailed", (waited, errors)
    assert "was started with raysharded 0.1 (protocol 1; this is" in waited["raised"][0]["text"]
    (tmp_path / "hurry").touch()
    entries, errors = start(installed, "fit").ended()
    assert "checkpoint" in entries["started"][0]["source"], (entries, errors)
    assert entries["result"][0]["fingerprint"] == undisturbed(tmp_path)
