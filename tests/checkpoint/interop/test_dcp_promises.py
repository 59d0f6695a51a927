"""Promises in the documentation of `torch.distributed.checkpoint`, with torch's own storage and ours by the same body.

Here: one process. Planners are in test_dcp_promises_planners.py, several ranks in test_dcp_promises_ranks.py, and
deliberate differences in test_dcp_promises_differences.py.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from tests.checkpoint.interop.dcp_promises_storages import KINDS, Kind, blank, said, weights
from tests.checkpoint.interop.ranks import assert_same, dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name),
]


def test_save_returns_the_metadata_of_what_it_saved(tmp_path: Path, kind: Kind) -> None:
    writer = kind.writer(tmp_path / "c")
    found = dcp.save({"model": weights("a"), "epoch": 3}, storage_writer=writer)
    assert isinstance(found, Metadata)
    assert set(found.state_dict_metadata) == {f"model.{name}" for name in weights("a")} | {"epoch"}
    assert found.planner_data["model.a.weight"] == ("model", "a.weight")
    meta = found.storage_meta
    assert meta is not None
    assert str(meta.checkpoint_id) == str(writer.checkpoint_id) == str(tmp_path / "c")

    read = kind.reader(tmp_path / "c").read_metadata()
    assert read.storage_meta.save_id == meta.save_id
    assert read.planner_data == found.planner_data
    for key, entry in found.state_dict_metadata.items():
        assert type(read.state_dict_metadata[key]) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert read.state_dict_metadata[key].size == entry.size
            assert read.state_dict_metadata[key].properties.dtype == entry.properties.dtype


def test_load_returns_nothing_and_fills_tensors_in_place(tmp_path: Path, kind: Kind) -> None:
    state = weights("a")
    kind.save(state, tmp_path)
    into = blank(state)
    tensors = dict(into)
    assert dcp.load(into, storage_reader=kind.reader(tmp_path)) is None
    assert all(into[name] is tensors[name] for name in tensors)
    assert_same(into, state)


def test_a_view_of_another_tensor_is_filled_and_nothing_around_it(tmp_path: Path, kind: Kind) -> None:
    kind.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path)
    around = torch.full((4, 6), -1.0)
    kind.load({"a": around[1:3, ::2]}, tmp_path)
    assert around[1:3, ::2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (around == -1).sum() == 18


def test_a_parameter_that_needs_gradients_is_saved_and_filled(tmp_path: Path, kind: Kind) -> None:
    kind.save({"a": torch.nn.Parameter(torch.ones(3))}, tmp_path)
    into = {"a": torch.nn.Parameter(torch.zeros(3))}
    kind.load(into, tmp_path)
    assert into["a"].tolist() == [1, 1, 1]
    assert into["a"].requires_grad


def test_another_dtype_in_the_state_is_converted_to(tmp_path: Path, kind: Kind) -> None:
    kind.save({"a": torch.arange(6.0)}, tmp_path)
    assert kind.load({"a": torch.zeros(6, dtype=torch.int16)}, tmp_path)["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_values_that_are_no_tensors_are_replaced_in_the_state(tmp_path: Path, kind: Kind) -> None:
    values: dict[str, Any] = {
        "number": 3,
        "large": 2**70,
        "real": 0.1,
        "inf": float("-inf"),
        "flag": True,
        "nothing": None,
        "text": "größe\n\u0000",
        "bytes": b"\x00\xff",
        "pair": (1, "a", (2.5, None)),
        "names": ["a", "b", "a"],
        "nested": {"list": [1, {"deep": [3, 4]}], "by number": {1: "one"}},
    }
    kind.save({"values": values, "top": "x"}, tmp_path)
    into = kind.load({"values": blank(values), "top": None}, tmp_path)
    expected = {**values, "nested": {**values["nested"], "by number": {1: None, "1": "one"}}}  # torch's keys are text
    assert str(into["values"]) == str(expected)
    assert into["top"] == "x"


def test_checkpoint_id_names_the_folder_and_goes_before_the_writers_own(tmp_path: Path, kind: Kind) -> None:
    state = weights("a")
    writer, reader = kind.writer(tmp_path / "unused"), kind.reader(tmp_path / "unused")
    for name in ("first", "second"):  # a Path and text, one object for both
        state["a.count"] += 1
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer)
        assert str(writer.checkpoint_id) == str(tmp_path / name)
        into = blank(state)
        dcp.load(into, checkpoint_id=str(tmp_path / name), storage_reader=reader)
        assert str(reader.checkpoint_id) == str(tmp_path / name)
        assert_same(into, state)
    assert not kind.is_checkpoint(tmp_path / "unused")


def test_one_writer_saves_again_and_again_over_what_is_there(tmp_path: Path, kind: Kind) -> None:
    writer, reader = kind.writer(tmp_path, overwrite=True), kind.reader(tmp_path)
    for seed in range(3):
        state = {"model": weights("a", *("b" if seed == 1 else ""), seed=seed), "seed": seed}
        dcp.save(state, storage_writer=writer)
        into = blank(state)
        dcp.load(into, storage_reader=reader)
        assert_same(into, state)
    assert "Missing key" in said(dcp.load, weights("b"), storage_reader=reader)


def test_a_complete_checkpoint_is_kept_if_overwriting_is_off(tmp_path: Path, kind: Kind) -> None:
    state = weights("a")
    kind.save(state, tmp_path)
    assert "CheckpointException" in said(kind.save, weights("a", seed=1), tmp_path)
    assert_same(kind.load(blank(state), tmp_path), state)


def test_a_key_that_the_checkpoint_lacks_is_an_error_by_name(tmp_path: Path, kind: Kind) -> None:
    kind.save(weights("a"), tmp_path)
    text = said(kind.load, weights("a", "b"), tmp_path)
    assert "CheckpointException" in text
    assert "Missing key in checkpoint state_dict: b.count" in text


def test_allow_partial_load_leaves_what_the_checkpoint_lacks(tmp_path: Path, kind: Kind) -> None:
    kind.save(weights("a"), tmp_path)
    into = blank(weights("a")) | weights("b", seed=1) | {"epoch": 7}
    kind.load(into, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(into, weights("a") | weights("b", seed=1) | {"epoch": 7})


def test_a_part_of_the_state_is_loaded_alone(tmp_path: Path, kind: Kind) -> None:
    kind.save({"model": weights("a", "b"), "epoch": 3}, tmp_path)
    into = {"model": {"b.weight": torch.zeros(6, 5)}}
    kind.load(into, tmp_path)
    assert_same(into, {"model": {"b.weight": weights("a", "b")["b.weight"]}})


def test_another_size_is_an_error_by_name_and_changes_nothing(tmp_path: Path, kind: Kind) -> None:
    kind.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path)
    into = {"a": torch.zeros(4), "b": torch.zeros(2)}
    assert "Size mismatch" in said(kind.load, into, tmp_path)
    assert_same(into, {"a": torch.zeros(4), "b": torch.zeros(2)})


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path, kind: Kind) -> None:
    assert "CheckpointException" in said(kind.load, weights("a"), tmp_path / "nothing")


def test_a_state_is_read_without_a_template_whole_or_by_key(tmp_path: Path, kind: Kind) -> None:
    state = {"model": weights("a"), "list": [torch.ones(2), {"x": 1}], "epoch": 3}
    kind.save(state, tmp_path)
    assert_same(_load_state_dict_from_keys(storage_reader=kind.reader(tmp_path)), state)
    some = _load_state_dict_from_keys({"model", "epoch"}, storage_reader=kind.reader(tmp_path))
    assert_same(some, {"model": weights("a"), "epoch": 3})


class _Counter:
    """Stateful, as PyTorch's protocol has it."""

    def __init__(self, value: int) -> None:
        self.value, self.calls = value, list[str]()

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"value": self.value, "twice": torch.tensor([2 * self.value])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        assert state_dict["twice"].tolist() == [2 * state_dict["value"]]
        self.value = state_dict["value"]


