"""Folders of torch.distributed.checkpoint: plain torch loads exported ones, and folders of plain torch are imported."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from raysharded.checkpoint.interop.dcp.exporter import export_dcp
from raysharded.checkpoint.interop.dcp.importer import import_dcp
from raysharded.checkpoint.interop.dcp.item_reader import tensor_slabs
from raysharded.checkpoint.interop.dcp.metadata import parse
from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from raysharded.testing.storages import save_rows
from tests.checkpoint.interop.ranks import assert_same, bits, dcp, model, run_ranks, trained, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _state() -> dict[str, Any]:
    return {
        "model": {"a.b": torch.randn(40, 3), "half": torch.randn(7).bfloat16(), "turned": torch.randn(5, 6).t()},
        "list": [torch.zeros(2), {"x": 1}],
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "group": {"betas": (0.9, 0.999), "lr": 1e-3, "foreach": None, "names": ["a", "b"], "inf": float("inf")},
    }


def _plain(tmp_path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
    return tmp_path / "dcp"


def _imported(source: Path, dest: Path, **options: Any) -> Checkpoint:
    import_dcp(place_of(str(source)), place_of(str(dest)), **options)
    return open_checkpoint(*place_of(str(dest)))


def _as_one_file(folder: Path) -> Any:
    dcp_to_torch_save(folder, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=False)


def test_a_state_survives_import_and_export_to_the_bit_for_plain_torch(tmp_path: Path) -> None:
    state = _state()
    checkpoint = _imported(_plain(tmp_path, state), tmp_path / "ours", step=5)
    assert checkpoint.step == 5
    checkpoint.verify()

    # Slabs and files so small that every tensor becomes several chunks, over several files.
    written = export_dcp(checkpoint, place_of(str(tmp_path / "out")), slab_bytes=64, file_bytes=100)
    assert len(written.files) > 3
    assert_same(_as_one_file(tmp_path / "out"), state)

    into = {"model": {"a.b": torch.zeros(40, 3)}, "group": {"betas": None}}
    dcp.load(into, checkpoint_id=str(tmp_path / "out"))
    assert_same(into, {"model": {"a.b": state["model"]["a.b"]}, "group": {"betas": (0.9, 0.999)}})


def test_lazily_conjugated_and_negated_tensors_have_the_values_that_torch_loads(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conjugated": number.conj(),
        "negated": torch._neg_view(torch.tensor([1.0, -2.0, 0.0])),
        "both": torch._neg_view(number.conj()),
        "part": number.conj().imag,
        "turned": torch.arange(6).to(torch.complex64).mul(1j).reshape(2, 3).t().conj(),
        "parameter": torch.nn.Parameter(number.conj()),
        "whole number": torch._neg_view(torch.tensor([1, -2])),
        "big": torch.arange(3 << 20).to(torch.complex64).mul(1j).conj(),  # 24 MB: more than one slab
    }
    assert state["negated"].is_neg()
    assert state["parameter"].is_conj()
    folder = _plain(tmp_path, state)
    expected = {name: torch.empty_like(value).detach() for name, value in state.items()}
    dcp.load(expected, checkpoint_id=str(folder))
    checkpoint = _imported(folder, tmp_path / "ours")
    for name, value in expected.items():
        found = checkpoint.read(name, (0,) * value.dim(), tuple(value.shape))
        assert found.tobytes() == bits(value.resolve_conj().resolve_neg()), name


class _Rebuilt:
    """A tensor that is pickled with other arguments for the function that makes it again."""

    def __init__(self, tensor: torch.Tensor, *more: Any) -> None:
        function, arguments = tensor.__reduce_ex__(2)
        self._reduced = function, (*arguments, *more)

    def __reduce__(self) -> Any:
        return self._reduced


def _put(folder: Path, key: str, value: Any) -> None:
    """Store another value under a key."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == key)
    torch.save(value, folder / "other.distcp")
    info.relative_path, info.offset, info.length = "other.distcp", 0, (folder / "other.distcp").stat().st_size
    metadata.storage_data[index] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_lazily_negated_tensor_that_torch_cannot_negate_is_refused(tmp_path: Path) -> None:
    flags = torch.tensor([True, False])
    folder = _plain(tmp_path, {"a": flags})
    _put(folder, "a", _Rebuilt(flags, {"neg": True}))
    with pytest.raises(CheckpointError, match="bool, which torch cannot negate"):
        _imported(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    "more", [({"twisted": True},), ({"conj": 1},), ("conj",), (None, 1)], ids=["unknown", "number", "text", "further"]
)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_is_not_known_of_a_tensor_is_refused_and_not_ignored(tmp_path: Path, more: Any) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(3)})
    _put(folder, "a", _Rebuilt(torch.ones(3), *more))
    with pytest.raises(CheckpointError, match=r"other\.distcp.*(properties|argument)"):
        _imported(folder, tmp_path / "ours")
    assert not (tmp_path / "ours" / "manifest.json").exists()


