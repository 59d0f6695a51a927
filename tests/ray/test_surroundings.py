"""Processes that lack what others have: streams, a working directory, a home, rights; and what cannot be sent."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

import raysharded as rs
from raysharded.actors.process import surroundings
from raysharded.cli import machine
from raysharded.errors import ConfigError
from raysharded.locations import local_path, with_home
from raysharded.ray_backend import cluster
from tests.paths import ROOT

SCRIPT = """
import os, sys
import raysharded as rs
from tests.faults.on_fake_nfs import Ramps, Squares

folder, what = sys.argv[1:]
trainer = rs.ElasticTrainer(
    task=Squares(), data=Ramps(), batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
    scaling=rs.ScalingConfig(num_workers=1, cpus_per_worker=0.25),
    run=rs.RunConfig(name=what, storage_path=folder, max_steps=3),
)
if what == "gone":
    os.mkdir(folder + "/here")
    os.chdir(folder + "/here")
    os.rmdir(folder + "/here")
result = trainer.fit()
with open(folder + "/told", "w") as file:
    file.write(result.fingerprint)
"""


def run(folder: Path, what: str, shell: str = "", /, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """The script with other variables (None: without it), and with a shell's redirections."""
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    environment = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", SCRIPT, str(folder), what]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long  # test_local_ray.py has another
@pytest.mark.ray
@pytest.mark.clusters
def test_fit_needs_no_standard_streams(tmp_path: Path) -> None:
    done = run(tmp_path, "closed", "<&- >&- 2>&-")
    assert done.returncode == 0
    assert len((tmp_path / "told").read_text()) == 32


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize(
    ("what", "home", "told"),
    [
        ("gone", "/tmp", "the working directory of this process was removed. Start it in a folder that exists (`cd`)"),
        ("homeless", "/proc", "Ray keeps a token in ~/.ray/auth_token, and HOME=/proc cannot be written by user "),
    ],
)
def test_what_ray_lacks_in_order_to_start_is_one_sentence(tmp_path: Path, what: str, home: str, told: str) -> None:
    auth: dict[str, str | None] = {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None}
    done = run(tmp_path, what, **{**auth, "HOME": home})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ClusterError: Ray cannot be started on this machine: ")
    assert told in last
    assert "Traceback" not in done.stderr


class Guarded:
    def __init__(self) -> None:
        self.parts = {"first": [1, threading.Lock()]}


def test_what_cannot_be_sent_is_named() -> None:
    task = Guarded()
    with pytest.raises(ConfigError, match=r"^task\.parts\['first'\]\[1\] \(_thread\.lock\) cannot be sent to other "):
        cluster.refuse_unsendable({"data": [1, 2], "task": task})
    taken = threading.Lock()
    with pytest.raises(ConfigError, match=r"^taken in preemption_notices\[0\] \(_thread\.lock\) cannot be sent"):
        cluster.refuse_unsendable({"preemption_notices": (lambda: taken.locked() or 1,)})
    cluster.refuse_unsendable({"task": 1, "data": "x"})


GUARD = threading.Lock()


def two(session: Any, lr: float) -> None:
    """A training function with a setting."""


class Called:
    def __call__(self, session: Any) -> None:
        """As `two`."""


@pytest.mark.parametrize("function", [partial(two, lr=1.0), partial(print, Called()), Called().__call__, two])
def test_the_module_of_a_function_is_sent_and_none_of_the_standard_library(function: Any) -> None:
    before = set(ray.cloudpickle.list_registry_pickle_by_value())
    try:
        cluster.carry_user_code(function, logging.getLogger("a"), partial(partial, print))
        assert set(ray.cloudpickle.list_registry_pickle_by_value()) - before == {__name__} - before
        cluster.refuse_unsendable({"train_fn": function})
        assert b"Called" in (sent := ray.cloudpickle.dumps(function)) or b"session" in sent, "by value"
    finally:
        for name in set(ray.cloudpickle.list_registry_pickle_by_value()) - before:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[name])


