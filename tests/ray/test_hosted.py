"""Runs of a driver actor: its starter may exit, the actor itself may die, and any process may query it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from torch import nn
from typer.testing import CliRunner

import raysharded as rs
from raysharded import checkpoint
from raysharded.checkpoint import open_storage
from raysharded.cli import app
from raysharded.errors import CheckpointError, ConfigError, RunFailed, RunOwnedElsewhere, StorageError, TaskError
from raysharded.journal.log import read
from raysharded.run.hosted.registry import host_of, hosts
from raysharded.run.hosted.remote import AttachedRun
from raysharded.run.offline import StoredRun
from tests.docs.blocks import blocks, page
from tests.ray.driving import STEPS, hurry, trainer, undisturbed
from tests.ray.leftovers import assert_no_slot_is_leaked, wait_until
from tests.report.entries import data, generation, run_with_a_loss, started, step, write_run

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_host_stays")]

STARTS = """
import sys, time
from pathlib import Path
from tests.ray.driving import trainer

print(trainer(Path(sys.argv[1]), 1).start(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_host_stays(cluster: None) -> Iterator[None]:
    """End the driver actors of finished runs, which would stay for a minute."""
    yield
    for name in hosts():
        with contextlib.suppress(RayError):
            ray.kill(host_of(name), no_restart=True)
    wait_until(lambda: not hosts(), "all hosts gone")


def host_pid(run: rs.Run) -> int:
    return int(run.status().driver.partition("(process ")[2].partition(" ")[0])


def is_written(run: rs.Run, step: int) -> bool:
    return any(entry["kind"] == "step" and entry["step"] >= step for entry in read(open_storage(run.url)))


def assert_right(run: rs.Run, result: rs.Result) -> None:
    """The run's bits are those of an undisturbed one, and no step was computed twice."""
    assert result.fingerprint == undisturbed().fingerprint
    steps = Counter(entry["step"] for entry in read(open_storage(run.url)) if entry["kind"] == "step")
    assert steps == dict.fromkeys(range(1, STEPS + 1), 1)
    table = run.metrics()
    assert table["step"].to_pylist() == list(range(1, STEPS + 1))
    assert table["loss"].to_pylist() == [numbers["loss"] for numbers in undisturbed().numbers]
    assert run.report().ok


def test_a_run_continues_when_the_process_that_started_it_is_killed_and_is_attached_to_by_name(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    notebook = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert notebook.stdout is not None
    assert "AttachedRun 'driven'" in notebook.stdout.readline()
    notebook.kill()
    notebook.wait()
    run = rs.attach("driven")
    with pytest.raises(RunOwnedElsewhere, match=r"driven already \(process \d+ on .*attach\('driven'\)"):
        trainer(tmp_path, 1).start()
    wait_until(lambda: run.status().step >= 1, "a step")
    with pytest.raises(ConfigError, match=r"its driver actor is at work \(process \d+ on "):
        rs.remove_run("driven")
    status = run.status().as_dict()
    assert (status["driver_pid"], status["name"]) == (host_pid(run), "driven")
    assert (status["state"], status["workers"], len(status["pids"])) == ("running", 1, 1)
    watching = subprocess.Popen(
        [sys.executable, "-m", "raysharded", "attach", "driven"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline()
    watching.terminate()
    assert (watching.communicate(timeout=60)[1], watching.returncode) == ("left the view; the run continues\n", 0)
    hurry(tmp_path)
    kinds = [kind for batch in run.follow() for _, kind, _ in batch]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert_right(run, run.wait(240))
    over = rs.attach(str(tmp_path / "driven")).status()
    assert (over.phase, over.state) == ("over", "finished")
    assert_no_slot_is_leaked()
    rs.remove_run("driven")
    assert not (tmp_path / "driven").exists()
    with pytest.raises(StorageError, match="there is no run at"):
        run.report()


def test_a_host_that_is_killed_is_started_again_and_takes_the_workers_over_from_memory(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1).start()
    numbers, steps, killed, stored = [], list[int](), False, StoredRun("driven", run.url)
    for batch in run.follow():
        numbers += [number for number, _, _ in batch]
        steps += [fields["step"] for _, kind, fields in batch if kind == "step"]
        if not killed and any(kind == "step" and fields["step"] >= 3 for _, kind, fields in batch):
            killed = True
            before = run.status()
            wait_until(partial(is_written, run, before.step + 2), "steps that this follower has not fetched")
            os.kill(host_pid(run), signal.SIGKILL)
            wait_until(lambda: stored.status().state == "restarting", "storage and cluster know of the restart")
            hurry(tmp_path)
    assert numbers == sorted(set(numbers))
    assert steps == list(range(1, STEPS + 1)), "a step comes once, though the next driver records it again"
    entries = list(read(open_storage(run.url)))
    (taken,) = [entry for entry in entries if entry["kind"] == "taken_over"]
    assert taken["workers"] == list(before.workers)
    assert [entry["because"] for entry in entries if "because" in entry] == ["its process is gone"]
    assert run.status().pids == before.pids  # no worker was started
    assert_right(run, run.wait(240))
    assert_no_slot_is_leaked()


def test_a_driver_that_is_replaced_by_word_hands_its_workers_over(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1).start()
    wait_until(lambda: run.status().step >= 3, "three steps")
    before = run.status()
    newer = trainer(tmp_path, 1).start(take_over=True)
    hurry(tmp_path)
    assert_right(newer, newer.wait(240))
    assert run.wait(240) == newer.wait(240)  # handles follow the run, not the process
    assert newer.status().pids == before.pids  # no worker was started
    taken = [entry["workers"] for entry in read(open_storage(run.url)) if entry["kind"] == "taken_over"]
    assert taken == [list(before.workers)]
    assert_no_slot_is_leaked()


def test_what_a_run_failed_with_comes_with_the_task_s_own_traceback_and_is_in_the_journal_later(tmp_path: Path) -> None:
    def no_such_column(model: nn.Module, batch: object) -> rs.Loss:
        raise KeyError("no such column")

    failing = trainer(tmp_path, 1)
    failing.task.loss = no_such_column  # type: ignore[method-assign]
    run = failing.start()
    with pytest.raises(TaskError, match=r"in step 1.*KeyError: 'no such column'") as caught:
        run.wait(240)
    assert 'raise KeyError("no such column")' in caught.value.user_traceback
    ray.kill(host_of(next(iter(hosts()))), no_restart=True)
    wait_until(lambda: not hosts(), "its host's end")
    later = rs.attach("driven")
    with pytest.raises(
        RunFailed, match=r"(?s)'driven' failed at step 0: TaskError.*Started again, it resumes from the start"
    ):
        later.wait(240)
    assert later.status().phase == "failed"
    assert_no_slot_is_leaked()


def test_a_run_is_stopped_forked_and_queried_in_vain_when_it_is_over(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1).start()
    with pytest.raises(CheckpointError, match=r"no committed checkpoint of step 1; there are: none"):
        run.fork("other", step=1)
    written = run.checkpoint(timeout_s=120)
    told = CliRunner().invoke(app, ["fork", "driven", "other", "--storage", str(tmp_path / "forks")])
    assert f"run other begins with step {written.step} of {run.url}\n" in told.stdout, told.stderr
    assert f"its folder: {tmp_path}/forks/other;" in told.stdout
    fork = rs.attach("other")
    run.stop(checkpoint=True)
    with pytest.raises(
        rs.RunStopped, match=r"Stopped\. Run 'driven' was at step \d+ of 12; the next fit\(\) resumes from its"
    ) as stopped:
        run.wait(240)
    found = stopped.value.result  # it came from the driver actor
    assert (found.name, found.url) == ("driven", run.url)
    assert found.steps >= written.step
    assert checkpoint.open(found.checkpoint).step == found.steps
    with pytest.raises(RunFailed, match="is over"):
        run.checkpoint()
    run.stop()  # it is
    hurry(tmp_path)
    forked = fork.wait(240)
    assert forked.fingerprint == undisturbed().fingerprint
    started = next(entry for entry in read(open_storage(fork.url)) if entry["kind"] == "started")
    assert started["resumed_after_step"] == written.step
    again = trainer(tmp_path, 1).start()  # the finished driver actor is replaced
    assert again.wait(240).fingerprint == undisturbed().fingerprint
    ray.kill(host_of(next(name for name, run in hosts().items() if run == "driven")), no_restart=True)
    wait_until(lambda: "driven" not in hosts().values(), "its host's end")
    assert rs.attach("driven").wait(240) == again.wait(240)
    assert_no_slot_is_leaked()


def test_a_stop_is_answered_beside_many_calls_that_wait_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, sent = AttachedRun._answer, list[Any]()

    def counted(run: AttachedRun, call: Any, timeout_s: float | None) -> Any:
        sent.append(call)
        return answer(run, call, timeout_s)

    unable = trainer(tmp_path, 1)
    unable.scaling = rs.ScalingConfig(num_workers=1, resources_per_worker={"a_node_that_never_comes": 1.0})
    run = unable.start()
    run.wait_until_begun(60.0)
    monkeypatch.setattr(AttachedRun, "_answer", counted)
    with ThreadPoolExecutor(20) as threads:
        waiting = [threads.submit(run.checkpoint) for _ in range(20)]
        wait_until(lambda: len(sent) == 20, "all calls are sent")
        run.stop()
        with pytest.raises(RunFailed, match="Stopped"):
            run.wait(60)
        for one in waiting:
            with pytest.raises(RunFailed, match="ended before the checkpoint was committed"):
                one.result()
    assert_no_slot_is_leaked()


DETACHED = """
from pathlib import Path

from tests.ray.driving import trainer as made

def trainer():
    return made(Path({folder!r}), 1)
"""


def test_a_detached_start_returns_when_the_driver_leads_the_run_or_with_its_refusal(tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.stdout, done.stderr

    program = tmp_path / "detached_program.py"
    program.write_text(DETACHED.format(folder=str(tmp_path)))
    url = write_run(tmp_path / "driven", [started(run="driven"), data(), *generation(1, [0, 1], 0), step(1)])
    refusal = "was started with batch="
    status, out, error = command("run", str(program), "--detach")
    assert (status, out) == (1, "")
    assert error.startswith("error: run 'driven' was started with batch=")
    for name in ("driven", url):  # by its driver actor, which stays for a minute, and by its storage
        status, out, _ = command("attach", name)
        assert (status, refusal in out.splitlines()[-1]) == (1, True), out
        assert out.splitlines()[-1].startswith("run driven failed at step 1 of ")
        assert refusal in json.loads(command("wait", name, "--json")[1])["error"]
    told = json.loads(command("status", "driven", "--json")[1])
    assert (told["state"], refusal in told["error"]) == ("failed", True)
    shutil.rmtree(url)
    status, out, error = command("run", str(program), "--detach")
    assert (status, out.splitlines()[0]) == (0, "run driven has begun: raysharded attach driven"), error
    assert rs.attach("driven").status().driver
    assert command("wait", "driven", "--timeout", "0")[0] == 124
    rs.attach("driven").stop()
    assert command("wait", "driven")[0] == 3
    assert "nothing is stopped: run driven was stopped at step" in command("stop", "driven")[1]
    assert_no_slot_is_leaked()


def test_wrong_names_end_with_one_sentence_and_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, 1, name="qwerty2").start()
    told = CliRunner().invoke(app, ["status", "qwerty2"])
    assert told.exit_code == 0, told.stderr
    assert "new: it is starting" in told.stdout
    run.stop()
    with pytest.raises(RunFailed, match="Stopped"):
        run.wait(240)
    told = CliRunner().invoke(app, ["status", "qwerty2", "--json"])
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["url"] == str(tmp_path / "qwerty2")
    assert "did you mean 'qwerty2'?" in CliRunner().invoke(app, ["status", "qwrty2"]).stderr
    with pytest.raises(
        ConfigError, match=r"no run named 'qwrty2' was started on this cluster: did you mean 'qwerty2'\?"
    ):
        rs.attach("qwrty2")
    with pytest.raises(ConfigError, match=r"there is no run at .*nothing/here"):
        rs.attach(str(tmp_path / "nothing" / "here"))
    write_run(tmp_path / "qwertyB", run_with_a_loss())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r": did you mean 'qwerty2' or \./qwertyB\?$"):
        rs.attach("qwrty2")
    rs.remove_run("qwerty2")
    with pytest.raises(ConfigError, match=r"on this cluster: did you mean \./qwertyB\?$"):
        rs.attach("qwrty2")


@pytest.mark.long
def test_the_lines_of_the_guide_work_as_described(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks(page("running.md"), "python") if "run.resize(4)" in block)
    driven = trainer(tmp_path, (2, 4), name="gpt-5m")
    names: dict[str, Any] = {"raysharded": rs, "trainer": driven}
    started, resized, stopped = shown.partition("run.resize(4)")
    exec(compile(started + resized, "running.md", "exec"), names)  # noqa: S102 - our own documentation
    wait_until(lambda: names["run"].status().step > 0, "a step")
    with pytest.raises(RunFailed, match="the next fit"):  # it is requested to stop
        exec(compile(stopped, "running.md", "exec"), names)  # noqa: S102
    kinds = [entry["kind"] for entry in read(open_storage(driven.url))]
    assert {"resize", "checkpoint", "stopped"} <= set(kinds)
