"""The commands that change a run, where there is none to change; on real runs their handles are tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raysharded
from raysharded.errors import ClusterError
from raysharded.ray_backend import cluster
from raysharded.report.nearby import like
from tests.cli.test_commands import fail, invoke, succeed
from tests.report.entries import run_with_a_loss, write_run


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other clusters on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))


def test_a_name_means_nothing_without_a_cluster() -> None:
    for command in (
        ["pause", "gpt"],
        ["resize", "gpt", "3"],
        ["fork", "gpt", "other"],
        ["learning-rate", "gpt", "0.5"],
        ["mixture-weights", "gpt", "web=0.5", "code=0.5"],
    ):
        assert "there is no Ray cluster here that could know a run named 'gpt'" in fail(*command)


COMMANDS = [
    *[[command, "gpt-5m"] for command in ("status", "report", "replay", "attach", "pause", "stop", "save")],
    ["kill", "gpt-5m", "--worker", "0"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_name_without_a_cluster_leads_to_the_run_in_a_folder_here(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "gpt-5m", run_with_a_loss())
    write_run(tmp_path / "runs" / "gpt-5x", run_with_a_loss())
    monkeypatch.chdir(tmp_path)
    error = fail(*command)
    assert error.startswith("no cluster: ")
    assert " Did you mean runs/gpt-5m? " in error
    assert "<storage_path>/gpt-5m" in error


def test_without_a_cluster_similar_names_come_next_and_then_any_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Did you mean" not in fail("status", "gpt-5m")
    write_run(tmp_path / "gpt-5x", run_with_a_loss())
    write_run(tmp_path / "old" / "bert", run_with_a_loss())
    assert " Did you mean ./gpt-5x? " in fail("status", "gpt-5m")
    assert " Runs here: ./gpt-5x, old/bert. " in fail("status", "zzzz")
    assert like("bret", ["./gpt-5x", "old/bert"]) == ["old/bert"]
    assert like("nope", ["runs/one"]) == []
    with pytest.raises(ClusterError, match=r"^no cluster: .* Did you mean old/bert\?"):
        raysharded.attach("bert")


def test_a_cluster_that_does_not_answer_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "gpt", run_with_a_loss())
    error = fail("attach", "gpt", "--address", "127.0.0.1:1")
    assert error.startswith("no cluster: there is no Ray cluster at 127.0.0.1:1: nothing answered")
    assert " Did you mean runs/gpt? " in error


def test_a_run_that_is_over_is_not_changed_and_may_be_stopped(tmp_path: Path) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    assert "is over (finished, step 6). A larger max_steps continues it." in fail("rewind", url, "2")
    assert succeed("stop", url) == f"nothing is stopped: run {tmp_path.name} finished at step 6 of 6\n"
    status = json.loads(succeed("stop", url, "--json"))
    assert (status["phase"], status["state"], status["step"], status["members"]) == (
        "finished",
        "finished",
        6,
        [0, 2, 3],
    )


def test_stop_of_a_run_that_failed_says_with_what(tmp_path: Path) -> None:
    failed = ("failed", {"step": 0, "error": "TaskError: no such column"})
    url = write_run(tmp_path / "tiny", [*run_with_a_loss()[:3], failed])
    assert succeed("stop", url) == (
        "nothing is stopped: run tiny failed at step 0 of 6: TaskError: no such column; started again, it resumes from "
        "the start: it has no checkpoint\n"
    )


def test_a_source_tree_whose_folders_are_named_as_a_run_s_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("journal", "claims", "checkpoints", "lease"):
        (tmp_path / "prod" / name).mkdir(parents=True)
        (tmp_path / "prod" / name / "__init__.py").touch()
    write_run(tmp_path / "gpt", run_with_a_loss())
    monkeypatch.chdir(tmp_path)
    assert " Runs here: ./gpt. " in fail("status", "zzzz")
    assert [run["name"] for run in json.loads(succeed("runs", ".", "--json"))] == ["tiny"]
    assert fail("status", "./prod").startswith(f"there is no run at {tmp_path}/prod")
    assert fail("attach", "./prod").startswith(f"there is no run at {tmp_path}/prod")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    assert "there is no run at" in fail("save", tmp_path / "some" / "run")


def test_wrong_usage_ends_with_2() -> None:
    assert invoke("resize", "gpt", "0").exit_code == 2
    assert invoke("learning-rate", "gpt", "-1").exit_code == 2
