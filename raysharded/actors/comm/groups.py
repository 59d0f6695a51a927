"""One generation's process groups: only this module forms, aborts and ends them.

There are three groups, each with its own sockets:

- `train` is this worker's shard group and carries FSDP2's collectives (NCCL on GPUs, gloo on CPUs). Tensor parallelism
  uses two groups within it: `data`, the workers of one tensor rank, and `tensor`, the workers of one data shard.
- `replicas`, if there are several, is the workers that hold the same shard. It carries partial sums of gradients.
- `state` is all workers, always gloo, for host memory (`host_group`): the step consensus, mirrors, resharding.

The rendezvous store lives outside the workers; each generation has a fresh prefix in it, and a separate secret. `links`
connects the gloo groups, and lets only members in. NCCL accepts no connection without a random number from the store.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from raysharded.actors.comm import sockets
from raysharded.actors.comm.abortable_wait import T, has_ended, keep_until_ended, require_descriptors, run_or_leave
from raysharded.actors.comm.communicators import Communicators
from raysharded.actors.comm.device_mesh import DeviceMeshes, forget
from raysharded.actors.comm.fsdp_collectives import Finish, finish_plainly
from raysharded.actors.comm.host_group import HostGroup, Replicas
from raysharded.actors.comm.links import CONNECT_TIMEOUT_S, Intruded, Links, arrive, connect_alone
from raysharded.actors.comm.store_client import StoreClient
from raysharded.actors.comm.torch_groups import BACKEND, ConnectedGroup, forget_default, hand_over
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.actors.device.hangup_watch import HangupWatch
from raysharded.errors import CollectiveAborted
from raysharded.layout import Mesh

_log = logging.getLogger(__name__)
_ATTEMPTS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The place at which the members of a generation find each other."""

    host: str
    port: int
    prefix: str
    """Prefix in the store, fresh for every generation."""
    secret: bytes = field(repr=False)
    """Secret of the members, by which the store and each other know them."""
    rank: int
    mesh: Mesh
    arrival_timeout_s: float
    """Time limit for all members to arrive."""
    collective_timeout_s: float
    """Time after which a collective of gloo fails by itself; NCCL's end with an abort."""
    besides: str = ""
    """Name of groups that meet at the prefix besides the generation's."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


class Groups:
    """The process groups of one generation. `abort` may be called by any thread, at any time."""

    def __init__(self, use_gpu: bool) -> None:
        self.use_gpu = use_gpu
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._left: list[Any] = []
        """Collectives that gloo had not ended when they were aborted."""
        self.aborted = False
        self.failed = False
        """True once a gloo collective has failed here: the generation is over, also if the error is caught."""
        self.rank = 0
        self.mesh = Mesh(shards=1)
        self.replicas: Replicas | None = None
        """The workers that hold this worker's shard; None if it is the only one."""
        self._everyone: Replicas | None = None
        self._client: StoreClient | None = None
        self._store: Any = None
        self._state: HostGroup | None = None
        self._gloo_train: Any = None
        self._gloo_data: Any = None
        self._gloo_tensor: Any = None
        self._gloo_everyone: Any = None
        self._alone: Any = None
        self._communicators = Communicators()
        self.with_sources: Groups | None = None  # while state moves: also with workers that only hand it over
        self._connected: ConnectedGroup | None = None
        """The default group of torch on GPUs; also the future one, if connected in the background."""
        self._watch: HangupWatch | None = None
        self._is_default = False
        """Whether torch's default group belongs to this object."""
        self._meshes: list[DeviceMesh] = []

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def state(self) -> HostGroup:
        """The group of all workers, for host memory. Raises `CollectiveAborted` once the groups are closed."""
        if self._state is None:
            raise CollectiveAborted("the groups are closed")
        return self._state

    @property
    def everyone(self) -> Replicas | None:
        """All workers of this worker's tensor rank, for parameters that each holds whole; None for a single worker.

        Made at the first access, which must come at the same point on all workers.
        """
        mesh = self.mesh
        size, rank = mesh.data.world_size, mesh.data_rank_of(self.rank)
        if self._everyone is None and size > 1:
            if self.use_gpu and (mesh.replicas, mesh.tensor) == (1, 1):
                group = self._communicators.train
            elif self.use_gpu:
                group = self._communicator(f"everyone/{mesh.tensor_of(self.rank)}", rank, size)
            else:
                group = self._gloo_everyone
            self._everyone = Replicas(group, size, self._timeout, self._finish_train)
        return self._everyone

    def form(self, where: Rendezvous) -> None:
        """Connect to the other members. Raises `CollectiveAborted` on `abort`, or if a member is missing or lost."""
        self.rank, self.mesh, self._prefix = where.rank, where.mesh, where.prefix
        self._timeout = datetime.timedelta(seconds=where.collective_timeout_s)
        try:
            self._connect_or_leave(where)
            self._register(where)
        except (RuntimeError, ValueError) as error:  # torch's errors here are RuntimeErrors and DistErrors
            self.abort()
            raise CollectiveAborted(f"forming {where.prefix} of {where.world_size} workers: {error}") from error

    def connect_beside(self, where: Rendezvous) -> None:
        """Connect to the other members while the groups of another generation are in use.

        `take_over` then makes these the process's groups. Raises as `form`. Not for tensor parallel groups, which need
        torch's default group.

        On GPUs this makes NCCL's communicators beside another thread's collectives. Making one launches one kernel, on
        a separate stream that does not wait for training; other collectives run only after `take_over`. It also
        allocates device memory, which may wait for running collectives: so it must be requested.
        """
        assert where.mesh.tensor == 1, where.mesh
        self.rank, self.mesh, self._prefix = where.rank, where.mesh, where.prefix
        self._timeout = datetime.timedelta(seconds=where.collective_timeout_s)
        try:
            self._connect_or_leave(where)
            self._connected = self._connected_group(where)
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the last two from another torch
            self.abort()
            raise CollectiveAborted(f"preparing {where.prefix} of {where.world_size} workers: {error}") from error

    def take_over(self) -> None:
        """Make the group from `connect_beside` torch's default group; the previous generation's must be closed."""
        if self.aborted or self._connected is None:
            raise CollectiveAborted("what was prepared is not connected any more")
        self._is_default = True
        try:
            self._connected.make_default()
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            self.abort()
            raise CollectiveAborted(f"taking over what was prepared: {error}") from error

    def _connect_or_leave(self, where: Rendezvous) -> None:
        """Connect in a separate thread: gloo cannot be freed while it connects to a dead peer.

        Raises ClusterError at the limit of open files, where gloo's threads would end the process.
        """
        require_descriptors(where.world_size)
        self.beside(lambda: self._connect(where), f"connect {where.prefix}")

    @waits_for_peers
    def _connect(self, where: Rendezvous) -> None:
        client = self._reach_store(where)
        with self._lock:
            self._client = client
        if self.aborted:
            client.close()
        strictly = arrive(client, where.rank, where.world_size, where.arrival_timeout_s, where.besides)
        for attempt in itertools.count():
            client.set_timeout(datetime.timedelta(seconds=CONNECT_TIMEOUT_S))
            try:
                self._attempt(client, where, attempt, strictly=strictly or attempt % 2 == 1)
                break
            except Intruded as error:
                if attempt + 1 >= _ATTEMPTS:
                    raise
                _log.warning("%s: a stranger was in a member's place, and is out: %s", where.prefix, error)
        client.set_timeout(self._timeout)
        if self.use_gpu:
            made = self._communicators
            made.connect_mesh(where.mesh, where.rank, self._store, self._timeout)
            if made.replicas is not None:
                self.replicas = self._replicas(made.replicas)

    def _reach_store(self, where: Rendezvous) -> StoreClient:
        return StoreClient(where.host, where.port, where.prefix, where.secret, self._timeout, lambda: self.aborted)

    @waits_for_peers
    def _attempt(self, client: StoreClient, where: Rendezvous, attempt: int, *, strictly: bool) -> None:
        name, error = f"{where.prefix}{where.besides}/try{attempt}", None
        reach, is_aborted = partial(self._reach_store, where), lambda: self.aborted
        links = Links(client, reach, where.secret, name, self._timeout, is_aborted, strictly=strictly)
        try:
            self._state = HostGroup(links.connect("state", where.rank, where.world_size), self._timeout, self.finish)
            if not self.use_gpu:
                self._connect_train_groups(links, where)
        except RuntimeError as failure:
            error = failure
        links.settle(where.rank, where.world_size, error)
        self._store = PrefixStore(f"try{attempt}", client)
        self._keep(links.sockets)

    def _connect_train_groups(self, links: Links, where: Rendezvous) -> None:
        mesh, rank = where.mesh, where.rank
        replica, shard = mesh.replica_of(rank), mesh.shard_of(rank)
        self._gloo_train, self._gloo_everyone = links.connect(f"train/{replica}", shard, mesh.shards), self.state.group
        if mesh.tensor > 1:
            place, data_rank, data = mesh.tensor_of(rank), mesh.data_rank_of(rank), mesh.data
            data_shard = data.shard_of(data_rank)
            self._gloo_tensor = links.connect(f"tensor/{data_rank}", place, mesh.tensor)
            self._gloo_data = links.connect(f"data/{replica}/{place}", data_shard, data.shards)
            self._gloo_everyone = links.connect(f"everyone/{place}", data_rank, data.world_size)
        if mesh.replicas > 1:
            self.replicas = self._replicas(links.connect(f"replicas/{shard}", replica, mesh.replicas))

    def _replicas(self, group: Any) -> Replicas:
        return Replicas(group, self.mesh.replicas, self._timeout, self._finish_train)

    def _register(self, where: Rendezvous) -> None:
        """Make the train group torch's default group, which FSDP2's meshes need."""
        if dist.is_initialized():
            raise RuntimeError("the groups of the generation before were not closed")
        self._is_default = True
        if self.use_gpu:
            self._connected = self._connected_group(where)
            self._connected.make_default()
            return
        replica, shard = where.mesh.replica_of(where.rank), where.mesh.shard_of(where.rank)
        store = PrefixStore(f"train/{replica}", self._store)
        hand_over(self._gloo_train)
        dist.init_process_group(BACKEND, store=store, rank=shard, world_size=where.mesh.shards, timeout=self._timeout)

    def _communicator(self, name: str, rank: int, size: int) -> Any:
        """One more communicator of the accelerator, connected to all members."""
        connect, store = self._communicators.connect, self._store
        return self.beside(lambda: connect(name, store, rank, size, self._timeout), name)

    def _connected_group(self, where: Rendezvous) -> ConnectedGroup:
        """The shard group as a group of torch's that is not its default one."""
        device = accelerator().current() if self.use_gpu else torch.device("cpu")
        backend = self._communicators.train if self.use_gpu else self._gloo_train
        shard = where.mesh.shard_of(where.rank)
        return ConnectedGroup(backend, where.prefix + where.besides, self._store, shard, where.mesh.shards, device)

    def _keep(self, found: list[socket.socket]) -> None:
        with self._lock:
            self._sockets.extend(found)
            if self.aborted:
                sockets.shut_down(found)
            elif self.use_gpu and found:
                self._watch = HangupWatch(found, self.abort, self._prefix)

    def axes(self) -> DeviceMeshes:
        """The meshes for FSDP2 and tensor parallelism: this worker's shard group, in one dimension or two.

        DTensor's caches treat meshes with equal ranks and names as equal, although this worker's rank may differ
        between generations. So the names contain the generation's prefix.
        """
        world, device, mesh = dist.group.WORLD, self._device_type, self.mesh
        names = (f"data of {self._prefix}", f"tensor of {self._prefix}")
        if self._connected is not None and mesh.tensor == 1:
            return DeviceMeshes(data=self._noted(self._connected.mesh(names[0])), alone=self._mesh_of_one)
        assert world is not None
        if mesh.tensor == 1:
            data = self._noted(DeviceMesh.from_group(world, device, mesh_dim_names=names[:1]))
            return DeviceMeshes(data=data, alone=self._mesh_of_one)
        ranks = torch.arange(mesh.shards).view(-1, mesh.tensor)
        own = dist.get_rank()
        of_row, of_column = self._communicators.data or self._gloo_data, self._communicators.tensor or self._gloo_tensor
        rows = self._subgroup("data", ranks[:, own % mesh.tensor].tolist(), of_row)
        columns = self._subgroup("tensor", ranks[own // mesh.tensor].tolist(), of_column)
        both = self._noted(DeviceMesh.from_group([rows, columns], device, mesh=ranks, mesh_dim_names=names))
        return DeviceMeshes(data=both[names[0]], tensor=both[names[1]], alone=self._mesh_of_one)

    def _mesh_of_one(self) -> DeviceMesh:
        """A mesh of this worker alone."""
        own, name = dist.get_rank(), f"alone in {self._prefix}"
        if self.use_gpu:
            connected = self._communicator(f"alone/{self.rank}", 0, 1)
        else:
            connected = connect_alone(self._timeout)
        self._alone = connected
        group = self._subgroup("alone", [own], connected)
        return self._noted(DeviceMesh.from_group(group, self._device_type, mesh_dim_names=(name,)))

    def _noted(self, mesh: DeviceMesh) -> DeviceMesh:
        """Register a mesh that `close` releases, and return it."""
        self._meshes.append(mesh)
        return mesh

    def _subgroup(self, name: str, ranks: list[int], connected: Any) -> dist.ProcessGroup:
        """A group of these ranks of torch's default group, with this rank, around the connected group."""
        if self.use_gpu:
            rank, device = ranks.index(dist.get_rank()), accelerator().current()
            made = ConnectedGroup(connected, f"{self._prefix}/{name}", self._store, rank, len(ranks), device)
            made.make_known({member: place for place, member in enumerate(ranks)})
            return made.group
        hand_over(connected)
        group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def _device_type(self) -> str:
        return accelerator().device_type if self.use_gpu else "cpu"

    @waits_for_peers
    def finish(self, work: Any) -> None:
        """Return when a gloo collective is done; raise its error, or CollectiveAborted if gloo keeps it on abort."""
        try:
            while not has_ended(work):
                if self.aborted:
                    self._left.append(work)
                    raise CollectiveAborted("aborted while gloo kept a collective")
        except BaseException:
            self.failed = True
            raise

    @property
    def _finish_train(self) -> Finish:
        return finish_plainly if self.use_gpu else self.finish

    def beside(self, do: Callable[[], T], name: str) -> T:
        """The result of `do`, which sends and receives by itself; raises its error, or CollectiveAborted on abort."""
        return run_or_leave(do, lambda: self.aborted, name)

    def abort(self) -> None:
        """Make every blocked collective of this generation fail now, here and at the peers. Any thread; idempotent."""
        with self._lock:
            self.aborted = True
            sockets.shut_down(self._sockets)
            if self._client is not None:
                self._client.close()
        if (more := self.with_sources) is not None:
            more.abort()
        self._communicators.abort()

    def close(self) -> list[Any]:
        """End the groups, so that the next generation can form its own. Returns them, to be freed in another thread:
        a destructor in gloo waits up to 10 ms for its event loop."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        ended: list[Any] = [self._state, self._gloo_train, self._gloo_data, self._gloo_tensor, self._gloo_everyone]
        if not self.use_gpu:
            ended += [self.replicas, self._everyone, self._alone]
        if self._left:
            keep_until_ended(ended, self._left)
            ended, self._left = [], []
        if self.aborted or self.world_size > 1:
            with self._lock:
                sockets.shut_down(self._sockets)
        self._communicators.abort()  # with a dead peer they can only be aborted, not destroyed
        if self._connected is not None and not self._is_default:
            self.abort()
            self._connected.forget()
        if self._is_default and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                (forget_default if self.use_gpu else dist.destroy_process_group)()
        self._state = self._store = self._gloo_train = self._gloo_data = self._gloo_tensor = self._gloo_everyone = None
        self.replicas = self._everyone = self._connected = self._alone = None
        self._communicators.release()  # it stays aborted, for a thread that still connects one
        forget(*self._meshes)
        if self._is_default:  # this is then the thread that trained
            hand_over(None)
        self._is_default, self._meshes = False, []
        with self._lock:
            sockets.close_all(self._sockets)
            self._sockets = []
            if self._client is not None:
                self._client.close()
                self._client = None
        return ended
