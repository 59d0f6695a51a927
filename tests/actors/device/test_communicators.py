"""The accelerator's communicators of a generation: aborted at any time, together, and in a limited time."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysharded import numerics
from raysharded.actors.comm import communicators
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.device import accelerator
from raysharded.actors.worker import Worker
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh
from raysharded.protocol.messages import FromStart, GenerationReady, GenerationSpec
from raysharded.rendezvous.server import RendezvousStore
from tests import patches
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.forked import in_a_fork
from tests.training.harness import make_job

pytestmark = pytest.mark.procs


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    found = RendezvousStore("127.0.0.1")
    yield found
    found.close()


def place(store: RendezvousStore, prefix: str, rank: int = 0, mesh: Mesh | None = None) -> Rendezvous:
    return Rendezvous(
        host="127.0.0.1",
        port=store.port,
        prefix=prefix,
        secret=store.secret(prefix),
        rank=rank,
        mesh=mesh or Mesh(shards=1),
        arrival_timeout_s=30.0,
        collective_timeout_s=30.0,
    )


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _two_generations(
    first: Rendezvous, second: Rendezvous, beside: bool, meeting: Any
) -> tuple[list[str], list[float]]:
    """In a process: both generations formed, used, and closed; the calls of NCCL, and the sums."""
    device = DoubleAccelerator()
    accelerator.use(device)
    torch.set_num_threads(1)
    sums = []
    before: Groups | None = None
    for where in (first, second):
        groups = Groups(use_gpu=True)
        if before is not None and beside:
            groups.connect_beside(where)
            meeting.wait(60.0)  # a closed connection aborts the peer's generation
            before.close()
            groups.take_over()
        else:
            if before is not None:
                meeting.wait(60.0)
                before.close()
            groups.form(where)
        values = torch.tensor([1.0 + where.rank])
        dist.all_reduce(values)
        sums.append(values.item())
        if groups.replicas is not None:
            groups.replicas.all_reduce(values)
            sums.append(values.item())
        everyone = groups.everyone
        if everyone is not None:
            everyone.all_reduce(values)
            sums.append(values.item())
        assert groups.axes().data.device_type == "cpu"
        before = groups
    assert before is not None
    meeting.wait(60.0)
    before.close()
    assert not dist.is_initialized()
    eventually(lambda: not device.live)
    return device.calls, sums


@pytest.mark.parametrize("beside", [False, True], ids=["formed", "prepared"])
@pytest.mark.parametrize(
    ("mesh", "names", "sums"),
    [
        (Mesh(shards=2), ["train/0"], [3.0, 6.0]),
        (Mesh(replicas=2, shards=1), ["train/0", "replicas/0", "everyone/0"], [1.0, 3.0, 6.0]),
    ],
    ids=["shards", "replicas"],
)
def test_generations_in_real_processes_abort_all_their_communicators_at_once(
    store: RendezvousStore, mesh: Mesh, names: list[str], sums: list[float], beside: bool
) -> None:
    places = [[place(store, prefix, rank, mesh) for prefix in ("g1", "g2")] for rank in range(2)]
    meeting = multiprocessing.get_context("forkserver").Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda two: in_a_fork(_two_generations, *two, beside, meeting), places))
    calls, seen = found[0]
    assert seen == [*sums, *sums]
    for kind in ("abort", "end"):
        of_kind = [call.partition(" ")[2] for call in calls if call.startswith(f"{kind} ")]
        assert [set(of_kind[: len(names)]), set(of_kind[len(names) :])] == [set(names)] * 2
        assert len(of_kind) == 2 * len(names)


def _with(device: DoubleAccelerator, groups: Groups, where: Rendezvous) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def form() -> None:
        try:
            groups.form(where)
        except CollectiveAborted as error:
            errors.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    eventually(lambda: any(call.startswith("connect") for call in device.calls))
    return thread, errors


@pytest.fixture
def device() -> Iterator[DoubleAccelerator]:
    found = DoubleAccelerator()
    undo = accelerator.use(found)
    yield found
    undo()


@pytest.mark.parametrize("how", ["connect", "connect for good"])
def test_an_abort_frees_a_worker_that_waits_for_a_communicator(
    store: RendezvousStore, device: DoubleAccelerator, how: str
) -> None:
    device.blocking = {how}
    groups = Groups(use_gpu=True)
    thread, errors = _with(device, groups, place(store, "g1"))
    groups.abort()
    thread.join(30.0)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert "abort train/0" in device.calls
    groups.close()
    assert not dist.is_initialized()


def test_an_abort_that_blocks_keeps_nobody_waiting_for_long(
    store: RendezvousStore, device: DoubleAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicators, "ABORT_TIMEOUT_S", 0.2)
    groups = Groups(use_gpu=True)
    groups.form(place(store, "g1"))
    device.blocking = {"abort"}
    threads = [threading.Thread(target=groups.abort) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    groups.close()
    assert not dist.is_initialized()
    assert device.calls.count("abort train/0") == 1
    device.blocking = set()
    after = Groups(use_gpu=True)
    after.form(place(store, "g2"))
    after.close()


def test_a_communicator_that_is_made_after_the_abort_is_aborted_too(device: DoubleAccelerator) -> None:
    made = communicators.Communicators()
    assert made.abort()
    with pytest.raises(CollectiveAborted, match="before"):
        made.connect("train/0", None, 0, 1, None)  # type: ignore[arg-type]
    assert not any(call.startswith("connect") for call in device.calls)


def _until_aborted(where: Rendezvous, seconds: float) -> float:
    """In a process: the seconds after which a member learns that the other one is dead, without a driver."""
    accelerator.use(DoubleAccelerator())
    groups = Groups(use_gpu=True)
    groups.form(where)
    groups.state.barrier()
    if where.rank == 1:
        return 0.0  # this process ends
    began = time.monotonic()
    while not groups.aborted and time.monotonic() < began + seconds:
        time.sleep(0.005)
    took = time.monotonic() - began
    groups.close()
    return took


def test_a_peers_death_aborts_the_generation_without_the_driver(store: RendezvousStore) -> None:
    places = [place(store, "g1", rank, Mesh(shards=2)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        took, _ = pool.map(lambda where: in_a_fork(_until_aborted, where, 60.0), places)
    assert took < 60.0


def test_a_communicator_of_closed_groups_is_not_connected(store: RendezvousStore, device: DoubleAccelerator) -> None:
    groups = Groups(use_gpu=True)
    groups.form(place(store, "g1"))
    groups.close()
    connects = sum(call.startswith("connect") for call in device.calls)
    with pytest.raises(CollectiveAborted, match="before"):
        groups._communicators.connect("late", None, 0, 1, None)  # type: ignore[arg-type]
    assert sum(call.startswith("connect") for call in device.calls) == connects


def test_a_communicator_has_summed_before_it_is_used(store: RendezvousStore, device: DoubleAccelerator) -> None:
    groups = Groups(use_gpu=True)
    device.reached.clear()
    errors: list[BaseException] = []

    def form() -> None:
        try:
            groups.form(place(store, "g1"))
        except CollectiveAborted as error:
            errors.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    eventually(lambda: "allreduce train/0" in device.calls)
    assert not dist.is_initialized(), "its sum is not done"
    groups.abort()
    thread.join(30.0)
    assert not thread.is_alive()
    assert errors
    device.reached.set()
    groups.close()


def _lock_beside_an_interrupt(spec: GenerationSpec, folder: str) -> tuple[bool, bool]:
    """In a process: whether another thread gets the worker's lock while an abort blocks, and whether it then blocks."""
    patches.replace(communicators, "ABORT_TIMEOUT_S", 60.0)
    device = DoubleAccelerator()
    accelerator.use(device)
    worker = Worker(WorkerId(0), make_job(folder, use_gpu=True, microbatches=1, steps=1))
    worker.ready()
    formed = worker.form(spec)
    assert isinstance(formed, GenerationReady), formed
    device.blocking = {"abort"}
    interrupting = threading.Thread(target=worker.interrupt, args=(spec.generation,), daemon=True)
    interrupting.start()
    eventually(lambda: "abort train/0" in device.calls)
    is_free = worker._changing.acquire(timeout=20.0)
    return is_free, interrupting.is_alive()


def test_an_interrupt_whose_abort_blocks_does_not_hold_the_workers_lock(store: RendezvousStore, tmp_path: Path) -> None:
    """`form` and `report` need it."""
    spec = GenerationSpec(
        generation=GenerationId(1),
        members=(WorkerId(0),),
        source=FromStart(),
        host="127.0.0.1",
        port=store.port,
        prefix="g1",
        secret=store.secret("g1"),
        numerics=numerics.newest(),
    )
    assert in_a_fork(_lock_beside_an_interrupt, spec, f"{tmp_path}/run") == (True, True)
