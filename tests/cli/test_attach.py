"""`raysharded attach`, over a handle on a run whose entries come one after the other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import signal
import string
import sys
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
from ray._private.worker import print_to_stdstream
from typer.testing import CliRunner

import raysharded
from raysharded.cli import app
from raysharded.cli.runs.attach import _until_next
from raysharded.display.raylet_output import quiet_raylet
from raysharded.run import Result, Run, Status
from raysharded.run.handle import Ask
from tests.report.entries import run_with_a_loss, with_times
from tests.report.standing import Stands


class Handle(Run):
    """Gives some entries per call, as a run that continues does."""

    name = "tiny"

    def __init__(self, interrupted: bool = False, state: str = "finished", error: str = "") -> None:
        self._state, self._error = state, error
        self._all = [(number, entry["kind"], entry) for number, entry in enumerate(with_times(run_with_a_loss()), 1)]
        self._interrupted = interrupted

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[tuple[int, str, dict[str, Any]]]:
        if self._interrupted and after:
            raise KeyboardInterrupt
        return [entry for entry in self._all if entry[0] > after][:7]

    def is_over(self) -> bool:
        return True

    def status(self) -> Status:
        return replace(Status(**asdict(Stands())), state=self._state, error=self._error)

    def wait(self, timeout_s: float | None = None) -> Result:
        raise AssertionError("attach follows a run by its entries")

    def _ask(self, what: Ask, **arguments: Any) -> Any:
        raise AssertionError(f"attach sends no request: {what}")


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
    assert values[1:-1] == with_times(run_with_a_loss())
    assert (values[-1]["kind"], values[-1]["state"]) == ("status", "finished")


def test_where_there_is_no_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attached(monkeypatch, Handle())
    assert found.exit_code == 0
    assert "worker 1 lost: the process died" in found.stdout
    assert f"step 6: finished, fingerprint {'f' * 32}" in found.stdout
    assert found.stdout.splitlines()[-1] == "run tiny finished at step 5 of 6"


@pytest.mark.parametrize(("state", "status"), [("failed", 1), ("damaged", 1), ("stopped", 3), ("ended", 4)])
def test_the_end_of_a_run_is_told_with_its_error_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, state: str, status: int
) -> None:
    found = attached(monkeypatch, Handle(state=state, error="RunFailed: 4 workers lost"))
    assert found.exit_code == status
    last = found.stdout.splitlines()[-1]
    assert last.startswith("run tiny ")
    assert last.endswith(": RunFailed: 4 workers lost; started again, it resumes from its checkpoint of step 3")
    as_json = attached(monkeypatch, Handle(state=state, error="RunFailed: 4 workers lost"), "--json")
    told = json.loads(as_json.stdout.splitlines()[-1])
    assert (as_json.exit_code, told["state"], told["error"]) == (status, state, "RunFailed: 4 workers lost")


class Over(Handle):
    """A handle on a run that was over when its entries were first read."""

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[tuple[int, str, dict[str, Any]]]:
        assert timeout_s == 0, "nothing more will come"
        return super().entries(after, timeout_s)


def test_a_run_that_is_over_is_shown_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attached(monkeypatch, Over()).exit_code == 0


class Ended(Handle):
    """A handle during whose calls the process gets a SIGTERM."""

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[tuple[int, str, dict[str, Any]]]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().entries(after, timeout_s)


def test_sigterm_leaves_the_view_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = attached(monkeypatch, Ended())
    assert (found.exit_code, found.stderr) == (0, "left the view; the run continues\n")
    assert signal.getsignal(signal.SIGTERM) == before


class OfALostNode(Handle):
    """A handle during whose calls Ray prints, in its own thread and form, what it prints about a lost node."""

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[tuple[int, str, dict[str, Any]]]:
        name = "".join(secrets.choice(string.ascii_letters) for _ in range(20))  # Ray omits what it printed just now
        line = {"lines": [f"Raylet {name} is terminated.\n [state-dump]\n"], "pid": "raylet", "is_err": False}
        printing = threading.Thread(target=print_to_stdstream, args=(line, False))
        printing.start()
        printing.join()
        return super().entries(after, timeout_s)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ray_s_own_lines_about_a_lost_node_are_not_among_those_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    found = attached(monkeypatch, OfALostNode(), *options)
    assert (found.exit_code, found.stdout) == (0, attached(monkeypatch, Handle(), *options).stdout)
    OfALostNode().entries(0, 0.0)
    assert "state-dump" in capsys.readouterr().out, "Ray does print it"


def test_a_thread_that_prints_for_ray_does_not_swallow_the_lines_of_another() -> None:
    outside = io.StringIO()
    with contextlib.redirect_stdout(outside), quiet_raylet():
        began, go_on = threading.Event(), threading.Event()

        def print_as_ray() -> None:
            sys.stdout.write("\x1b[33m(raylet, ip=10.0.0.7)\x1b[0m a worker died\n[state-dump] more")
            began.set()
            assert go_on.wait(30)
            sys.stdout.write("\n")

        printing = threading.Thread(target=print_as_ray)
        printing.start()
        assert began.wait(30)
        sys.stdout.write("a line of the run\n")
        go_on.set()
        printing.join()
        sys.stdout.writelines(["(raylet) again\n", "and another\n"])
    assert outside.getvalue() == "a line of the run\nand another\n"


def test_ctrl_c_leaves_the_view_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attached(monkeypatch, Handle(interrupted=True))
    assert (found.exit_code, found.stderr) == (0, "left the view; the run continues\n")


@pytest.mark.parametrize(("look_s", "wait_s"), [(0.001, 0.5), (0.02, 2.0), (3.0, 5.0)])
def test_one_who_watches_takes_a_small_share_of_a_core(look_s: float, wait_s: float) -> None:
    assert _until_next(look_s) == wait_s
