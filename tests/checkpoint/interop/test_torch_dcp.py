"""torch.distributed.checkpoint's own save and load over our format."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop import RayshardedReader, RayshardedWriter
from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import CheckpointError, ConfigError
from raysharded.testing.storages import save_rows
from tests.cases import tried_each_time
from tests.checkpoint.interop.ranks import assert_same, dcp, model, run_ranks, trained, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _state() -> dict[str, Any]:
    return {
        "model": {"a.b": torch.randn(40, 3), "half": torch.randn(7).bfloat16(), "turned": torch.randn(5, 6).t()},
        "list": [torch.zeros(2), {"x": 1}],
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "group": {"betas": (0.9, 0.999), "lr": 1e-3, "foreach": None, "names": ["a", "b"], "inf": float("inf")},
        "numbers": 7,
    }


def _blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_blank(value) for value in state]
    return None


def test_a_state_comes_back_to_the_bit_with_a_template_and_without(tmp_path: Path) -> None:
    state, uri = _state(), str(tmp_path / "run" / "step-12")
    dcp.save(state, storage_writer=RayshardedWriter(uri, metadata={"seed": 1}))

    into = _blank(state)
    dcp.load(into, storage_reader=RayshardedReader(uri))
    assert_same(into, state)
    assert_same(_load_state_dict_from_keys(storage_reader=RayshardedReader(uri)), state)

    manifest = open_checkpoint(*place_of(uri)).manifest
    assert (manifest.step, manifest.metadata) == (12, {"seed": 1})
    open_checkpoint(*place_of(uri)).verify()


def test_nothing_that_is_written_is_a_pickle(tmp_path: Path) -> None:
    dcp.save(_state(), storage_writer=RayshardedWriter(str(tmp_path / "c")))
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_the_folder_may_be_given_as_checkpoint_id(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=str(tmp_path / "c"), storage_writer=RayshardedWriter())
    into = {"a": torch.zeros(3)}
    dcp.load(into, checkpoint_id=str(tmp_path / "c"), storage_reader=RayshardedReader())
    assert into["a"].tolist() == [1, 1, 1]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    dcp.save({"a": torch.ones(3)}, storage_writer=RayshardedWriter(uri))
    with pytest.raises(BaseException, match="is a checkpoint already"):  # torch's CheckpointException
        dcp.save({"a": torch.zeros(3)}, storage_writer=RayshardedWriter(uri))
    into = {"a": torch.zeros(3)}
    dcp.load(into, storage_reader=RayshardedReader(uri))
    assert into["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("as_id", [False, True], ids=["uri", "checkpoint_id"])
def test_a_relative_folder_is_that_of_the_call_wherever_the_process_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_id: bool
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "first")

    class Moving(RayshardedWriter):
        def write_data(self, *args: Any) -> Any:
            monkeypatch.chdir(tmp_path / "later")
            return super().write_data(*args)

    class MovingReader(RayshardedReader):
        def read_metadata(self) -> Metadata:
            monkeypatch.chdir(tmp_path / "later")
            return super().read_metadata()

    given, name = ({}, "rel-3") if not as_id else ({"checkpoint_id": "rel-3"}, None)
    dcp.async_save({"a": torch.ones(3)}, storage_writer=Moving(name), no_dist=True, **given).result()
    assert not list((tmp_path / "later").iterdir())
    assert open_checkpoint(*place_of(tmp_path / "first" / "rel-3")).step == 3

    monkeypatch.chdir(tmp_path / "first")
    into = {"a": torch.zeros(3)}
    dcp.load(into, storage_reader=MovingReader(name), no_dist=True, **given)
    assert into["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("run-7", 7),
        ("4611686018427387904", 1 << 62),
        ("run-4611686018427387905", 0),
        ("run-20240101120000123456789", 0),
        ("run-" + "0" * 40 + "12", 12),
        ("7-b", 0),
    ],
)
def test_a_number_at_the_end_of_the_folders_name_is_the_step_unless_it_is_too_large(
    tmp_path: Path, name: str, step: int
) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=RayshardedWriter(tmp_path / name))
    assert open_checkpoint(*place_of(tmp_path / name)).step == step


def test_a_save_named_after_a_step_that_is_too_large_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    uri = tmp_path / "step-20240101120000123456789-abc"
    with pytest.raises(BaseException, match=r"named after step 20240101120000123456789, but steps are at most 2\^62"):
        dcp.save({"a": torch.ones(3)}, storage_writer=RayshardedWriter(uri))
    assert not uri.exists()


@pytest.mark.parametrize(
    "wrong", [{"metadata": {"a": (1,)}}, {"metadata": [1]}, {"step": -1}, {"step": True}, {"run": 3}, {"key": "k"}]
)
def test_what_cannot_be_stored_is_refused_when_the_writer_is_made(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=f"^{next(iter(wrong))}"):
        RayshardedWriter(tmp_path / "c", **wrong)


def test_the_metadata_is_that_of_the_call(tmp_path: Path) -> None:
    metadata = {"seeds": [1]}
    writer = RayshardedWriter(tmp_path / "c", metadata=metadata)
    metadata["seeds"].append(2)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert open_checkpoint(*place_of(tmp_path / "c")).manifest.metadata == {"seeds": [1]}


def test_of_two_saves_that_race_for_a_folder_one_learns_that_it_lost(tmp_path: Path) -> None:
    uri = str(tmp_path / "step-0000000006-abc")

    class Slow(RayshardedWriter):
        def write_data(self, *args: Any) -> Any:
            dcp.save({"a": torch.ones(3)}, storage_writer=RayshardedWriter(uri))
            return super().write_data(*args)

    with pytest.raises(BaseException, match="another writer committed"):
        dcp.save({"a": torch.zeros(3)}, storage_writer=Slow(uri))
    into = {"a": torch.zeros(3)}
    dcp.load(into, storage_reader=RayshardedReader(uri))
    assert into["a"].tolist() == [1, 1, 1]
    assert open_checkpoint(*place_of(uri)).step == 6


def test_a_folder_that_is_not_free_for_a_save_is_refused(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    with pytest.raises(BaseException, match="is named after step 6, but this is step 7"):
        dcp.save(state, storage_writer=RayshardedWriter(str(tmp_path / "step-0000000006-abc"), step=7))
    dcp.save(state, storage_writer=RayshardedWriter(str(tmp_path / "run" / "step-1")))
    with pytest.raises(BaseException, match="holds checkpoints, and is not one itself"):
        dcp.save(state, storage_writer=RayshardedWriter(str(tmp_path / "run")))
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_what_json_cannot_hold_is_refused_by_name_and_nothing_is_committed(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    with pytest.raises(BaseException, match=r"opt\.bad"):
        dcp.save({"a": torch.ones(3), "opt": {"bad": io.StringIO("x")}}, storage_writer=RayshardedWriter(uri))
    with pytest.raises(CheckpointError):
        open_checkpoint(*place_of(uri))


def test_a_signed_checkpoint_is_checked_with_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, other = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
    uri = str(tmp_path / "c")
    dcp.save({"a": torch.ones(3)}, storage_writer=RayshardedWriter(uri, key=key))
    into = {"a": torch.zeros(3)}
    dcp.load(into, storage_reader=RayshardedReader(uri, key=key))
    assert into["a"].tolist() == [1, 1, 1]
    with pytest.raises(BaseException, match="metadata"):  # torch's error; the reason is logged
        dcp.load(into, storage_reader=RayshardedReader(uri, key=other))
    assert "sign" in caplog.text


def test_a_flipped_byte_is_found_at_load(tmp_path: Path) -> None:
    uri = tmp_path / "c"
    dcp.save({"a": torch.ones(300)}, storage_writer=RayshardedWriter(str(uri)))
    (file,) = uri.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    with pytest.raises(BaseException, match="digest"):
        dcp.load({"a": torch.zeros(300)}, storage_reader=RayshardedReader(str(uri)))


def test_a_dtype_is_converted_as_torch_does_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    dcp.save({"a": torch.arange(6.0).reshape(2, 3)}, storage_writer=RayshardedWriter(uri))
    into = {"a": torch.zeros(3, 2, dtype=torch.float64).t()}
    dcp.load(into, storage_reader=RayshardedReader(uri))
    assert into["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def _save(uri: str, how: str) -> Any:
    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": 3}
    if how == "async":
        dcp.async_save(state, storage_writer=RayshardedWriter(uri)).result()
    else:
        dcp.save(state, storage_writer=RayshardedWriter(uri))
    return whole(state)


def _load(uri: str) -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
    dcp.load(state, storage_reader=RayshardedReader(uri))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return whole({"model": model_state, "optimizer": optimizer_state, "epoch": state["epoch"]})


@pytest.mark.procs
@pytest.mark.parametrize("how", tried_each_time(["async"], ["save", "async"]))
def test_an_fsdp2_state_saved_by_two_ranks_is_loaded_by_three_to_the_bit(tmp_path: Path, how: str) -> None:
    uri = str(tmp_path / "c")
    saved = run_ranks(tmp_path, 2, _save, uri, how)
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 2
    for found in run_ranks(tmp_path, 3, _load, uri):
        assert_same(found, saved[0])


def _save_with_one_full_disk(uri: str) -> str:
    net, _ = trained(1)
    target = uri if dist.get_rank() == 0 else "/proc/no/such/place"
    try:
        dcp.save({"model": get_state_dict(net, ())[0]}, storage_writer=RayshardedWriter(target))
    except BaseException as error:  # noqa: BLE001  # torch's CheckpointException is no Exception
        return str(error)
    return ""


@pytest.mark.procs
def test_an_error_of_one_rank_reaches_all_and_nothing_is_committed(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    for said in run_ranks(tmp_path, 2, _save_with_one_full_disk, uri):
        assert "/proc/no/such" in said
    with pytest.raises(CheckpointError):
        open_checkpoint(*place_of(uri))


def test_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    """Bytes, for example, of torchtitan's data loader, which pickles and unpickles them itself."""
    uri = str(tmp_path / "c")
    dcp.save({"dataloader": {"dp_rank_0": b"\x80\x04\x00\xff", "world_size": 1}}, storage_writer=RayshardedWriter(uri))
    into: dict[str, Any] = {"dataloader": {"dp_rank_0": b"", "world_size": 0}}
    dcp.load(into, storage_reader=RayshardedReader(uri))
    assert into == {"dataloader": {"dp_rank_0": b"\x80\x04\x00\xff", "world_size": 1}}


