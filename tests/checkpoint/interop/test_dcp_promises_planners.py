"""Planners of `torch.distributed.checkpoint`, with torch's own storage and with ours by the same body."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.checkpoint.interop.dcp_promises_storages import KINDS, Kind, blank, said, weights
from tests.checkpoint.interop.ranks import assert_same, dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name),
]


class _Renaming(DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class _RenamingBack(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, metadata, is_coordinator)
        self.original_state_dict = state_dict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


def test_planners_that_rename_keys_at_save_and_at_load(tmp_path: Path, kind: Kind) -> None:
    state = {**weights("a"), "epoch": 3}
    kind.save(state, tmp_path, planner=_Renaming())
    assert "Missing key" in said(kind.load, blank(state), tmp_path)
    assert_same(kind.load({"foo_epoch": 0}, tmp_path), {"foo_epoch": 3})
    assert_same(kind.load(blank(state), tmp_path, planner=_RenamingBack()), state)


class _Halving(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data if isinstance(data, io.BytesIO) else data.to(torch.float16)


def test_a_planner_that_saves_another_dtype(tmp_path: Path, kind: Kind) -> None:
    state: dict[str, Any] = {"a": torch.randn(5, 3), "epoch": 3}
    kind.save(state, tmp_path, planner=_Halving())
    assert kind.reader(tmp_path).read_metadata().state_dict_metadata["a"].properties.dtype == torch.float16
    assert_same(_load_state_dict_from_keys(storage_reader=kind.reader(tmp_path))["a"], state["a"].half())
    assert_same(kind.load(blank(state), tmp_path), {"a": state["a"].half().float(), "epoch": 3})


class _ExtraData(DefaultSavePlanner):
    """From the documentation; merged as described there, or next to the paths of the keys."""

    def __init__(self, extra: Any, *, beside: bool) -> None:
        super().__init__(flatten_state_dict=beside)
        self._extra, self._beside = extra, beside

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self._beside:
            return replace(plan, planner_data=plan.planner_data | {"extra": self._extra, "a.count": "mine"})
        return replace(plan, planner_data=self._extra)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return (plans, metadata if self._beside else replace(metadata, planner_data=[p.planner_data for p in plans]))


@pytest.mark.parametrize("beside", [False, True])
def test_a_planner_that_adds_custom_data_to_the_checkpoint(tmp_path: Path, kind: Kind, beside: bool) -> None:
    kind.save(weights("a"), tmp_path, planner=_ExtraData({"seen": [1, 2]}, beside=beside))
    found = kind.reader(tmp_path).read_metadata().planner_data
    assert (found["extra"] if beside else found[0]) == {"seen": [1, 2]}
    if beside:
        assert (found["a.count"], found["a.weight"]) == ("mine", ("a.weight",))
    assert_same(kind.load(blank(weights("a")), tmp_path), weights("a"))


class _Materializing(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor


def test_a_planner_that_makes_tensors_of_the_meta_device(tmp_path: Path, kind: Kind) -> None:
    state = {name: tensor.contiguous() for name, tensor in weights("a").items()}
    kind.save(state, tmp_path)
    into = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    assert_same(kind.load(into, tmp_path, planner=_Materializing()), state)


class _Following(DefaultSavePlanner):
    """Records the order of calls and `storage_meta`, as documented."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []
        self.metas: list[StorageMeta] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        assert storage_meta is not None
        assert is_coordinator
        self.calls, self.metas = ["set_up_planner"], [*self.metas, storage_meta]
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.calls.append("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.calls.append(f"resolve {write_item.index.fqn}")
        return super().resolve_data(write_item)


def test_a_save_planner_is_called_in_the_documented_order_for_each_item(tmp_path: Path, kind: Kind) -> None:
    planner, state = _Following(), {**weights("a"), "epoch": 3}
    kind.save(state, tmp_path, planner=planner)
    assert planner.calls[:4] == ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
    assert set(planner.calls[4:]) == {f"resolve {name}" for name in state}


def test_a_planner_receives_the_folder_and_the_id_that_the_save_gets(tmp_path: Path, kind: Kind) -> None:
    planner, writer = _Following(), kind.writer(tmp_path / "unused", overwrite=True)
    for name in ("a", "b", "b", "step-0000000006-abc"):  # the last one named as a run names its own
        found = dcp.save(weights("a"), checkpoint_id=tmp_path / name, storage_writer=writer, planner=planner)
        told = planner.metas[-1]
        assert str(told.checkpoint_id) == str(tmp_path / name)
        assert told.save_id == found.storage_meta.save_id
        assert kind.reader(tmp_path / name).read_metadata().storage_meta.save_id == told.save_id
    assert len({meta.save_id for meta in planner.metas}) == 4


class _FollowingLoad(DefaultLoadPlanner):
    calls: list[str]

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        assert is_coordinator
        self.calls = ["set_up_planner"]
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.calls.append("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        self.calls.append(f"bytes {read_item.dest_index.fqn}")
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        self.calls.append(f"resolve {read_item.dest_index.fqn}")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        assert tensor.tolist() == weights("a")[name].tolist(), "it comes when the tensor has its values"
        self.calls.append(f"commit {name}")
        super().commit_tensor(read_item, tensor)


def test_a_load_planner_resolves_and_commits_each_tensor_once(tmp_path: Path, kind: Kind) -> None:
    kind.save({**weights("a"), "epoch": 3}, tmp_path)
    planner = _FollowingLoad()
    kind.load({**blank(weights("a")), "epoch": 0}, tmp_path, planner=planner)
    assert planner.calls[:4] == ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
    calls = planner.calls[4:]
    assert sorted(calls) == sorted(
        ["bytes epoch", *(f"{what} {n}" for n in weights("a") for what in ("resolve", "commit"))]
    )
    assert all(calls.index(f"resolve {name}") < calls.index(f"commit {name}") for name in weights("a"))


def test_a_flat_state_is_saved_and_loaded_without_flattening(tmp_path: Path, kind: Kind) -> None:
    state = {**weights("a"), "group": {"lr": 0.1, "betas": [0.9, 0.99]}}
    kind.save(state, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    metadata = kind.reader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == set(state)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    into = kind.load({**blank(weights("a")), "group": None}, tmp_path, planner=planner)
    assert_same(into, state)
