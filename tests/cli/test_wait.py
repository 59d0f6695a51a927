"""`raysharded wait`: how a run ended, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raysharded.cli.runs import wait
from raysharded.errors import RunFailed
from raysharded.ownership.lease import Process
from raysharded.ownership.process_identity import this_process
from raysharded.testing.processes import ProcessLauncher
from tests.cli.test_commands import fail, invoke, succeed
from tests.cli.test_runs import at_work, journal_now, own
from tests.report.entries import Entry, checkpoint, run_with_a_loss, write_run
from tests.run.test_handles import trainer

RESUMES = "started again, it resumes from the start: it has no checkpoint"
ENDINGS: list[tuple[list[Entry], int, str]] = [
    (run_with_a_loss(), 0, "run tiny finished at step 6 of 6"),
    (
        [*run_with_a_loss()[:8], ("failed", {"step": 3, "error": "RunFailed: 4 workers lost"})],
        1,
        f"run tiny failed at step 3 of 6: RunFailed: 4 workers lost; {RESUMES}",
    ),
    (
        [*run_with_a_loss()[:8], ("stopped", {"step": 3, "fingerprint": None})],
        3,
        f"run tiny was stopped at step 3 of 6; {RESUMES}",
    ),
]


@pytest.mark.parametrize(("entries", "status", "text"), ENDINGS, ids=["finished", "failed", "stopped"])
def test_the_end_of_a_run_is_a_line_and_an_exit_status(
    tmp_path: Path, entries: list[Entry], status: int, text: str
) -> None:
    found = invoke("wait", write_run(tmp_path / "tiny", entries))
    assert (found.exit_code, found.stdout) == (status, f"{text}\n")
    as_json = invoke("wait", tmp_path / "tiny", "--json")
    told, shown = json.loads(as_json.stdout), json.loads(succeed("status", tmp_path / "tiny", "--json"))
    assert as_json.exit_code == status
    assert told.pop("age_s") <= shown.pop("age_s")
    assert told == shown
    attached = invoke("attach", tmp_path / "tiny")
    assert (attached.exit_code, attached.stdout.splitlines()[-1]) == (status, text)


def test_a_driver_that_exited_without_a_word_has_a_status_of_its_own(tmp_path: Path) -> None:
    journal_now(tmp_path / "x", [*at_work(), checkpoint(2)])
    own(tmp_path / "x", "driver0", process=Process(machine=this_process().machine, pid=1 << 22, started=1))
    found = invoke("wait", tmp_path / "x")
    assert found.exit_code == 4
    assert found.stdout.startswith("run x ended at step 2 of 6: its driver exited without a final entry; started")


def test_a_start_that_waits_for_another_driver_says_so_until_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(tmp_path / "asked", "driver0", lease_s=60.0)  # on another machine, and silent
    run, told = trainer(tmp_path).start_with(ProcessLauncher), []

    def stop_when_told(text: str, *, err: bool) -> None:
        told.append((text.partition(" may hold the run")[0], err))
        run.stop()

    monkeypatch.setattr(wait, "echo", stop_when_told)
    monkeypatch.setattr(wait, "_BEGIN_S", 0.05)
    with pytest.raises(RunFailed):
        wait.wait_until_begun(run)
    ((text, err),) = told
    assert text.startswith("run asked is starting: driver driver0 (process 7 on node-1)")
    assert err


def test_a_wait_ends_after_its_time_and_an_unknown_run_is_an_error(tmp_path: Path) -> None:
    journal_now(tmp_path / "x", at_work())
    own(tmp_path / "x", "driver0", process=this_process(), lease_s=15.0)
    found = invoke("wait", tmp_path / "x", "--timeout", "0")
    assert (found.exit_code, found.stdout) == (124, "")
    assert found.stderr == "error: run x is still running after 0 s\n"
    assert "there is no run at" in fail("wait", tmp_path / "y")
    assert invoke("wait", tmp_path / "x", "--timeout", "-1").exit_code == 2