def test_the_state_of_stateful_objects_is_requested_and_given_back(tmp_path: Path, kind: Kind) -> None:
    saved, loaded = _Counter(5), _Counter(0)
    model = torch.nn.Linear(3, 2)
    kind.save({"counter": saved, "model": model, "epoch": 1}, tmp_path)
    other = torch.nn.Linear(3, 2)
    into = kind.load({"counter": loaded, "model": other, "epoch": 0}, tmp_path)
    assert into["counter"] is loaded
    assert into["model"] is other
    assert loaded.value == 5
    assert (saved.calls, loaded.calls) == (["state_dict"], ["state_dict", "load_state_dict"])
    assert_same(OrderedDict(other.state_dict()), OrderedDict(model.state_dict()))
    assert into["epoch"] == 1


@pytest.mark.parametrize("how", ["default", "stager", "staging in a thread"])
def test_async_save_stores_the_state_as_it_was_when_it_returned(tmp_path: Path, kind: Kind, how: str) -> None:
    state = {"model": weights("a"), "epoch": 3}
    expected = {"model": weights("a"), "epoch": 3}
    stager = None if how == "default" else DefaultStager(StagingOptions(False, False, how != "stager", False))
    answer = dcp.async_save(state, storage_writer=kind.writer(tmp_path), async_stager=stager)
    assert isinstance(answer, AsyncSaveResponse if how == "staging in a thread" else Future)
    if isinstance(answer, AsyncSaveResponse):
        answer.staging_completion.result(60)
        answer = answer.upload_completion
    for tensor in state["model"].values():  # type: ignore[attr-defined]
        tensor.zero_()
    assert isinstance(answer.result(60), Metadata)
    if stager is not None:
        stager.close()
    assert_same(kind.load(blank(expected), tmp_path), expected)


def test_what_fails_in_async_save_is_raised_by_its_future(tmp_path: Path, kind: Kind) -> None:
    kind.save(weights("a"), tmp_path)
    future = dcp.async_save(weights("b"), storage_writer=kind.writer(tmp_path))
    assert "CheckpointException" in said(future.result, 60)
    assert_same(kind.load(blank(weights("a")), tmp_path), weights("a"))
