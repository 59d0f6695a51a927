"""Workers without a driver: the state that they keep for the next one, and the last checkpoint that they make."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharded import numerics
from raysharded.checkpoint import Claims, Storage, newest_complete, open_storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.stored_claims import find_newest
from raysharded.clock import SystemClock
from raysharded.errors import RunOwnedElsewhere, StaleGeneration, StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal, read
from raysharded.orphans.leased_worker import LeasedWorker
from raysharded.orphans.orphan_checkpoint import wait_for_turn, write_orphan_checkpoint
from raysharded.ownership.lease import Holder, Process, encode, lease_key
from raysharded.protocol.job import Job
from raysharded.protocol.messages import FromStart, GenerationReady, GenerationSpec, Stopped, StopReason
from raysharded.protocol.session import DriverSession, PartOf
from raysharded.protocol.version import PROTOCOL
from raysharded.rendezvous.server import RendezvousStore
from tests.cases import tried_each_time
from tests.training.harness import SmallTask, make_job

STEPS = 3
LEASE_S = 0.5
WITHIN_S = 60.0
"""Only a hang reaches it."""
TERMS = DriverSession(
    driver="first",
    epoch=1,
    run_name="engine",
    global_batch_size=16,
    metadata={},
    signed=False,
    lease_s=LEASE_S,
    orphan_wait_s=60.0,
)


class InProcess:
    """Implements `Peers` for leased workers of this process. Those that do not answer are numbers alone."""

    def __init__(self, *tenants: Any, silent: tuple[int, ...] = ()) -> None:
        self._tenants = {WorkerId(number): tenant for number, tenant in enumerate(tenants)}
        self._silent = silent
        self.ended_all = False

    def before(self, worker: WorkerId) -> list[WorkerId]:
        return [WorkerId(number) for number in sorted({*self._tenants, *self._silent}) if number < worker]

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        answers = {}
        for worker, tenant in self._tenants.items():
            if (calls is None or worker in calls) and method != "leave":
                try:
                    answers[worker] = getattr(tenant, method)(*args, *(calls[worker] if calls else ()))
                except StaleGeneration:
                    continue
        return answers

    def end_all(self) -> None:
        self.ended_all = True


class WithDriver:
    """A worker that receives calls from its driver."""

    def is_orphan(self) -> bool:
        return False

    def last_words(self, epoch: int, after_step: int) -> None:
        raise StaleGeneration("it has a driver")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(str(tmp_path), task=SmallTask(), steps=STEPS)


@pytest.fixture
def tenant(job: Job) -> Iterator[LeasedWorker]:
    """One worker that has done all steps in generation 1, and receives no more calls from its driver."""
    tenant = LeasedWorker(WorkerId(0), job, TERMS, "identity")
    tenant.call(1, "ready")
    store = RendezvousStore("127.0.0.1")
    form(tenant, 1, store)
    stopped = tenant.call(1, "train", GenerationId(1))
    assert isinstance(stopped, Stopped)
    assert stopped.reason is StopReason.FINISHED
    yield tenant
    tenant._worker._leave()


def form(tenant: LeasedWorker, generation: int, store: RendezvousStore) -> None:
    spec = GenerationSpec(
        generation=GenerationId(generation),
        members=(WorkerId(0),),
        source=FromStart(),
        host="127.0.0.1",
        port=store.port,
        prefix=f"run/g{generation}",
        secret=store.secret(f"run/g{generation}"),
    )
    assert isinstance(tenant.call(1, "form", spec), GenerationReady)


def driver_that_died(storage: Storage, name: str, generation: int) -> Claims:
    """The claim and the lease that the driver left."""
    claims = Claims(storage, name)
    gone = Holder(driver=name, host="h", process=Process(), since=0.0, lease_s=LEASE_S)
    storage.write(lease_key(name), [encode(gone)])
    claims.own(generation)
    return claims


def wait_for_the_lease_to_end(tenant: LeasedWorker) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not tenant.is_orphan():
        assert time.monotonic() < deadline
        time.sleep(LEASE_S / 10)


def saved_step(storage: Storage) -> int:
    newest = newest_complete(storage).checkpoint
    return newest.step if newest else 0


@pytest.mark.parametrize("followed", tried_each_time([True], [False, True]))
def test_the_last_checkpoint_is_written_also_when_a_second_driver_died_before_it_took_the_workers(
    followed: bool, job: Job, tenant: LeasedWorker
) -> None:
    storage = open_storage(job.run_url)
    driver_that_died(storage, "first", 1)
    rules = numerics.whole("draws 7")  # the worker knows which it can compute under, the journal which the run had
    Journal(storage, SystemClock(), "first").append(
        "started", {"resumed_after_step": 0, "numerics": rules}, durable=True
    )
    if followed:
        driver_that_died(storage, "second", 2)
    wait_for_the_lease_to_end(tenant)
    peers = InProcess(tenant)
    write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert newest.step == STEPS
    assert newest.manifest.metadata["arithmetic"]["numerics"] == rules
    assert newest.manifest.metadata["arithmetic"]["torch"] == torch.__version__
    assert peers.ended_all
    entries = [entry for entry in read(storage) if entry["kind"] != "started"]
    assert [entry["step"] for entry in entries if entry["kind"] == "step"] == [1, 2, 3]
    assert [entry["kind"] for entry in entries if entry["kind"] != "step"] == ["orphaned", "checkpoint"]


def test_the_last_checkpoint_waits_for_storage_that_takes_no_writes(
    job: Job, tenant: LeasedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(job.run_url)
    driver_that_died(storage, "first", 1)
    wait_for_the_lease_to_end(tenant)
    write, is_full = LocalStorage.write, True

    def refusing(given: LocalStorage, key: str, parts: Any) -> None:
        if is_full and key.startswith("checkpoints/"):
            raise StorageError(f"write {given.url}/{key} failed: No space left on device.")
        write(given, key, parts)

    monkeypatch.setattr(LocalStorage, "write", refusing)
    peers = InProcess(tenant)
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"worker 0 could not write the part of rank 0: .*No space left on device"
        ):
            write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers, may_retry=lambda: True)
        assert not peers.ended_all
    is_full = False
    assert write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    assert peers.ended_all
    assert saved_step(storage) == STEPS


def test_a_driver_that_was_asleep_for_too_long_finds_that_its_run_was_taken(job: Job, tenant: LeasedWorker) -> None:
    storage = open_storage(job.run_url)
    asleep = driver_that_died(storage, "first", 1)
    wait_for_the_lease_to_end(tenant)
    write_orphan_checkpoint(WorkerId(0), TERMS, storage, InProcess(tenant))
    assert asleep.find_rival() is not None
    with pytest.raises(RunOwnedElsewhere):
        asleep.commit(1, STEPS + 1, "checkpoints/p", "d")


def test_a_worker_that_alone_does_not_receive_the_driver_disturbs_nobody(job: Job, tenant: LeasedWorker) -> None:
    storage = open_storage(job.run_url)
    driver_that_died(storage, "first", 1)
    wait_for_the_lease_to_end(tenant)
    peers = InProcess(tenant, WithDriver(), WithDriver())
    write_orphan_checkpoint(WorkerId(0), TERMS, storage, peers)
    assert not peers.ended_all
    assert saved_step(storage) == 0
    newest = find_newest(storage)[1]
    assert newest is not None
    assert newest.writer == "first"


def test_the_next_worker_leads_when_those_before_it_do_not_answer() -> None:
    began = time.monotonic()
    wait_for_turn(WorkerId(0), InProcess())
    wait_for_turn(WorkerId(1), InProcess(silent=(0,)))
    assert time.monotonic() - began < 10.0


def test_every_query_gets_the_protocol_in_plain_data_and_is_no_sign_of_a_driver(tenant: LeasedWorker) -> None:
    first, deadline = {"orphan": True}, time.monotonic() + WITHIN_S
    while first["orphan"]:  # a machine may stand still for a lease's time
        assert time.monotonic() < deadline
        tenant.renew(1)
        first = tenant.hello()
    assert {type(value) for value in first.values()} <= {int, float, str, bool}
    assert first["protocol"] == PROTOCOL
    assert 0 < first["wait_s"] <= TERMS.lease_s + TERMS.orphan_wait_s
    while not tenant.hello()["orphan"]:  # this query does not renew the lease
        assert time.monotonic() < deadline
        time.sleep(LEASE_S / 10)
    assert tenant.hello()["wait_s"] < first["wait_s"]


def test_what_is_written_only_at_the_end_is_refused_while_there_is_a_driver(tenant: LeasedWorker) -> None:
    tenant.renew(1)
    with pytest.raises(StaleGeneration, match="has a driver"):
        tenant.last_words(2, 0)


def test_a_driver_that_follows_a_leader_that_died_takes_the_workers_over(tenant: LeasedWorker) -> None:
    wait_for_the_lease_to_end(tenant)
    tenant.last_words(2, 0)
    with pytest.raises(StaleGeneration, match="without a driver for too long"):
        tenant.renew(2)
    adopted = tenant.adopt(replace(TERMS, driver="third", epoch=3))
    assert [report.step for report in adopted.reports] == [1, 2, 3]
    part = PartOf(holder=WorkerId(0), rank=0, layout=1, medium="snapshot", step=STEPS)
    with pytest.raises(StaleGeneration, match="has a driver"):  # the leader was not dead
        tenant.write_part(2, part, GenerationId(2), "second")


def test_steps_of_older_generations_are_reported_to_the_driver_that_follows(tenant: LeasedWorker) -> None:
    store = RendezvousStore("127.0.0.1")
    form(tenant, 2, store)  # the driver dies before the first generation's steps are in the journal
    adopted = tenant.adopt(replace(TERMS, driver="second", epoch=3, recorded_step=1))
    assert [report.step for report in adopted.reports] == [2, 3]
    assert adopted.fence == 3
    with pytest.raises(StaleGeneration, match="taken this worker over"):
        tenant.call(1, "train", GenerationId(2))


def test_a_generation_that_was_requested_and_has_not_begun_is_interrupted_too(tenant: LeasedWorker) -> None:
    busy = threading.Event()
    tenant._worker._computing.submit(busy.wait, 20.0)
    store = RendezvousStore("127.0.0.1")
    spec = GenerationSpec(
        generation=GenerationId(7),
        members=(WorkerId(0), WorkerId(1)),
        source=FromStart(),
        host="127.0.0.1",
        port=store.port,
        prefix="run/g7",
        secret=store.secret("run/g7"),
    )
    with ThreadPoolExecutor(2) as pool:
        formed = pool.submit(tenant.call, 1, "form", spec)
        while tenant._worker.generation != 7:
            time.sleep(0.01)
        adopted = pool.submit(tenant.adopt, replace(TERMS, driver="second", epoch=8))
        busy.set()
        began = time.monotonic()
        assert adopted.result(20.0).fence == 8
        assert formed.result(20.0).reason is StopReason.ABORTED
        assert time.monotonic() - began < 10.0  # worker 1 was not waited for


def test_the_journal_of_the_driver_before_is_continued(job: Job, tenant: LeasedWorker) -> None:
    storage = open_storage(job.run_url)
    driver_that_died(storage, "first", 1)
    journal = Journal(storage, SystemClock(), "first")
    journal.append("started", {"resumed_after_step": 0, "skips": []})
    journal.append("generation", {"generation": 1, "step": 0})
    for report in tenant._worker.newest_reports(0)[:2]:
        journal.append("step", report.fields(), durable=True)
    wait_for_the_lease_to_end(tenant)
    write_orphan_checkpoint(WorkerId(0), TERMS, storage, InProcess(tenant))
    assert [entry["step"] for entry in read(storage) if entry["kind"] == "step"] == [1, 2, 3]
