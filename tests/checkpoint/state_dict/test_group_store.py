"""The ranks of a group agree on a name that no earlier group over the same store had."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.testing._internal.distributed import fake_pg as fake_pg  # registers the backend

from raysharded.checkpoint import api
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.group_store import GroupSession
from raysharded.errors import CheckpointError
from tests.checkpoint.state_dict.ranks import run_ranks

LONG_S = 60.0


class Ranks:
    """A session of one group on each rank; the ranks are threads with connections of their own to one store."""

    def __init__(self, server: TCPStore, world_size: int) -> None:
        self.world_size = world_size
        self._port = server.port
        self._sessions = [GroupSession() for _ in range(world_size)]

    def prefix(self, rank: int, timeout_s: float = LONG_S) -> str | CheckpointError:
        """The rank's next prefix, or its error."""
        store = PrefixStore("test", TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False))
        try:
            return self._sessions[rank].next_prefix(store, rank, self.world_size, timeout_s)
        except CheckpointError as error:
            return error

    def prefixes(self) -> list[Any]:
        """The next prefix of every rank."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(self.prefix, range(self.world_size)))


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_every_use_has_a_prefix_that_all_ranks_know_and_leaves_one_key(server: TCPStore) -> None:
    ranks = Ranks(server, 4)
    found = [ranks.prefixes() for _ in range(3)]
    assert [len(set(prefixes)) for prefixes in found] == [1, 1, 1]
    assert len({prefixes[0] for prefixes in found}) == 3
    assert [key for key in server.list_keys() if "test/" in key] == ["test/session"]


def test_a_rank_that_is_early_waits_for_the_name_of_its_own_group(server: TCPStore) -> None:
    """Rank 1 finds the name of the group before, which rank 0 confirmed to the rank 1 of that time."""
    [earlier, _] = Ranks(server, 2).prefixes()
    ranks = Ranks(server, 2)
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ranks.prefix, 1)
        PrefixStore("test", server).wait([f"{earlier.partition('/')[0]}/here/1"], timedelta(seconds=LONG_S))
        first = pool.submit(ranks.prefix, 0)
        assert first.result() == early.result() != earlier


def test_a_missing_rank_is_named_on_all_that_came_and_the_next_attempt_works(server: TCPStore) -> None:
    ranks = Ranks(server, 3)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ranks.prefix, 1)
        reason = ranks.prefix(0, timeout_s=3.0)
        began = time.monotonic()
        received = waiting.result()
        assert time.monotonic() - began < LONG_S / 2
    assert isinstance(reason, CheckpointError)
    assert str(reason).startswith("1 of 3 ranks sent no message within 3 s: 2.")
    assert str(received) == f"rank 0 failed: {reason}"
    late = ranks.prefix(2, timeout_s=0.1)
    assert str(late).startswith("rank 2: rank 0 sent no message within 0.1 s.")
    assert len(set(ranks.prefixes())) == 1


def test_a_rank_that_timed_out_before_rank_0_came_takes_part_in_the_next_save(server: TCPStore) -> None:
    """Its token was set in time for the others, so they have their session already."""
    ranks = Ranks(server, 2)
    PrefixStore("test", server).set("session", "earlier")
    assert isinstance(ranks.prefix(1, timeout_s=0.2), CheckpointError)
    token = ranks._sessions[1]._token
    name = ranks._sessions[0]._token
    PrefixStore("test", server).set(f"{name}/here/1", token)
    assert ranks.prefix(0) == f"{name}/1"
    assert ranks.prefixes() == [f"{name}/2"] * 2


def remade(rank: int, folder: str) -> tuple[Any, int]:
    """A save fails on rank 0 alone; both ranks make their group anew over the same store, save, and load.

    The groups have torch's fake backend. Gloo finds addresses of the earlier group in the store, and connects or not
    by chance; the messages need the store alone.
    """
    base = dist.distributed_c10d._get_default_store()
    base.set(f"rank {rank}", "")  # a rank that is still connecting would fail if the other left
    base.wait(["rank 0", "rank 1"], timedelta(seconds=LONG_S))
    dist.destroy_process_group()
    received: Any = None
    for group in range(2):
        dist.init_process_group("fake", store=base, rank=rank, world_size=2)
        if rank == 1 and group == 1:
            with suppress(dist.DistStoreError):  # rank 0 has a second in which it would take the older message
                base.wait(["sent 1"], timedelta(seconds=1.0))
        coordinator = Coordinator.of(None, LONG_S)
        with suppress(CheckpointError), coordinator.guarded():
            if rank == 0 and group == 0:
                base.wait(["sent 0"], timedelta(seconds=LONG_S))
                raise CheckpointError("the disk is full.")
            received = coordinator.gather(f"rank {rank} of group {group}")
            base.set(f"sent {group}", "")
        if group == 0:
            dist.destroy_process_group()
    state = {"mine": {f"of {rank}": torch.full((3,), float(rank))}}
    api.save(folder, state, step=1, timeout_s=LONG_S)
    return received, api.load(folder, {"mine": {f"of {rank}": torch.zeros(3)}}, timeout_s=LONG_S).step


@pytest.mark.procs
def test_messages_of_a_failed_save_do_not_reach_a_group_made_anew_over_the_same_store(tmp_path: Path) -> None:
    first, second = run_ranks(2, remade, str(tmp_path / "c"))
    assert first == (["rank 0 of group 1", "rank 1 of group 1"], 1)
    assert second == (None, 1)
