"""Packed documents: every target once, no document sees another, and plans that are whole or refused."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.cli.settings import apply, read_settings
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, Mixture, PackedDataset, TokenDataset
from raysharded.data.packed import arrange as arranging
from raysharded.data.packed.arrange import arrange, samples_per_block
from raysharded.data.packed.arrangement import Group, Pieces, groups, look_ahead, placed
from raysharded.data.packed.plan_file import GroupColumns
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError, DataError, RayshardedError
from tests.cases import examples

END = 256
Tokens = npt.NDArray[np.int64]


def _store(folder: Path, lengths: list[int], *, kind: Kind | None = None, closed: bool = True, seed: int = 0) -> Tokens:
    """A store of documents with so many tokens before their end; returns its stream."""
    rng = np.random.default_rng(seed)
    stream = np.concatenate([np.append(rng.integers(0, END, length), END) for length in lengths])
    stream = stream if closed else stream[:-1]
    with StoreWriter(str(folder), kind or Kind(tokenizer="bytes", vocab_size=257), 50_000) as writer:
        writer.write(stream.astype(np.uint32))
    return stream


def _lengths(number: int, median: int, seed: int = 1) -> list[int]:
    return [int(one) for one in np.exp(np.random.default_rng(seed).normal(np.log(median), 1.2, number))]


def _targets(sample: dict[str, Any]) -> list[tuple[int, ...]]:
    """The pieces of a sample as tokens, each with its last target."""
    pieces = []
    for number in range(int(sample["document_ids"].max()) + 1):
        places = np.flatnonzero(sample["document_ids"] == number)
        assert places.tolist() == list(range(places[0], places[-1] + 1))
        assert sample["position_ids"][places].tolist() == list(range(len(places)))
        inputs, labels = sample["input_ids"][places], sample["labels"][places]
        assert inputs[1:].tolist() == labels[:-1].tolist()
        pieces.append((*inputs.tolist(), int(labels[-1])))
    padding = sample["document_ids"] == -1
    assert (sample["labels"][padding] == -100).all()
    assert not (sample["labels"][~padding] == -100).any()
    assert {value.dtype for value in sample.values()} == {np.dtype(np.int64)}
    return pieces


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=150),
    seq_len=st.integers(1, 40),
    samples=st.sampled_from([1, 2, 8, 32]),
)
@settings(max_examples=examples(50, of=150))
def test_every_piece_is_in_one_group_and_in_one_sample_that_has_room(
    lengths: list[int], seq_len: int, samples: int
) -> None:
    ends = np.cumsum(np.asarray(lengths) + 1) - 1
    pieces = Pieces.of(ends, 0, int(ends[-1]) + 1, seq_len)
    assert int(pieces.sizes.sum()) == sum(lengths)
    found: list[tuple[int, int]] = []
    for group, where in groups(
        zip(pieces.starts.tolist(), pieces.sizes.tolist(), strict=True), seq_len=seq_len, samples=samples
    ):
        inside = ends[(ends >= group.start) & (ends < group.start + group.length)]
        again = Pieces.of(inside, group.start, group.start + group.length, seq_len)
        own = [number for number in range(len(again.starts)) if number not in group.others]
        sizes = again.sizes[own].tolist()
        assert placed(sizes, group.num_sorted, seq_len, samples) == where
        assert max(np.bincount(where, weights=sizes)) <= seq_len
        found += zip(again.starts[own].tolist(), sizes, strict=True)
    assert sorted(found) == sorted(zip(pieces.starts.tolist(), pieces.sizes.tolist(), strict=True))


def test_a_group_reads_little_more_than_it_uses_and_pads_little() -> None:
    lengths = np.asarray(_lengths(8000, 400)) + 1
    ends = np.cumsum(lengths + 1) - 1
    seq_len, samples = 2048, samples_per_block(2048)
    pieces = Pieces.of(ends, 0, int(ends[-1]) + 1, seq_len)
    listed = list(zip(pieces.starts.tolist(), pieces.sizes.tolist(), strict=True))
    found = list(groups(listed, seq_len=seq_len, samples=samples))
    read = sum(group.length for group, _ in found) / (int(ends[-1]) + 1)
    places = ((len(found) - 1) * samples + max(found[-1][1]) + 1) * seq_len
    assert 1 - int(pieces.sizes.sum()) / places < 0.01
    assert read < 1.03
    begins = [group.start for group, _ in found]
    ends_of = [group.start + group.length for group, _ in found]
    overlaps = [end - begin for end, begin in zip(ends_of, begins[1:], strict=False)]
    assert max(overlaps) < look_ahead(seq_len, samples) + 2 * seq_len


@pytest.mark.parametrize("seq_len", [7, 100, 4096])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_every_target_of_every_document_is_in_one_sample(
    tmp_path: Path, seq_len: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arranging, "_CHUNK_TOKENS", 1000)  # documents continue from one chunk to the next
    monkeypatch.setattr(arranging, "GROUP_PLACES", 1 << 13)
    stream = _store(tmp_path / "store", [*_lengths(150, 60), 0, 5000, 0, 0, 7, 14, 2100], closed=closed)
    facts = arrange(tmp_path / "store", seq_len=seq_len)
    data = PackedDataset(tmp_path / "store", seq_len=seq_len)
    data.validate()
    found = sorted(piece for index in range(len(data)) for piece in _targets(data[index]))
    wanted, start = [], 0
    ends = np.flatnonzero(stream == END).tolist()
    for end in [*ends, *([] if closed else [len(stream) - 1])]:
        wanted += [tuple(stream[at : min(at + seq_len, end) + 1].tolist()) for at in range(start, end, seq_len)]
        start = end + 1
    assert found == sorted(wanted)
    assert facts.num_targets == sum(len(piece) - 1 for piece in wanted)
    assert facts.num_documents == sum(length > 0 for length in np.diff([-1, *ends]) - 1) + (0 if closed else 1)
    assert facts.num_cuts == len(wanted) - facts.num_documents
    assert data.padding == pytest.approx(1 - facts.num_targets / (len(data) * seq_len))
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_pickled_copy_and_a_loader_read_the_same_samples(tmp_path: Path) -> None:
    _store(tmp_path / "store", _lengths(300, 300))
    arrange(tmp_path / "store", seq_len=64)
    data = PackedDataset(tmp_path / "store", seq_len=64, cache_bytes=1 << 16)
    copy = pickle.loads(pickle.dumps(data))
    batch = BatchConfig(global_batch_size=8, microbatch_size=4)
    loaders = [MicrobatchLoader(one, batch, prefetch=ahead) for one, ahead in ((data, False), (copy, True))]
    for loader in loaders:
        loader.skip((), 2, (data.samples_per_block, 8))
    for step in range(1, 6):
        loaders[1].plan([(step, 0), (step, 1)])
        for number in (0, 1):
            one, other = (loader.load(step, number) for loader in loaders)
            assert one.digest == other.digest
            assert [_targets(sample) for sample in one.samples] == [_targets(sample) for sample in other.samples]
    for loader in loaders:
        loader.close()


def test_concatenated_documents_have_the_stream_of_tokens_and_masks_between_them(tmp_path: Path) -> None:
    stream = _store(tmp_path / "store", _lengths(80, 30))
    data = PackedDataset(tmp_path / "store", seq_len=50, packing="concatenate")
    assert len(data) == len(TokenDataset(tmp_path / "store", seq_len=50))
    assert data.padding == 0
    for index in range(len(data)):
        sample = data[index]
        tokens = stream[index * 50 : index * 50 + 51]
        assert sample["input_ids"].tolist() == tokens[:-1].tolist()
        is_end = tokens[:-1] == END
        assert sample["labels"].tolist() == np.where(is_end, -100, tokens[1:]).tolist()
        document = position = 0
        for place in range(50):
            assert (sample["document_ids"][place], sample["position_ids"][place]) == (document, position)
            document, position = (document + 1, 0) if is_end[place] else (document, position + 1)


def test_packed_sources_are_mixed_and_must_fit_each_other(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        _store(tmp_path / name, _lengths(50, 40), seed=seed)
        arrange(tmp_path / name, seq_len=32)
    sources = {name: PackedDataset(tmp_path / name, seq_len=32) for name in ("a", "b")}
    mixture = Mixture(sources, {"a": 1, "b": 1})
    mixture.validate()
    assert _targets(mixture[5])
    odd = PackedDataset(tmp_path / "b", seq_len=16, packing="concatenate")
    with pytest.raises(DataError, match="source 'b' has seq_len 16, but 'a' has 32"):
        Mixture({"a": sources["a"], "b": odd}, {"a": 1, "b": 1}).validate()


def test_settings_of_a_file_make_a_packed_dataset(tmp_path: Path) -> None:
    from examples.train_packed import NextToken

    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "data": {"paths": "corpus/", "seq_len": 16, "packing": "concatenate"},
                "task": {"vocab_size": 257, "seq_len": 16},
                "run": {"name": "run", "storage_path": str(tmp_path), "max_steps": 1},
                "batch": {"global_batch_size": 2, "microbatch_size": 1},
                "scaling": {"num_workers": 1},
            }
        )
    )
    trainer = apply(NextToken, read_settings(str(tmp_path / "run.yaml"), ()))
    assert isinstance(trainer.data, PackedDataset)
    assert trainer.data.packing == "concatenate"


def test_documents_of_a_store_with_fewer_tokens_than_a_sample_are_packed(tmp_path: Path) -> None:
    stream = _store(tmp_path / "store", [3, 5])
    arrange(tmp_path / "store", seq_len=4096)
    data = PackedDataset(tmp_path / "store", seq_len=4096)
    data.validate()
    assert (len(data), data.vocab_size, data.tokenizer) == (1, 257, "bytes")
    assert sorted(_targets(data[0])) == sorted([tuple(stream[:4].tolist()), tuple(stream[4:].tolist())])
    (tmp_path / "store" / "tokens.json").unlink()
    with pytest.raises(DataError, match="no token store"):
        PackedDataset(tmp_path / "store", seq_len=4096).validate()


def test_arrangements_in_memory_are_bounded_in_bytes(tmp_path: Path) -> None:
    _store(tmp_path / "store", [16] * 40_000)
    arrange(tmp_path / "store", seq_len=64)
    sizes = []
    for cache_bytes in (1 << 30, 1 << 20):
        data = PackedDataset(tmp_path / "store", seq_len=64, cache_bytes=cache_bytes)
        tracemalloc.start()
        try:
            for index in range(0, len(data), data.samples_per_block):
                data[index]
            taken = tracemalloc.get_traced_memory()[0]
            data.close()
        finally:
            tracemalloc.stop()
        sizes.append(taken)
    of_all = sizes[0] - 40_000 * 17 * 2  # without the blocks
    assert of_all < 40_000 * 14, "8 bytes for each document, 4 for each sample"
    assert sizes[1] < (1 << 20) * 5 / 4 + (1 << 19)


def test_memory_while_a_plan_is_made_is_20_bytes_for_a_group() -> None:
    columns, number = GroupColumns(), 50_000
    tracemalloc.start()
    try:
        for place in range(number):
            columns.add(Group(start=place << 17, length=1 << 17, num_sorted=1000, others=(7, 9)))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < number * (20 + 8) * 9 / 8 + 5000


def _refused(kind: type[RayshardedError], message: str, path: Path, **settings: Any) -> None:
    with pytest.raises(kind, match=message):
        PackedDataset(path, **{"seq_len": 8, **settings}).validate()


def test_missing_and_damaged_plans_are_refused_with_the_command_that_makes_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    _store(store, _lengths(40, 40))
    _refused(DataError, r"no plan .* of 8 tokens\. Make it with `raysharded data arrange .* --seq-len 8`", store)
    arrange(store, seq_len=8)
    _refused(ConfigError, "end_of_document=3, but the plan was made with 256", store, end_of_document=3)
    plan = store / "packed-8.plan"
    data = plan.read_bytes()
    for damaged in (data[:-1], data[:40], b"", bytes([data[0] ^ 1]) + data[1:]):
        plan.write_bytes(damaged)
        _refused(DataError, "packed-8.plan: damaged, or no packing plan", store)
    other = tmp_path / "other"
    _store(other, _lengths(40, 41))
    arrange(other, seq_len=8)
    plan.write_bytes((other / "packed-8.plan").read_bytes())
    _refused(DataError, "made for other tokens than the store has now. Delete it, and make it again with", store)
    arrange(store, seq_len=9)
    plan.write_bytes((store / "packed-9.plan").read_bytes())
    _refused(DataError, "made for sequences of 9 tokens instead of 8: it was renamed. Delete it", store)
    plan.write_bytes((other / "packed-8.plan").read_bytes())
    with pytest.raises(ConfigError, match="was made for other tokens, or another end_of_document"):
        arrange(store, seq_len=8)
    plan.write_bytes(data)
    opened = PackedDataset(store, seq_len=8)
    opened.validate()
    copy = pickle.loads(pickle.dumps(opened))
    copy.validate()
    plan.unlink()
    arrange(store, seq_len=8, end_of_document=7)
    with pytest.raises(DataError, match="the plan was replaced"):
        copy.validate()


def test_wrong_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packing='tight': choose one of 'best_fit', 'concatenate'"):
        PackedDataset(tmp_path, seq_len=8, packing="tight")  # type: ignore[arg-type]
    store, unnamed = tmp_path / "store", tmp_path / "unnamed"
    _store(store, _lengths(40, 40))
    _store(unnamed, _lengths(40, 40), kind=Kind(tokenizer="sha256:1", vocab_size=300))
    _refused(ConfigError, "does not name the token that ends documents", unnamed, packing="concatenate")
    _refused(ConfigError, "end_of_document=300 is no token", unnamed, packing="concatenate", end_of_document=300)
    ends = [tmp_path / "ends 7", tmp_path / "ends 9"]
    for folder, end in zip(ends, (7, 9), strict=True):
        _store(folder, _lengths(40, 40), kind=Kind(tokenizer="sha256:1", vocab_size=300, end_of_document=end))
    with pytest.raises(ConfigError, match="documents end with token 7 or 9, by the store"):
        PackedDataset(ends, seq_len=8, packing="concatenate").validate()
    PackedDataset(ends, seq_len=8, packing="concatenate", end_of_document=7).validate()
    _refused(DataError, "no token store. Make one of text with", tmp_path)
    _refused(DataError, "neither a token store nor a file that ends with '.parquet'", tmp_path, packing="concatenate")
    with pytest.raises(ConfigError, match="does not name the token that ends documents"):
        arrange(unnamed, seq_len=8)
    with pytest.raises(ConfigError, match="seq_len=0"):
        arrange(store, seq_len=0)
    with pytest.raises(DataError, match="no token store"):
        arrange(tmp_path, seq_len=8)
    empty = tmp_path / "empty"
    _store(empty, [0, 0, 0])
    with pytest.raises(DataError, match="no document in it has two tokens"):
        arrange(empty, seq_len=8)
    with pytest.raises(ConfigError, match="a plan is for one token store"):
        PackedDataset([str(store), str(empty)], seq_len=8).validate()
