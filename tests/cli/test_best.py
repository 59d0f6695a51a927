"""The best checkpoint of a run in the commands: marked in lists, and chosen with --best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raysharded.checkpoint import Best, Storage, list_pins, open_checkpoint, open_storage
from raysharded.checkpoint.retention.best import recorded
from tests.checkpoint.retention.runs import Run
from tests.cli.test_commands import fail, invoke, succeed


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run that keeps the best by its evaluation's loss: step 20."""
    storage = open_storage(str(tmp_path / "run"))
    run = Run(storage, recorded(Best(metric="evaluation.loss", mode="min")))
    for step, loss in ((10, 2.5), (20, 1.25), (30, 1.75)):
        run.save(step, {"evaluation.loss": loss})
    run.save(40, {"loss": 1.0})
    run.unfinished(50)
    return storage


def test_ls_shows_the_number_of_each_and_marks_the_best(storage: Storage) -> None:
    rows = json.loads(succeed("checkpoint", "ls", storage.url, "--json"))
    assert [(row["step"], row["best"], row["metric"], row["value"]) for row in rows] == [
        (10, False, "evaluation.loss", 2.5),
        (20, True, "evaluation.loss", 1.25),
        (30, False, "evaluation.loss", 1.75),
        (40, False, None, None),
        (50, False, None, None),
    ]
    lines = succeed("checkpoint", "ls", storage.url).splitlines()
    assert "evaluation.loss" in lines[1]
    assert [line.split()[0] for line in lines if "1.25, the best" in line] == ["20"]


def test_without_a_rule_ls_has_no_column_for_it(tmp_path: Path) -> None:
    Run(open_storage(str(tmp_path))).save(10, {"loss": 1.0})
    (row,) = json.loads(succeed("checkpoint", "ls", tmp_path, "--json"))
    assert (row["best"], row["metric"], row["value"]) == (False, None, None)
    assert "loss" not in succeed("checkpoint", "ls", tmp_path)


def test_every_command_that_takes_a_checkpoint_takes_the_best(storage: Storage, tmp_path: Path) -> None:
    url = storage.url
    assert json.loads(succeed("checkpoint", "show", url, "--best", "--json"))["step"] == 20
    assert "step 20: whole" in succeed("checkpoint", "verify", url, "--best")
    assert "step 20" in succeed("checkpoint", "export", url, tmp_path / "copy", "--format", "raysharded", "--best")
    assert open_checkpoint(open_storage(str(tmp_path)), "copy").step == 20
    assert "step 20" in succeed("checkpoint", "pin", url, "good", "--best")
    assert [(pin.tag, pin.step) for pin in list_pins(storage)] == [("good", 20)]
    assert "begins with step 20" in succeed("checkpoint", "fork", url, "other", "--best")
    assert succeed("checkpoint", "diff", url, tmp_path / "copy", "--best-a").startswith("1 tensor is equal")
    assert invoke("checkpoint", "diff", url, url, "--best-b").exit_code == 1  # the newest, and the best


def test_the_best_is_refused_where_it_is_not_known(storage: Storage, tmp_path: Path) -> None:
    Run(open_storage(str(tmp_path / "plain"))).save(10, {"loss": 1.0})
    assert "records no CheckpointConfig.keep_best" in fail("checkpoint", "show", tmp_path / "plain", "--best")
    folder = next((tmp_path / "run" / "checkpoints").glob("*/manifest.json")).parent
    assert "--best is for runs" in fail("checkpoint", "show", folder, "--best")
    assert "give one of the two" in invoke("checkpoint", "show", storage.url, "--best", "--step", 10).stderr
    assert "give one of the two" in invoke("checkpoint", "verify", storage.url, "--best", "--all").stderr
