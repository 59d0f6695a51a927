"""Packing on a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raysharded.data.pack import pack
from raysharded.data.text import documents
from raysharded.ray_backend.packing import ray_tasks
from raysharded.ray_backend.packing.ray_tasks import RayTasks
from tests.cli.test_commands import invoke
from tests.paths import ROOT
from tests.ray.clusters import run_script

pytestmark = pytest.mark.ray


def _lines(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": "x" * (number % 90) + str(number)}) + "\n" for number in range(2000)))
    return path


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lines have several times as many parts as are packed at once."""
    pytest.importorskip("pandas")
    monkeypatch.setattr(documents, "_PART_BYTES", 20_000)
    monkeypatch.setattr(ray_tasks, "PARTS_AT_ONCE", 3)


@pytest.mark.usefixtures("cluster", "small_parts")
def test_tasks_of_a_cluster_write_the_bytes_that_one_process_writes(tmp_path: Path) -> None:
    source = _lines(tmp_path / "a.jsonl")
    alone = pack(source, tmp_path / "alone", tokens_per_file=10_000)
    assert pack(source, tmp_path / "ray", tokens_per_file=10_000, encoders=RayTasks) == alone
    told = invoke("data", "pack", "--ray", "--tokens-per-file", 10_000, source, tmp_path / "command")
    assert told.exit_code == 0, told.output
    assert "of the input" in told.stderr
    assert ray.is_initialized()
    stores = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "ray", "command")
    ]
    assert stores[0] == stores[1] == stores[2]


KILLED = """
import os
import signal
import sys

from raysharded.data.pack import pack
from raysharded.data.text import documents
from raysharded.ray_backend.packing import ray_tasks

documents._PART_BYTES, ray_tasks.PARTS_AT_ONCE = 20_000, 3


def stop(found):
    if found.shards == 4:
        os.kill(os.getpid(), signal.SIGKILL)


pack(sys.argv[1], sys.argv[2], tokens_per_file=10_000, encoders=ray_tasks.RayTasks, on_progress=stop)
"""


@pytest.mark.usefixtures("cluster", "small_parts")
def test_a_packing_by_tasks_that_was_killed_is_continued_by_tasks_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """The killed one is a process of the cluster, which takes some seconds to begin."""
    source, output = _lines(tmp_path / "a.jsonl"), tmp_path / "out"
    environment = {**os.environ, "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(source), str(output)]
    assert subprocess.run(command, env=environment, check=False, timeout=240).returncode == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in output.glob("*.tokens")}
    assert len(kept) == 4
    assert (output / "unfinished.json").exists()
    pack(source, output, tokens_per_file=10_000, encoders=RayTasks)
    pack(source, tmp_path / "alone", tokens_per_file=10_000)
    stores = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (output, tmp_path / "alone")]
    assert stores[0] == stores[1]
    assert len(stores[0]) > 2 * len(kept)
    assert {name: (output / name).stat().st_mtime_ns for name in kept} == kept, "they were not written again"


STARTED = """
import json
import sys

from raysharded.data.pack import pack
from raysharded.ray_backend.packing.ray_tasks import RayTasks

source, folder = sys.argv[1:]
stores = [pack(source, f"{folder}/{name}", **how) for name, how in (("alone", {}), ("ray", {"encoders": RayTasks}))]
print(json.dumps([str(store) for store in stores]))
"""


def test_without_a_cluster_one_is_started_even_if_the_file_of_an_ended_one_is_left(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    """It used to try the address in the file, where nobody answers, for ever."""
    pytest.importorskip("pandas")
    left = Path(own_cluster["RAY_TMPDIR"], "ray", "ray_current_cluster")
    left.parent.mkdir()
    left.write_text("127.0.0.1:1")
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    alone, on_ray = run_script(STARTED, str(source), str(tmp_path), environment=own_cluster)
    assert alone == on_ray
