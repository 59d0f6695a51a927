"""Declared, tested and reported versions are the same; an untested one is one sentence at a run's start."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from raysharded import versions
from raysharded.cli import diagnostics
from raysharded.config import BatchConfig, RunConfig, ScalingConfig
from raysharded.protocol.job import Job
from raysharded.protocol.worker_launcher import Launcher
from raysharded.trainer import ElasticTrainer
from raysharded.versions import TESTED, untested
from tests.packaging import compat
from tests.paths import ROOT
from tests.training.harness import GptTask, Tokens


def declared(name: str) -> set[str]:
    """The bounds of a package in pyproject.toml, wherever it is named."""
    optional = [each for extra in compat.project()["optional-dependencies"].values() for each in extra]
    asked = [each for each in (*compat.project()["dependencies"], *optional) if re.match(rf"{name}\b(?!-)", each)]
    return {re.sub(rf"{name}(\[\w+\])?", "", each) for each in asked}


def test_what_is_declared_is_what_was_tested() -> None:
    newest_torch = re.fullmatch(r"2\.(\d+)", TESTED["torch"][1])
    assert newest_torch is not None
    assert declared("torch") == {f">={TESTED['torch'][0]},<2.{int(newest_torch[1]) + 1}"}
    assert declared("ray") == {f">={TESTED['ray'][0]}"}


def test_pages_name_the_versions_that_were_tested() -> None:
    told = re.compile(r"torch (2\.\d+) to (2\.\d+)")
    for name in (
        "docs/exchange.md",
        "raysharded/actors/comm/torch_groups.py",
        "raysharded/checkpoint/interop/dcp/__init__.py",
    ):
        assert set(told.findall((ROOT / name).read_text())) == {TESTED["torch"]}, name


def test_every_lower_bound_is_tried() -> None:
    tried = {re.split("==", each)[0] for each in compat.constraints()}
    needed = {re.split(r"[\[><=]", each)[0] for each in compat.project()["dependencies"]}
    assert needed <= tried
    assert "torch==2.13.0" in compat.constraints()
    assert compat.lowest("cattrs>=24.1.3") == "cattrs==24.1.3"
    assert compat.lowest("ray[default]>=2.54") == "ray==2.54.0"


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.14.1", "2.15.0.dev20261001+cu130", "2.15"])
def test_nothing_is_reported_of_what_was_tested(found: str) -> None:
    assert untested({"torch": found, "python": "3.99"}) == []


@pytest.mark.parametrize("found", ["2.16.0", "2.9.0+cu128", "3.0.1", "unknown"])
def test_one_sentence_is_reported_of_what_was_not(found: str) -> None:
    expected = f"raysharded was tested with torch 2.13 to 2.15; this is {found}: run `raysharded doctor --self-test`."
    assert untested({"torch": found, "ray": "2.60.0"}) == [expected]


class NotToday(Exception):
    """No worker is started."""


def no_launcher(job: Job) -> Launcher:
    raise NotToday


def test_a_run_reports_it_once_at_its_start_and_doctor_reports_it_and_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(versions.TESTED, "torch", ("2.7", "2.8"))
    expected = (
        f"raysharded was tested with torch 2.7 to 2.8; this is {version('torch')}: run `raysharded doctor --self-test`."
    )
    trainer = ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=BatchConfig(global_batch_size=2, microbatch_size=1),
        scaling=ScalingConfig(num_workers=1),
        run=RunConfig(name="untested", storage_path=str(tmp_path), max_steps=1),
    )
    with caplog.at_level(logging.WARNING, "raysharded"):
        run = trainer.start_with(no_launcher)
        with pytest.raises(NotToday):
            run.wait()
    assert [record.getMessage() for record in caplog.records] == [expected]
    (finding,) = diagnostics.versions()
    assert (finding.ok, finding.advice) == (True, expected)
