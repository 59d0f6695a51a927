"""A bucket that refuses everything for a while, in mid-run: training continues, and nothing is lost when it is back.

The server itself refuses, by a policy, or a proxy in front of it does. Driver and workers are processes with separate
clients. The outage lasts until the driver has reported it, and a checkpoint has failed: minutes and seconds are alike.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import boto3
import pytest

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.driver.driver import Driver
from raysharded.errors import RunOwnedElsewhere, StorageError
from raysharded.ids import WorkerId
from raysharded.journal import writer as journal_writer
from raysharded.journal.log import read, read_placed
from raysharded.report.loader import load
from tests.cases import tried_each_time
from tests.ray.driving import PacedTokens, hurry
from tests.ray.leftovers import wait_until
from tests.s3.fixtures import FaultyS3
from tests.s3.keys import Key, allow, new_user, remove_user
from tests.s3.proxy import Refuse
from tests.s3.server import S3Server
from tests.s3.test_rights import RIGHTS
from tests.training.harness import Collector, Outcome, Tokens, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.s3, pytest.mark.procs]

STEPS, WORKERS, MICROBATCHES, SAVE_EVERY = 40, 2, 4, 4
AWAY_FROM = 5


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES)


@dataclass
class Outage:
    """Something that begins and ends; until then the bucket refuses everything."""

    url: str
    """URL of the run, whose requests are refused."""
    direct_url: str
    """URL of its storage for all others."""
    begin: Callable[[], object]
    end: Callable[[], object]
    said: str
    """The server's answer, in the driver's report."""


@dataclass
class Listening(Collector):
    """Begins an outage at a step. Ends it when the driver has reported it, a checkpoint has failed, and steps came."""

    outage: Outage | None = None
    until: frozenset[str] = frozenset({"storage_failing", "checkpoint_failed"})
    begun_at: int = 0
    ended_at: int = 0
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if self.outage is None:
            return
        if self.begun_at:
            self.heard.append((kind, dict(fields)))
        if kind == "step" and fields["step"] == AWAY_FROM:
            self.begun_at = fields["step"]
            self.outage.begin()
        elif kind == "step" and not self.ended_at and self.until <= {heard for heard, _ in self.heard}:
            self.ended_at = fields["step"]
            self.outage.end()


def _prepare(environment: Mapping[str, str]) -> None:
    """In a worker's process, which a server forks that has an older environment."""
    os.environ.update(environment)


def driver(
    url: str, listen: Collector, data: Tokens, *, steps: int = STEPS, take_over: bool = False, **on_storage: Any
) -> Driver:
    """The driver of the run of all tests here."""
    job = make_job(url, steps=steps, microbatches=MICROBATCHES, save_every=SAVE_EVERY, data=data)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prepare = {WorkerId(worker): partial(_prepare, environment) for worker in range(WORKERS)}
    limits = make_limits(job, WORKERS)
    return make_driver(job, limits, listen, prepare=prepare, take_over=take_over, on_storage=on_storage)


@pytest.fixture(params=tried_each_time(["policy"], ["policy", "NoSuchBucket", "InvalidAccessKeyId"]))
def outage(request: pytest.FixtureRequest, s3_server: S3Server, s3_credentials: None) -> Iterator[Outage]:
    """A bucket of a user's own that will be refused to the user, or one behind a proxy that will refuse."""
    if request.param == "policy":
        yield from _by_policy(s3_server, request.getfixturevalue("monkeypatch"))
        return
    faulty: FaultyS3 = request.getfixturevalue("faulty_s3")
    status = 404 if request.param == "NoSuchBucket" else 403
    refusing = []
    yield Outage(
        url=faulty.url,
        direct_url=faulty.direct_url,
        begin=lambda: refusing.append(faulty.proxy.inject(Refuse(status, request.param), times=10**6)),
        end=lambda: setattr(refusing[0], "left", 0),
        said="the server answered" if status == 403 else "404 NoSuchBucket",
    )
    assert refusing[0].fired >= 2, "requests of the journal and of a checkpoint were refused"


def _by_policy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    owner = boto3.session.Session().client("s3", endpoint_url=server.endpoint_url)
    bucket = f"outage-{secrets.token_hex(6)}"
    owner.create_bucket(Bucket=bucket)
    user, key = new_user(server)
    allow(server, bucket, user, RIGHTS, ())
    url = f"s3://{bucket}/{secrets.token_hex(4)}/run?endpoint_url={server.endpoint_url}"
    with monkeypatch.context() as patch:
        _use(key, patch)
        yield Outage(
            url=f"{url}&timeout_s=90.{secrets.randbelow(10**9)}",
            direct_url=url,
            begin=lambda: allow(server, bucket, user, RIGHTS, RIGHTS),
            end=lambda: allow(server, bucket, user, RIGHTS, ()),
            said="403 AccessDenied",
        )
    remove_user(server, user)


