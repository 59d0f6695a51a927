"""`raysharded check` and `ElasticTrainer.check`: they report each promise that holds, name each broken one with its
message, and leave nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharded.errors import ConfigError
from raysharded.preflight import Check, Needs, fresh_process, host_memory
from tests import forked
from tests.cli.test_commands import invoke
from tests.preflight import tasks
from tests.session.loops import Loop
from tests.training.harness import SmallTask, Tokens, samples

pytestmark = pytest.mark.procs


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that a check leaves nothing, with any result: no temporary file, no process, no folder of the run."""
    util.get_temp_dir()  # Python's own server keeps its sockets there, whose paths must be short
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(own_processes())
    yield
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "runs").exists()
    deadline = time.monotonic() + 30
    while left := set(own_processes()) - before:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)


def own_processes() -> Iterator[int]:
    """Processes below this one that build, train or read data; the server that they are forked from stays."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    servers = {pid for pid, parent in parents.items() if parent == os.getpid() and "forkserver" in command_of(pid)}
    for pid, parent in parents.items():
        if parent in servers or (parent == os.getpid() and "fresh_process" in command_of(pid)):
            yield pid


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class Forked:
    """A process of the check that is forked, so that it starts at once, in place of a fresh one."""

    def __init__(self, connection: Connection, hash_seed: int) -> None:
        context = forked.server()
        self._process = context.Process(target=serve, args=(connection, hash_seed), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def serve(connection: Connection, hash_seed: int) -> None:
    os.environ["PYTHONHASHSEED"] = str(hash_seed)
    fresh_process.serve(connection.fileno())


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requested hash seeds."""
    seeds: list[int] = []

    def start(connection: Connection, hash_seed: int) -> Forked:
        seeds.append(hash_seed)
        return Forked(connection, hash_seed)

    monkeypatch.setattr(fresh_process, "start", start)
    return seeds


