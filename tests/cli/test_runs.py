"""`raysharded runs` and `status`: reports on runs from their storage alone, and their cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import Claims, open_storage
from raysharded.clock import SystemClock
from raysharded.journal.log import Journal, segment_key
from raysharded.ownership.lease import Holder, Process, encode, lease_key
from raysharded.ownership.process_identity import this_process
from raysharded.report import overview
from raysharded.report.live.follow import follow
from raysharded.report.overview import find_runs, look
from raysharded.report.recent import RecentReader, Starting, read_recent
from raysharded.report.state_meaning import meaning
from raysharded.run import Status
from raysharded.run.offline import StoredRun
from raysharded.run.status import stored_status, with_stored_best
from raysharded.testing.storages import CountingStorage, FailingStorage
from tests.cli.test_commands import fail, invoke, succeed
from tests.report.entries import Entry, data, generation, run_with_a_loss, started, step, write_run

ELSEWHERE = Process(machine="another machine", pid=7, started=1)


def own(folder: Path, driver: str, *, process: Process = ELSEWHERE, **lease: object) -> Holder:
    """The driver owns the run and holds its lease."""
    storage = open_storage(str(folder))
    Claims(storage, driver).own(1)
    holder = Holder(driver=driver, host="node-1", process=process, since=1.0, lease_s=0.3)
    holder = replace(holder, **lease)  # type: ignore[arg-type]  # any fields of it
    storage.write(lease_key(driver), [encode(holder)])
    return holder


def at_work() -> list[Entry]:
    return [started(name="x"), data(), *generation(1, [0, 1], 0), step(1), step(2)]


def journal_now(folder: Path, entries: list[Entry], driver: str = "driver0") -> None:
    journal = Journal(open_storage(str(folder)), SystemClock(), driver)
    for kind, fields in entries:
        journal.append(kind, fields, durable=True)


def state_of(folder: Path) -> str:
    (found,) = look([open_storage(str(folder))], pause=lambda _: None)
    return found.state


def test_runs_are_listed_with_how_far_they_are(tmp_path: Path) -> None:
    write_run(tmp_path / "done", run_with_a_loss())
    journal_now(tmp_path / "going", at_work())
    claims = Claims(open_storage(str(tmp_path / "going")), "driver0")
    claims.own(1)
    claims.commit(1, 1, "checkpoints/step-1", "d" * 64)
    open_storage(str(tmp_path / "going")).write("checkpoints/step-1/manifest.json", [b"{}"])
    holder = Holder(driver="driver0", host="node-1", process=this_process(), since=1.0, lease_s=15.0)
    open_storage(str(tmp_path / "going")).write(lease_key("driver0"), [encode(holder)])
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")

    done, going = json.loads(succeed("runs", tmp_path, "--json"))
    assert (done["name"], done["state"], done["step"], done["max_steps"]) == ("tiny", "finished", 6, 6)
    assert (done["driver"], done["checkpoint_step"]) == ("", None)
    assert (going["state"], going["step"], going["max_steps"], going["loss"]) == ("running", 2, 6, 2.5)
    assert (going["workers"], going["checkpoint_step"], going["url"]) == (2, 1, f"{tmp_path}/going")
    assert "driver driver0" in going["driver"]
    assert 0 <= going["age_s"] < 60
    out = succeed("runs", tmp_path)
    for part in ("finished", "6 of 6", "running", "2 of 6", "2.5000", "step 1"):
        assert part in out


def test_a_run_itself_is_listed_alone(tmp_path: Path) -> None:
    url = write_run(tmp_path / "tiny", run_with_a_loss())
    assert [run["url"] for run in json.loads(succeed("runs", url, "--json"))] == [url]


def test_an_empty_folder_has_no_runs_and_one_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    found = invoke("runs", tmp_path / "empty")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "", f"no runs in {tmp_path}/empty\n")
    assert json.loads(succeed("runs", tmp_path / "empty", "--json")) == []
    for options in ([], ["--json"]):
        assert fail("runs", tmp_path / "none", *options) == f"there is no folder {tmp_path}/none: it does not exist."
        assert fail("runs", tmp_path / "empti", *options).endswith(f" Did you mean {tmp_path}/empty?")
        assert fail("runs", tmp_path / "file", *options) == f"there is no folder {tmp_path}/file: it is a file."


def test_ctrl_c_between_a_step_and_its_entry_is_told_with_that_step(tmp_path: Path) -> None:
    journal_now(tmp_path, [*at_work()[:-2], ("stopped", {"step": 1, "interrupted": True})])
    own(tmp_path, "driver0", ended=True)
    assert "stopped: interrupted at step 1; the next fit() resumes from the start" in succeed("status", tmp_path)


def test_runs_that_are_elsewhere_are_named_with_their_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt", run_with_a_loss())
    write_run(tmp_path / "bert", run_with_a_loss())
    assert fail("status", tmp_path / "zzzz").endswith(f" Runs in {tmp_path}: bert, gpt.")


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (("stopped", {"step": 2, "interrupted": True}), "stopped: interrupted at step 2; the next fit() resumes "),
        (("stopped", {"step": 2}), "stopped: it was stopped at step 2; the next fit() resumes "),
        (("failed", {"step": 2, "error": "x"}), "failed: it ended with an error at step 2; the next fit() resumes "),
        (("learning_rate", {}), "ended: its driver exited without a final entry at step 2; the next fit() resumes "),
    ],
)
def test_the_state_of_a_run_that_is_over_says_where_the_next_start_resumes(
    tmp_path: Path, last: Entry, told: str
) -> None:
    journal_now(tmp_path, [*at_work(), last])
    own(tmp_path, "driver0", ended=True)
    assert f"{told}from the start: it has no checkpoint\n" in succeed("status", tmp_path)
    storage = open_storage(str(tmp_path))
    claims = Claims(storage, "driver0")
    claims.own(2)
    claims.commit(2, 1, "checkpoints/step-1", "d" * 64)
    storage.write("checkpoints/step-1/manifest.json", [b"{}"])
    assert f"{told}from its checkpoint of step 1\n" in succeed("status", tmp_path)


def test_a_run_that_failed_before_its_first_step_says_that_nothing_of_it_was_trained(tmp_path: Path) -> None:
    journal_now(tmp_path / "x", [started(name="x"), ("failed", {"step": 0, "error": "TaskError: no data"})])
    own(tmp_path / "x", "driver0", ended=True)
    out = succeed("status", tmp_path / "x")
    assert "failed to start: it failed before its first step, so nothing of it was trained." in out
    assert "TaskError: no data" in out
    assert "failed to start" in succeed("runs", tmp_path)


def test_a_driver_actor_that_is_lost_is_not_taken_for_the_end_of_its_run(tmp_path: Path) -> None:
    journal_now(tmp_path, at_work())
    gone = replace(this_process(), started=1)
    own(tmp_path, "driver0", process=gone, cluster="10.0.0.1:6379/session", job="actor abc start 0")
    (found,) = look([open_storage(str(tmp_path))])
    assert (found.state, found.lost_actor) == ("ended", True)
    assert "the process of its driver actor has exited. Ray restarts it if its cluster is up" in meaning(found)
    own(tmp_path, "driver0", process=gone, job="actor abc start 0", ended=True)
    (found,) = look([open_storage(str(tmp_path))])
    assert (found.state, found.lost_actor) == ("ended", False)


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (("failed", {"step": 2, "error": "no memory"}), "failed"),
        (("stopped", {"step": 2}), "stopped"),
        (("orphaned", {"step": 2, "workers": [0, 1]}), "stopped"),
        (("finished", {"step": 2, "fingerprint": "f"}), "finished"),
        (("checkpoint", {"step": 2, "prefix": "p"}), "ended"),
    ],
)
def test_the_last_entry_of_a_driver_that_released_the_run_is_the_state(tmp_path: Path, last: Entry, state: str) -> None:
    journal_now(tmp_path, [*at_work(), last])
    own(tmp_path, "driver0", ended=True)
    assert state_of(tmp_path) == state


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([("pause", {"step": 2})], "running"),
        ([("pause", {"step": 2}), ("paused", {"step": 3})], "paused"),
        ([("paused", {"step": 3}), ("checkpoint", {"step": 3, "prefix": "p"})], "paused"),
        ([("paused", {"step": 3}), ("resume", {"step": 3})], "running"),
        ([("paused", {"step": 3}), started(resumed_after_step=3)], "running"),
        ([("paused", {"step": 3}), ("stopped", {"step": 3})], "stopped"),
    ],
)
def test_a_run_that_stands_still_is_paused(tmp_path: Path, entries: list[Entry], state: str) -> None:
    journal_now(tmp_path, [*at_work(), *entries])
    own(tmp_path, "driver0", process=this_process(), ended=state == "stopped")
    assert state_of(tmp_path) == state


def test_a_checkpoint_that_a_rewind_deleted_is_not_the_newest(tmp_path: Path) -> None:
    journal_now(tmp_path, at_work())
    claims, storage = Claims(open_storage(str(tmp_path)), "driver0"), open_storage(str(tmp_path))
    claims.own(1)
    for number in (1, 2):
        claims.commit(1, number, f"checkpoints/step-{number}", "d" * 64)
    storage.write("checkpoints/step-1/manifest.json", [b"{}"])
    (found,) = look([storage], pause=lambda _: None)
    assert found.checkpoint_step == 1


def test_a_new_driver_has_the_run_after_any_last_message_of_the_one_before(tmp_path: Path) -> None:
    journal_now(tmp_path, [*at_work(), ("failed", {"step": 2, "error": "x"})])
    own(tmp_path, "driver0", ended=True)
    own(tmp_path, "driver1", process=this_process())
    assert state_of(tmp_path) == "new"
    journal_now(tmp_path, [started(resumed_after_step=1)], "driver1")
    (found,) = look([open_storage(str(tmp_path))])
    assert (found.state, found.step, found.loss, found.error) == ("running", 1, 2.5, "")


def test_a_run_that_another_driver_resumes_is_not_said_to_have_written_nothing(tmp_path: Path) -> None:
    journal_now(tmp_path, at_work())
    own(tmp_path, "driver1", process=this_process())
    (found,) = look([open_storage(str(tmp_path))])
    assert (found.state, found.step) == ("new", 2)
    assert meaning(found) == "a driver resumes it, or takes it over, and has written nothing yet"


def test_a_status_reads_checkpoints_only_of_a_run_that_keeps_the_best(tmp_path: Path) -> None:
    journal_now(tmp_path / "plain", at_work())
    first, *others = at_work()
    journal_now(tmp_path / "best", [(first[0], {**first[1], "keep_best": ["loss", "min", 1]}), *others])
    for name, reads in (("plain", False), ("best", True)):
        counting = FailingStorage(open_storage(str(tmp_path / name)), fail_at=1 << 30)
        (found,) = look([counting])
        before = counting.operations
        with_stored_best(stored_status(found), found, counting)
        assert (counting.operations > before) == reads


def test_a_driver_whose_process_has_exited_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    gone = replace(this_process(), pid=process.pid, started=1)
    process.wait()
    journal_now(tmp_path, at_work())
    own(tmp_path, "driver0", process=gone)
    assert state_of(tmp_path) == "ended"


def test_a_driver_here_that_does_not_renew_its_lease_cannot_write(tmp_path: Path) -> None:
    """As on a full disk: its process is alive, and neither its entries nor its lease reach storage."""
    write_run(tmp_path, at_work())  # entries of long ago
    own(tmp_path, "driver0", process=this_process(), lease_s=15.0)
    (found,) = look([open_storage(str(tmp_path))])
    assert (found.state, found.error) == ("running", "")
    path = tmp_path / lease_key("driver0")
    os.utime(path, (path.stat().st_mtime - 300, path.stat().st_mtime - 300))
    (found,) = look([open_storage(str(tmp_path))])
    assert found.state == "running"
    words = r"its driver's process has not renewed its lease for 5 min \d+ s: it cannot write to the run's storage"
    assert re.match(words, found.error)
    assert re.match(words, json.loads(succeed("status", tmp_path, "--json"))["error"])
    assert "has not renewed its lease" in succeed("status", tmp_path)


def test_a_driver_elsewhere_is_at_work_if_its_lease_changes_between_two_looks(tmp_path: Path) -> None:
    for name in ("alive", "quiet"):
        write_run(tmp_path / name, at_work())  # entries of long ago, by this machine's clock
        holder = own(tmp_path / name, "driver0")
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        open_storage(str(tmp_path / "alive")).write(lease_key("driver0"), [encode(replace(holder, beat=9))])

    alive, quiet = find_runs(str(tmp_path), pause=pause)
    assert (alive.state, quiet.state) == ("running", "silent")
    assert waits == [pytest.approx(1.1)]  # a third of its lease and a second, once for all


def test_a_journal_that_is_damaged_at_its_end_is_reported_as_damaged(tmp_path: Path) -> None:
    write_run(tmp_path, at_work())
    (tmp_path / "journal" / "99999999.jsonl").write_text("{\n")
    (found,) = look([open_storage(str(tmp_path))])
    assert found.state == "damaged"
    assert "cannot be read" in found.error


def test_listing_a_long_run_reads_few_segments(tmp_path: Path) -> None:
    first = [started(), data(), *generation(1, [0], 0), *(step(number) for number in range(1, 30))]
    second = [started(resumed_after_step=29, max_steps=900), *generation(2, [0, 1, 2], 29)]
    second += [step(number, workers=3, gen=2) for number in range(30, 600)]
    folder = tmp_path / "long"
    storage = open_storage(str(folder))
    number = 1
    for writer, entries in (("a", first), ("b", second)):
        for kind, fields in entries:
            lines = [{"kind": "segment", "writer": writer}, {"kind": kind, "at": float(number), **fields}]
            storage.write(segment_key(number), ["".join(json.dumps(line) + "\n" for line in lines).encode()])
            number += 1
    counting = CountingStorage(storage)
    (found,) = look([counting])
    assert (found.step, found.max_steps, found.workers, found.num_segments) == (599, 900, 3, number - 1)
    assert len(counting.reads) <= 13  # 1, and a bisection of 600


def test_many_runs_take_little_time(tmp_path: Path) -> None:
    for number in range(100):
        journal_now(tmp_path / f"run-{number:03d}", [started(), *generation(1, [0], 0), step(1)])
        own(tmp_path / f"run-{number:03d}", "driver0", process=this_process())
    began = time.process_time()
    found = find_runs(str(tmp_path))
    assert [run.state for run in found] == ["running"] * 100
    assert time.process_time() - began < 2.0


def test_a_long_error_is_short_in_the_list_of_runs_and_whole_in_the_status(tmp_path: Path) -> None:
    error = "TaskError: " + "worker 0: the shape is wrong, " * 12 + "for want of a column. Add one."
    ended: Entry = ("failed", {"step": 2, "fingerprint": None, "error": error})
    journal_now(tmp_path / "long", [*at_work(), ended])
    *_, row = succeed("runs", tmp_path).splitlines()
    told = row.partition(" ago")[2].strip()
    assert told.startswith("TaskError: worker 0: the shape")
    assert told.endswith(" for want of a column.")
    assert len(told) <= 80
    assert error in " ".join(succeed("status", tmp_path / "long").split())


# -- status --


def test_status_shows_who_and_how_many_and_what_happened_last(tmp_path: Path) -> None:
    loss = ("worker_lost", {"worker": 1, "step": 2, "reason": "the process died"})
    journal_now(tmp_path, [*at_work(), loss, *generation(2, [0, 3], 2), step(3, gen=2), step(4, gen=2)])
    own(tmp_path, "driver0", process=this_process())
    found = json.loads(succeed("status", tmp_path, "--json"))
    assert (found["state"], found["step"], found["members"], found["generation"]) == ("running", 4, [0, 3], 2)
    assert [incident["text"] for incident in found["incidents"]] == ["worker 1 lost: the process died"]
    assert found["step_s"] >= 0
    out = succeed("status", tmp_path)
    for part in ("running: its driver is at work", "4 of 6", "2: 0, 3", "worker 1 lost", "driver driver0"):
        assert part in out


def test_status_shows_what_a_run_lacks_that_may_have_more_workers(tmp_path: Path) -> None:
    lacks = "Each worker needs 1 CPU (the cluster has 2, 0 free)."
    below: Entry = ("below_maximum", {"step": 2, "workers": 2, "wanted": 3, "missing": lacks})
    text = f"2 of at most 3 workers: 1 more would be taken. {lacks}"
    journal_now(tmp_path, [*at_work(), below])
    own(tmp_path, "driver0", process=this_process())
    assert json.loads(succeed("status", tmp_path, "--json"))["workers_missing"] == text
    assert text in " ".join(succeed("status", tmp_path).split())
    for _ in range(130):  # more segments than are read for what happened last
        journal_now(tmp_path, [step(3)])
    assert json.loads(succeed("status", tmp_path, "--json"))["workers_missing"] == text
    journal_now(tmp_path, [*generation(2, [0, 1, 2], 3), step(4, 3, 2)])
    assert json.loads(succeed("status", tmp_path, "--json"))["workers_missing"] == ""
    assert "would be taken" not in succeed("status", tmp_path)


def ready(worker: int, pid: int, node: str) -> Entry:
    return ("worker_ready", {"worker": worker, "pid": pid, "node": node, "node_id": "n", "start_cpu_s": 1.0})


def test_a_status_has_one_shape_wherever_it_is_printed_as_json(tmp_path: Path) -> None:
    """The driver's, with every value that a handle and that storage know, and the processes of the members."""
    folder = tmp_path / "x"
    journal_now(folder, [started(run="x"), ready(0, 11, "node-a"), ready(1, 12, "node-b"), *at_work()[1:]])
    journal_now(folder, [("worker_lost", {"worker": 1, "step": 2, "reason": "died"}), ready(3, 13, "node-b")])
    journal_now(folder, [*generation(2, [0, 3], 2), step(3, gen=2)])
    own(folder, "driver0", process=this_process(), lease_s=15.0)
    (listed,) = json.loads(succeed("runs", tmp_path, "--json"))
    status = json.loads(succeed("status", folder, "--json"))
    in_report = json.loads(succeed("report", folder, "--json"))["run_status"]
    handle = StoredRun("x", str(folder)).status().as_dict()
    shapes = [list(found) for found in (status, listed, in_report, handle, Status(**NOTHING).as_dict())]
    assert shapes == [shapes[0]] * 5
    for found in (status, in_report, handle):
        assert (found["workers"], found["members"], found["generation"]) == (2, [0, 3], 2)
        assert (found["pids"], found["nodes"]) == ({"0": 11, "3": 13}, {"0": "node-a", "3": "node-b"})
    for found in (status, listed, in_report, handle):
        assert (found["driver_pid"], found["driver_node"], found["started_at"]) == (os.getpid(), "node-1", 1.0)
        assert (found["state"], found["phase"], found["name"], found["step"]) == ("running", "running", "x", 3)
    out = succeed("status", folder)
    for part in ("2: 0, 3", "on node-a: 0 is process 11", "on node-b: 3 is process 13", f"(process {os.getpid()} on"):
        assert part in out
    journal_now(folder, [("stopped", {"step": 3, "fingerprint": "0" * 32})])
    assert "is process" not in succeed("status", folder)


