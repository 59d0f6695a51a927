"""A run and its forks on a real S3 server are removed to the last object, and unfinished uploads with them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from raysharded.checkpoint import fork, list_checkpoints, list_pins, newest_complete, open_storage
from raysharded.checkpoint.storage.s3.bucket import open_bucket
from raysharded.errors import CheckpointError, ConfigError, StorageError
from raysharded.locations import join_url
from raysharded.report.overview import find_runs
from raysharded.run.removal import execution as removal
from raysharded.run.removal.execution import carry_out, planned, remove_run
from raysharded.run.removal.plan import RemovalPlan
from raysharded.testing.storages import FailingStorage
from tests.checkpoint.retention.runs import Run
from tests.report.entries import run_with_a_loss, started

pytestmark = pytest.mark.s3


def write_journal(url: str) -> None:
    from raysharded.clock import SystemClock
    from raysharded.journal.log import Journal

    journal = Journal(open_storage(url), SystemClock(), "driver0")
    for kind, fields in [started(), run_with_a_loss()[-1]]:
        journal.append(kind, fields, durable=True)


def begin_upload(url: str, key: str) -> Any:
    bucket = open_bucket(url)
    return bucket.request("create_multipart_upload", Key=bucket.location.full(key))


def test_a_run_its_copy_in_a_fork_and_the_fork_are_removed(s3_url: str) -> None:
    url, child_url = join_url(s3_url, "a"), join_url(s3_url, "child")
    parent, child = Run(open_storage(url)), open_storage(child_url)
    prefix = parent.save(5)
    write_journal(url)
    begin_upload(url, f"{prefix}/torn.safetensors")
    fork(parent.storage, list_checkpoints(parent.storage)[0], child)
    before = newest_complete(child).checkpoint
    assert before is not None
    weights = before.read("w", [0], [20]).tobytes()
    with pytest.raises(ConfigError, match="its fork"):
        remove_run(url)
    remove_run(url, copy_into_forks=True)
    assert parent.storage.list() == []
    assert parent.storage.unfinished() == []
    after = newest_complete(child).checkpoint
    assert after is not None
    assert (after.storage.url, after.read("w", [0], [20]).tobytes()) == (child.url, weights)
    assert [run.url for run in find_runs(s3_url)] == [child.url]
    remove_run(child_url)
    assert child.list() == []
    assert find_runs(s3_url) == []


def test_a_removal_that_stops_is_finished_by_the_next(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_LEASE_S", 0.5)
    monkeypatch.setattr("raysharded.ownership.leadership._PATIENCE_S", 0.0)
    url = join_url(s3_url, "a")
    half = 0
    for fail_at in (12, 16, 20, 24):
        run = Run(open_storage(url))
        run.save(5)
        write_journal(url)
        plan = planned(url, with_forks=False, copy_into_forks=False)
        with contextlib.suppress(StorageError):
            carry_out(RemovalPlan(storage=FailingStorage(run.storage, fail_at=fail_at), name="a", glance=plan.glance))
        try:
            newest_complete(run.storage)
        except CheckpointError:
            half += 1
            assert find_runs(s3_url) == []
        remove_run(url)
        assert run.storage.list() == []
    assert half > 1
    assert list_pins(run.storage) == []