def test_a_part_is_exported_by_pattern(tmp_path: Path) -> None:
    state = _state()
    checkpoint = _imported(_plain(tmp_path, state), tmp_path / "ours")
    export_dcp(checkpoint, place_of(str(tmp_path / "out")), names=("model.*",))
    assert_same(_as_one_file(tmp_path / "out"), {"model": state["model"]})
    with pytest.raises(CheckpointError, match="no tensor is called 'modle"):
        export_dcp(checkpoint, place_of(str(tmp_path / "other")), names=("modle.*",))


def test_what_our_trainer_saved_is_exported_as_torch_nests_it(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "model.l.weight": np.ones((5, 3), np.float32),
        "buffer.l.count": np.arange(4),
        "constant.l.tables['of'].low[0]": np.ones(2, np.float32),
        "optim.l.weight.exp_avg": np.full((5, 3), 2.0, np.float32),
        "number.l.weight.step": np.array(7, np.int64),
    }
    storage = LocalStorage(str(tmp_path))
    prefix = save_rows(storage, arrays, step=1, save_id="a", num_writers=2)
    export_dcp(open_checkpoint(storage, prefix), place_of(str(tmp_path / "out")))
    state = {"exp_avg": torch.full((5, 3), 2.0), "step": 7}
    assert_same(
        _as_one_file(tmp_path / "out"),
        {
            "model": {"l.weight": torch.ones(5, 3), "l.count": torch.arange(4)},
            "constant": {"l.tables['of'].low[0]": torch.ones(2)},
            "optimizer": {"state": {"l.weight": state}},
        },
    )


def test_an_export_is_not_overwritten_and_a_failed_one_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = _imported(_plain(tmp_path, {"a": torch.ones(500)}), tmp_path / "ours")
    export_dcp(checkpoint, place_of(str(tmp_path / "out")))
    with pytest.raises(CheckpointError, match=r"has \.metadata already, and nothing is overwritten"):
        export_dcp(checkpoint, place_of(str(tmp_path / "out")))

    (file,) = (tmp_path / "ours").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="digest"):
        export_dcp(checkpoint, place_of(str(tmp_path / "other")))
    assert list((tmp_path / "other").glob("*")) == []