def test_a_new_driver_s_workers_are_starting_and_those_of_the_one_before_are_gone(tmp_path: Path) -> None:
    folder, needs = tmp_path / "x", {"scaling": {"num_workers": [2, 4]}}
    before = [started(run="x"), ready(0, 11, "node-a"), ready(1, 12, "node-b"), *at_work()[1:]]
    journal_now(folder, [*before, ("stopped", {"step": 2, "fingerprint": None})])

    def seen() -> tuple[str, dict[str, Any]]:
        out, found = succeed("status", folder), json.loads(succeed("status", folder, "--json"))
        (listed,) = json.loads(succeed("runs", tmp_path, "--json"))
        assert listed["workers"] == found["workers"]
        return next(line for line in out.splitlines() if line.startswith("workers")).split(maxsplit=1)[1], found

    own(folder, "driver1", process=this_process(), lease_s=15.0)
    assert seen()[0] == "starting"
    told: list[tuple[Entry, str, int]] = [
        (started(2, run="x", **needs), "starting: 0 ready, at least 2 needed", 0),
        (ready(0, 21, "node-c"), "starting: 1 ready, at least 2 needed", 1),
        (ready(1, 22, "node-c"), "starting: 2 ready, at least 2 needed", 2),
        (("worker_lost", {"worker": 1, "step": 2, "reason": "died"}), "starting: 1 ready, at least 2 needed", 1),
        (ready(2, 23, "node-c"), "starting: 2 ready, at least 2 needed", 2),
    ]
    for entry, text, number in told:
        journal_now(folder, [entry], "driver1")
        line, found = seen()
        assert (line, found["workers_ready"], found["workers_needed"]) == (text, number, 2)
        assert (found["workers"], found["members"], found["pids"], found["generation"]) == (None, [], {}, None)
        assert (found["step"], found["loss"]) == (2, 2.5)
    journal_now(folder, generation(2, [0, 2], 2), "driver1")
    line, found = seen()
    assert (line, found["pids"]) == ("2: 0, 2", {"0": 21, "2": 23})
    assert (found["workers"], found["workers_ready"], found["workers_needed"]) == (2, None, None)


