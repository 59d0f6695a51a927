"""Registered state of workers that outlive their driver: in their last checkpoint, and for the next driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy
from raysharded.orphans.leased_worker import LeasedWorker
from raysharded.orphans.orphan_checkpoint import write_orphan_checkpoint
from raysharded.protocol.job import Job
from raysharded.protocol.messages import REGISTERED_STATE, FromMemory, GenerationReady, GenerationSpec, Stopped
from raysharded.rendezvous.server import RendezvousStore
from raysharded.task import TrainFunction
from tests.session.loops import Loop
from tests.training.harness import make_job
from tests.training.test_orphans import STEPS, TERMS, InProcess, driver_that_died, form, wait_for_the_lease_to_end


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(str(tmp_path), task=TrainFunction(Loop()), steps=STEPS)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    store = RendezvousStore("127.0.0.1")
    yield store
    store.close()


@pytest.fixture
def tenant(job: Job, store: RendezvousStore) -> Iterator[LeasedWorker]:
    """One worker that has done all steps in generation 1."""
    tenant = LeasedWorker(WorkerId(0), job, TERMS, "identity")
    tenant.call(1, "ready")
    form(tenant, 1, store)
    assert isinstance(tenant.call(1, "train", GenerationId(1)), Stopped)
    yield tenant
    tenant._worker._leave()


def test_the_last_checkpoint_has_the_registered_state(job: Job, tenant: LeasedWorker) -> None:
    storage = open_storage(job.run_url)
    driver_that_died(storage, "first", 1)
    wait_for_the_lease_to_end(tenant)
    assert write_orphan_checkpoint(WorkerId(0), TERMS, storage, InProcess(tenant))
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    assert '["count",3]' in checkpoint.manifest.metadata[REGISTERED_STATE]


def test_the_next_driver_continues_with_the_registered_state_in_the_workers_memory(
    job: Job, tenant: LeasedWorker, store: RendezvousStore
) -> None:
    stopped = tenant._worker.report(GenerationId(1))
    (held,) = (one for one in stopped.held if one.step == STEPS)
    copies = (Copy(medium="snapshot", world_size=1, holders=(WorkerId(0),), layout_id=held.layout_id),)
    spec = GenerationSpec(
        generation=GenerationId(2),
        members=(WorkerId(0),),
        source=FromMemory(step=STEPS, spec=stopped.specs[STEPS], copies=copies),
        host="127.0.0.1",
        port=store.port,
        prefix="run/g2",
        secret=store.secret("run/g2"),
    )
    assert isinstance(tenant.call(1, "form", spec), GenerationReady)
    assert '["count",3]' in (tenant._worker._store.registered(STEPS) or "")
