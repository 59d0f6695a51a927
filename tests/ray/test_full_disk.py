"""A detached run whose disk fills up, or whose share is unmounted: what its status, a stop and a lost driver are like
meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

import raysharded as rs
from raysharded.checkpoint import open_storage
from raysharded.cli import app
from raysharded.errors import RunFailed
from raysharded.journal.log import read
from raysharded.ray_backend.peers import host_name, host_of
from tests.ray.driving import STEPS, hurry, trainer, undisturbed
from tests.ray.leftovers import assert_no_slot_is_leaked, wait_until
from tests.ray.test_hosted import host_pid, no_host_stays as no_host_stays

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_host_stays")]


class FullDisk:
    """A small file system, which a file can fill."""

    says = restarted_says = "No space left"

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "raysharded-test", str(folder)], check=True)

    def fail(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def recover(self) -> None:
        self._ballast.unlink()

    def end(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


class UnmountedShare:
    """A folder that is mounted at another place. Unmounted, it leaves that place empty."""

    says, restarted_says = "is not the run's folder", "there is no run at"

    def __init__(self, folder: Path) -> None:
        self.folder, self._shared = folder / "mounted", folder / "shared"
        for made in (self.folder, self._shared):
            made.mkdir()
        self.recover()

    def fail(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def recover(self) -> None:
        assert list(self.folder.iterdir()) == [], "something was written in the share's place"
        subprocess.run(["mount", "--bind", str(self._shared), str(self.folder)], check=True)

    def end(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=False)


Disk = FullDisk | UnmountedShare


@pytest.fixture(params=[FullDisk, pytest.param(UnmountedShare, marks=pytest.mark.long)])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    try:
        made: Disk = request.param(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted here, that takes root: {error}")
    yield made
    made.end()


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout


def status(run: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["status", run, "--json"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()  # this process started the workers, so Ray prints their ends here, too
    found: dict[str, Any] = json.loads("\n".join(line for line in lines if "(raylet)" not in line))
    return found


def has_warning(run: str, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in status(run)["warnings"])


def driven(folder: Path, orphan_wait_s: float = 60.0) -> rs.ElasticTrainer:
    """A run that does not reach its last step within a test."""
    return trainer(folder, 1, orphan_wait_s=orphan_wait_s, max_steps=1000)


def assert_as_undisturbed(run: rs.Run, *, once: bool = True) -> None:
    """Stop the run. Its steps had the losses of an undisturbed one, and none was computed twice if `once`."""
    before = run.status().step
    hurry(Path(run.url).parent)
    wait_until(lambda: run.status().step > max(before, STEPS), "a further step")
    run.stop()
    with pytest.raises(rs.RunStopped):
        run.wait(240)
    done = [(entry["step"], entry["loss"]) for entry in read(open_storage(run.url)) if entry["kind"] == "step"]
    assert not once or [step for step, _ in done] == list(range(1, len(done) + 1))
    expected = dict(enumerate((numbers["loss"] for numbers in undisturbed().numbers), 1))
    assert {step for step, _ in done} >= expected.keys()
    assert [loss for step, loss in done if step in expected] == [expected[step] for step, _ in done if step in expected]


def test_a_restarted_driver_waits_for_its_full_disk_and_the_run_loses_nothing(disk: Disk) -> None:
    run = driven(disk.folder).start()
    wait_until(lambda: run.status().step >= 2, "two steps")
    disk.fail()
    wait_until(lambda: has_warning("driven", "storage has taken no entries", disk.says), "the driver's word")
    assert status("driven")["state"] == "running"
    os.kill(host_pid(run), signal.SIGKILL)
    wait_until(
        lambda: has_warning(run.url, "its restarted driver cannot begin", disk.restarted_says), "the next one's word"
    )
    assert status(run.url)["state"] == "restarting"
    disk.recover()
    wait_until(lambda: run.status().state == "running", "the driver at work")
    assert_as_undisturbed(run)  # the workers kept what they had
    assert_no_slot_is_leaked()


@pytest.mark.long  # the leader of the last checkpoint tries for a minute to acquire the run, and then retries
def test_workers_without_a_driver_keep_their_state_until_the_disk_takes_a_last_checkpoint(disk: Disk) -> None:
    run = driven(disk.folder, orphan_wait_s=1.0).start()
    wait_until(lambda: (status(run.url)["step"] or 0) >= 2, "two steps in storage")
    disk.fail()
    pid = next(iter(status("driven")["pids"].values()))
    node: Any = ray._private.worker._global_node
    (log,) = Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")
    ray.kill(host_of(host_name(run.name, run.url)), no_restart=True)
    wait_until(lambda: "the last checkpoint is retried: " in log.read_text(), "an attempt")
    disk.recover()
    wait_until(lambda: status(run.url)["checkpoint_step"], "the last checkpoint")
    assert_as_undisturbed(driven(disk.folder, orphan_wait_s=1.0).start())


def test_a_stop_on_a_full_disk_says_what_it_waits_for_and_a_second_one_ends_the_run(disk: Disk) -> None:
    run = driven(disk.folder).start()
    wait_until(lambda: run.status().step >= 1, "a step")
    saved = run.checkpoint(60).step
    wait_until(lambda: run.status().step > saved, "a step that a stop has to save")
    disk.fail()
    wait_until(lambda: has_warning("driven", "storage has taken no entries"), "the driver's word")
    code, out = command("stop", "driven")
    assert (code, "ends after a checkpoint" in out) == (0, True)
    assert "storage has taken no entries" in out
    wait_until(lambda: has_warning("driven", "it ends when a checkpoint of a step after"), "the driver's answer")
    assert status("driven")["stop_requested"]
    assert not run.is_over()
    code, out = command("stop", "driven")
    assert (code, "ends at once, without the requested checkpoint" in out) == (0, True)
    code, out = command("wait", "driven")
    assert (code, "the end of the run's journal could not be written" in out) == (3, True), out
    with pytest.raises(RunFailed, match="However, the end of the run's journal could not be written"):
        run.wait(60)
    found = status("driven")
    assert (found["state"], found["stop_requested"]) == ("stopped", False)
    disk.recover()
    assert_as_undisturbed(driven(disk.folder).start(), once=False)
    assert_no_slot_is_leaked()


def test_a_run_without_a_driver_says_how_long_its_workers_keep_the_newest_state(tmp_path: Path) -> None:
    run = driven(tmp_path).start()
    wait_until(lambda: (status(run.url)["step"] or 0) >= 1, "a step in storage")
    pid = host_pid(run)
    ray.kill(host_of(host_name(run.name, run.url)), no_restart=True)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the driver's end")
    wait_until(lambda: has_warning(run.url, "1 worker keeps the newest state in memory for another"), "orphans")
    code, out = command("status", run.url)
    assert (code, "its workers wait for another one" in " ".join(out.split())) == (0, True), out
    (worker,) = status(run.url)["pids"].values()
    node: Any = ray._private.worker._global_node
    (log,) = Path(node.get_logs_dir_path()).glob(f"worker-*-{worker}.err")
    wait_until(lambda: "worker 0: no driver for" in log.read_text(), "the worker's line")
    assert log.read_text().count("worker 0: no driver for") == 1
    assert_as_undisturbed(driven(tmp_path).start())
