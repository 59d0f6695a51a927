"""The page coming-from-hugging-face.md: both sides of its diff run, and ours has the same bits at every size."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.testing import processes
from tests.docs.blocks import page, programs as read
from tests.training.harness import SEQUENCE, Tokens

pytestmark = pytest.mark.procs
PAGE = page("coming-from-hugging-face.md")
FEWER = {
    "max_steps=1_000": "max_steps=3",
    "global_batch_size=64": "global_batch_size=8",
    "logging_steps=10": "logging_steps=1",
}


def short(program: str) -> str:
    """The page's program for three steps of eight samples."""
    for long, few in FEWER.items():
        program = program.replace(long, few)
    return program


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """(theirs, ours), in a folder with the rows that they read."""
    datasets = pytest.importorskip("datasets")
    tokens = Tokens()
    rows = [tokens[index].tolist() for index in range(40)]
    assert len(rows[0]) == SEQUENCE + 1
    datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}).save_to_disk(tmp_path / "rows")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs, ours = read(PAGE)
    return short(theirs), short(ours)


def test_their_side_trains(programs: tuple[str, str], tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "theirs"}
    exec(compile(programs[0], PAGE.name, "exec"), names)  # noqa: S102 - our own documentation
    names["main"]()
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()


def test_our_side_trains_with_the_same_bits_at_every_number_of_workers(
    programs: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "coming_from_hugging_face.py").write_text(programs[1])
    shown: rs.ElasticTrainer = importlib.import_module("coming_from_hugging_face").trainer
    found = set()
    try:
        for workers in (1, 2):
            trainer = rs.ElasticTrainer(
                train_fn=shown.task.function,  # type: ignore[attr-defined]
                data=shown.data,
                batch=shown.batch,
                scaling=dataclasses.replace(shown.scaling, num_workers=workers, use_gpu=False),
                engine=rs.EngineConfig(prefetch=workers > 1),  # a single one reads its data itself
                run=dataclasses.replace(shown.run, storage_path=str(tmp_path / f"runs{workers}")),
            )
            result = processes.fit(trainer)
            assert result.steps == 3
            found.add(result.fingerprint)
    finally:
        del sys.modules["coming_from_hugging_face"]
    assert len(found) == 1
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()
