"""The writers in docs/metrics.md, unchanged, against the real packages in their modes without a server.

W&B and MLflow are some 100 MB and not among the packages that the tests install: where they are missing, their tests
are skipped, with this reason.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysharded.metrics import Beginning, MetricsWriter, RunEvent, StepMetrics, grafana_dashboard
from tests.paths import DOCS, ROOT

TEXT = (DOCS / "metrics.md").read_text()


def example(name: str) -> str:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if name in block)
    return str(code)


def writer(name: str) -> MetricsWriter:
    names: dict[str, Any] = {}
    exec(example(f"class {name}"), names)  # noqa: S102 - our own documentation
    made: MetricsWriter = names[name]()
    return made


def tell(told: MetricsWriter, after_step: int, last: int) -> None:
    """Write a driver's steps; each loss depends on the driver."""
    told.begin(Beginning(run="gpt", url="runs/gpt", after_step=after_step, settings={"batch": {"seed": 1}}))
    for number in range(after_step + 1, last + 1):
        values = {"loss": number + after_step / 4, "metrics/accuracy": 0.5}
        told.step(StepMetrics(step=number, values=values, at=1000.0 + number))
    told.event(RunEvent(kind="checkpoint", step=last, text="committed", fields={}, at=2000.0))
    told.close()


def test_each_writer_in_the_docs_is_short() -> None:
    for name in ("Wandb", "Mlflow"):
        lines = [line for line in example(f"class {name}").splitlines() if line.strip()]
        assert len(lines) <= 16


def test_the_dashboard_is_written_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example("grafana_dashboard"), {})  # noqa: S102 - our own documentation
    assert json.loads((tmp_path / "raysharded.json").read_text()) == json.loads(grafana_dashboard())


def wandb_records(path: Path) -> Iterator[bytes]:
    """W&B's file: a head of 7 bytes, then LevelDB's log format (blocks of 32 KiB; checksum, length, type, data)."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if part in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.procs
def test_wandb_offline_has_the_curves_of_both_drivers(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    from wandb.proto import wandb_internal_pb2

    for after_step, last in ((0, 3), (2, 4)):  # W&B keeps to one folder per process, and writes until that ends
        told = f"from tests.metrics.test_docs import tell, writer; tell(writer('Wandb'), {after_step}, {last})"
        environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", told], cwd=tmp_path, env=environment, check=True, timeout=300)
    found = []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/run-gpt.wandb")):
        for data in wandb_records(path):
            record = vars(wandb_internal_pb2)["Record"]()
            record.ParseFromString(data)
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            if "loss" in row:
                found.append((row["step"], row["loss"], row["metrics/accuracy"]))
    assert sorted(found) == [(1, 1.0, 0.5), (2, 2.0, 0.5), (3, 3.0, 0.5), (3, 3.5, 0.5), (4, 4.5, 0.5)]


@pytest.mark.long
@pytest.mark.slow
def test_mlflow_in_a_folder_has_one_run_of_both_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    for after_step, last in ((0, 3), (2, 4)):
        tell(writer("Mlflow"), after_step, last)
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.5), (4, 4.5)]
    assert run.data.metrics["metrics/accuracy"] == 0.5
    assert run.data.tags["checkpoint"] == "committed"
