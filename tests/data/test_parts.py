"""Held-out parts: nothing is in both, reading the rest costs no more, and both fit mixtures and evaluations."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.config import BatchConfig, EngineConfig, EvalConfig
from raysharded.data import Bucketed, DatasetPart, Mixture, TokenDataset, sample_ids, split
from raysharded.data.order import Blocks
from raysharded.data.parts import Layout
from raysharded.data.sources import Sources, vocabulary
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError, DataError, RayshardedError
from tests.cases import tried_each_time

BATCH = BatchConfig(global_batch_size=8, microbatch_size=4, seed=2)


@settings(deadline=None)
@given(number=st.integers(2, 9000), block=st.integers(0, 12), share=st.floats(0.001, 0.6))
def test_every_sample_is_in_one_part_once(number: int, block: int, share: float) -> None:
    layout = Layout.of(number, 1 << block, share)
    held = layout.held_out(np.arange(layout.num_held_out))
    rest = layout.training(np.arange(number - layout.num_held_out))
    assert np.array_equal(np.sort(np.concatenate([held, rest])), np.arange(number))
    assert np.all(np.diff(rest) > 0)
    assert abs(len(held) - share * number) <= max(layout.run, 1)


def test_of_large_data_whole_blocks_are_held_out() -> None:
    layout = Layout.of(10**12 // 128, 512, 0.001)
    assert layout.run == 512
    last = 10**12 // 128 - layout.num_held_out
    for first in (0, 512, 10**9 // 512 * 512, (last // 512 - 1) * 512):
        block = layout.training(first + np.arange(512))
        assert block[0] % 512 == 0
        assert np.array_equal(block, block[0] + np.arange(512))
    assert layout.held_runs.nbytes < 130_000


def test_the_first_held_out_samples_are_from_all_over_the_data() -> None:
    number, run = 1 << 20, 64
    layout = Layout.of(number, run, 0.05)
    first = layout.held_out(np.arange(64))
    assert len(np.unique(first // run)) == 64
    counts = np.bincount(first * 4 // number, minlength=4)
    assert counts.min() >= 8, "of each quarter, where 16 would be even"


def test_the_parts_are_the_same_for_ever() -> None:
    layout = Layout.of(5000, 8, 0.004)
    assert layout.held_runs.tolist() == [125, 375, 625, 875, 1125]
    assert layout.held_out(np.arange(6)).tolist() == [500, 2500, 3500, 1500, 4500, 501]
    assert layout.training(np.asarray([0, 499, 500, 4979])).tolist() == [0, 499, 504, 4999]


def _store(folder: Path, number: int, vocab_size: int = 257, seed: int = 0) -> str:
    tokens = np.random.default_rng(seed).integers(0, 257, number, dtype=np.uint32)
    with StoreWriter(str(folder), Kind(tokenizer="bytes", vocab_size=vocab_size), 50_000) as store:
        store.write(tokens)
    return str(folder)


def _read(sources: Sources, num: int) -> list[Any]:
    sources.check()
    sources.training.skip((), 2, (sources.training.samples_per_block, 8))
    keys = [(step, index) for step in range(1, 9) for index in (0, 1)]
    sources.training.plan(keys)
    found: list[Any] = [np.stack(sources.training.load(*key).samples) for key in keys]
    assert sources.held_out is not None
    return [*found, np.stack(sources.held_out.load_range(0, num))]


@pytest.mark.parametrize("mixed", tried_each_time([True], [False, True]), ids="mixed={}".format)
def test_a_run_reads_one_part_and_evaluates_the_other(tmp_path: Path, mixed: bool) -> None:
    """In a thread that reads ahead as here, and from a pickled copy."""
    stores = [_store(tmp_path / name, 60_000 + 5000 * seed, seed=seed) for seed, name in enumerate("ab")]
    whole = {store[-1]: TokenDataset(store, seq_len=16) for store in stores}
    parts = {name: split(data, held_out=0.1) for name, data in whole.items()}
    training: Any = parts["a"][0]
    held_out: Any = parts["a"][1]
    if mixed:
        training, held_out = (
            Mixture({name: of[which] for name, of in parts.items()}, {"a": 3, "b": 1}, seed=5) for which in (0, 1)
        )
    told = []
    for ahead in (True, False):
        data, evaluation = pickle.loads(
            pickle.dumps((training, EvalConfig(data=held_out, num_samples=40, every_steps=1)))
        )
        sources = Sources(data, evaluation, BATCH, EngineConfig(prefetch=ahead), lambda: None)
        try:
            assert sources.process is None, "no process is needed"
            told.append(_read(sources, 40))
        finally:
            sources.close()
    assert all(np.array_equal(one, other) for one, other in zip(*told, strict=True))
    read = {row.tobytes() for batch in told[0][:-1] for row in batch}
    held = {row.tobytes() for row in told[0][-1]}
    assert not read & held
    assert held <= {of[1][index].tobytes() for of in parts.values() for index in range(len(of[1]))}
    assert vocabulary(training) == vocabulary(held_out) == 257


def test_reading_the_part_to_train_on_costs_what_the_data_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysharded.data.order.WINDOW_BLOCKS", 16)
    monkeypatch.setattr("raysharded.data.parts._LEAST_RUNS", 16)
    url = _store(tmp_path / "store", (80 << 16) + 1000)
    data = split(TokenDataset(url, seq_len=2048, cache_bytes=8 << 20), held_out=0.05)[0]
    ids = sample_ids(2, np.arange(len(data)), len(data), 2, Blocks(data.samples_per_block, 8))
    for part in np.array_split(ids, 8):
        data.read_ahead(part)
        for index in part.tolist():
            data[index]
    (reader,) = data.dataset._reader.readers  # type: ignore[attr-defined]
    assert reader.num_bytes / (len(data) * 2048 * 2) < 1.05
    assert len(np.unique(data.ids(ids))) == len(data)
    data.close()


def test_a_run_can_tell_one_share_from_another() -> None:
    digests = {part.contents_digest for share in (0.1, 0.2) for part in split(range(5000), held_out=share)}
    assert len(digests) == 4
    assert split(range(5000))[0].contents_digest == split(list(range(5000)))[0].contents_digest


def test_parts_of_sources_with_different_vocabularies_are_refused(tmp_path: Path) -> None:
    stores = {str(size): _store(tmp_path / str(size), 60_000, vocab_size=size) for size in (257, 300)}
    mixture = Mixture(
        {name: split(TokenDataset(url, seq_len=16))[0] for name, url in stores.items()}, {"257": 1, "300": 1}
    )
    with pytest.raises(DataError, match="source '300' has vocab_size 300, but '257' has 257"):
        mixture.validate()
    with pytest.raises(DataError, match="nowhere"):
        Mixture({"a": split(TokenDataset(tmp_path / "nowhere", seq_len=16))[0]}, {"a": 1}).require_local_files()


@pytest.mark.parametrize(
    ("kind", "data", "settings", "words"),
    [
        (ConfigError, range(9), {"held_out": 0}, "held_out=0: give a number above 0 and below 1"),
        (ConfigError, range(9), {"held_out": 1.0}, "below 1"),
        (ConfigError, range(9), {"held_out": True}, "below 1"),
        (DataError, [1], {}, "1 samples: too few to hold out"),
        (ConfigError, Bucketed([1, 2], [1, 1], microbatch_size=1), {}, "a Bucketed decides the order"),
    ],
)
def test_wrong_input_is_one_sentence(kind: type[RayshardedError], data: Any, settings: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        split(data, **settings)[0].validate()


def test_parts_have_as_many_samples_as_they_say() -> None:
    for part in split(range(300), held_out=0.1):
        assert len([part[index] for index in range(len(part))]) == len(part)
        with pytest.raises(IndexError):
            part[len(part)]
    with pytest.raises(ConfigError, match="which='test'"):
        DatasetPart(range(9), "test")  # type: ignore[arg-type]
