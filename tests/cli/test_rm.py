"""`raysharded rm`: confirms, removes, and states what keeps a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from raysharded.checkpoint import fork, list_checkpoints, open_storage, pin
from raysharded.checkpoint.retention.run_removal import RunRemoval
from raysharded.cli import app
from tests.checkpoint.retention.runs import Run
from tests.cli.test_commands import fail, succeed
from tests.report.entries import run_with_a_loss, write_run


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other clusters of this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))


def make_run(folder: Path) -> str:
    write_run(folder, run_with_a_loss())
    Run(open_storage(str(folder))).save(5)
    return str(folder)


def make_fork(url: str, folder: Path) -> str:
    fork(open_storage(url), list_checkpoints(open_storage(url))[0], open_storage(str(folder)))
    return str(folder)


def answer(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["rm", *arguments], input=text, catch_exceptions=False)


def test_it_asks_and_removes_nothing_without_a_yes(tmp_path: Path) -> None:
    url = make_run(tmp_path / "a")
    whole = sorted((tmp_path / "a").rglob("*"))
    for text in ("n\n", ""):
        refused = answer(text, url)
        assert refused.exit_code == 1
        question = f"Remove the run tiny at {url} (finished, step 6 of 6)? [y/N] "
        assert (refused.stdout, refused.stderr) == ("", f"{question}nothing was removed\n")
        assert sorted((tmp_path / "a").rglob("*")) == whole
    agreed = answer("y\n", url)
    assert agreed.exit_code == 0
    assert agreed.stdout.startswith(f"{url}: removed, ")
    assert not (tmp_path / "a").exists()


def test_with_json_standard_output_has_one_value(tmp_path: Path) -> None:
    url = make_run(tmp_path / "a")
    child = make_fork(url, tmp_path / "child")
    found = json.loads(answer("y\n", url, "--with-forks", "--json").stdout)
    assert (found["url"], found["forks"], found["copied"], found["left"]) == (url, [child], [], [])
    assert found["num_files"] > 5
    assert list(tmp_path.iterdir()) == []


def test_what_keeps_a_run_is_said_before_it_asks(tmp_path: Path) -> None:
    url = make_run(tmp_path / "a")
    child = make_fork(url, tmp_path / "child")
    pin(open_storage(url), "best", list_checkpoints(open_storage(url))[0])
    for more in ((), ("--yes",)):
        error = fail("rm", url, *more)
        assert error.startswith(f"the run at {url} stays: its fork {child} needs its checkpoint of step 5")
        assert "; step 5 is pinned as 'best'" in error
        assert "--with-forks" in error
    assert "give one of them" in fail("rm", url, "--with-forks", "--copy-into-forks")


def test_forks_that_go_or_get_a_copy_are_named_in_the_question(tmp_path: Path) -> None:
    url = make_run(tmp_path / "a")
    child = make_fork(url, tmp_path / "child")
    assert f", and its forks {child}? [y/N]" in answer("n\n", url, "--with-forks").stderr
    assert f", after copying step 5 into its fork {child}? [y/N]" in answer("n\n", url, "--copy-into-forks").stderr
    out = succeed("rm", url, "--copy-into-forks", "--yes")
    assert out.startswith(f"{child}: has its own copy of the checkpoint that it began with\n{url}: removed, ")


def test_an_interrupted_removal_is_named_everywhere_and_finished_by_the_next(tmp_path: Path) -> None:
    url = make_run(tmp_path / "a")
    RunRemoval(open_storage(url), ["journal", "lease"]).begin(lambda: False)
    for command in ("status", "report", "replay", "attach", "stop", "runs"):
        assert f"Run `raysharded rm {url}` again to finish it." in fail(command, url)
    assert f"`raysharded rm {url}` again" in fail("checkpoint", "ls", url)
    assert succeed("runs", tmp_path) == ""
    assert answer("n\n", url).stderr.startswith(f"Finish the removal of the run at {url}? [y/N]")
    succeed("rm", url, "--yes")
    assert not (tmp_path / "a").exists()


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path / "gpt-small")
    (tmp_path / "empty").mkdir()
    assert f"Did you mean {tmp_path}/gpt-small?" in fail("rm", tmp_path / "gpt-smal", "--yes")
    assert fail("rm", tmp_path / "empty", "--yes").startswith(f"there is no run at {tmp_path}/empty.")
    assert (tmp_path / "empty").exists()
