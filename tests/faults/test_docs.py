"""The examples of docs/testing.md run unchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raysharded as rs
from raysharded.run import Result
from raysharded.testing import Chaos, faults
from raysharded.testing.processes import ProcessLauncher
from tests.paths import DOCS
from tests.training.harness import GptTask, Tokens

pytestmark = [pytest.mark.procs, pytest.mark.alone]

PAGE = (DOCS / "testing.md").read_text(encoding="utf-8")
STEPS = 5


def make_trainer(name: str, folder: Path) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(2, 3)),
        run=rs.RunConfig(name=name, storage_path=str(folder), max_steps=STEPS),
    )


def fit_with_processes(trainer: rs.ElasticTrainer, *, context: Callable[[rs.Run], Chaos]) -> Result:
    run = trainer.start_with(ProcessLauncher)
    with context(run):
        return run.wait()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's examples define."""
    module = ModuleType("my_training")
    module.make_trainer = make_trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_training", module)
    monkeypatch.setattr(rs.ElasticTrainer, "fit", fit_with_processes)  # in place of Ray's
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/testing.md", "exec"), names)  # noqa: S102 - the page's own text
    return names


def test_the_page_s_test_passes(shown: dict[str, Any], tmp_path: Path) -> None:
    shown["test_a_worker_killed_in_backward_changes_nothing"](tmp_path)


def test_the_page_s_chaos_runs(shown: dict[str, Any], tmp_path: Path) -> None:
    result = shown["train_in_chaos"](tmp_path)
    assert isinstance(result, Result)
    assert result.report().ok


def test_the_page_names_every_kind_and_phase_and_no_other() -> None:
    tables = [re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in PAGE.split("\n## ")[1].split("| phase |")]
    kinds, phases = ([name for row in rows for name in re.findall(r"`(\w+)`", row)] for rows in tables)
    assert sorted(kinds) == sorted(faults.KINDS)
    assert phases == list(faults.PHASES)