def test_what_our_trainer_saved_is_loaded_as_torch_nests_it(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "model.weight": np.arange(15, dtype=np.float32).reshape(5, 3),
        "buffer.count": np.arange(4),
        "optim.weight.exp_avg": np.full((5, 3), 2.0, np.float32),
        "number.weight.step": np.array(7, np.int64),
    }
    prefix = save_rows(LocalStorage(str(tmp_path)), arrays, step=1, save_id="a", num_writers=2)
    into: dict[str, Any] = {
        "model": {"weight": torch.zeros(5, 3), "count": torch.zeros(4, dtype=torch.int64)},
        "optimizer": {"state": {"weight": {"exp_avg": torch.zeros(5, 3), "step": 0}}},
    }
    dcp.load(into, storage_reader=RayshardedReader(tmp_path / prefix))
    assert_same(
        into,
        {
            "model": {"weight": torch.arange(15.0).reshape(5, 3), "count": torch.arange(4)},
            "optimizer": {"state": {"weight": {"exp_avg": torch.full((5, 3), 2.0), "step": 7}}},
        },
    )


def _read_own_part(uri: str) -> tuple[int, int]:
    """(bytes that this rank wants, bytes of the data that it read)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into = {"w": distribute_tensor(torch.zeros(1000, 640), mesh, [Shard(0)])}
    reader = RayshardedReader(uri)
    read = 0
    original = Checkpoint.read_many

    def counted(self: Checkpoint, requests: Any) -> int:
        nonlocal read
        found = original(self, requests)
        read += found
        return found

    Checkpoint.read_many = counted  # type: ignore[method-assign]
    dcp.load(into, storage_reader=reader)
    return into["w"].to_local().nbytes, read


@pytest.mark.procs
def test_a_rank_reads_little_more_than_its_own_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    dcp.save({"w": torch.randn(1000, 640)}, storage_writer=RayshardedWriter(uri))
    for wanted, read in run_ranks(tmp_path, 3, _read_own_part, uri):
        assert wanted <= read <= 1.1 * wanted + 2 * (64 << 10)


class _Late(RayshardedReader):
    """On rank 1 it opens the folder after another job has replaced the checkpoint that rank 0 opened."""

    def __init__(self, uri: str, replace: Callable[[], None]) -> None:
        super().__init__(uri)
        self._replace = replace

    def read_metadata(self) -> Metadata:
        if dist.get_rank() == 0:
            found = super().read_metadata()
            self._replace()
            dist.barrier()
            return found
        dist.barrier()
        return super().read_metadata()


class _Forgetful(DefaultLoadPlanner):
    """A planner that makes new plans: one stage of them without the data of the storage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(plan.items) for plan in global_plan] if self._stage == "global" else global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(central_plan.items) if self._stage == "last" else central_plan


def _load_while_it_is_replaced(uri: str, stage: str) -> tuple[str, list[float]]:
    def replace() -> None:
        dcp.save({"w": torch.full((4,), 2.0)}, no_dist=True, storage_writer=RayshardedWriter(uri, overwrite=True))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    said = ""
    try:
        dcp.load(into, storage_reader=_Late(uri, replace), planner=_Forgetful(stage))
    except BaseException as error:  # noqa: BLE001  # torch's CheckpointException is no Exception
        said = str(error)
    return said, into["w"].to_local().tolist()


@pytest.mark.procs
@pytest.mark.parametrize("stage", ["none", "global", "last"])
def test_ranks_never_load_a_mixture_of_two_checkpoints(tmp_path: Path, stage: str) -> None:
    uri = str(tmp_path / "c")
    dcp.save({"w": torch.ones(4)}, storage_writer=RayshardedWriter(uri))
    before = open_checkpoint(*place_of(uri)).digest
    found = run_ranks(tmp_path, 2, _load_while_it_is_replaced, uri, stage)
    after = open_checkpoint(*place_of(uri)).digest
    assert before != after
    for said, _ in found:
        assert before in said
        assert after in said
    assert found[1][1] == [0, 0]
