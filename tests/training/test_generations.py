"""Generations follow each other as often as need be: nothing of an older one stays, and none waits for another."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

import raysharded as rs
from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.model.build import allocate, build_sharded, build_units_of, wrap
from raysharded.actors.preparation import Preparation
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.saver import Saver
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.engine import Engine
from raysharded.actors.task_calls.remarks import Notes
from raysharded.checkpoint import open_storage
from raysharded.data import MicrobatchLoader
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh
from raysharded.protocol.messages import FromStart, GenerationSpec
from raysharded.rendezvous.server import RendezvousStore
from tests.ray.leftovers import wait_until
from tests.training.harness import GptTask, make_job
from tests.training.llama import LlamaTask

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only: needs /proc")


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    gc.collect()
    gc.freeze()  # and never thawed: `held`, and collections of later tests, would walk through older objects
    store = RendezvousStore("127.0.0.1")
    yield store
    store.close()
    gc.collect()


def where(store: RendezvousStore, prefix: str, timeout_s: float = 30.0) -> Rendezvous:
    return Rendezvous(
        host="127.0.0.1",
        port=store.port,
        prefix=prefix,
        secret=store.secret(prefix),
        rank=0,
        mesh=Mesh(shards=1),
        arrival_timeout_s=30.0,
        collective_timeout_s=timeout_s,
    )


def held() -> tuple[int, int, int]:
    """The threads, open descriptors and (of this test) device meshes of this process."""
    gc.collect()
    meshes = sum(isinstance(each, DeviceMesh) for each in gc.get_objects())
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), meshes


def a_generation(task: rs.Task, store: RendezvousStore, prefix: str, *, beside: bool, taken: bool) -> None:
    """Its groups, its model and a step, all ended."""
    groups, config, cpu = Groups(use_gpu=False), rs.EngineConfig(), torch.device("cpu")
    if beside:
        groups.connect_beside(where(store, prefix))
        wrapped = wrap(build_units_of(task, config, None), config, groups.axes())
        if taken:
            groups.take_over()
            sharded = allocate(wrapped, cpu)
    else:
        groups.form(where(store, prefix))
        sharded = build_sharded(task, config, groups.axes(), cpu)
    if taken:
        loss = task.loss(sharded.model, torch.zeros(2, 9, dtype=torch.int64))
        assert isinstance(loss, rs.Loss)
        loss.total.backward()
    groups.close()


@pytest.mark.parametrize(
    ("task", "beside", "taken"),
    [
        pytest.param(GptTask(), False, True, marks=pytest.mark.long),
        (GptTask(), True, True),
        (GptTask(), True, False),
        (LlamaTask(), False, True),
    ],
    ids=["flat", "prepared", "prepared in vain", "parallel styles"],
)
def test_of_a_generation_that_is_over_no_thread_no_socket_and_no_mesh_is_left(
    store: RendezvousStore, task: rs.Task, beside: bool, taken: bool
) -> None:
    counts = []
    for generation in range(5):
        a_generation(task, store, f"{store.port}/g{generation}", beside=beside, taken=taken)
        counts.append(held())
    wait_until(  # the store, in a separate thread, closes its ends of connections a moment later
        lambda: all(late <= early for late, early in zip(held(), counts[1], strict=True)),
        lambda: f"threads, descriptors and meshes after each generation: {counts}, and now: {held()}",
        20.0,
    )


class FailsToBuild(GptTask):
    """Its constructor raises."""

    def build_model(self) -> nn.Module:
        raise MemoryError("no room for a second one")


def is_known_to_torch(name: str) -> bool:
    try:
        return bool(_resolve_process_group(GroupName(name)))
    except RuntimeError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nothing_is_left_of_a_preparation_that_failed_after_it_was_connected(
    store: RendezvousStore, tmp_path: Path
) -> None:
    name = f"{store.port}/failed"
    before = held()
    job = make_job(str(tmp_path), task=FailsToBuild())
    preparation = Preparation(job, where(store, name), threading.Lock(), 0, BuiltObjects(job.task, job.engine))
    with pytest.raises(MemoryError):
        preparation.make(lambda: None)
    assert preparation.take() is None
    assert not is_known_to_torch(name)
    assert held()[1] <= before[1]


def test_nothing_is_left_of_a_preparation_that_is_released_before_it_is_built(
    store: RendezvousStore, tmp_path: Path
) -> None:
    name, task_calls = f"{store.port}/unwanted", threading.Lock()
    before = held()
    job = make_job(str(tmp_path))
    preparation = Preparation(job, where(store, name), task_calls, 0, BuiltObjects(job.task, job.engine))
    with ThreadPoolExecutor(1) as pool:
        with task_calls:
            making = pool.submit(preparation.make, lambda: None)
            eventually(lambda: is_known_to_torch(name))
            preparation.discard()
        with pytest.raises(CollectiveAborted):
            making.result(timeout=30.0)
    assert not is_known_to_torch(name)
    assert held()[1] <= before[1]


def test_groups_that_wait_for_a_store_that_does_not_answer_keep_no_others_waiting(store: RendezvousStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        stuck, groups = Groups(use_gpu=False), Groups(use_gpu=False)
        gone = replace(where(store, "of a driver that is gone", timeout_s=15.0), port=silent.getsockname()[1])
        waiting = pool.submit(stuck.form, gone)
        silent.accept()
        stuck.abort()
        with pytest.raises(CollectiveAborted):
            waiting.result(timeout=10.0)
        forming = pool.submit(groups.form, where(store, f"{store.port}/next"))
        try:
            forming.result(timeout=10.0)
        finally:
            groups.abort()
            groups.close()


def test_a_worker_that_waits_for_a_constructor_in_another_thread_can_be_interrupted(tmp_path: Path) -> None:
    job, groups, task_calls = make_job(str(tmp_path)), Groups(use_gpu=False), threading.Lock()
    spec = GenerationSpec(
        generation=GenerationId(1), members=(WorkerId(0),), source=FromStart(), host="", port=0, prefix=""
    )
    storage = open_storage(job.run_url)
    engine = Engine(
        job,
        RankPosition(spec=spec, worker=WorkerId(0), mirrors=False),
        groups,
        ShardStore(),
        MicrobatchLoader(job.data, job.batch),
        None,
        storage,
        Saver(storage),
        torch.device("cpu"),
        lambda _phase, _step: None,
        task_calls,
        Notes(),
    )
    with ThreadPoolExecutor(1) as pool, task_calls:
        preparing = pool.submit(engine.prepare, None, BuiltObjects(job.task, job.engine))
        eventually(lambda: engine.phase == "prepare")
        groups.abort()
        with pytest.raises(CollectiveAborted):
            preparing.result(timeout=10.0)
