"""The public calls in one process: values that may be saved, loaded and read, and the errors for all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import raysharded.checkpoint as checkpoint
from raysharded.checkpoint import Claims, SigningKey, api, open_storage
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.sharded_io.checkpoint_uri import split
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.save import About, Target, content_of, write
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.entries import Entry, entry_of
from raysharded.checkpoint.state_dict.load_target import Answers, LoadTarget
from raysharded.errors import CheckpointError, ConfigError, CorruptCheckpoint, IncompleteCheckpoint
from raysharded.testing.storages import save_rows
from tests.checkpoint.state_dict.ranks import run_ranks

ALL_DTYPES = list(SAFETENSORS_DTYPES)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved_beside(uri: Path, state: Any) -> None:
    with api.AsyncSaver() as saver:
        saver.save(uri, state).result(60)


def test_the_package_offers_the_calls() -> None:
    assert (checkpoint.save, checkpoint.load, checkpoint.open) == (api.save, api.load, api.open)
    assert checkpoint.AsyncSaver is api.AsyncSaver


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_comes_back_to_the_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (24 * dtype.itemsize,), dtype=torch.uint8)
    whole = raw.view(dtype).reshape(4, 6)
    state = {"contiguous": whole, "scattered": whole.t(), "scalar": whole[1, 2], "empty": whole[:0], "row": whole[2]}
    api.save(tmp_path / "c", state)
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    api.load(tmp_path / "c", into)
    for key, tensor in state.items():
        assert bits(into[key]) == bits(tensor), key
        assert bits(api.open(tmp_path / "c").read(key)) == bits(tensor), key


@pytest.mark.parametrize("saver", [api.save, saved_beside], ids=["save", "beside"])
def test_what_torch_conjugates_or_negates_lazily_is_saved_and_filled(tmp_path: Path, saver: Any) -> None:
    whole = torch.randn(4, 6, dtype=torch.complex64)
    saver(tmp_path / "c", {"conj": whole.conj(), "neg": whole.conj().imag})
    into = torch.zeros(2, 4, 6, dtype=torch.complex64)
    conj, neg = into[0].conj(), into[1].conj().imag
    assert (conj.is_conj(), neg.is_neg()) == (True, True)
    api.load(tmp_path / "c", {"conj": conj, "neg": neg})
    assert torch.equal(conj, whole.conj())
    assert torch.equal(neg, whole.conj().imag)


def fill_conjugated(rank: int, uri: str) -> list[complex]:
    into = torch.zeros(3, dtype=torch.complex64).conj()
    api.load(uri, {"w": into})
    found: list[complex] = into.tolist()
    return found


@pytest.mark.procs
def test_what_is_conjugated_lazily_is_sent_as_it_reads(tmp_path: Path) -> None:
    values = [1 + 2j, 3 - 1j, 2j]
    api.save(tmp_path / "c", {"w": torch.tensor(values)})
    assert run_ranks(2, fill_conjugated, str(tmp_path / "c")) == [values, values]


def test_a_save_returns_what_it_saved(tmp_path: Path) -> None:
    saved = api.save(
        tmp_path / "c",
        {"w": torch.zeros(100)},
        step=7,
        run="r",
        metadata={"a": 1},
        metrics={"loss": 0.5},
        data={"n": 9},
    )
    assert (saved.uri, saved.step) == (str(tmp_path / "c"), 7)
    assert 400 < saved.size_bytes < 2000
    with api.open(tmp_path / "c") as opened:
        assert (opened.digest, opened.step, opened.data) == (saved.digest, 7, {"n": 9})
        assert opened.metadata == {"a": 1, "metrics": {"loss": 0.5}}
        assert opened.checkpoint.manifest.run == "r"
        assert {name: (info.dtype, info.shape) for name, info in opened.tensors.items()} == {"w": ("float32", (100,))}


def test_no_password_of_a_url_is_shown(tmp_path: Path) -> None:
    uri = f"memory://user:secret@{tmp_path.name}/c"
    saved = api.save(uri, {"w": torch.ones(2)}, step=3)
    with api.AsyncSaver() as saver:
        pending = saver.save(f"{uri}-2", {"w": torch.ones(2)})
    for shown, begin in ((saved, "Saved(uri="), (pending, "PendingSave("), (api.open(uri), "OpenCheckpoint(")):
        assert repr(shown).startswith(f"{begin}'memory://user:***@{tmp_path.name}/c")
        assert "secret" not in f"{shown!r}{shown}"
    assert saved.uri == uri
    assert repr(saved).endswith(
        f", step=3, digest={saved.digest!r}, size_bytes={saved.size_bytes}, seconds={saved.seconds})"
    )


def test_the_whole_state_comes_back(tmp_path: Path) -> None:
    state = {"a": [torch.arange(3), {"b": torch.ones(2, 2)}], "c": (1, "x", None), 4: torch.zeros(0)}
    api.save(tmp_path / "c", state)
    back = api.open(tmp_path / "c").state()
    assert str(back) == str(state)


indices = st.integers(-7, 6) | st.slices(7)


@given(st.tuples(indices) | st.tuples(indices, indices) | st.tuples(st.just(...), indices) | indices)
def test_a_part_of_a_tensor_is_what_indexing_gives(tmp_path_factory: pytest.TempPathFactory, index: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    folder = tmp_path_factory.getbasetemp() / "indexed"
    whole = torch.arange(7 * 7 * 2).reshape(7, 7, 2)
    if not folder.exists():
        api.save(folder, {"w": whole})
    length = whole.shape[-1] if items[0] is ... else 7
    bad_step = any(isinstance(item, slice) and (item.step or 1) < 0 for item in items)
    outside = any(isinstance(item, int) and not -length <= item < length for item in items)
    opened = api.open(folder)
    if bad_step or outside:
        with pytest.raises(CheckpointError, match="index"):
            opened.read("w", index)
    else:
        assert torch.equal(opened.read("w", index), whole[index])


def test_an_unknown_tensor_or_index_is_refused(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"w": torch.zeros(2, 3)})
    opened = api.open(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no tensor 'v' among the 1"):
        opened.read("v")
    api.save(tmp_path / "d", {"optim.head.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"among the 1 .*Did you mean 'optim\.head\.weight'\?"):
        api.open(tmp_path / "d").read("optimizer.head.weight")
    with pytest.raises(CheckpointError, match=r"of shape \[2, 3\] cannot be indexed by"):
        opened.read("w", (0, 0, 0))


def two_layers() -> dict[str, Any]:
    return {"layers": [{"w": torch.zeros(2, 2), "b": torch.zeros(2)} for _ in range(2)], "lr": 0.1}


def saved_layers(folder: Path) -> Path:
    state = two_layers()
    for layer in state["layers"]:
        layer["w"] += 1
        layer["b"] += 1
    api.save(folder / "c", {**state, "lr": 0.7})
    return folder / "c"


@pytest.mark.parametrize(
    ("names", "filled", "lr"),
    [
        ("layers.1.*", ["layers.1.b", "layers.1.w"], 0.1),
        (["*.w", "lr"], ["layers.0.w", "layers.1.w"], 0.7),
        (["layers.0.w"], ["layers.0.w"], 0.1),
        (None, ["layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w"], 0.7),
    ],
)
def test_some_can_be_chosen_by_name_or_pattern(tmp_path: Path, names: Any, filled: list[str], lr: float) -> None:
    state = two_layers()
    loaded = api.load(saved_layers(tmp_path), state, names=names)
    found = [f"layers.{n}.{key}" for n, layer in enumerate(state["layers"]) for key in layer if layer[key].any()]
    assert sorted(found) == filled
    assert loaded.state["lr"] == lr
    assert (loaded.missing, loaded.unexpected) == ((), ())


def test_a_name_that_chooses_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names: 'layer.0.\*' matches no name. There are .* such as"):
        api.load(saved_layers(tmp_path), two_layers(), names="layer.0.*")


def test_all_differences_are_listed_in_one_error(tmp_path: Path) -> None:
    uri = saved_layers(tmp_path)
    state: dict[str, Any] = two_layers()
    state["layers"][0]["extra"] = torch.zeros(1)
    state["layers"][0]["w"] = torch.zeros(2, 3)
    state["layers"][1]["w"] = torch.zeros(2, 2, dtype=torch.float64)
    del state["layers"][1]["b"]
    with pytest.raises(CheckpointError) as caught:
        api.load(uri, state)
    said = str(caught.value)
    assert "2 do not fit: layers.0.w has shape [2, 2] and not [2, 3], layers.1.w is float32 and not float64" in said
    assert "1 are not in the checkpoint: layers.0.extra" in said
    assert "1 have no place to go: layers.1.b" in said
    with pytest.raises(CheckpointError, match="2 do not fit") as caught:
        api.load(uri, state, strict=False)
    assert "are not in the checkpoint" not in str(caught.value)


def test_without_strict_the_differences_are_returned_and_the_rest_is_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = two_layers()
    state["layers"][0]["extra"] = torch.zeros(1)
    state["more"] = 5
    del state["layers"][1]["b"]
    loaded = api.load(saved_layers(tmp_path), state, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("layers.0.extra", "more"), ("layers.1.b",))
    assert loaded.state["more"] == 5
    assert bool(state["layers"][1]["w"].all())


def test_dtypes_are_converted_on_request(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"w": torch.tensor([1.5, 2.25]), "n": torch.tensor(3)})
    state = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.tensor(0.0)}
    api.load(tmp_path / "c", state, cast=True)
    assert state["w"].tolist() == [1.5, 2.25]
    assert state["n"].item() == 3.0


def test_parts_that_are_not_loaded_into_are_left_alone(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}})
    state = {"model": {"w": torch.zeros(2)}}
    assert api.load(tmp_path / "c", state).unexpected == ()
    api.load(tmp_path / "c", {**state, "step": 0}, names=["*.w"])


def test_the_newest_complete_checkpoint_of_a_run_is_found(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    claims = Claims(storage, "driver")
    claims.own(1)
    for step in (3, 12):
        arrays = {"model.w": torch.full((5, 2), float(step)).numpy()}
        save_rows(storage, arrays, step=step, save_id="g1", num_writers=2, claims=claims)
    assert api.open(tmp_path).step == 12
    state = {"model": {"w": torch.zeros(5, 2)}}
    assert api.load(tmp_path, state).step == 12
    assert bool((state["model"]["w"] == 12).all())


def test_a_checkpoint_that_was_moved_and_linked_back_is_found_beside_the_others(tmp_path: Path) -> None:
    for step in (1, 2):
        api.save(tmp_path / "side" / f"step-{step}", {"w": torch.ones(1)}, step=step)
    (tmp_path / "side" / "step-2").rename(tmp_path / "elsewhere")
    (tmp_path / "side" / "step-2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "side" / "latest").symlink_to("step-1")
    (tmp_path / "side" / "other-9").symlink_to(tmp_path / "side")
    assert api.open(tmp_path / "side").step == 2
    assert api.load(tmp_path / "side", {"w": torch.zeros(1)}).step == 2


def test_the_newest_of_checkpoints_side_by_side_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        api.save(tmp_path / f"step-{step}", {"w": torch.full((2,), step)}, step=step)
    (tmp_path / "step-200" / "manifest.json").unlink()  # as if it had never been committed
    state = {"w": torch.zeros(2, dtype=torch.int64)}
    assert api.load(tmp_path, state).step == 10
    assert state["w"].tolist() == [10, 10]
    assert api.open(tmp_path).step == 10


def test_an_empty_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match="nor a folder that holds complete checkpoints"):
        api.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_signed_checkpoint_is_read_with_the_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SigningKey(b"k" * 32)
    api.save(tmp_path / "signed", {"w": torch.zeros(1)}, key=key)
    api.save(tmp_path / "unsigned", {"w": torch.zeros(1)})
    assert api.open(tmp_path / "signed", key=key).step == 0
    with pytest.raises(CorruptCheckpoint):
        api.open(tmp_path / "signed", key=SigningKey(b"x" * 32))
    with pytest.raises(CheckpointError):
        api.load(tmp_path / "unsigned", {"w": torch.zeros(1)}, key=key)
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", "y" * 64)
    with pytest.raises(CheckpointError):
        api.open(tmp_path / "unsigned")


def test_what_cannot_be_staged_at_once_is_staged_in_pieces(tmp_path: Path) -> None:
    state = {"a": torch.arange(3000.0).reshape(30, 100).t(), "b": torch.arange(50.0).reshape(5, 10).t()}
    storage = open_storage(str(tmp_path))
    target = Target(uri="c", storage=storage, prefix="c")
    write(content_of(state), target, About(), Coordinator.of(None, 1.0), stage_bytes=1000)
    files = [key for key in storage.list("c") if key.endswith(".safetensors")]
    assert len(files) > 10
    assert all(storage.size(key) < 1000 + 1000 for key in files)
    for name, tensor in state.items():
        assert torch.equal(api.open(tmp_path / "c").read(name), tensor)


@pytest.mark.parametrize(
    ("uri", "above", "name"),
    [
        ("/a/b/c", "/a/b", "c"),
        ("/a/b/c/", "/a/b", "c"),
        ("/a", "/", "a"),
        ("file:///a/b%20c", "/a", "b c"),
        ("file://localhost/a/b", "/a", "b"),
        ("s3://bucket/a/b", "s3://bucket/a", "b"),
        ("s3://bucket/a?endpoint_url=http://h:1/", "s3://bucket?endpoint_url=http://h:1/", "a"),
        ("memory://a/b", "memory://a", "b"),
    ],
)
def test_a_uri_is_a_name_below_a_place(uri: str, above: str, name: str) -> None:
    assert split(uri) == (above, name)


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "/", "s3://bucket?region=x"])
def test_a_uri_that_names_nothing_below_a_place_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="does not name a checkpoint's folder"):
        split(uri)


def test_other_storages_work_too() -> None:
    import fsspec

    fsspec.filesystem("memory").store.clear()
    api.save("memory://runs/c", {"w": torch.arange(5)})
    assert api.open("memory://runs/c").read("w").tolist() == [0, 1, 2, 3, 4]


class Counted(frozenset[Any]):
    """Counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.walks += 1
        return super().__iter__()


def test_a_load_walks_through_what_it_filled_once_however_many_tensors_there_are(tmp_path: Path) -> None:
    """A flat dict of 8,000 tensors took 7 s of processor time when every key walked through all of them."""
    api.save(tmp_path / "c", state := {f"t{number}": torch.zeros(1) for number in range(50)})
    entries: dict[tree.Path, Entry] = {(key,): entry_of(state, key) for key in state}
    target = LoadTarget.of(entries, open_checkpoint(open_storage(str(tmp_path)), "c").manifest)
    answers = Answers(values={}, emptied=Counted(frozenset()))
    assert target.with_answers(answers, list(state)).keys() == state.keys()
    assert Counted.walks == 1
