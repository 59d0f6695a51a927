"""Promises of `torch.distributed.checkpoint` that take several ranks: each a function that runs on all of them."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.reader import open_checkpoint
from tests.checkpoint.interop.dcp_promises_storages import Kind, blank, said, weights
from tests.checkpoint.interop.ranks import assert_same, dcp

Promise = Callable[[Kind, Path], None]
NOT_TRIED = "not tried: another failed before it"


def play(name: str, promises: tuple[Promise, ...], folder: Path) -> dict[str, str]:
    """For each promise the error that this rank found, "" for none. Each has a separate folder.

    A rank that finds an error stops: it may have missed messages of the others, who run into their time-out.
    """
    found = dict.fromkeys((promise.__name__ for promise in promises), NOT_TRIED)
    for promise in promises:
        try:
            promise(Kind(name), folder / promise.__name__)
            dist.barrier()
        except BaseException:  # noqa: BLE001  # torch's CheckpointException is no Exception
            found[promise.__name__] = traceback.format_exc()
            break
        found[promise.__name__] = ""
    return found


# Layouts


def numbers(*shape: int) -> torch.Tensor:
    """A tensor of numbers that all differ."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 0.5


def layouts() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to spread a tensor over the existing ranks."""
    size = dist.get_world_size()
    line, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    placed: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "replicated": (line, [Replicate()]),
        "rows and columns": (square, [Shard(0), Shard(1)]),
        "columns and rows": (square, [Shard(1), Shard(0)]),
        "replicas of rows": (square, [Replicate(), Shard(0)]),
        "rows twice": (square, [Shard(0), Shard(0)]),
    }

    def spread(mesh: DeviceMesh, placements: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    return {name: spread(*how) for name, how in placed.items()} | {"plain": lambda tensor: tensor}


_SHAPES = ((13, 7), (2, 3))
"""Shapes that no number of ranks divides, and smaller than the number of ranks."""


def expected(seed: float) -> dict[str, Any]:
    return {f"{name}.{at}": numbers(*shape) * seed for name in layouts() for at, shape in enumerate(_SHAPES)}


def in_layouts(seed: float, shift: int = 0) -> dict[str, Any]:
    """Each tensor in the layout of its name, or in the one `shift` further."""
    ways = list(layouts().values())
    return {
        key: ways[(at // len(_SHAPES) + shift) % len(ways)](tensor)
        for at, (key, tensor) in enumerate(expected(seed).items())
    }


def few(seed: float, shift: int = 0) -> dict[str, Any]:
    """Some tensors of `in_layouts`."""
    return {key: tensor for at, (key, tensor) in enumerate(in_layouts(seed, shift).items()) if at % 5 == 0}


def expected_few(seed: float) -> dict[str, Any]:
    return {key: tensor for at, (key, tensor) in enumerate(expected(seed).items()) if at % 5 == 0}


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def layouts_are_loaded_into_others(kind: Kind, folder: Path) -> None:
    _shifted(kind, folder, (3, 6))


def every_layout_is_loaded_into_every_other(kind: Kind, folder: Path) -> None:
    _shifted(kind, folder, range(len(layouts())))


def _shifted(kind: Kind, folder: Path, shifts: Iterable[int]) -> None:
    kind.save(in_layouts(1), folder)
    for shift in shifts:
        assert_same(gathered(kind.load(in_layouts(0, shift), folder)), expected(1))


def what_other_numbers_of_ranks_saved_is_loaded(kind: Kind, folder: Path) -> None:
    """Loads `folder.parent/last` in other layouts, and leaves this number of ranks' result there."""
    last = folder.parent / "last"
    found = kind.load(in_layouts(0, 3), last)
    assert_same(gathered(found), expected(1))
    kind.save(found, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        last.rename(folder.parent / f"before-{dist.get_world_size()}")
        folder.rename(last)


def a_state_in_layouts_is_left_for_other_numbers_of_ranks(kind: Kind, folder: Path) -> None:
    kind.save(in_layouts(1), folder.parent / "last")


def a_mesh_of_some_of_the_ranks(kind: Kind, folder: Path) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    part = {"a": distribute_tensor(numbers(7, 3), mesh, [Shard(0)])}
    kind.save(part, folder)
    into = {"a": distribute_tensor(torch.zeros(7, 3), init_device_mesh("cpu", (4,)), [Shard(1)])}
    assert_same(gathered(kind.load(into, folder)), {"a": numbers(7, 3)})
    back = {"a": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)])}
    kind.load(back, folder)
    if dist.get_rank() < 3:
        assert_same(back["a"].to_local(), numbers(7, 3)[:, dist.get_rank()].reshape(7, 1).contiguous())


