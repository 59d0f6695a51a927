"""One generation's process groups. The only place that makes, aborts and ends them.

Three groups: `train` is this worker's shard group and carries FSDP2's collectives (NCCL on GPUs, gloo on CPUs);
`replicas`, where there are several, are the workers that hold the same shard, and carries partial sums of gradients;
`state` is all workers, always gloo, and carries what lies in host memory: the agreement, mirrors, resharding. Each has
its own sockets. The rendezvous store lives outside every worker, under a fresh prefix per generation.
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
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from raysharded.actors import sockets
from raysharded.errors import CollectiveAborted
from raysharded.layout import Mesh

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
    mesh: Mesh
    arrival_timeout_s: float
    """How long to wait until all members have arrived."""
    collective_timeout_s: float
    """After so long a collective fails by itself."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


_CONNECTED_GLOO = "raysharded_gloo"


class _ConnectedGloo(threading.local):
    """Hands torch a gloo group that is connected already."""

    group: Any = None

    def __call__(self, store: object, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return self.group


_connected_gloo = _ConnectedGloo()
dist.Backend.register_backend(_CONNECTED_GLOO, _connected_gloo, devices=["cpu"])


class Replicas:
    """The workers that hold one shard, by replica; a `raysharded.actors.replicas.ReplicaGroup`."""

    def __init__(self, group: Any, size: int, timeout: datetime.timedelta) -> None:
        self._group, self.size, self._timeout = group, size, timeout

    def all_to_all(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        self._group.alltoall_base(received, send, out_sizes, in_sizes, options).wait()

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._group._allgather_base(received, own, options).wait()

    def all_reduce(self, values: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._timeout
        self._group.allreduce([values], options).wait()

    def abort(self) -> None:
        """Free those that wait; of an NCCL group."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class Groups:
    """The process groups of one generation. `abort` may be called by any thread, at any time."""

    def __init__(self, use_gpu: bool) -> None:
        self._use_gpu = use_gpu
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._changed = threading.Event()
        """Set when connecting has ended, or by `abort`."""
        self.aborted = False
        self.rank = 0
        self.mesh = Mesh(shards=1)
        self.replicas: Replicas | None = None
        """Who else holds this worker's shard; None if nobody does."""
        self._everyone: Replicas | None = None

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def everyone(self) -> Replicas | None:
        """All workers, for what each of them has whole; None if there is only one. Made when it is first asked for, in
        the same place by all."""
        if self._everyone is None and self.world_size > 1:
            group = self.state if not self._use_gpu else self._nccl("everyone", self.rank, self.world_size)
            self._everyone = Replicas(group, self.world_size, self._timeout)
        return self._everyone

    def form(self, where: Rendezvous) -> None:
        """Connect to the other members. Raises `CollectiveAborted` if one does not come, goes away, or on `abort`."""
        self.rank, self.mesh = where.rank, where.mesh
        self._timeout = datetime.timedelta(seconds=where.collective_timeout_s)
        try:
            self._connect_or_leave(where)
            self._register(where)
        except (RuntimeError, ValueError) as error:  # torch's errors here are RuntimeErrors and DistErrors
            self.abort()
            raise CollectiveAborted(f"forming {where.prefix} of {where.world_size} workers: {error}") from error

    def _connect_or_leave(self, where: Rendezvous) -> None:
        """Connect in a thread that is left behind on `abort`: gloo cannot be freed while it connects to a dead peer."""
        outcome: list[BaseException | None] = []

        def connect() -> None:
            try:
                self._connect(where)
                outcome.append(None)
            except Exception as error:  # noqa: BLE001 - handed over to the waiting thread
                outcome.append(error)
            finally:
                self._changed.set()

        threading.Thread(target=connect, daemon=True, name=f"connect {where.prefix}").start()
        self._changed.wait()
        if self.aborted or not outcome:
            raise RuntimeError("aborted while connecting")
        if outcome[0] is not None:
            raise outcome[0]

    def _connect(self, where: Rendezvous) -> None:
        before_store = sockets.open_sockets()
        tcp = TCPStore(where.host, where.port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        store = self._store = PrefixStore(where.prefix, tcp)
        self._keep(sockets.connected_to(sockets.open_sockets() - before_store, frozenset({where.port})))
        self._wait_for_all(store, where)
        before = sockets.open_sockets()
        store.set_timeout(datetime.timedelta(seconds=CONNECT_TIMEOUT_S))
        self.state = self._gloo("state", where.rank, where.world_size)
        if not self._use_gpu:
            self._connect_train_groups(where)
        appeared = sockets.open_sockets() - before
        self._keep(sockets.connected_to(appeared, self._ports_of_all(store, where, sockets.listening_ports(appeared))))
        store.set_timeout(self._timeout)

    def _connect_train_groups(self, where: Rendezvous) -> None:
        mesh, rank = where.mesh, where.rank
        replica, shard = mesh.replica_of(rank), mesh.shard_of(rank)
        self._gloo_train = self._gloo(f"train/{replica}", shard, mesh.shards)
        if mesh.replicas > 1:
            self.replicas = self._replicas(self._gloo(f"replicas/{shard}", replica, mesh.replicas))

    def _replicas(self, group: Any) -> Replicas:
        return Replicas(group, self.mesh.replicas, self._timeout)

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        """A gloo group, connected to all members; its time-out is short while it connects."""
        connect_timeout = datetime.timedelta(seconds=CONNECT_TIMEOUT_S)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        options._timeout = connect_timeout
        group = dist.ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options)
        group._set_default_timeout(self._timeout)
        return group

    def _own_address(self) -> str:
        """The address under which this machine reaches the store; its host name may mean loopback."""
        for sock in self._sockets:
            return str(sock.getsockname()[0]).removeprefix("::ffff:")
        return socket.gethostbyname(socket.gethostname())

    def _register(self, where: Rendezvous) -> None:
        """Make the train group torch's default group, which FSDP2's meshes need."""
        if dist.is_initialized():
            raise RuntimeError("the groups of the generation before were not closed")
        mesh, rank = where.mesh, where.rank
        replica, shard = mesh.replica_of(rank), mesh.shard_of(rank)
        store = PrefixStore(f"train/{replica}", self._store)
        if self._use_gpu:
            device = torch.device("cuda", torch.cuda.current_device())
            dist.init_process_group(
                "nccl",
                store=store,
                rank=shard,
                world_size=mesh.shards,
                timeout=self._timeout,
                device_id=device,  # connects now, not in the first forward
            )
            if mesh.replicas > 1:
                self.replicas = self._replicas(self._nccl(f"replicas/{shard}", replica, mesh.replicas))
            return
        _connected_gloo.group = self._gloo_train
        dist.init_process_group(_CONNECTED_GLOO, store=store, rank=shard, world_size=mesh.shards, timeout=self._timeout)

    def _nccl(self, name: str, rank: int, size: int) -> Any:
        """An NCCL group beside torch's default one, connected to all members."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group = dist.ProcessGroupNCCL(PrefixStore(name, self._store), rank, size, options)
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return group

    def _wait_for_all(self, store: PrefixStore, where: Rendezvous) -> None:
        """Return once every member has arrived: connecting to one that is gone would take gloo its whole time-out."""
        count = store.add("arrived", 1)
        deadline = time.monotonic() + where.arrival_timeout_s
        while count < where.world_size:
            if self.aborted or time.monotonic() > deadline:
                raise RuntimeError(f"{count} of {where.world_size} workers arrived within {where.arrival_timeout_s} s")
            time.sleep(_POLL_S)
            count = store.add("arrived", 0)

    @staticmethod
    def _ports_of_all(store: PrefixStore, where: Rendezvous, own: list[int]) -> frozenset[int]:
        store.set(f"ports/{where.rank}", json.dumps(own))
        values = store.multi_get([f"ports/{rank}" for rank in range(where.world_size)])
        return frozenset(port for value in values for port in json.loads(value))

    def _keep(self, found: list[socket.socket]) -> None:
        with self._lock:
            self._sockets.extend(found)
            if self.aborted:
                sockets.shut_down(found)

    def device_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: this worker's shard group."""
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, "cuda" if self._use_gpu else "cpu")

    def device_mesh_of_one(self) -> DeviceMesh:
        """A mesh of this worker alone."""
        if not self._use_gpu:
            _connected_gloo.group = self._gloo(f"alone/{self.rank}", 0, 1)
        group = dist.new_group([dist.get_rank()], timeout=self._timeout, use_local_synchronization=True)
        return DeviceMesh.from_group(group, "cuda" if self._use_gpu else "cpu")

    def barrier(self) -> None:
        """Return when every member has come here."""
        self.sum_int64(torch.zeros(1, dtype=torch.int64))

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of an int64 host tensor over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._timeout
        self.state.allreduce([values], options).wait()
        return values

    def max_int(self, value: int) -> int:
        """The largest of the members' values."""
        values = torch.tensor([value], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = self._timeout
        self.state.allreduce([values], options).wait()
        return int(values.item())

    def broadcast(self, data: torch.Tensor) -> None:
        """Overwrite a uint8 host tensor, as long at every member, with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self.state.broadcast([data], options).wait()

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
        self._changed.set()
        world = dist.group.WORLD  # None as soon as another thread has closed the groups
        if self._use_gpu and world is not None:
            with contextlib.suppress(RuntimeError):
                world._get_backend(torch.device("cuda")).abort()
            for group in (self.replicas, self._everyone):
                if group is not None:
                    group.abort()

    def close(self) -> None:
        """End the groups, so that the next generation can form its own."""
        if self.aborted or self.world_size > 1:
            with self._lock:
                sockets.shut_down(self._sockets)
        if dist.is_initialized():
            if self._use_gpu:  # a communicator with a dead peer can only be aborted, not destroyed
                self.abort()
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self.state = self._gloo_train = _connected_gloo.group = self.replicas = self._everyone = None
        with self._lock:
            sockets.close_all(self._sockets)
            self._sockets = []


def prepare_environment(use_gpu: bool) -> None:
    """Settings that must be made before the first group: NCCL must report errors, not end the survivors."""
    if use_gpu:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


def start_store(host: str) -> TCPStore:
    """The rendezvous store of a run, on a free port; lives as long as the object, in the driver's process."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)
