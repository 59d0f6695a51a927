"""A thread that gloo blocks, in the middle of a message to or from a lost peer, is released on abort."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharded.actors.comm import links
from raysharded.actors.comm.abortable_wait import FREEING, join_or_leave, keep_until_ended
from raysharded.actors.comm.fsdp_collectives import AllGather, ReduceScatter, all_to_all
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.comm.lasting_threads import begin
from raysharded.actors.telemetry.stack_probe import is_waiting
from raysharded.errors import CollectiveAborted
from raysharded.ids import WorkerId
from raysharded.layout import Mesh
from raysharded.rendezvous.server import RendezvousStore
from raysharded.testing import Fault
from tests import patches
from tests.cases import tried_each_time
from tests.forked import server
from tests.training.harness import GptTask, Small, train

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only: needs /proc"),
]

_BYTES = 1 << 30
"""More than any socket takes: a message that is on its way for a while."""
_FEW_BYTES = 1 << 10
_TIMEOUT_S = 6.0
"""gloo's own time-out."""
AMONG = ["broadcasts among all", "broadcasts in its shard group"]
_CONNECT_TIMEOUT_S = 1.0
"""In place of that of `links`, in a test that waits longer."""


def place(store: RendezvousStore, rank: int, does: str) -> Rendezvous:
    return Rendezvous(
        host="127.0.0.1",
        port=store.port,
        prefix="letting go",
        secret=store.secret("letting go"),
        rank=rank,
        mesh=Mesh(shards=2),
        arrival_timeout_s=60.0,
        collective_timeout_s=60.0 if does in ("sends late", "reduces") else _TIMEOUT_S,  # where nobody waits until then
    )


def message() -> torch.Tensor:
    """A message whose first and last byte show that they have come. The pages between stay empty: a fill takes a
    second."""
    data = torch.zeros(_BYTES, dtype=torch.uint8)
    data[0] = data[-1] = 1
    return data


def peer(where: Rendezvous, does: str) -> None:
    """The other worker: rank 1."""
    torch.set_num_threads(1)
    if does == "sends late":
        patches.replace(links, "CONNECT_TIMEOUT_S", _CONNECT_TIMEOUT_S)
    groups = Groups(use_gpu=False)
    groups.form(where)
    shard_group: Any = dist.group.WORLD
    data = torch.zeros(_BYTES, dtype=torch.uint8) if does == "dies while it receives" else message()
    if does == "sends":
        groups.state.deliver(groups.state.send(data, 0, 7))
    elif does == "reduces":
        given, own = torch.randn(8), torch.zeros(4)
        shard_group._reduce_scatter_base(own, given.clone(), dist.ReduceScatterOptions()).wait()
        ReduceScatter(groups.finish)(own, given, shard_group, dist.ReduceOp.SUM)
    elif does == "sends late":
        time.sleep(_CONNECT_TIMEOUT_S + 0.5)
        groups.state.deliver(groups.state.send(data[-_FEW_BYTES:], 0, 7))
    elif does == "dies while it receives":
        coming = groups.state.recv(data, 0, 7)
        in_the_middle(data)
        os.kill(os.getpid(), signal.SIGKILL)
        groups.state.deliver(coming)
    elif does == "broadcasts among all":
        groups.state.group.broadcast([data], rooted_at(1)).wait()
    elif does == "broadcasts in its shard group":
        shard_group.broadcast([data], rooted_at(1)).wait()
    time.sleep(600)