def tensors_on_the_meta_device_are_made_and_filled(kind: Kind, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    kind.save({"a": distribute_tensor(numbers(7, 3), mesh, [Shard(0)]), "b": numbers(3)}, folder)
    with torch.device("meta"):
        into = {"a": distribute_tensor(torch.empty(7, 3), mesh, [Shard(0)]), "b": torch.empty(3)}
    assert into["b"].is_meta
    assert_same(gathered(kind.load(into, folder)), {"a": numbers(7, 3), "b": numbers(3)})


# Arguments


def only_the_ranks_of_process_group_take_part(kind: Kind, folder: Path) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        state = {"a": distribute_tensor(numbers(5, 2), DeviceMesh.from_group(group, "cpu"), [Shard(0)]), "who": 13}
        dcp.save(state, storage_writer=kind.writer(folder), process_group=group)
        into = {"a": distribute_tensor(torch.zeros(5, 2), DeviceMesh.from_group(group, "cpu"), [Shard(1)]), "who": 0}
        dcp.load(into, storage_reader=kind.reader(folder), process_group=group)
        assert_same(gathered(into), {"a": numbers(5, 2), "who": 13})
    dist.barrier()
    assert_same(kind.load({"a": torch.zeros(5, 2), "who": 0}, folder), {"a": numbers(5, 2), "who": 13})


def no_dist_is_a_checkpoint_of_each_rank_by_itself(kind: Kind, folder: Path) -> None:
    rank = dist.get_rank()
    own = folder / f"of-{rank}"
    if rank != 2:  # nobody waits for it
        kind.save({"a": numbers(2, rank + 1), "rank": rank}, own, no_dist=True)
        into = kind.load({"a": torch.zeros(2, rank + 1), "rank": -1}, own, no_dist=True)
        assert_same(into, {"a": numbers(2, rank + 1), "rank": rank})


def keys_of_one_rank_alone_are_kept(kind: Kind, folder: Path) -> None:
    rank = dist.get_rank()
    own = {f"loader.{rank}": {"at": rank, "seen": torch.full((2,), float(rank))}, "epoch": 3}
    kind.save(own, folder)
    assert_same(kind.load(blank(own), folder), own)
    other = (rank + 1) % 4
    into: dict[str, Any] = {f"loader.{other}": {"at": None, "seen": torch.zeros(2)}}
    assert_same(kind.load(into, folder), {f"loader.{other}": {"at": other, "seen": torch.full((2,), float(other))}})


def async_save_is_of_the_moment_it_was_called(kind: Kind, folder: Path) -> None:
    state = few(1)
    future = dcp.async_save({"model": state, "epoch": 1}, storage_writer=kind.writer(folder))
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    assert isinstance(future.result(60), Metadata)
    found = kind.load({"model": few(0, 1), "epoch": 0}, folder)
    assert_same(gathered(found["model"]), expected_few(1))
    assert found["epoch"] == 1


# Planners


class Counting(DefaultSavePlanner):
    """Records the items that this rank is requested to write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.resolved: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.resolved.append(write_item.index.fqn)
        return super().resolve_data(write_item)


def _resolved(kind: Kind, folder: Path, planner: Counting) -> list[list[str]]:
    """By rank, the requested items of four equal plain tensors and a value. They are loaded again, too."""
    state = {**{f"t{at}": numbers(5, 2) + at for at in range(4)}, "epoch": 3}
    kind.save(state, folder, planner=planner)
    assert_same(kind.load(blank(state), folder), state)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(set(planner.resolved)))
    return found


def replicas_are_written_once_spread_over_the_ranks(kind: Kind, folder: Path) -> None:
    found = _resolved(kind, folder, Counting())
    assert sorted(chain(*found)) == ["epoch", "t0", "t1", "t2", "t3"]
    assert all(len(names) <= 2 for names in found)


def dedup_save_to_lowest_rank_has_them_all_on_one(kind: Kind, folder: Path) -> None:
    found = _resolved(kind, folder, Counting(dedup_save_to_lowest_rank=True))
    assert found == [["epoch", "t0", "t1", "t2", "t3"], [], [], []]


class Balancing(Counting):
    """From the documentation: the items of rank 0 are dealt out."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items = [iter(all_plans[0].items)] * len(all_plans)
        by_rank = [[item for item in row if item is not None] for row in zip(*zip_longest(*items), strict=True)]
        plans = [replace(plan, items=row) for plan, row in zip(all_plans, by_rank, strict=True)]
        return super().create_global_plan(plans)


def a_planner_that_deals_out_the_work_of_one_rank(kind: Kind, folder: Path) -> None:
    found = _resolved(kind, folder, Balancing())
    assert sorted(map(len, found)) == [1, 1, 1, 2]
    assert sorted(chain(*found)) == ["epoch", "t0", "t1", "t2", "t3"]


class Caching(DefaultSavePlanner):
    """A separate class: torch caches plans by the name of the class."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def files_of(kind: Kind, folder: Path) -> set[str]:
    """Our data files that the checkpoint refers to, checked against their digests."""
    if not kind.is_ours:
        return set()
    checkpoint = open_checkpoint(*place_of(folder))
    checkpoint.verify()
    return {file.path for file in checkpoint.manifest.files}


def plan_caching_stores_the_values_of_each_save(kind: Kind, folder: Path) -> None:
    """One plan, then one with another tensor, then the first again; by one writer, also over existing checkpoints."""
    writer = kind.writer(folder / "unused", overwrite=True)
    names: list[set[str]] = []
    for seed, extra, at in ((1, 0, "a"), (2, 0, "b"), (3, 0, "b"), (4, 1, "a"), (5, 0, "b")):
        more = {"model": few(seed), "seed": seed, **({"more": numbers(3) * seed} if extra else {})}
        dcp.save(more, checkpoint_id=folder / at, storage_writer=writer, planner=Caching())
        assert Caching._cached_final_save_plan.keys() == {"Caching"}
        into: dict[str, Any] = {"model": few(0, seed), "seed": 0, **({"more": torch.zeros(3)} if extra else {})}
        kind.load(into, folder / at)
        assert_same(gathered(into["model"]), expected_few(seed))
        assert into["seed"] == seed
        if extra:
            assert_same(into["more"], numbers(3) * seed)
        names.append(files_of(kind, folder / at))
        dist.barrier()
    assert all(one.isdisjoint(other) for at, one in enumerate(names) for other in names[:at])


# Failures


class Failing(DefaultSavePlanner):
    """Fails on rank 2."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def create_local_plan(self) -> SavePlan:
        if dist.get_rank() == 2 and self._what == "plan":
            raise OSError("rank 2 has no plan")
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 2 and self._what == "write":
            raise OSError("rank 2 has no data")
        return super().resolve_data(write_item)


class FailingLoad(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise OSError("rank 2 has no memory")
        return super().resolve_tensor(read_item)


def _failures(act: Any, *args: Any, **options: Any) -> dict[int, str]:
    try:
        act(*args, **options)
    except dcp.CheckpointException as error:
        return {rank: f"{type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()}
    return {}


def a_rank_that_fails_is_named_on_every_rank(kind: Kind, folder: Path) -> None:
    for what, text in (("plan", "rank 2 has no plan"), ("write", "rank 2 has no data")):
        assert _failures(kind.save, few(1), folder, planner=Failing(what)) == {2: f"OSError: {text}"}
        assert not kind.is_checkpoint(folder)
        assert "CheckpointException" in said(kind.load, few(0), folder)
    kind.save(few(1), folder)  # the folder is as good as new
    assert _failures(kind.load, few(0), folder, planner=FailingLoad()) == {2: "OSError: rank 2 has no memory"}
    assert_same(gathered(kind.load(few(0), folder)), expected_few(1))


def a_key_that_one_rank_misses_is_named_on_every_rank(kind: Kind, folder: Path) -> None:
    kind.save(weights("a"), folder)
    wanted = weights("a", *(["b"] if dist.get_rank() == 3 else []))
    found = _failures(kind.load, blank(wanted), folder)
    assert found == {3: "RuntimeError: Missing key in checkpoint state_dict: b.count."}


ON_FOUR: tuple[Promise, ...] = (
    layouts_are_loaded_into_others,
    a_state_in_layouts_is_left_for_other_numbers_of_ranks,
    only_the_ranks_of_process_group_take_part,
    async_save_is_of_the_moment_it_was_called,
    replicas_are_written_once_spread_over_the_ranks,
    a_rank_that_fails_is_named_on_every_rank,
    a_key_that_one_rank_misses_is_named_on_every_rank,
)
LONG_ON_FOUR: tuple[Promise, ...] = (
    every_layout_is_loaded_into_every_other,
    a_mesh_of_some_of_the_ranks,
    tensors_on_the_meta_device_are_made_and_filled,
    no_dist_is_a_checkpoint_of_each_rank_by_itself,
    keys_of_one_rank_alone_are_kept,
    dedup_save_to_lowest_rank_has_them_all_on_one,
    a_planner_that_deals_out_the_work_of_one_rank,
    plan_caching_stores_the_values_of_each_save,
)
BETWEEN: tuple[Promise, ...] = (what_other_numbers_of_ranks_saved_is_loaded,)
