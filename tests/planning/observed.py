"""Allocations and messages of real workers: a task that watches the process that it runs in."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import _disable_current_modes

import raysharded as rs
from raysharded.actors.comm.fsdp_collectives import AllGather, ReduceScatter
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup, Replicas
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.reduction import tree_reducer
from raysharded.actors.reduction.tree_reducer import TreeReducer
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.engine import Engine
from raysharded.actors.step.gradient import StepGradient
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.telemetry import busy_sampler
from raysharded.layout import Mesh
from raysharded.planning.tracing.tensor_lifetimes import MemoryFollower
from raysharded.task import Strategy, has_tensor_parallelism
from tests.training.harness import train

_STEPS = 4
_STEADY = range(3, _STEPS + 1)
"""Steps before which all snapshots and mirrors were there."""


class Watch(NotFollowed):
    """The watch of one worker process: its training thread's tensors, and its arguments of collectives."""

    def __init__(self) -> None:
        self.reported: set[int] = set()
        """Steps."""
        self.sent: Counter[str] = Counter()
        self.rank, self.mesh = 0, Mesh(shards=1)
        self.follower = _Follower(self)
        self._enters = [self.follower.__enter__]  # once
        _before(Engine, "prepare", self._enter)  # in the thread that trains
        self.stores: dict[int, ShardStore] = {}
        self.kinds: dict[str, int] = {}
        self._count_collectives()
        self._look_at_state()
        # A frame that another thread inspects keeps its variables for as long, beyond its function's end.
        setattr(busy_sampler, "is_waiting", lambda _: False)  # noqa: B010 - its own module alone calls it

    def _enter(self, *_: Any) -> None:
        while self._enters:
            self._enters.pop()()  # type: ignore[no-untyped-call]

    def _count_collectives(self) -> None:
        def all_gather(_: AllGather, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **__: Any) -> None:
            self.sent["all_gather"] += output_tensor.nbytes - input_tensor.nbytes

        def all_to_all(
            _: torch.Tensor, given: torch.Tensor, __: list[int] | None, splits: list[int] | None, **___: Any
        ) -> None:
            shards = self.mesh.data.shards
            splits = splits or [given.numel() // shards] * shards
            own = self.mesh.shard_of(self.rank) // self.mesh.tensor
            others = sum(size for shard, size in enumerate(splits) if shard != own)
            self.sent["reduction"] += others * given.itemsize

        def reduce_scatter(_: Any, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **__: Any) -> None:
            self.sent["reduction"] += input_tensor.nbytes - output_tensor.nbytes

        def send(_: Any, tensors: list[torch.Tensor], *__: Any) -> None:
            self.sent["mirror"] += tensors[0].nbytes

        def place(_: StepGradient, *given: Any, **__: Any) -> None:
            groups = next(each for each in given if isinstance(each, Groups))
            self.rank, self.mesh = groups.rank, groups.mesh

        def agree(_: HostGroup, values: torch.Tensor) -> None:
            if values.numel() > 1:  # not a barrier
                self.sent["agreement"] += 2 * values.nbytes * (self.mesh.world_size - 1) // self.mesh.world_size

        def meet(holders: Replicas, _: torch.Tensor, given: torch.Tensor, __: list[int], splits: list[int]) -> None:
            assert len(set(splits)) == 1  # as much for itself as for each other one
            self.sent["replicas"] += sum(splits) * given.itemsize * (holders.size - 1) // holders.size

        def share(holders: Replicas, _: torch.Tensor, own: torch.Tensor) -> None:
            self.sent["replicas"] += own.nbytes * (holders.size - 1)

        def add_up(holders: Replicas, values: torch.Tensor) -> None:
            self.sent["replicas"] += 2 * values.nbytes * (holders.size - 1) // holders.size

        _on_copies(tree_reducer, "all_to_all")
        _before(tree_reducer, "all_to_all", all_to_all)
        _units_on_copies(AllGather)
        _before(AllGather, "__call__", all_gather)
        for name, of_holders in (("all_to_all", meet), ("all_gather", share)):
            _on_copies(Replicas, name, is_method=True)
            _before(Replicas, name, of_holders)
        _before(Replicas, "all_reduce", add_up)
        _before(ReduceScatter, "__call__", reduce_scatter)
        _before(dist.ProcessGroupGloo, "send", send)
        _before(StepGradient, "__init__", place)
        _before(HostGroup, "sum_int64", agree)

    def _look_at_state(self) -> None:
        def begin(store: ShardStore, *_: Any, **__: Any) -> None:
            self.stores[id(store)] = store

        def apply(optimizer: ShardOptimizer, *_: Any) -> None:
            params = [p.detach() for p in optimizer._params.values()]
            self.kinds["parameters"] = _size(params)
            self.kinds["gradients"] = _size(optimizer.gradients())
            self.kinds["optimizer"] = _size(optimizer.state().values())

        waiting: dict[int, int] = {}

        def reduced(reducer: TreeReducer) -> None:
            sums: list[torch.Tensor] = []
            reducer._sum.map_waiting(lambda value: sums.append(value) or value)  # type: ignore[func-returns-value]
            waiting[id(reducer)] = _size(sums)
            self.kinds["accumulators"] = max(self.kinds.get("accumulators", 0), sum(waiting.values()))

        _before(ShardStore, "begin", begin)
        _before(ShardOptimizer, "apply", apply)
        for name in ("__call__", "all_reduce_hook"):
            _after(TreeReducer, name, reduced)

    def report(self, folder: str, step: int) -> None:
        """Write the observations since the step before."""
        buffers = [b for store in self.stores.values() for b in store._buffers]
        kinds = self.kinds | {
            f"{medium}s": sum(b.data.nbytes for b in buffers if b.medium == medium) for medium in ("snapshot", "mirror")
        }
        entry = {"peak": self.follower.peak, "sent": dict(self.sent), "kinds": kinds}
        path = Path(folder) / f"{os.getpid()}.json"
        found = json.loads(path.read_text()) if path.exists() else {"steps": {}}
        found["rank"] = self.rank
        found["steps"][str(step)] = entry
        path.write_text(json.dumps(found))
        if step == _STEADY.start - 1:
            gc.collect()  # the first steps leave garbage in cycles, which Python collects when it likes
        self.follower.restart()
        self.sent.clear()
        self.kinds.clear()


class _Follower(MemoryFollower):
    """Follows memory, and counts what tensor parallel groups send: torch's functional collectives, which nothing else
    uses."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and func.namespace == "_c10d_functional":
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        watch, workers = self._watch, self._watch.mesh.tensor
        match func._schema.name:
            case "_c10d_functional::all_reduce":
                watch.sent["tensor"] += 2 * (workers - 1) * args[0].nbytes // workers
            case "_c10d_functional::all_gather_into_tensor":
                watch.sent["tensor"] += result.nbytes - args[0].nbytes
            case "_c10d_functional::reduce_scatter_tensor":
                watch.sent["tensor"] += args[0].nbytes - result.nbytes
            case "_c10d_functional::wait_tensor" | "_c10d_functional::_wrap_tensor_autograd":
                pass
            case name:
                raise AssertionError(f"{name} is not counted")


_watch: Watch | None = None


class Watched(rs.Task):
    """Another task, with its worker watched."""

    def __init__(self, task: rs.Task, folder: str) -> None:
        self.task, self.folder = task, folder
        self.max_grad_norm = task.max_grad_norm

    def build_model(self) -> nn.Module:
        global _watch
        if _watch is None:  # a worker's process builds the model before it trains
            _watch = Watch()
        return self.task.build_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.task.build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> rs.Loss | torch.Tensor:
        return self.task.loss(model, batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        return self.task.wrap(model)

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return self.task.strategy(name, module)

    def lr_scale(self, step: int) -> float:
        assert _watch is not None
        if step not in _watch.reported:
            _watch.reported.add(step)
            _watch.report(self.folder, step)
        return self.task.lr_scale(step)


class WatchedParallel(Watched):
    """Another task with tensor parallelism, with its worker watched."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle] | None:
        return self.task.parallelize(model, mesh)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The memory and the messages of a steady step of one worker."""

    peak: int
    """Bytes of tensors, at most, in every steady step."""
    kinds: dict[str, int]
    """Kind -> bytes, at most."""
    sent: dict[str, int]
    """Kind -> bytes in one step."""


def observe(mesh: Mesh, task: rs.Task, *, engine: rs.EngineConfig, microbatches: int) -> dict[int, Seen]:
    """Rank -> the observations of its worker in this mesh."""
    shards = mesh.shards
    kind = WatchedParallel if has_tensor_parallelism(task) else Watched
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(
            mesh.world_size,
            task=kind(task, folder),
            engine=engine,
            microbatches=microbatches,
            steps=_STEPS,
            shards=shards,
            tensor=mesh.tensor,
        )
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert [entry["mesh"] for entry in outcome.of("generation")] == [str(mesh)]
    assert sorted(each["rank"] for each in found) == list(range(mesh.world_size))
    seen = {}
    for each in found:
        steady = [each["steps"][str(step)] for step in _STEADY]
        assert all(step["sent"] == steady[0]["sent"] for step in steady)
        peak = min(step["peak"] for step in steady)  # gloo may keep its last messages
        seen[each["rank"]] = Seen(peak=peak, kinds=steady[0]["kinds"], sent=steady[0]["sent"])
    return seen


def _size(tensors: Any) -> int:
    """Bytes of the tensors' memory, shared memory once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _on_copies(owner: Any, name: str, *, is_method: bool = False) -> None:
    """Give a collective copies that are not followed: gloo's own threads keep their last arguments, for a time that
    depends on which of them gets the next ones."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        bound, (output, given, *more) = args[:is_method], args[is_method:]
        with _disable_current_modes():
            received = torch.empty_like(output)
            result = original(*bound, received, given.clone(), *more, **options)
            output.copy_(received)
            return result

    setattr(owner, name, call)


def _units_on_copies(owner: Any) -> None:
    """Give copies also to the collectives that FSDP2 calls with names."""
    original = owner.__call__

    def call(self: Any, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> None:
        with _disable_current_modes():
            received = torch.empty_like(output_tensor)
            original(self, output_tensor=received, input_tensor=input_tensor.clone(), **options)
            output_tensor.copy_(received)

    owner.__call__ = call


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        note(self)
        return result

    setattr(owner, name, call)