def test_an_export_that_was_stopped_removes_what_it_wrote(tmp_path: Path) -> None:
    checkpoint = _imported(_plain(tmp_path, {"a": torch.ones(500)}), tmp_path / "ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    there: list[bool] = []

    def stop(_: int) -> None:
        there.append((tmp_path / "out" / "__0_1.distcp").exists())
        if there[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dcp(checkpoint, place_of(str(tmp_path / "out")), progress=stop, slab_bytes=64, file_bytes=100)
    assert there[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


def test_an_export_takes_the_place_of_what_a_killed_one_left(tmp_path: Path) -> None:
    state = {"a": torch.arange(500.0)}
    checkpoint = _imported(_plain(tmp_path, state), tmp_path / "ours")
    (tmp_path / "out").mkdir()
    for name in ("__0_0.distcp", "__0_99.distcp"):
        (tmp_path / "out" / name).write_text("half")
    export_dcp(checkpoint, place_of(str(tmp_path / "out")), slab_bytes=64, file_bytes=100)
    assert_same(_as_one_file(tmp_path / "out"), state)


def _save_plainly(folder: str) -> Any:
    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": 3}
    dcp.save(state, checkpoint_id=folder)
    return whole(state)


def _load_plainly(folder: str) -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return whole({"model": model_state, "optimizer": optimizer_state, "epoch": state["epoch"]})


@pytest.mark.long
@pytest.mark.procs
def test_an_fsdp2_state_of_plain_torch_passes_through_our_format_to_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(tmp_path, 3, _save_plainly, str(tmp_path / "dcp"))
    checkpoint = _imported(tmp_path / "dcp", tmp_path / "ours")
    export_dcp(checkpoint, place_of(str(tmp_path / "out")), slab_bytes=100)
    for found in run_ranks(tmp_path, 2, _load_plainly, str(tmp_path / "out")):
        assert_same(found, saved[0])


def test_values_that_json_cannot_hold_are_listed_and_can_be_left_out(tmp_path: Path) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(3), "bad[0]": {1, 2}, "worse": Path("/x"), "good": 3})
    with pytest.raises(CheckpointError, match=r"2 of 3 values cannot be kept.*bad.*worse"):
        _imported(folder, tmp_path / "ours")
    checkpoint = _imported(folder, tmp_path / "ours", skip=("bad[0]", "worse"))
    assert checkpoint.manifest.tree == {"dict": [["a", {"tensor": "a"}], ["good", {"value": 3}]]}


class _Evil:
    """The payload that runs when the pickle of a hostile class is loaded."""

    def __init__(self, act: Any, *args: Any) -> None:
        self._act, self._args = act, args

    def __reduce__(self) -> Any:
        return self._act, self._args


@pytest.mark.parametrize(
    ("evil", "named"),
    [
        (_Evil(os.system, "touch pwned"), r"posix\.system"),
        (_Evil(eval, "open('pwned','w')"), r"builtin(s|__)\.eval"),
        (_Evil(getattr, 1, "real"), r"builtin(s|__)\.getattr"),
        (_Evil(torch.load, "x"), r"torch\.serialization\.load"),
        (_Evil(np.load, "x"), r"numpy\.load"),
        (np.float32(1), "numpy"),
    ],
    ids=["system", "eval", "getattr", "torch.load", "numpy.load", "a scalar"],
)
@pytest.mark.parametrize("place", ["metadata", "value", "tensor"])
def test_a_hostile_pickle_is_refused_by_name_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Any, named: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _plain(tmp_path, {"a": torch.ones(3), "v": 3})
    if place == "metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = {"x": evil}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        _put(folder, {"tensor": "a", "value": "v"}[place], evil)
    with pytest.raises(CheckpointError, match=named if place != "value" else "v: cannot be read without running"):
        _imported(folder, tmp_path / "ours")
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "ours" / "manifest.json").exists()


def test_members_of_enumerations_may_be_pickled_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_name(self: Any, _protocol: int) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (type(self), self.name)  # as Python 3.11.0 to 3.11.3 do

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    data = (_plain(tmp_path, {"a": torch.ones(3)}) / ".metadata").read_bytes()
    assert b"getattr" in data
    assert list(parse(data, "x").tensors) == ["a"]
    with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
        parse(data.replace(b"_MEM_FORMAT_ENCODING", b"BytesStorageMetadata"), "x")


def test_metadata_that_is_cut_off_or_changed_anywhere_never_does_more_than_raise(tmp_path: Path) -> None:
    data = (_plain(tmp_path, {"a": torch.ones(3, 2), "v": 3}) / ".metadata").read_bytes()
    good = parse(data, "x")
    random = np.random.default_rng(0)
    for at in random.choice(len(data), 300):
        changed = bytearray(data)
        changed[at] ^= 1 << int(random.integers(8))
        for broken in (data[:at], bytes(changed)):
            try:
                parse(broken, "x")
            except CheckpointError:
                continue
    assert good.tensors["a"].shape == (3, 2)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ""])
def test_metadata_cannot_name_files_outside_the_folder(tmp_path: Path, path: str) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(3)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    with pytest.raises(CorruptCheckpoint, match="outside the folder"):
        parse(pickle.dumps(metadata), "x")


