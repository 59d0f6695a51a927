"""A run whose storage is S3 trains on while keys are exchanged, or a page is shown instead of S3, with the same bits.

Driver and workers are processes with separate clients.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.checkpoint.storage import retry
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from tests import patches
from tests.s3.fixtures import FaultyS3
from tests.s3.keys import new_key, remove_key
from tests.s3.proxy import Injected, Page
from tests.s3.server import S3Server
from tests.training.harness import Collector, Outcome, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.s3, pytest.mark.procs]

STEPS, WORKERS = 8, 2


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=4)


def _prepare(environment: Mapping[str, str], quick: bool) -> None:
    """In a worker's process, which a server forks that has an older environment."""
    os.environ.update(environment)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        if name not in environment:
            os.environ.pop(name, None)
    if quick:
        patches.replace(retry, "MAX_WAIT_S", 0.05)


def _train(url: str, at: Mapping[int, Callable[[], object]], *, quick: bool = False) -> set[str]:
    """Train on this storage, with a checkpoint every two steps; call `at[step]` after that step. Compares the bits.

    Returns the kinds of the journal's entries.
    """
    collected = Collector()

    def listen(kind: str, fields: dict[str, Any]) -> None:
        collected(kind, fields)
        if kind == "step" and fields["step"] in at:
            at[fields["step"]]()

    job = make_job(url, steps=STEPS, microbatches=4, save_every=2)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prepare = {WorkerId(worker): partial(_prepare, environment, quick) for worker in range(WORKERS)}
    state = make_driver(job, make_limits(job, WORKERS), listen, prepare=prepare).run()
    assert state.result_fingerprint == undisturbed().fingerprint
    numbers = tuple(collected.numbers[step] for step in range(1, STEPS + 1))
    assert repr(numbers) == repr(undisturbed().numbers)
    return {kind for kind, _ in collected.entries}


def _assert_nothing_is_lost(url: str) -> None:
    storage = open_storage(url)
    assert [entry["step"] for entry in read(storage) if entry["kind"] == "step"] == list(range(1, STEPS + 1))
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert newest.step == STEPS
    assert storage.unfinished() == []


def test_keys_that_are_exchanged_while_a_run_trains_cost_nothing(
    s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = tmp_path / "credentials", [new_key(s3_server)]
    keys[0].write(path)
    url = f"{s3_url}&timeout_s=100.{secrets.randbelow(10**9)}"  # a separate connection

    def exchange() -> None:
        keys.append(new_key(s3_server))
        keys[-1].write(path)
        remove_key(s3_server, keys[-2])

    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        kinds = _train(url, {3: exchange, 6: exchange})
        assert len(keys) == 3
        assert not kinds & {"checkpoint_failed", "storage_failing"}
        _assert_nothing_is_lost(url)
        assert open_storage(url).retries == 0
    remove_key(s3_server, keys[-1])


def test_a_page_that_is_shown_for_some_steps_costs_nothing(
    faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.05)
    shown: list[Injected] = []

    def begin() -> None:
        shown.append(faulty_s3.proxy.inject(Page(), times=10**6))

    def end() -> None:
        deadline = time.monotonic() + 60.0
        while shown[0].fired <= 8:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shown[0].left = 0

    _train(faulty_s3.url, {3: begin, 6: end}, quick=True)
    assert shown[0].fired > 8
    _assert_nothing_is_lost(faulty_s3.direct_url)
