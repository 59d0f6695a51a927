"""What the guide and the example say works as they say it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raysharded.checkpoint import api

ROOT = Path(__file__).parents[3]


def test_every_snippet_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 7
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/checkpoints.md", "exec"), names)  # noqa: S102 - the guide's own text
    assert names["epoch"] == 4
    assert api.open(tmp_path / "runs/demo").step == 200


def torchrun(ranks: int, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.procs
def test_the_example_resumes_at_another_number_of_ranks(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "checkpoint_fsdp2.py")
    assert "steps 1 to 30 on 2 ranks" in torchrun(2, example, str(tmp_path / "run"))
    assert "steps 31 to 60 on 1 ranks" in torchrun(1, example, str(tmp_path / "run"))
    with api.open(tmp_path / "run") as opened:
        assert opened.step == 60
        assert opened.read("optimizer.state.0.weight.step").item() == 60.0
        assert opened.metadata["metrics"]["loss"] < 10
        assert opened.tensors["model.0.weight"].shape == (64, 16)
        assert bool(torch.isfinite(opened.read("model.2.weight")).all())