@pytest.mark.parametrize("change", ["negative", "huge", "beyond", "missing chunk", "text", "no place"])
def test_metadata_with_impossible_numbers_is_refused(tmp_path: Path, change: str) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(4, 3)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["a"]
    match change:
        case "negative":
            entry.size = torch.Size([-4, 3])
        case "huge":
            entry.size = torch.Size([1 << 61, 3])
        case "beyond":
            entry.chunks[0].offsets = torch.Size([1, 0])
        case "missing chunk":
            entry.chunks.clear()
        case "text":
            entry.size = ("4", "3")
        case "no place":
            metadata.storage_data.clear()
    with pytest.raises(CorruptCheckpoint, match="'a'"):
        parse(pickle.dumps(metadata), "x")


def test_every_flipped_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(50)})
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    begin = data.index(torch.ones(50).numpy().tobytes())
    for number, at in enumerate(range(begin, begin + 200, 13)):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp"):
            _imported(folder, tmp_path / f"ours{number}")


def test_files_that_are_cut_off_missing_or_swapped_are_named(tmp_path: Path) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(50), "b": torch.ones(7, dtype=torch.int32)})
    file = folder / "__0_0.distcp"
    data = file.read_bytes()

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    one, two = metadata.storage_data.values()
    one.offset, two.offset, one.length, two.length = two.offset, one.offset, two.length, one.length
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (swapped / ".metadata").write_bytes(pickle.dumps(metadata))
    (swapped / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="where the metadata has"):
        _imported(swapped, tmp_path / "ours0")

    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        _imported(folder, tmp_path / "ours1")
    file.unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"__0_0\.distcp is missing"):
        _imported(folder, tmp_path / "ours2")
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        _imported(folder, tmp_path / "ours3")


def test_a_tensor_larger_than_a_slab_is_read_in_pieces(tmp_path: Path) -> None:
    state = {"big": torch.arange(5 << 20), "turned": torch.arange(3 << 20).reshape(1 << 10, -1).t()}  # 40 and 24 MB
    checkpoint = _imported(_plain(tmp_path, state), tmp_path / "ours")
    for name, value in state.items():
        found = checkpoint.read(name, (0,) * value.dim(), tuple(value.shape))
        assert found.tobytes() == value.contiguous().numpy().tobytes()


@pytest.mark.parametrize("wrong", [{"metadata": {"a": (1,)}}, {"step": -1}, {"run": 3}])
def test_what_cannot_be_stored_with_an_import_is_refused_before_anything_is_written(tmp_path: Path, wrong: Any) -> None:
    folder = _plain(tmp_path, {"a": torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"^{next(iter(wrong))}"):
        _imported(folder, tmp_path / "ours", **wrong)
    assert not (tmp_path / "ours").exists()


def test_dtypes_that_our_format_lacks_are_named(tmp_path: Path) -> None:
    folder = _plain(tmp_path, {"c": torch.ones(3, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"'c' has dtype complex128"):
        _imported(folder, tmp_path / "ours")


def test_a_pickle_that_names_a_far_place_in_its_memo_takes_no_memory(tmp_path: Path) -> None:
    data = b"\x80\x04}r\xff\xff\xff\x7f."  # an empty dict, to be remembered at place 2^31
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpoint):
        parse(data, "x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in KiB


def test_any_change_of_a_data_file_is_found_or_changes_nothing(tmp_path: Path) -> None:
    folder = _plain(tmp_path, {"a": torch.arange(40), "v": [1, "x"]})
    (item,) = (chunk.item for chunk in parse((folder / ".metadata").read_bytes(), "x").tensors["a"].chunks)
    file = folder / item.path
    data = file.read_bytes()
    storage = LocalStorage(str(folder))
    random = np.random.default_rng(0)
    for at in item.start + random.choice(item.length, 400):
        changed = bytearray(data)
        changed[at] ^= 1 << int(random.integers(8))
        file.write_bytes(changed)
        try:
            found = [part.tobytes() for _, part in tensor_slabs(storage, "", item, "int64", (40,))]
        except CheckpointError:
            continue
        assert b"".join(found) == torch.arange(40).numpy().tobytes()