def _use(key: Key, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", key.access)
    patch.setenv("AWS_SECRET_ACCESS_KEY", key.secret)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver retries sooner, so that an outage may be short."""
    monkeypatch.setattr(journal_writer, "BACK_OFF_S", 0.2)


def test_a_run_trains_on_while_its_bucket_refuses_everything_and_loses_nothing(outage: Outage, tmp_path: Path) -> None:
    def end() -> None:
        outage.end()
        hurry(tmp_path)

    listener = Listening(outage=replace(outage, end=end))
    state = driver(outage.url, listener, PacedTokens(tmp_path)).run()
    assert listener.ended_at > listener.begun_at, "steps were done meanwhile"
    failing = next(fields for kind, fields in listener.heard if kind == "storage_failing")
    assert outage.said in failing["error"]
    kinds = [kind for kind, _ in listener.heard]
    assert kinds.index("storage_failing") < kinds.index("storage_back")
    assert "worker_lost" not in kinds
    assert state.result_fingerprint == undisturbed().fingerprint
    assert repr(tuple(listener.numbers[step] for step in range(1, STEPS + 1))) == repr(undisturbed().numbers)
    storage = open_storage(outage.direct_url)
    assert [entry["step"] for entry in read(storage) if entry["kind"] == "step"] == list(range(1, STEPS + 1))
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert newest.step == STEPS
    assert storage.unfinished() == []
    report = load(outage.direct_url)
    assert report.ok
    assert report.summary.entries_dropped == 0


def test_a_bucket_that_is_away_for_longer_than_the_run_s_patience_ends_it_in_one_true_sentence(
    faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    gone = Outage(
        url=faulty_s3.url,
        direct_url=faulty_s3.direct_url,
        begin=lambda: faulty_s3.proxy.inject(Refuse(404, "NoSuchBucket"), times=10**6),
        end=lambda: None,
        said="",
    )
    listener = Listening(outage=gone, until=frozenset({"nothing"}))
    with pytest.raises(StorageError, match=r"404 NoSuchBucket.*Create the bucket, or correct its name"):
        driver(faulty_s3.url, listener, PacedTokens(tmp_path), patience_s=1.0).run()
    reported = [fields for kind, fields in listener.heard if kind == "storage_failing"]
    assert [fields["left_s"] <= 1.0 for fields in reported] == [True]
    assert max(listener.numbers) > AWAY_FROM, "it trained on"


def test_a_driver_whose_bucket_was_away_while_another_took_the_run_over_ends_and_writes_nothing(
    faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    away, over = threading.Event(), list[BaseException]()
    gone = Outage(
        url=faulty_s3.url,
        direct_url=faulty_s3.direct_url,
        begin=lambda: refusing.append(faulty_s3.proxy.inject(Refuse(403, "AccessDenied"), times=10**6)),
        end=away.set,  # not yet the end of it
        said="",
    )
    refusing: list[Any] = []
    older = driver(faulty_s3.url, Listening(outage=gone), PacedTokens(tmp_path), steps=100 * STEPS)

    def run() -> None:
        try:
            older.run()
        except BaseException as error:  # noqa: BLE001 - it is compared below
            over.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert away.wait(120)
    collector = Collector()
    newer = driver(faulty_s3.direct_url, collector, Tokens(), take_over=True)
    newer.restore()
    state = newer.run()
    refusing[0].left = 0  # the bucket is back for the older one
    wait_until(lambda: not thread.is_alive(), "the older driver's end", 120.0)
    assert [type(error) for error in over] == [RunOwnedElsewhere]
    assert f"this one ({older.state.driver})" in str(over[0])
    assert state.result_fingerprint == undisturbed().fingerprint
    storage = open_storage(faulty_s3.direct_url)
    steps = [entry["step"] for entry in read(storage) if entry["kind"] == "step"]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    writers = [one.writer for one in read_placed(storage)]
    assert set(writers[writers.index(state.driver) :]) == {state.driver}
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert (newest.step, newest.manifest.writer) == (STEPS, state.driver)
    assert load(faulty_s3.direct_url).ok
