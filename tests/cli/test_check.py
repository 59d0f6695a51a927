"""`raysharded check`: its possible targets, and its exit status. Its findings: tests/preflight."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.cli import check as check_command
from raysharded.cli.streams import own_stdout
from raysharded.errors import ConfigError
from raysharded.preflight import Check, Report
from tests.cli.test_commands import invoke
from tests.preflight.test_needs import NEEDS

TRAINER = """
import raysharded as rs
from tests.training.harness import GptTask, Tokens

def trainer():
    return rs.ElasticTrainer(
        task=GptTask(), data=Tokens(), batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=(1, 2)), run=rs.RunConfig(name="it", storage_path="runs", max_steps=1),
    )

made = trainer()

def named(name, microbatch="2"):
    it = trainer()
    it.run = rs.RunConfig(name=name, storage_path="runs", max_steps=1)
    return it

class Small(GptTask):
    def __init__(self, width):
        self.width = width
"""
SETTINGS = """
task: {width: 8}
data: {paths: [corpus/], seq_len: 8}
batch: {global_batch_size: 4, microbatch_size: 2}
scaling: {num_workers: 1}
run: {name: from-yaml, storage_path: runs, max_steps: 1}
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A folder with a file of trainers; the checked targets, with their settings: every check holds."""
    found: list[Any] = []

    def check(trainer: rs.ElasticTrainer, **options: Any) -> Report:
        found.append((trainer, options))
        if options["steps"] == 99:
            raise ConfigError("there is no room.")
        status = "differs" if options["steps"] == 98 else "ok"
        checks = (Check(name="two builds", status=status, found="as it is"),)  # type: ignore[arg-type]  # one of those
        return Report(needs=NEEDS, checks=checks, untried=(), remarks=(), versions={}, took_s=1.0)

    (tmp_path / "to_check.py").write_text(TRAINER)
    (tmp_path / "check.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(rs.ElasticTrainer, "check", check)
    yield found
    sys.modules.pop("to_check", None)


def test_arguments_are_settings_unless_the_function_takes_some(checked: list[Any]) -> None:
    assert invoke("check", "to_check.py", "batch.global_batch_size=32", "run.name=other").exit_code == 0
    assert invoke("check", "to_check.py:made", "run.name=another").exit_code == 0
    assert invoke("check", "to_check.py:named", "third").exit_code == 0
    assert invoke("check", "to_check.py:Small", "run.name=fifth", "--config", "check.yaml").exit_code == 0
    trainers = [trainer for trainer, _ in checked]
    assert [trainer.run.name for trainer in trainers] == ["other", "another", "third", "fifth"]
    assert trainers[0].batch.global_batch_size == 32
    assert trainers[3].task.width == 8


def test_options_reach_the_check(checked: list[Any]) -> None:
    invoke("check", "to_check.py", "--steps", 5, "--device", "cpu", "--timeout", 7)
    ((_, options),) = checked
    assert {name: options[name] for name in ("steps", "device", "timeout_s")} == {
        "steps": 5,
        "device": "cpu",
        "timeout_s": 7.0,
    }


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["to_check.py", "--steps", "98"], 1, ""),
        (["to_check.py", "--steps", "99"], 2, "error: there is no room.\n"),
        (["to_check.py", "--steps", "1"], 2, "--steps"),
        (["to_check.py", "--device", "tpu"], 2, "give cpu, or leave it out"),
        (["nothing.py"], 2, "there is no file"),
        (["to_check.py", "batch.size=3"], 2, "there is no setting batch.size"),
        (["to_check.py:Small"], 2, "it needs the settings data, batch, scaling, run as well"),
    ],
)
def test_the_exit_status_distinguishes_wrong_usage_from_a_failed_check(
    checked: list[Any], arguments: list[str], status: int, message: str
) -> None:
    result = invoke("check", *arguments)
    assert (result.exit_code, message in result.stderr) == (status, True), result.output


def test_a_target_that_never_comes_ends_past_the_time_limit(
    checked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "_BEYOND_S", -0.9)
    (tmp_path / "to_wait_for.py").write_text("import time\ntime.sleep(60)\n")
    result = invoke("check", "to_wait_for.py", "--timeout", "1")
    assert result.exit_code == 1
    assert result.stderr == "error: not done within 1 s. Give it a longer --timeout, or fewer --steps.\n"
    sys.modules.pop("to_wait_for", None)


def test_json_has_standard_output_for_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with own_stdout():
        os.write(1, b"of a worker\n")
        print("of the task")  # noqa: T201 - as users do
    print("{}")  # noqa: T201
    out, errors = capfd.readouterr()
    assert (out, sorted(errors.splitlines())) == ("{}\n", ["of a worker", "of the task"])