def test_what_a_function_holds_is_named_in_its_words_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(session: Any) -> None:
        def inner() -> None:
            GUARD.acquire()

        inner()

    trainer = rs.ElasticTrainer(
        train_fn=partial(train),
        batch=rs.BatchConfig(global_batch_size=2, microbatch_size=1),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(name="unsendable", storage_path=str(tmp_path), max_steps=1),
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # no cluster is there
    with pytest.raises(
        ConfigError, match=r"^GUARD in train_fn\.func \(_thread\.lock\) .* in the function, or leave it"
    ):
        trainer.fit(progress=False)


def test_a_part_of_large_data_is_tried_before_ray_starts() -> None:
    cluster.refuse_unsendable({"data": [*range(40_000), threading.Lock()]}, 1000)
    with pytest.raises(ConfigError, match=r"^data\[40000\] .* it is used, in the dataset's __getitem__, or leave"):
        cluster.refuse_unsendable({"data": [*range(40_000), threading.Lock()]}, 1e9)


@pytest.mark.parametrize("home", ["", None])
def test_a_tilde_that_stands_for_nothing_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # a user without a line
    else:
        monkeypatch.setenv("HOME", home)
    for path in ("~/runs", "~"):
        with pytest.raises(ConfigError, match=r"~ is no folder here \(HOME is not set to one"):
            local_path(path)
    with pytest.raises(ConfigError, match="~nobody_of_that_name is no folder here"):
        local_path("~nobody_of_that_name/runs")
    assert local_path("./~/runs") == f"{tmp_path}/~/runs"
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    assert (with_home("~/runs"), with_home("a/~"), local_path("~/runs")) == ("/home/one/runs", "a/~", "/home/one/runs")


def test_a_relative_path_in_a_removed_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="'runs' is a relative path, and the working directory of this process was"):
        local_path("runs")
    assert local_path("/runs") == "/runs"
    found = machine.home()
    assert (found.ok, found.advice) == (False, "Start it in a folder that exists (`cd`).")


def test_doctor_knows_where_ray_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert surroundings.home_problem() == surroundings.session_problem() == ""
    assert machine.home().found == f"{tmp_path}, writable"
    monkeypatch.setenv("HOME", "/proc/self/status")  # no folder
    assert "Set HOME to a folder that can be written, or RAY_AUTH_MODE=disabled" in surroundings.home_problem()
    found = machine.home()
    assert (found.ok, found.found.startswith("Ray keeps a token in ~/.ray/auth_token, and HOME=")) == (False, True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert (surroundings.home_problem(), machine.home().ok) == ("", True)
    monkeypatch.setenv("RAY_TMPDIR", "/proc/self/status")
    assert machine.home().found.startswith("Ray keeps its sessions in /proc/self/status/ray, which cannot be written")


def test_an_error_of_rays_start_is_explained_by_what_is_missing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    refused = PermissionError(errno.EACCES, "Permission denied", "/tmp/ray")
    monkeypatch.setenv("RAY_TMPDIR", "/proc/self/status")  # no folder
    assert surroundings.why_not_started(refused).startswith(
        "Ray cannot be started on this machine: Ray keeps its sessions in /proc/self/status/ray, which cannot be "
        f"written by user {os.getuid()}. Set RAY_TMPDIR to a folder with a short path that can be written "
        "(PermissionError: "
    )
    failed = RuntimeError("The raylet exited.")
    assert surroundings.why_not_started(failed) == "Ray did not start: RuntimeError: The raylet exited."
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert surroundings.why_not_started(refused).startswith("Ray did not start: PermissionError: ")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # a user without a line
    with pytest.raises(RuntimeError) as homeless:
        Path.home()
    told = f"Ray keeps a token in ~/.ray/auth_token, and user {os.getuid()} has no home: HOME is not set"
    assert surroundings.home_problem().startswith(told)
    assert surroundings.why_not_started(homeless.value).startswith(f"Ray cannot be started on this machine: {told}")
    assert machine.home().found.startswith(told)
