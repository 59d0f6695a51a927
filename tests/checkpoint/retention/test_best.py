"""The best checkpoint of a run is the one that retention keeps as the best, and its number can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import Best, Keep, best_checkpoint, list_checkpoints, open_storage, pin, prune
from raysharded.checkpoint.retention.best import by_value, recorded
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.testing.storages import CountingStorage
from tests.checkpoint.retention.runs import Run, ref_of

LOWEST = Best(metric="evaluation.loss", mode="min")


@pytest.mark.parametrize(("mode", "steps"), [("min", [30, 10, 20, 40]), ("max", [40, 20, 10, 30])])
def test_checkpoints_are_ordered_by_the_recorded_rule_and_of_equal_ones_the_newest_is_best(
    tmp_path: Path, mode: Any, steps: list[int]
) -> None:
    rule = Best(metric="evaluation.loss", mode=mode)
    run = Run(open_storage(str(tmp_path)), recorded(rule))
    for step, loss in ((10, 2.0), (20, 3.0), (30, 1.0), (40, 4.0)):
        run.save(step, {"evaluation.loss": loss, "loss": 0.0})
    run.save(50, {"loss": -1.0})  # without the number
    run.save(60, {"evaluation.loss": True})  # no number
    found = by_value(run.storage, list_checkpoints(run.storage))
    assert [one.ref.step for one in found] == steps
    best = best_checkpoint(run.storage)
    assert best is not None
    assert (best.metric, best.checkpoint.step) == ("evaluation.loss", steps[0])
    run.save(70, {"evaluation.loss": best.value})
    newer = best_checkpoint(run.storage)
    assert newer is not None
    assert (newer.ref.step, newer.value) == (70, best.value)


def test_the_best_is_what_retention_keeps(tmp_path: Path) -> None:
    run = Run(open_storage(str(tmp_path)), recorded(LOWEST))
    for step, loss in ((10, 2.0), (20, 1.5), (30, 1.75), (40, 1.9)):
        run.save(step, {"evaluation.loss": loss})
        prune(run.storage, Keep(last=1, best=LOWEST))
    best = best_checkpoint(run.storage)
    assert best is not None
    assert [ref.step for ref in list_checkpoints(run.storage) if ref.complete] == [20, 40]
    assert (best.ref.step, best.value) == (20, 1.5)


def test_what_is_being_deleted_damaged_or_never_committed_is_not_the_best(tmp_path: Path) -> None:
    run = Run(open_storage(str(tmp_path)), recorded(LOWEST))
    prefixes = [
        run.save(step, {"evaluation.loss": loss}) for step, loss in ((10, 4.0), (20, 1.0), (30, 2.0), (40, 3.0))
    ]
    run.unclaimed(50)
    marked = ref_of(run.storage, prefixes[1])
    pin(run.storage, "held", marked)
    assert not retire(run.storage, marked, number=0)  # pinned: it is marked, and still there
    manifest = tmp_path / prefixes[2] / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert [one.ref.step for one in by_value(run.storage, list_checkpoints(run.storage))] == [40, 10]


def test_a_rule_may_be_given_and_without_any_one_manifest_is_read(tmp_path: Path) -> None:
    storage = CountingStorage(open_storage(str(tmp_path)))
    run = Run(storage)
    for step in (10, 20, 30):
        run.save(step, {"loss": step / 10})
    refs = list_checkpoints(storage)
    storage.reads.clear()
    assert by_value(storage, refs) == []
    assert {key for key, _, _ in storage.reads} == {f"{refs[-1].prefix}/manifest.json"}
    best = best_checkpoint(storage, Best(metric="loss", mode="max"))
    assert best is not None
    assert (best.ref.step, best.value) == (30, 3.0)


@pytest.mark.parametrize(
    "told", ["loss", ["loss", "min"], ["loss", "least", 1], [1, "min", 1], ["loss", "min", "x"], {}]
)
def test_a_record_that_is_no_rule_is_none(tmp_path: Path, told: Any) -> None:
    run = Run(open_storage(str(tmp_path)), {"keep_best": told})
    run.save(10, {"loss": 1.0})
    assert best_checkpoint(run.storage) is None


def test_the_newest_checkpoint_decides_which_rule_holds(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    run = Run(storage, recorded(Best(metric="loss", mode="min")))
    run.save(10, {"loss": 1.0})
    run.save(20, {"loss": 2.0})
    run.metadata = recorded(Best(metric="loss", mode="max"))
    run.save(30, {"loss": 1.5})
    best = best_checkpoint(storage)
    assert best is not None
    assert best.ref.step == 20
    run.metadata = {}  # keep_best was removed
    run.save(40, {"loss": 9.0})
    assert best_checkpoint(storage) is None
