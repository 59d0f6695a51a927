"""A driver that is cut off from its workers, and another that takes the run over: only one of them commits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.stored_claims import list_numbers, read_claim
from raysharded.driver.driver import Driver
from raysharded.errors import RunOwnedElsewhere
from tests.ray.leftovers import wait_until
from tests.training.harness import Collector, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 16
MICROBATCHES = 4
SAVE_EVERY = 2
STOPPED_AFTER_STEP = 4
FENCED = 7
"""Exit status of the older driver when it finds that another driver leads the run."""


def driver(url: str) -> Driver:
    job = make_job(url, steps=STEPS, microbatches=MICROBATCHES, save_every=SAVE_EVERY)
    return make_driver(job, make_limits(job, 2), Collector())


def older_driver(url: str) -> None:
    """The process that is to be stopped; prints a line when it has come to a step."""
    job = make_job(url, steps=STEPS, microbatches=MICROBATCHES, save_every=SAVE_EVERY)

    def say(kind: str, fields: dict[str, object]) -> None:
        if kind == "step":
            print(fields["step"], flush=True)  # noqa: T201 - the test reads it

    older = make_driver(job, make_limits(job, 2), say)
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
    claims = [read_claim(storage, number) for number in sorted(list_numbers(storage))]
    first = next(number for number, claim in enumerate(claims) if claim.writer != claims[0].writer)
    assert {claim.writer for claim in claims[first:]} == {newer.state.driver}
    assert claims[first].kind == "owner"
    assert claims[-1].step == STEPS
    assert state.result_fingerprint == train(1, steps=STEPS, microbatches=MICROBATCHES).fingerprint
