"""A driver that is cut off from its workers or from its storage, and another that takes the run over.

Only one of them commits.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from raysharded.checkpoint import Storage, newest_complete, open_storage
from raysharded.checkpoint.stored_claims import list_numbers, read_claim
from raysharded.driver.driver import Driver
from raysharded.errors import RunOwnedElsewhere
from raysharded.journal.log import read, read_placed
from raysharded.ownership.run_folder import run_storage
from tests.golden.record_runs import Slow
from tests.ray.leftovers import wait_until
from tests.training.harness import Collector, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 16
MICROBATCHES = 4
SAVE_EVERY = 2
STOPPED_AFTER_STEP = 4
FENCED = 7
"""Exit status of the older driver when it finds that another driver leads the run."""


@cache
def undisturbed() -> str | None:
    return train(1, steps=STEPS, microbatches=MICROBATCHES).fingerprint


def driver(url: str) -> Driver:
    job = make_job(url, steps=STEPS, microbatches=MICROBATCHES, save_every=SAVE_EVERY)
    return make_driver(job, make_limits(job, 2), Collector())


def older_driver(url: str, pause_s: float = 0.0) -> None:
    """The process that is to be stopped; prints a line when it has come to a step, and when storage fails.

    `pause_s`: for each sample of a run that does not come to its end before another driver has.
    """
    data, steps = (Slow(pause_s), 100 * STEPS) if pause_s else (None, STEPS)
    job = make_job(url, steps=steps, microbatches=MICROBATCHES, save_every=SAVE_EVERY, data=data)

    def say(kind: str, fields: dict[str, object]) -> None:
        if kind == "step":
            print(fields["step"], flush=True)  # noqa: T201 - the test reads it
        elif kind == "storage_failing":
            print(fields["error"], flush=True)  # noqa: T201

    limits = make_limits(job, 2, start_timeout_s=240.0)
    older = make_driver(job, limits, say, storage=run_storage(url))
    older.restore()
    try:
        older.run()
    except RunOwnedElsewhere:
        sys.exit(FENCED)


def shard_steps(storage: Storage) -> set[int]:
    """The steps that workers have written shards of, whether or not they were committed."""
    return {int(key.split("step-")[1].split("-")[0]) for key in storage.list("checkpoints") if "step-" in key}


def test_workers_whose_driver_is_cut_off_write_on_and_only_the_new_driver_commits(tmp_path: Path) -> None:
    url = f"{tmp_path}/run"
    storage = open_storage(url)
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.faults.test_partition import older_driver; older_driver({url!r})"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= STOPPED_AFTER_STEP:
                break
        os.kill(process.pid, signal.SIGSTOP)  # the driver alone: it receives and sends nothing
        before = len(list_numbers(storage))
        newest = max(shard_steps(storage))
        wait_until(lambda: max(shard_steps(storage)) >= newest + 2 * SAVE_EVERY, "its workers write on")
        assert len(list_numbers(storage)) == before  # and nothing of it is committed
        newer = driver(url)
        newer.restore()
        state = newer.run()
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(240) == FENCED
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
    assert_only_the_newer_commits(storage, newer)
    assert state.result_fingerprint == undisturbed()


def assert_only_the_newer_commits(storage: Storage, newer: Driver) -> None:
    """From its first claim on there are none of another driver."""
    claims = [read_claim(storage, number) for number in sorted(list_numbers(storage))]
    first = next(number for number, claim in enumerate(claims) if claim.writer != claims[0].writer)
    assert {claim.writer for claim in claims[first:]} == {newer.state.driver}
    assert claims[first].kind == "owner"
    assert claims[-1].step == STEPS


def mounted(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def test_a_driver_whose_share_was_unmounted_while_another_took_the_run_over_ends_and_writes_nothing(
    tmp_path: Path,
) -> None:
    """The share is mounted where the older driver looks for it, in its own namespace; the newer one uses it itself.

    Each of two drivers trains, one after the other.
    """
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here: they need root")
    share, place = tmp_path / "share", tmp_path / "place"
    share.mkdir()
    place.mkdir()
    code = f"from tests.faults.test_partition import older_driver; older_driver({str(place / 'run')!r}, 0.2)"
    older = f"mount --bind {share} {place} && exec {sys.executable} -c {shlex.quote(code)}"
    log = tmp_path / "older.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", older],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    inside = ("nsenter", "-t", str(process.pid), "-m")
    try:
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if line.strip() == str(STOPPED_AFTER_STEP):
                mounted(*inside, "umount", "-l", str(place))
            if "is not the run's folder" in line:
                break
        else:
            raise AssertionError(f"it ended early: {seen} {log.read_text(encoding='utf-8')}")
        storage = open_storage(str(share / "run"))
        job = make_job(str(share / "run"), steps=STEPS, microbatches=MICROBATCHES, save_every=SAVE_EVERY)
        newer = make_driver(job, make_limits(job, 2), Collector(), take_over=True)
        newer.restore()
        state = newer.run()
        assert list(place.iterdir()) == [], "nothing was written in the share's place"
        mounted(*inside, "mount", "--bind", str(share), str(place))
        process.stdout.read()
        assert process.wait(240) == FENCED
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
    assert_only_the_newer_commits(storage, newer)
    steps = [entry["step"] for entry in read(storage) if entry["kind"] == "step"]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    writers = [one.writer for one in read_placed(storage)]
    assert set(writers[writers.index(state.driver) :]) == {state.driver}
    assert newest_complete(storage).checkpoint is not None
    assert state.result_fingerprint == undisturbed()
