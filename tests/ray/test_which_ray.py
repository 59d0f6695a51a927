"""The Ray that is used, and the reason that is given: Ray's own rules, with real clusters of `ray start`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raysharded.cli import machine
from raysharded.errors import ClusterError
from raysharded.ray_backend import cluster
from raysharded.ray_backend.which_ray import choose
from tests.paths import ROOT
from tests.ray.clusters import refused, run_script, with_token
from tests.ray.leftovers import processes_marked
from tests.ray.test_whose_ray import listener, note


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's folder of temporary files in RAY_TMPDIR, empty; this process is connected to nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return tmp_path / "ray"


@pytest.mark.parametrize("given", [None, ""])
def test_an_empty_ray_address_is_as_none(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    choice = choose(given)
    assert choice.address == ""
    why = f"no cluster of yours was found in RAY_TMPDIR={folder.parent}; RAY_ADDRESS=HOST:PORT names one"
    assert str(choice) == f"a separate Ray on this machine ({why})"
    assert machine.which_ray().found == str(choice), "doctor has the same words"


def test_what_names_the_ray_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(choose("local")) == "a separate Ray on this machine (as the given address says)"
    assert str(choose("10.0.0.1:6379")) == "the Ray at 10.0.0.1:6379, as the given address says"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert str(choose()) == "the Ray at 10.0.0.2:6379, as RAY_ADDRESS says"
    assert str(choose("10.0.0.1:6379")) == "the Ray at 10.0.0.1:6379, as the given address says"
    assert str(choose("auto")) == str(choose()), "as in Ray, RAY_ADDRESS precedes the keyword"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert str(choose()) == "a separate Ray on this machine (as RAY_ADDRESS=local says)"


def test_the_file_of_a_dead_cluster_names_none(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    note(folder, address)
    assert choose().address == ""
    with pytest.raises(ClusterError, match='"auto" names no Ray cluster: no cluster of yours was found'):
        choose("auto")


def test_what_has_taken_the_port_of_a_dead_cluster_is_no_cluster(folder: Path) -> None:
    """Redis, for example, has Ray's port 6379. Ray itself tries for a minute to speak with it."""
    with listener() as (_, address):
        file = note(folder, address)
        choice = choose()
    assert choice.address == ""
    assert f"what answers at {address}, which {file} names, is no Ray of this machine" in str(choice)


LOOKS = """
import json, os, sys
import ray
from typer.testing import CliRunner
from raysharded.cli import app
from raysharded.cli.machine import which_ray
from raysharded.testing.ray_nodes import descendants

told = {}
for address in ("local", ""):
    os.environ["RAY_ADDRESS"] = address
    for command in (["status", "gpt"], ["attach", "gpt"], ["runs", "."], ["report", "gpt"]):
        told[address, command[0]] = CliRunner().invoke(app, command).output
    told[address, "used"] = which_ray().found
told = {" ".join(key): value for key, value in told.items()}
told["children"] = [open(f"/proc/{pid}/comm").read() for pid in descendants(os.getpid())]
told["connected"] = ray.is_initialized()
print(json.dumps(told))
"""


def test_a_look_up_starts_no_ray(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", LOOKS], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["children"], told["connected"]) == ([], False)
    for address, why in (("local", "as RAY_ADDRESS=local says"), ("", "no cluster of yours was found")):
        assert f"could know a run named 'gpt' ({why}" in " ".join(told[f"{address} status"].split())
        assert told[f"{address} used"].startswith(f"a separate Ray on this machine ({why}")


@contextlib.contextmanager
def started(environment: dict[str, str], *arguments: str) -> Iterator[None]:
    """A cluster of `ray start --head`, which the fixture of the environment ends."""
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--port=0", "--num-cpus=2"]
    subprocess.run(
        [*command, "--include-dashboard=false", "--disable-usage-stats", *arguments],
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    yield


STARTS = """
import json, logging, sys
from pathlib import Path
import ray
from tests.ray.test_main_job import trainer

said = []

class Heard(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("raysharded.driver").addHandler(Heard())
logging.getLogger("raysharded.driver").setLevel("INFO")
trainer(Path(sys.argv[1]), 1, steps=2).start().wait()
print(json.dumps({"said": said, "address": ray.get_runtime_context().gcs_address}))
"""


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize("how", ["--temp-dir", pytest.param("RAY_TMPDIR", marks=pytest.mark.long)])
def test_a_cluster_with_a_folder_of_its_own_is_used_and_no_second_ray_is_started(
    how: str, tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    place = Path(own_cluster["RAY_TMPDIR"]) / "ray"
    environment = with_token(own_cluster, tmp_path)
    marker = f"RAYSHARDED_TEST={environment['RAYSHARDED_TEST']}"
    if how == "--temp-dir":
        del environment["RAY_TMPDIR"]
        environment["TMPDIR"] = str(tmp_path)  # nor does Ray's usual folder name a cluster of somebody else
    with started(environment, *([f"--temp-dir={place}"] if how == "--temp-dir" else [])):
        address = (place / "ray_current_cluster").read_text()
        found: dict[str, Any] = run_script(STARTS, str(tmp_path), environment=environment)
        status = [sys.executable, "-m", "raysharded", "status", "job", "--json"]
        asked = subprocess.run(status, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        raylets = [line for line in processes_marked(marker) if "/raylet" in line.split()[0]]
        (tmp_path / "other").mkdir()
        without_token = refused(address, tmp_path / "other")
    assert found["address"] == address
    told = f"on the Ray at {address}, which runs on this machine ({place})"
    others = r"(, the newest of \d+ that do: RAY_ADDRESS=HOST:PORT names one)?"  # of other tests
    assert re.fullmatch(rf"{re.escape(told)}{others}: starting the driver of run job", found["said"][0])
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["name"] == "job"
    assert len(raylets) == 1, "no second Ray is beside it"
    assert not [line for line in found["said"] if "Token" in line]
    assert "set RAY_AUTH_MODE=token here, and have the token of ~/.ray/auth_token" in without_token


@pytest.mark.ray
def test_a_process_that_is_connected_uses_that_cluster(cluster_of_tests: str) -> None:
    assert str(cluster.find_choice()) == f"the Ray at {cluster_of_tests}, to which this process is connected"


@pytest.fixture
def cluster_of_tests(cluster: None) -> str:
    """Address of the Ray that all tests share."""
    return str(ray.get_runtime_context().gcs_address)
