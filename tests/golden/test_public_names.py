"""Names that the documentation has told people stay: imported, asked for, called with these parameters."""

from __future__ import annotations

import pytest

import raysharded
from raysharded.driver.replay import rerun
from raysharded.run.results import Result
from tests.golden import public_names


def test_every_name_that_was_ever_public_is_there() -> None:
    lines = public_names.kept()
    assert len(lines) > 1_000
    faults = [fault for fault in map(public_names.fault, lines) if fault] + public_names.new_demands(lines)
    assert not faults, (
        f"{len(faults)} public names are gone or changed:\n" + "\n".join(faults) + "\n"
        "Keep the old name as an alias. If it is to go, delete its lines from tests/golden/public-names.txt, in a "
        "commit of its own."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raysharded.driver.replay.loadd", "raysharded.driver.replay has no loadd"),
        ("raysharded.drivers.replay", "raysharded has no drivers"),
        ("raysharded.Run.attend", "raysharded.Run has no attend"),
        ("raysharded.ElasticTrainer.fit(* besides=)", "raysharded.ElasticTrainer.fit takes no besides"),
        ("raysharded.ElasticTrainer.fit(0 beside=)", "beside was parameter 0, and is not now"),
        ("raysharded.RunConfig(* name=)", "name could be left out, and must be given now"),
        ("raysharded.Result.report().summary.stepss", "raysharded.Result.report.summary has no stepss"),
        ("raysharded.Result.steps()", "raysharded.Result.steps cannot be called"),
        ("$ raysharded run --chaoss", "there is no `raysharded run --chaoss` any more"),
    ],
)
def test_a_name_that_is_gone_is_named(line: str, message: str) -> None:
    assert message in public_names.fault(line)


def test_a_parameter_that_must_be_given_from_now_on_is_named() -> None:
    (found,) = public_names.new_demands(["raysharded.testing.chaos_for(1 hazards)"])
    assert found == "raysharded.testing.chaos_for: trainer must be given now, and was unknown"


def test_an_alias_is_as_good_as_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "raysharded.driver.replay.rerun.load(0 run_url)"
    load = rerun.load
    monkeypatch.delattr(rerun, "load")
    assert "raysharded.driver.replay.rerun has no load" in public_names.fault(line)
    monkeypatch.setattr(rerun, "load", load, raising=False)
    assert public_names.fault(line) == ""


def test_the_list_has_what_the_documentation_names() -> None:
    lines = set(public_names.kept())
    assert {
        "raysharded.ElasticTrainer.fit(* beside=)",
        "raysharded.checkpoint.exchange.diff.diff",
        "raysharded.driver.replay.load",
        "raysharded.ids.WorkerId",
        "raysharded.layout.Mesh",
        "raysharded.planning.memory",
        "raysharded.report.notebook.run_html",
        "raysharded.testing.processes.fit",
        "$ raysharded checkpoint verify --all",
    } <= lines
    assert {f"raysharded.{name}" for name in raysharded.__all__} <= lines
    assert {f"raysharded.Result.{name}" for name in Result.__dataclass_fields__} <= lines