def test_workers_that_a_driver_took_over_are_ready_and_keep_their_processes(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    journal_now(folder, [started(run="x"), ready(0, 11, "a"), ready(1, 12, "b"), *at_work()[1:]])
    own(folder, "driver1", process=this_process(), lease_s=15.0)
    taken = ("taken_over", {"workers": [1], "step": 2, "ended": 1, "before": "driver0"})
    journal_now(folder, [started(2, run="x"), taken], "driver1")
    out = succeed("status", folder)
    assert "running: its driver is at work, and its workers are starting\n" in out
    assert "starting: 1 ready\n" in out
    journal_now(folder, generation(2, [1], 2), "driver1")
    assert json.loads(succeed("status", folder, "--json"))["pids"] == {"1": 12}


def test_a_worker_that_was_lost_is_no_member_until_the_next_generation(tmp_path: Path) -> None:
    journal_now(tmp_path / "x", [*at_work(), ("worker_lost", {"worker": 1, "reason": "SIGKILL", "step": 2})])
    storage = open_storage(str(tmp_path / "x"))
    assert read_recent(storage).members == (0,)
    journal_now(tmp_path / "x", generation(2, [0, 2], 2))
    assert read_recent(storage).members == (0, 2)


def test_a_start_that_takes_long_is_seen_beyond_the_newest_segments(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    waits: list[Entry] = [("waiting", {"ready": 1, "needed": 2, "missing": "no GPU"})] * 300
    resumed = started(2, run="x", scaling={"num_workers": [2, 2]})
    entries = [started(), ready(0, 11, "a"), ready(1, 12, "b"), *generation(1, [0, 1], 0), resumed, ready(0, 21, "c")]
    for number, (kind, fields) in enumerate([*entries, *waits, ready(1, 22, "c")], 1):
        lines = [{"kind": "segment", "writer": "w"}, {"kind": kind, "at": float(number), **fields}]
        storage.write(segment_key(number), ["".join(json.dumps(line) + "\n" for line in lines).encode()])
    assert read_recent(storage).starting == Starting(ready=2, needed=2)


NOTHING: dict[str, Any] = {"phase": "starting", "step": 0, "max_steps": 0, "workers": ()}


def test_processes_that_began_long_ago_are_found_in_older_segments(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    entries = [started(name="x"), ready(0, 11, "a"), ready(1, 12, "b"), *generation(1, [0, 1], 0), ready(0, 21, "c")]
    for number, (kind, fields) in enumerate([*entries, *(step(number) for number in range(1, 500))], 1):
        lines = [{"kind": "segment", "writer": "w"}, {"kind": kind, "at": float(number), **fields}]
        storage.write(segment_key(number), ["".join(json.dumps(line) + "\n" for line in lines).encode()])
    counting = CountingStorage(storage)
    reader = RecentReader(counting)
    for _ in range(2):
        found = reader.read()
        assert (found.members, found.pids, found.nodes) == ((0, 1), {0: 21, 1: 12}, {0: "c", 1: "b"})
        assert len(counting.reads) == len(entries) + 499  # each segment once


def test_status_of_a_name_that_is_mistyped_names_the_run_that_is_like_it(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt-small", run_with_a_loss())
    for command in ("status", "report", "replay"):
        assert f"Did you mean {tmp_path}/gpt-small?" in fail(command, tmp_path / "gpt-smal")
    assert f"Did you mean {tmp_path}/gpt-small?" in fail("checkpoint", "ls", tmp_path / "gpt-smal")


def test_following_prints_everything_that_is_written_and_ends_with_the_driver(tmp_path: Path) -> None:
    journal_now(tmp_path, at_work())
    holder = own(tmp_path, "driver0", process=this_process())
    storage = open_storage(str(tmp_path))
    (before,) = look([storage])
    more: list[list[Entry]] = [
        [step(3), ("worker_lost", {"worker": 1, "step": 3, "reason": "died"})],
        [],
        [step(4), ("finished", {"step": 4, "fingerprint": "f"})],
    ]

    def pause(_: float) -> None:
        journal_now(tmp_path, more.pop(0))
        if not more:
            storage.write(lease_key("driver0"), [encode(replace(holder, ended=True))])

    told = list(follow(storage, before, read_recent(storage).last_segment, every_s=1.0, pause=pause))
    kinds = [[change["kind"] for change in changes] for changes in told]
    assert kinds == [["step", "worker_lost"], ["step", "finished", "state"]]
    assert told[-1][-1]["state"] == "finished"
    assert more == []


def test_following_reports_a_driver_that_dies_silently(tmp_path: Path) -> None:
    journal_now(tmp_path, at_work())
    holder = own(tmp_path, "driver0", process=this_process())
    storage, clock = open_storage(str(tmp_path)), [time.time()]
    (before,) = look([storage])

    def pause(_: float) -> None:
        clock[0] += overview.JUST_NOW_S
        gone = replace(holder.process, started=holder.process.started + 1)
        storage.write(lease_key("driver0"), [encode(replace(holder, process=gone))])

    told = list(
        follow(storage, before, read_recent(storage).last_segment, every_s=1.0, pause=pause, now=lambda: clock[0])
    )
    assert [change["state"] for changes in told for change in changes] == ["ended"]


def test_status_follow_prints_lines_of_json_and_ends_at_once_for_a_run_that_is_over(tmp_path: Path) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    (line,) = succeed("status", url, "--follow", "--json").splitlines()
    assert json.loads(line)["state"] == "finished"
