"""A token store on a real S3 server: bytes and requests of an epoch, the start at any position, damage."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import open_storage
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, TokenDataset, dataset as data_set, order
from raysharded.data.store import store_source
from raysharded.data.store.layout import Kind
from raysharded.data.store.store_source import StoreSource
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import DataError

pytestmark = pytest.mark.s3

WINDOW = 64
KIND = Kind(tokenizer="bytes", vocab_size=50_257)
TOKENS = np.random.default_rng(0).integers(0, KIND.vocab_size, (3 * WINDOW << 16) + 100_000, dtype=np.uint32)


@pytest.fixture
def store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of three windows; a window, the read-ahead and the caches below are a sixteenth of the default ones."""
    monkeypatch.setattr(order, "WINDOW_BLOCKS", WINDOW)
    for module in (store_source, data_set):
        monkeypatch.setattr(module, "READ_AHEAD_BLOCKS", 4)
    with StoreWriter(s3_url, KIND, 1 << 22) as writer:
        for part in np.array_split(TOKENS, 10):
            writer.write(part)
    return s3_url


@pytest.mark.parametrize("seq_len", [128, 2048, 8192])
def test_an_epoch_reads_each_byte_about_once_in_few_requests(store: str, seq_len: int) -> None:
    dataset = TokenDataset(store, seq_len=seq_len, cache_bytes=16 << 20, disk_cache_bytes=0)
    dataset.validate()
    batch = BatchConfig(global_batch_size=32, microbatch_size=32, seed=1)
    loader = MicrobatchLoader(dataset, batch, prefetch=True)
    loader.skip((), 2, (dataset.samples_per_block, 32))
    steps = len(dataset) // 32
    for step in range(1, steps + 1):
        loader.plan([(step, 0)])
        microbatch = loader.load(step, 0)
        index = int(microbatch.ids[step % 32])
        assert np.array_equal(microbatch.samples[step % 32], TOKENS[index * seq_len : (index + 1) * seq_len + 1])
    assert isinstance(dataset._reader, StoreSource)
    (reader,) = dataset._reader.readers
    loader.close()
    tokens = steps * 32 * seq_len
    assert reader.num_bytes / (tokens * KIND.token_bytes) < 1.1
    assert reader.num_requests / tokens * 1e6 < 20


@pytest.mark.parametrize("position", [0, 10**9, 10**12])
def test_the_first_batch_after_a_resumption_at_any_position_is_there_soon(store: str, position: int) -> None:
    began = time.monotonic()
    dataset = TokenDataset(store, seq_len=2048, disk_cache_bytes=0)
    dataset.validate()
    loader = MicrobatchLoader(dataset, BatchConfig(global_batch_size=32, microbatch_size=32, seed=1), prefetch=True)
    loader.skip((), 2, (dataset.samples_per_block, 32))
    step = position // 32 + 1
    loader.plan([(step, 0)])
    assert len(loader.load(step, 0).samples) == 32
    took_s = time.monotonic() - began
    loader.close()
    assert took_s < 20  # under 2 s on a machine that does nothing else


def test_a_shard_that_is_missing_or_was_replaced_is_named(store: str, tmp_path: Path) -> None:
    storage = open_storage(store)
    shards = [key for key in storage.list() if key.endswith(".tokens")]
    good = storage.read(shards[1])
    storage.write(shards[1], [storage.read(shards[0])])
    dataset = TokenDataset(store, seq_len=2048, disk_cache=tmp_path)
    with pytest.raises(DataError, match=f"{shards[1]}.*the shard was replaced"):
        dataset[(1 << 22) // 2048 + 5]
    storage.write(shards[1], [good])
    dataset[(1 << 22) // 2048 + 5]
    storage.delete([shards[1]])
    with pytest.raises(DataError, match=f"{shards[1]}.*the shard is missing"):
        TokenDataset(store, seq_len=2048).validate()
    with pytest.raises(DataError, match=f"{shards[1]}.*the shard is missing"):
        TokenDataset(store, seq_len=2048, disk_cache_bytes=0)[(1 << 22) // 2048 + 5]
