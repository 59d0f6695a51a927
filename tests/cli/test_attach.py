"""`raysharded attach`, over a handle on a run whose entries come one after the other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from typer.testing import CliRunner

import raysharded
from raysharded.cli import app
from raysharded.cli.runs.attach import _until_next
from raysharded.run import Status
from tests.report.entries import run_with_a_loss, with_times
from tests.report.standing import Stands


class Handle:
    """Gives some entries per call, as a run that continues does."""

    def __init__(self, interrupted: bool = False) -> None:
        self._all = [(number, entry["kind"], entry) for number, entry in enumerate(with_times(run_with_a_loss()), 1)]
        self._interrupted = interrupted

    def entries(self, after: int, timeout_s: float) -> list[tuple[int, str, dict[str, Any]]]:
        if self._interrupted and after:
            raise KeyboardInterrupt
        return [entry for entry in self._all if entry[0] > after][:7]

    def is_over(self) -> bool:
        return True

    def status(self) -> Status:
        return Status(**asdict(Stands()))


def attached(monkeypatch: pytest.MonkeyPatch, handle: Handle, *arguments: str) -> Any:
    def attach(run: str, address: str | None) -> Handle:
        assert (run, address) == ("tiny", None)
        return handle

    monkeypatch.setattr(raysharded, "attach", attach, raising=False)
    monkeypatch.setattr("raysharded.cli.runs.attach._LEAST_S", 0.0)
    return CliRunner().invoke(app, ["attach", "tiny", *arguments])


def test_every_entry_is_a_value_after_where_the_run_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attached(monkeypatch, Handle(), "--json")
    values = [json.loads(line) for line in found.stdout.splitlines()]
    assert (found.exit_code, values[0]["kind"], values[0]["members"]) == (0, "status", [0, 2])
    assert (values[0]["workers"], values[0]["pids"], values[0]["nodes"]["2"]) == (
        2,
        {"0": 4711, "2": 4713},
        "trainer-2",
    )
    assert values[1:] == with_times(run_with_a_loss())


def test_where_there_is_no_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attached(monkeypatch, Handle())
    assert found.exit_code == 0
    assert "step 4: worker 1 lost: the process died" in found.stdout
    assert f"step 6: finished, fingerprint {'f' * 32}" in found.stdout


def test_ctrl_c_leaves_the_view_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attached(monkeypatch, Handle(interrupted=True))
    assert (found.exit_code, found.stderr) == (0, "left the view; the run continues\n")


@pytest.mark.parametrize(("look_s", "wait_s"), [(0.001, 0.5), (0.02, 2.0), (3.0, 5.0)])
def test_one_who_watches_takes_a_small_share_of_a_core(look_s: float, wait_s: float) -> None:
    assert _until_next(look_s) == wait_s
