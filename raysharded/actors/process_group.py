"""One generation's process groups. The only place that makes, aborts and ends them.

Two groups: `train` carries FSDP2's collectives (NCCL on GPUs, gloo on CPUs); `state` is always gloo and carries what lies
in host memory: the agreement, mirrors, resharding. Each has its own sockets. The rendezvous store lives outside
every worker, under a fresh prefix per generation.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raysharded.actors import sockets
from raysharded.errors import CollectiveAborted

CONNECT_TIMEOUT_S = 6.0
"""How long the members may take to connect once all of them are known to be there."""
_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the members of a generation find each other."""

    host: str
    port: int
    prefix: str
    """Fresh for every generation."""
    rank: int
    world_size: int
    arrival_timeout_s: float
    """How long to wait until all members have arrived."""
    collective_timeout_s: float
    """After so long a collective fails by itself."""


class Groups:
    """The process groups of one generation. `abort` may be called by any thread, at any time."""

    def __init__(self, use_gpu: bool) -> None:
        self._use_gpu = use_gpu
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.aborted = False
        self.rank = 0
        self.world_size = 1

    def form(self, where: Rendezvous) -> None:
        """Connect to the other members. Raises `CollectiveAborted` if one does not come or goes away meanwhile."""
        self.rank, self.world_size = where.rank, where.world_size
        try:
            self._form(where)
        except (RuntimeError, ValueError) as error:  # torch's errors here are RuntimeErrors and DistErrors
            self.abort()
            raise CollectiveAborted(f"forming {where.prefix} of {where.world_size} workers: {error}") from error

    def _form(self, where: Rendezvous) -> None:
        timeout = datetime.timedelta(seconds=where.collective_timeout_s)
        connect_timeout = datetime.timedelta(seconds=CONNECT_TIMEOUT_S)
        before_store = sockets.open_sockets()
        tcp = dist.TCPStore(where.host, where.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(where.prefix, tcp)
        self._keep(sockets.connected_to(sockets.open_sockets() - before_store, frozenset({where.port})))
        self._wait_for_all(store, where)
        before = sockets.open_sockets()
        if dist.is_initialized():
            raise RuntimeError("the groups of the generation before were not closed")
        store.set_timeout(connect_timeout)
        self.state = dist.ProcessGroupGloo(
            dist.PrefixStore("state", store), where.rank, where.world_size, timeout=connect_timeout
        )
        dist.init_process_group(
            "nccl" if self._use_gpu else "gloo",
            store=dist.PrefixStore("train", store),
            rank=where.rank,
            world_size=where.world_size,
            timeout=timeout if self._use_gpu else connect_timeout,
        )
        self.train = dist.group.WORLD
        appeared = sockets.open_sockets() - before
        self._keep(sockets.connected_to(appeared, self._ports_of_all(store, where, sockets.listening_ports(appeared))))
        store.set_timeout(timeout)
        if not self._use_gpu:
            self.train._get_backend(torch.device("cpu"))._set_default_timeout(timeout)  # type: ignore[union-attr]
        self._timeout = timeout

    def _wait_for_all(self, store: dist.Store, where: Rendezvous) -> None:
        """Return once every member has arrived: connecting to one that is gone would take gloo its whole time-out."""
        count = store.add("arrived", 1)
        deadline = time.monotonic() + where.arrival_timeout_s
        while count < where.world_size:
            if self.aborted or time.monotonic() > deadline:
                raise RuntimeError(f"{count} of {where.world_size} workers arrived within {where.arrival_timeout_s} s")
            time.sleep(_POLL_S)
            count = store.add("arrived", 0)

    @staticmethod
    def _ports_of_all(store: dist.Store, where: Rendezvous, own: list[int]) -> frozenset[int]:
        store.set(f"ports/{where.rank}", json.dumps(own))
        values = store.multi_get([f"ports/{rank}" for rank in range(where.world_size)])
        return frozenset(port for value in values for port in json.loads(value))

    def _keep(self, found: list[socket.socket]) -> None:
        with self._lock:
            self._sockets.extend(found)
            if self.aborted:
                sockets.shut_down(found)

    def mesh(self) -> DeviceMesh:
        """The flat mesh that FSDP2 shards over."""
        return DeviceMesh.from_group(dist.group.WORLD, "cuda" if self._use_gpu else "cpu")

    def barrier(self) -> None:
        """Return when every member has come here."""
        self.sum_int64(torch.zeros(1, dtype=torch.int64))

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of an int64 host tensor over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = self._timeout
        self.state.allreduce([values], options).wait()
        return values

    def max_int(self, value: int) -> int:
        """The largest of the members' values."""
        values = torch.tensor([value], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = self._timeout
        self.state.allreduce([values], options).wait()
        return int(values.item())

    def exchange(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        """All-to-all of uint8 host tensors; sizes are per member."""
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        self.state.alltoall_base(received, send, out_sizes, in_sizes, options).wait()

    def abort(self) -> None:
        """Make every blocked collective of this generation fail now, here and at the peers. Any thread; idempotent."""
        with self._lock:
            self.aborted = True
            sockets.shut_down(self._sockets)
        if self._use_gpu and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.group.WORLD._get_backend(torch.device("cuda")).abort()  # type: ignore[union-attr]

    def close(self) -> None:
        """End the groups, so that the next generation can form its own."""
        if self.aborted or self.world_size > 1:
            with self._lock:
                sockets.shut_down(self._sockets)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self.state = None
        self.train = None
        with self._lock:
            sockets.close_all(self._sockets)
            self._sockets = []


def prepare_environment(use_gpu: bool) -> None:
    """Settings that must be made before the first group: NCCL must report errors, not end the survivors."""
    if use_gpu:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


def start_store(host: str) -> dist.TCPStore:
    """The rendezvous store of a run, on a free port; lives as long as the object, in the driver's process."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
