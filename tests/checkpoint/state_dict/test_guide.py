"""The guide and the example work as documented."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from raysharded.checkpoint import api
from tests.cases import tried_each_time
from tests.forked import in_a_fork
from tests.paths import DOCS, ROOT


def test_every_snippet_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 8
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/checkpoints.md", "exec"), names)  # noqa: S102 - the guide's own text
    assert names["epoch"] == 4
    assert api.open(tmp_path / "runs/demo").step == 200


def by_torchrun(ranks: int, folder: str) -> str:
    """The example's output under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*command, str(ROOT / "examples" / "checkpoint_fsdp2.py"), folder],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def by_hand(ranks: int, folder: str) -> str:
    """The example's output in processes with the environment that torchrun gives them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(ranks) as pool:
        printed = pool.map(lambda rank: in_a_fork(train, rank, ranks, store.port, folder), range(ranks))
        return "".join(printed)


def train(rank: int, ranks: int, port: int, folder: str) -> str:
    from examples.checkpoint_fsdp2 import main

    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(folder)
    return printed.getvalue()


@pytest.mark.procs
@pytest.mark.parametrize("launched", tried_each_time([by_hand], of=[by_hand, by_torchrun]))
def test_the_example_resumes_at_another_number_of_ranks(tmp_path: Path, launched: Callable[[int, str], str]) -> None:
    assert "steps 1 to 30 on 2 ranks" in launched(2, str(tmp_path / "run"))
    assert "steps 31 to 60 on 1 ranks" in launched(1, str(tmp_path / "run"))
    with api.open(tmp_path / "run") as opened:
        assert opened.step == 60
        assert opened.read("optimizer.state.0.weight.step").item() == 60.0
        assert opened.metadata["metrics"]["loss"] < 10
        assert opened.tensors["model.0.weight"].shape == (64, 16)
        assert bool(torch.isfinite(opened.read("model.2.weight")).all())