def statuses(checks: Any) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_a_task_that_keeps_the_promise_holds_with_everything_and_ends_with_0(tmp_path: Path, forks: list[int]) -> None:
    result = invoke("check", "tests.preflight.tasks:loud", tmp_path / "runs", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"]) == (0, True), result.output
    assert [(check["name"], check["status"]) for check in found["checks"]] == [
        ("two builds", "ok"),
        ("1 worker", "ok"),
        ("2 workers, audited", "ok"),
        ("2 workers, one killed", "ok"),
    ]
    assert found["checks"][0]["found"] == "the same in two fresh processes: 17 parameters, 1 buffer and 1 constant"
    assert found["checks"][2]["found"].endswith("and 3 steps computed twice")
    assert found["checks"][3]["found"].startswith("killed in the backward of step 2, and replaced")
    needed = found["needs"]
    assert (needed["parameters"], needed["units"], needed["microbatches"], needed["samples"]) == (4387, 2, 4, 24)
    assert 0 < needed["host_bytes"] < needed["available_bytes"]
    assert found["untried"][0] == "steps of 16 microbatches: the check's have 4"
    assert {"python", "torch"} <= found["versions"].keys()


@pytest.mark.long
def test_a_task_that_keeps_the_promise_holds_in_fresh_processes(tmp_path: Path) -> None:
    assert tasks.trainer_of(tasks.Loud(), str(tmp_path / "runs"), Tokens(), compile=True).check().ok


def test_fresh_processes_find_the_programs_modules_and_have_different_orders_of_a_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orders_of_a_set.py").write_text(f"def order():\n    return list(set({tasks.NAMES}))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    order = importlib.import_module("orders_of_a_set").order
    with fresh_process.FreshProcess(1) as one, fresh_process.FreshProcess(2) as two:
        for process in (one, two):
            process.ask(order)
        orders = [process.answer(time.monotonic() + 120.0) for process in (one, two)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(tasks.NAMES)
    assert orders[0] != orders[1]


def test_what_differs_between_processes_sizes_and_generations_is_found_each_by_its_check(
    tmp_path: Path, forks: list[int]
) -> None:
    assert_each_is_found(tmp_path)
    assert forks == [1, 2]


@pytest.mark.long
def test_what_differs_is_found_in_fresh_processes(tmp_path: Path) -> None:
    assert_each_is_found(tmp_path)


def assert_each_is_found(tmp_path: Path) -> None:
    told: list[Needs | Check] = []
    data = [torch.from_numpy(sample) for sample in samples()]
    report = tasks.trainer_of(tasks.Broken(), str(tmp_path / "runs"), data).check(steps=2, listen=told.append)
    assert statuses(report.checks) == {
        "two builds": "differs",
        "1 worker": "ok",
        "2 workers, audited": "differs",
        "2 workers, one killed": "refused",
    }
    assert not report.ok
    assert told == [report.needs, *report.checks]
    builds, _, audited, killed = report.checks
    assert "where another has parameter 'more." in builds.found
    assert builds.found.endswith("has another order in each process: go through sorted(...).")
    assert audited.found.startswith("the loss of step 1 is ")
    assert "the number of workers" in audited.advice
    assert "worker 0 has group '0'" in killed.found
    assert "lr 0.01" in killed.found


@pytest.mark.long
def test_data_that_the_clock_makes_are_refused_in_the_engines_words(tmp_path: Path, forks: list[int]) -> None:
    trainer = tasks.trainer_of(SmallTask(), str(tmp_path / "runs"), data=tasks.Clock())
    report = trainer.check(steps=2)
    assert forks == [1, 2]
    assert list(statuses(report.checks).values()) == ["ok", "refused", "not tried", "not tried"]
    assert "gave other values when it was read a second time" in report.checks[1].found
    assert report.checks[2].found == "'1 worker' was refused"
    assert not report.ok


def test_where_the_task_raises_is_shown_once_and_nothing_of_ours(tmp_path: Path, forks: list[int]) -> None:
    result = invoke("check", "tests.preflight.tasks:raising", tmp_path / "runs")
    assert result.exit_code == 1
    assert "refused    1 worker (" in result.stdout
    assert result.stdout.count("'1 worker' was refused") == 2
    assert "Raises.loss in step 1, microbatch 0 raised LookupError: no such target" in result.stdout
    assert result.stderr.count("Traceback") == result.stderr.count("LookupError: no such target") == 1
    assert "raysharded/" not in result.stderr
    assert result.stdout.splitlines()[-1].startswith("not everything holds, in ")


def test_ctrl_c_ends_it_with_one_sentence(tmp_path: Path, forks: list[int]) -> None:
    trainer = tasks.trainer_of(tasks.Interrupts(os.getpid()), str(tmp_path / "runs"))
    with pytest.raises(KeyboardInterrupt, match=r"^Interrupted\. Nothing is left of the check\.$"):
        trainer.check()


def test_it_ends_when_its_time_is_over(tmp_path: Path, forks: list[int]) -> None:
    report = tasks.trainer_of(tasks.Sleeps(), str(tmp_path / "runs")).check(timeout_s=1.0)
    assert set(statuses(report.checks).values()) == {"not tried"}
    assert report.checks[0].found == "not done within 1.00 s"
    assert report.checks[1].found == "the time is over"
    assert "--timeout" in report.checks[0].advice
    assert not report.ok


def test_memory_that_there_is_not_is_reported_before_anything_is_trained(
    tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 204800 kB\n")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    result = invoke("check", "tests.preflight.tasks:loud", tmp_path / "runs")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the check needs up to 1.")
    assert "and 200.0 MiB is available, of which a tenth stays free. Give settings of a smaller model" in result.stderr
    assert result.stdout.startswith("needs      4,387 parameters in 2 units\n")
    assert "two builds" not in result.stdout
    assert forks == [1]


def test_a_task_that_other_processes_cannot_be_given_is_wrong_usage(tmp_path: Path, forks: list[int]) -> None:
    task = SmallTask()
    unpickled: Callable[[], int] = lambda: 3  # noqa: E731 - it has no name to be imported by
    vars(task)["schedule"] = unpickled
    with pytest.raises(ConfigError, match=r"cannot be pickled: .* put that into a module"):
        tasks.trainer_of(task, str(tmp_path / "runs")).check()


@pytest.mark.long
def test_a_loop_that_keeps_the_promise_holds(tmp_path: Path, forks: list[int]) -> None:
    report = tasks.trainer_of_loop(Loop(), str(tmp_path / "runs")).check()
    assert statuses(report.checks) == {"1 worker": "ok", "2 workers, audited": "ok", "2 workers, one killed": "ok"}
    assert report.ok


def test_a_loop_that_counts_its_steps_sees_all_of_its_program_and_ends_after_those_of_the_check(
    tmp_path: Path, forks: list[int]
) -> None:
    report = tasks.trainer_of_loop(tasks.Counted(), str(tmp_path / "runs")).check(steps=2)
    assert statuses(report.checks) == {"1 worker": "ok", "2 workers, audited": "ok", "2 workers, one killed": "ok"}
    assert report.ok
    assert "a training function builds its model when it is called" in report.needs.unknown
    assert len(forks) == 1
    assert "code behind a loop that counts its steps itself: the check ends it after 2" in report.untried


@pytest.mark.long
def test_a_loop_that_differs_between_sizes_and_generations_is_found(tmp_path: Path, forks: list[int]) -> None:
    report = tasks.trainer_of_loop(tasks.Rescaled(), str(tmp_path / "runs")).check(steps=2)
    assert statuses(report.checks) == {
        "1 worker": "ok",
        "2 workers, audited": "differs",
        "2 workers, one killed": "differs",
    }
    assert "the training function" in report.checks[1].advice