def rooted_at(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


class Pair:
    """This process, rank 0, with its groups, and the peer."""

    def __init__(self, does: str) -> None:
        self.does, self.store = does, RendezvousStore("127.0.0.1")
        where = place(self.store, 1, does)
        self.process: ForkServerProcess = server().Process(target=peer, args=(where, does), daemon=True)
        self.process.start()
        self.groups = Groups(use_gpu=False)
        self.groups.form(place(self.store, 0, does))

    def stop_peer(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def delivered(self, message: object) -> None:
        """Wait for it as training does."""
        self.groups.beside(lambda: self.groups.state.deliver(message), "a message")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.groups.abort()
        self.groups.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "sends late":
        monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", _CONNECT_TIMEOUT_S)
    pair = Pair(request.param)
    yield pair
    pair.end()


def in_the_middle(data: torch.Tensor) -> None:
    """Return when the first byte has come; the last is far away."""
    while not data[0]:
        time.sleep(0.0001)


def aborted_within(groups: Groups, waits: Callable[[], object]) -> float:
    """Abort while `waits` waits; the seconds until it raised CollectiveAborted."""
    aborted_at: list[float] = []

    def abort() -> None:
        time.sleep(0.3)
        aborted_at.append(time.monotonic())
        groups.abort()

    threading.Thread(target=abort).start()
    with pytest.raises(CollectiveAborted):
        waits()
    return time.monotonic() - aborted_at[0]


@pytest.mark.parametrize("pair", ["sends"], indirect=True)
def test_a_message_that_is_half_read(pair: Pair) -> None:
    data = torch.zeros(_BYTES, dtype=torch.uint8)
    coming = pair.groups.state.recv(data, 1, 7)
    in_the_middle(data)
    pair.stop_peer()
    assert aborted_within(pair.groups, lambda: pair.delivered(coming)) < _TIMEOUT_S / 2
    assert not data[-1]


@pytest.mark.parametrize("pair", ["sends late"], indirect=True)
def test_a_message_may_take_longer_than_connecting(pair: Pair) -> None:
    data = torch.zeros(_FEW_BYTES, dtype=torch.uint8)
    pair.groups.state.deliver(pair.groups.state.recv(data, 1, 7))
    assert data[-1]


@pytest.mark.parametrize("pair", ["dies while it receives"], indirect=True)
def test_a_message_that_is_half_sent(pair: Pair) -> None:
    going = pair.groups.state.send(message(), 1, 7)
    pair.process.join()
    assert aborted_within(pair.groups, lambda: pair.delivered(going)) < _TIMEOUT_S / 2


@pytest.mark.parametrize("pair", tried_each_time(AMONG[:1], AMONG), indirect=True)
def test_a_collective_in_the_middle_of_a_message_and_its_group_is_freed_when_gloo_returns(pair: Pair) -> None:
    groups, data = pair.groups, torch.zeros(_BYTES, dtype=torch.uint8)
    group: Any = groups.state.group if pair.does == "broadcasts among all" else dist.group.WORLD
    work = group.broadcast([data], rooted_at(1))
    del group
    in_the_middle(data)
    pair.stop_peer()
    assert aborted_within(groups, lambda: groups.finish(work)) < _TIMEOUT_S / 2
    assert not work.is_completed()

    before = time.monotonic()
    groups.close()
    assert time.monotonic() - before < _TIMEOUT_S / 2  # its destructor would have waited
    (keeper,) = [thread for thread in threading.enumerate() if thread.name == FREEING]
    threads = num_threads()
    keeper.join(2 * _TIMEOUT_S)
    assert work.is_completed()
    assert num_threads() < threads - 1  # without the keeper, and without those of the groups


@pytest.mark.parametrize("pair", ["waits"], indirect=True)
def test_closed_groups_are_freed_in_another_thread(pair: Pair) -> None:
    from tests.ray.leftovers import wait_until  # Ray, half a second of each peer's start if it were above

    ended = pair.groups.close()
    gc.collect()
    threads = num_threads()
    assert not [thread for thread in threading.enumerate() if thread.name == FREEING]

    keep_until_ended(ended)
    wait_until(lambda: not ended and num_threads() < threads, "the groups' threads have ended")


def gathers(groups: Groups) -> None:
    AllGather(groups.finish)(torch.zeros(8), torch.ones(4), dist.group.WORLD)


def scatters(groups: Groups) -> None:
    ReduceScatter(groups.finish)(torch.zeros(4), torch.ones(8), dist.group.WORLD, dist.ReduceOp.SUM)


def exchanges(groups: Groups) -> None:
    all_to_all(torch.zeros(8), torch.ones(8), group=dist.group.WORLD, finish=groups.finish)


def agrees(groups: Groups) -> None:
    groups.state.sum_int64(torch.ones(3, dtype=torch.int64))


def receives(groups: Groups) -> None:
    data = torch.zeros(3)
    groups.beside(lambda: groups.state.deliver(groups.state.recv(data, 1, 7)), "receive")


def joins(groups: Groups) -> None:
    data = torch.zeros(3)

    def receive() -> None:  # in a thread that is left behind, in which gloo reports the abort
        with suppress(RuntimeError, CollectiveAborted):
            groups.state.deliver(groups.state.recv(data, 1, 7))

    join_or_leave(begin(receive, "beside"), lambda: groups.aborted)


@pytest.mark.parametrize("pair", ["nothing"], indirect=True)
@pytest.mark.parametrize("waits", [gathers, scatters, exchanges, agrees, receives, joins])
def test_who_waits_for_others_is_seen_to_wait_and_leaves_on_abort(pair: Pair, waits: Callable[[Groups], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            waits(pair.groups)
        except (CollectiveAborted, RuntimeError) as error:  # gloo itself reports to most of them
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    assert all(is_waiting(thread.ident) for _ in range(50))
    pair.groups.abort()
    thread.join(_TIMEOUT_S / 2)
    assert not thread.is_alive()
    assert len(errors) == (waits is not joins) or isinstance(errors[0], CollectiveAborted)


@pytest.mark.parametrize("pair", ["reduces"], indirect=True)
def test_a_reduce_scatter_of_two_is_what_gloos_own_is(pair: Pair) -> None:
    given, own = torch.randn(8, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    expected = torch.zeros(4)
    shard_group: Any = dist.group.WORLD
    shard_group._reduce_scatter_base(expected, given.clone(), dist.ReduceScatterOptions()).wait()
    ReduceScatter(pair.groups.finish)(own, given, shard_group, dist.ReduceOp.SUM)
    assert torch.equal(own, expected)
    assert own.any()


class Large(Small):
    """Its shards are larger than any socket takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(4096, 1024))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(tokens) + self.ballast.mean()
        return logits


class LargeTask(GptTask):
    """Its mirrors take a while."""

    def build_model(self) -> nn.Module:
        return Large()


@pytest.mark.slow
def test_who_dies_while_mirrors_are_on_their_way_takes_nobody_along() -> None:
    until_they_are = Fault(worker=WorkerId(1), step=2, phase="data", kind="slow", seconds=0.02)
    dies = Fault(worker=WorkerId(1), step=2, phase="data")
    outcome = train(3, task=LargeTask(), microbatches=2, steps=2, faults=[until_they_are, dies])
    assert outcome.bits == train(1, task=LargeTask(), microbatches=2, steps=2).bits
    assert [lost["worker"] for lost in outcome.of("worker_lost")] == [1]


def num_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))
