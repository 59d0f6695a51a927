"""torchtitan's debug model on one GPU, by torchtitan and in a session: the same losses, and the time of a step."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raysharded.data.streams.numbered_microbatches import MicrobatchNumbers
from raysharded.task import TrainFunction
from tests.adapters.titan_programs import FOLDER, MICROBATCHES, Training, complete_torch, write_assets
from tests.gpu.shared_gpu import needs
from tests.paths import ROOT
from tests.training.harness import train

pytestmark = [
    *needs(1),
    pytest.mark.usefixtures("gpu_itself"),
    pytest.mark.skipif(not (FOLDER / "torchtitan").is_dir(), reason="torchtitan is not installed: `make test-gpu`"),
]
STEPS, WARM_UP, WITHIN = 30, 10, 1e-4


def with_torchtitan() -> None:
    """In a worker's process: find torchtitan."""
    sys.path.append(str(FOLDER))
    complete_torch()


def test_a_session_trains_torchtitans_debug_model_with_its_losses(tmp_path: Path, record_property: Any) -> None:
    folder = tmp_path / "torchtitan"
    write_assets(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    around = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "tests.adapters.plain_torchtitan", str(folder), str(STEPS), "gpu"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=600, env=os.environ | around | {"PYTHONPATH": str(ROOT)})
    task = TrainFunction(Training(folder, "others"))
    settings: dict[str, Any] = {"microbatches": MICROBATCHES, "steps": STEPS, "data": MicrobatchNumbers()}
    found = train(1, use_gpu=True, prepare=with_torchtitan, task=task, **settings)
    assert found.losses == pytest.approx(json.loads((folder / "plain.json").read_text()), abs=WITHIN)
    times = json.loads((folder / "times.json").read_text())
    plain = statistics.median([after - before for before, after in pairwise(times)][WARM_UP:])
    ours = statistics.median([sum(step["seconds"].values()) for step in found.of("step")][WARM_UP:])
    record_property("a step", f"{1e3 * ours:.1f} ms, torchtitan alone {1e3 * plain:.1f} ms")
