"""The commands that change a run, where there is none to change; on real runs their handles are tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raysharded.ray_backend import cluster
from tests.cli.test_commands import fail, invoke, succeed
from tests.report.entries import run_with_a_loss, write_run


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine is not found."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_ADDRESS_FILE", tmp_path / "none")


def test_a_name_means_nothing_without_a_cluster() -> None:
    for command in (
        ["pause", "gpt"],
        ["resize", "gpt", "3"],
        ["fork", "gpt", "other"],
        ["learning-rate", "gpt", "0.5"],
    ):
        assert "there is no Ray cluster here that could know a run named 'gpt'" in fail(*command)


def test_a_run_that_is_over_is_not_changed_and_may_be_stopped(tmp_path: Path) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    assert "is over (finished, step 6). Start it again with its trainer to resume it." in fail("rewind", url, "2")
    assert "it is at step 6 of 6 (finished)" in succeed("stop", url)
    status = json.loads(succeed("stop", url, "--json"))
    assert (status["phase"], status["step"], status["workers"]) == ("finished", 6, [])


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    assert "there is no run at" in fail("save", tmp_path / "some" / "run")


def test_wrong_usage_ends_with_2() -> None:
    assert invoke("resize", "gpt", "0").exit_code == 2
    assert invoke("learning-rate", "gpt", "-1").exit_code == 2
