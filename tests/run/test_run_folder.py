"""The identity of a run's folder: a run writes nothing where its folder is not."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import NoSuchKey, Storage, open_storage
from raysharded.errors import StorageError
from raysharded.journal.log import read
from raysharded.ownership.run_folder import RunFolder, identify, run_storage
from raysharded.report.loader import load
from raysharded.testing import processes
from tests.training.harness import SmallTask, samples, train

STEPS = 40
OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "write": lambda storage: storage.write("checkpoints/b", [b"x"]),
    "put": lambda storage: storage.put_if_absent("claims/1", b"x"),
    "delete": lambda storage: storage.delete(["checkpoints/a"]),
    "list": lambda storage: storage.list("claims"),
    "read": lambda storage: storage.read("checkpoints/a"),
    "size": lambda storage: storage.size("checkpoints/a"),
}


def test_a_folder_keeps_the_identity_that_it_got_first(tmp_path: Path) -> None:
    first = identify(run_storage(str(tmp_path)))
    assert identify(run_storage(str(tmp_path))) == first
    assert [path.name for path in (tmp_path / "claims").iterdir()] == [f"identity-{first}"]


@pytest.mark.parametrize("away", ["missing", "empty", "another"])
def test_nothing_is_done_where_the_folder_of_the_run_is_not(tmp_path: Path, away: str) -> None:
    """As with an unmounted share: its place is empty."""
    run = tmp_path / "run"
    storage = run_storage(str(run))
    identity = identify(storage)
    storage.write("checkpoints/a", [b"x"])
    run.rename(tmp_path / "unmounted")
    if away == "empty":
        run.mkdir()
    elif away == "another":
        identify(run_storage(str(run)))
    before = sorted(tmp_path.rglob("*"))
    for using in (storage, run_storage(str(run), identity)):
        for operation in OPERATIONS.values():
            with pytest.raises(StorageError, match="what is there is not the run's folder") as raised:
                operation(using)
            assert not isinstance(raised.value, NoSuchKey)
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(run, ignore_errors=True)
    (tmp_path / "unmounted").rename(run)
    assert storage.read("checkpoints/a") == b"x"


def test_other_storages_have_no_identity() -> None:
    storage = run_storage("memory://run-folder/run")
    assert not isinstance(storage, RunFolder)
    assert identify(storage) == ""
    assert storage.list() == []


def test_a_run_whose_folder_is_away_for_a_while_trains_on_and_makes_nothing_in_its_place(tmp_path: Path) -> None:
    run, unmounted = tmp_path / "shared" / "run", tmp_path / "unmounted"
    heard: list[str] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        heard.append(kind)
        if kind == "step" and fields["step"] == 5:
            run.rename(unmounted)
        elif kind == "storage_failing":
            assert "what is there is not the run's folder" in fields["error"]
            assert not run.exists()
            unmounted.rename(run)

    trainer = rs.ElasticTrainer(
        task=SmallTask(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=2),
        run=rs.RunConfig(
            name="run",
            storage_path=str(tmp_path / "shared"),
            max_steps=STEPS,
            checkpoint=rs.CheckpointConfig(every_steps=7),
        ),
    )
    result = processes.fit(trainer, listen=listen)
    assert heard.count("storage_failing") == 1
    steps = Counter(entry["step"] for entry in read(open_storage(str(run))) if entry["kind"] == "step")
    assert steps == dict.fromkeys(range(1, STEPS + 1), 1)
    assert result.fingerprint == train(1, task=SmallTask(), data=samples(), steps=STEPS, microbatches=2).fingerprint
    report = load(str(run))
    assert report.ok
    assert report.ledger is not None
    assert (report.ledger.samples_lost, report.ledger.steps_checked) == (0, STEPS)
    assert {record.step for record in report.summary.committed}.isdisjoint(
        record.step for record in report.summary.checkpoints if record.problem and not record.prefix
    )
