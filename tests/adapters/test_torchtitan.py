"""torchtitan's `Trainer` in a session: its losses, and the bits of one worker after losses of workers."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raysharded as rs
from raysharded.data.streams.numbered_microbatches import MicrobatchNumbers
from raysharded.errors import ConfigError
from raysharded.task import TrainFunction
from tests.adapters.conftest import server_with
from tests.adapters.titan_programs import FOLDER, MICROBATCHES, SIZE, Training, config_of, write_assets
from tests.docs.blocks import page, programs
from tests.paths import ROOT
from tests.training.harness import Outcome, train

pytestmark = [
    pytest.mark.procs,
    pytest.mark.long,
    pytest.mark.skipif(not (FOLDER / "torchtitan").is_dir(), reason="`make test-long` installs torchtitan"),
]
STEPS, WITHIN = 20, 1e-4


@pytest.fixture(scope="module", autouse=True)
def _server_with_torchtitan() -> Iterator[None]:
    with server_with("tests.adapters.preloaded_torchtitan"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("torchtitan")
    write_assets(found)
    return found


@cache
def run(folder: Path, workers: int, steps: int, *kills: tuple[int, int, str]) -> Outcome:
    task = TrainFunction(Training(folder, "validated" if steps < STEPS else "others"))
    return train(workers, task=task, microbatches=MICROBATCHES, steps=steps, data=MicrobatchNumbers(), kills=kills)


def test_the_losses_are_those_of_torchtitan_on_two_ranks(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    around = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.plain_torchtitan", str(folder), str(STEPS)],
            env=os.environ | around | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]
    plain = json.loads((folder / "plain.json").read_text())
    assert len(plain) == STEPS
    assert plain[0] > 2 * plain[-1]
    assert run(folder, 2, STEPS).losses == pytest.approx(plain, abs=WITHIN)


@pytest.mark.parametrize("phase", ["data", "backward", "apply", "snapshot"])
def test_losses_of_workers_change_no_bit(folder: Path, phase: str) -> None:
    assert run(folder, 2, 5, (1, 3, phase)).bits == run(folder, 1, 5).bits
    validated = set((folder / "validated").read_text().splitlines())  # by all workers of all runs, some twice
    assert [line.split()[0] for line in sorted(validated)] == ["1", "2", "4"]


def test_the_page_coming_from_torchtitan_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = programs(page("coming-from-torchtitan.md"))
    stand_in = ours.replace("from torchtitan.config import", "from tests.adapters.titan_programs import")
    (tmp_path / "coming_from_torchtitan.py").write_text(stand_in)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(tmp_path))
    program = importlib.import_module("coming_from_torchtitan")
    trainer: rs.ElasticTrainer = program.elastic_trainer([str(folder), "5"])
    assert (trainer.batch.global_batch_size, trainer.batch.microbatch_size) == (SIZE * MICROBATCHES, SIZE)
    found = train(
        2, task=trainer.task, microbatches=MICROBATCHES, steps=5, data=MicrobatchNumbers(), kills=[(1, 2, "apply")]
    )
    assert found.bits == run(folder, 1, 5).bits


SETTINGS: dict[str, Any] = {
    "checkpoint.enable": True,
    "compile.enable": True,
    "optimizer.implementation": "fused",
    "parallelism.context_parallel_degree": 2,
    "parallelism.data_parallel_replicate_degree": 2,
    "parallelism.data_parallel_shard_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.spmd_backend": "spmd_types",
    "parallelism.tensor_parallel_degree": 2,
    "training.disable_cuda_graphs": False,
    "training.enable_cpu_offload": True,
    "training.global_batch_size": -1,
    "training.local_batch_size": 3,
    "training.mixed_precision_param": "bfloat16",
    "training.steps": 7,
}


def test_settings_that_cannot_be_kept_are_refused_by_their_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from raysharded.adapters.torchtitan import require_supported

    batch = rs.BatchConfig(global_batch_size=SIZE * MICROBATCHES, microbatch_size=SIZE)
    session: Any = SimpleNamespace(batch=batch, max_steps=5, _job=SimpleNamespace(engine=rs.EngineConfig()))
    require_supported(config_of(folder, 5), session)
    for name, value in SETTINGS.items():
        config, (part, setting) = config_of(folder, 5), name.split(".")
        setattr(getattr(config, part), setting, value)
        with pytest.raises(ConfigError, match=rf"Trainer\.Config: {name}={value!r} cannot be kept in a session: "):
            require_supported(config, session)
