"""A token store on a real S3 server: bytes and requests of an epoch, the start at any position, damage."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.storage import retry
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, PackedDataset, TokenDataset, dataset as data_set, order
from raysharded.data.packed import packed_dataset
from raysharded.data.packed.packed_dataset import NO_TARGET, _BestFit
from raysharded.data.store import store_source
from raysharded.data.store.layout import HEADER_BYTES, Kind
from raysharded.data.store.store_source import StoreSource
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import DataError, StorageError
from tests.cli.test_commands import invoke
from tests.s3.fixtures import FaultyS3
from tests.s3.proxy import Refuse, Reset
from tests.s3.server import S3Server

pytestmark = pytest.mark.s3

WINDOW = 64
KIND = Kind(tokenizer="bytes", vocab_size=50_257)
TOKENS = np.random.default_rng(0).integers(0, KIND.vocab_size, (3 * WINDOW << 16) + 100_000, dtype=np.uint32)
INDEX_OF_BLOCK = (1 << 22) // 2048 + 70
"""A sample of 2,048 in the third block of the second shard."""
OFFSET = HEADER_BYTES + 64 * KIND.page_bytes
SIZE = 33 * KIND.page_bytes
"""The first byte of that block, and the bytes of its pages, of which the last has one target."""


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


def test_documents_are_arranged_and_read_packed_on_the_server_in_few_requests(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thirty-second of the default window, whose blocks are twice as large, and of the default cache."""
    monkeypatch.setattr(order, "WINDOW_BLOCKS", WINDOW // 2)
    for module in (store_source, packed_dataset):
        monkeypatch.setattr(module, "READ_AHEAD_BLOCKS", 4)
    seq_len, end = 2048, KIND.vocab_size - 1
    kind = replace(KIND, tokenizer="sha256:0", end_of_document=end)
    lengths = np.exp(np.random.default_rng(1).normal(np.log(400), 1.2, len(TOKENS) // 1000)).astype(np.int64) + 2
    tokens = np.minimum(TOKENS[: lengths.sum()], end - 1)
    tokens[np.cumsum(lengths)[:-1] - 1] = end
    for url in (s3_url, str(tmp_path)):
        with StoreWriter(url, kind, 1 << 22) as writer:
            writer.write(tokens)
        told = invoke("data", "arrange", url, "--seq-len", seq_len, "--json")
        assert told.exit_code == 0, told.output
    data = PackedDataset(s3_url, seq_len=seq_len, cache_bytes=16 << 20, disk_cache_bytes=0)
    data.validate()
    local = PackedDataset(tmp_path, seq_len=seq_len)
    assert data.contents_digest == local.contents_digest
    loader = MicrobatchLoader(data, BatchConfig(global_batch_size=32, microbatch_size=32, seed=1), prefetch=True)
    loader.skip((), 2, (data.samples_per_block, 32))
    steps, targets = len(data) // 32, 0
    for step in range(1, steps + 1):
        loader.plan([(step, 0)])
        microbatch = loader.load(step, 0)
        targets += sum(int((sample["labels"] != NO_TARGET).sum()) for sample in microbatch.samples)
        expected = local[int(microbatch.ids[step % 32])]
        assert all(np.array_equal(value, expected[key]) for key, value in microbatch.samples[step % 32].items())
    assert targets > 0.98 * steps * 32 * seq_len, "little is padding"
    opened = data._open()
    assert isinstance(opened, _BestFit)
    (reader,) = opened._source.readers
    loader.close()
    assert reader.num_bytes / (targets * KIND.token_bytes) < 1.1
    assert reader.num_requests / targets * 1e6 < 20


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


def test_a_truncated_shard_is_noticed_before_training_and_at_a_read(store: str) -> None:
    storage = open_storage(store)
    shard = [key for key in storage.list() if key.endswith(".tokens")][1]
    good = storage.read(shard)
    storage.write(shard, [good[:-1]])
    sizes = f"{len(good) - 1} bytes instead of {len(good)}"
    with pytest.raises(DataError, match=f"{shard}.*: the shard has {sizes}: it is truncated"):
        TokenDataset(store, seq_len=2048).validate()
    for pages in (70, 3):  # the end is within the block, and before it
        storage.write(shard, [good[: HEADER_BYTES + pages * KIND.page_bytes]])
        cut = rf"the shard is truncated: \d+ bytes from byte {OFFSET} on, instead of {SIZE}"
        with pytest.raises(DataError, match=f"{shard}.*: {cut}"):
            TokenDataset(store, seq_len=2048, disk_cache_bytes=0)[INDEX_OF_BLOCK]
    storage.write(shard, [good])
    assert TokenDataset(store, seq_len=2048, disk_cache_bytes=0)[INDEX_OF_BLOCK][0] == TOKENS[INDEX_OF_BLOCK * 2048]


def test_a_failing_read_is_named_with_its_shard_and_its_bytes_and_without_the_keys(
    store: str, s3_server: S3Server, faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.01)
    shard = [key for key in open_storage(store).list() if key.endswith(".tokens")][1]
    dataset = TokenDataset(faulty_s3.url, seq_len=2048, disk_cache_bytes=0)
    dataset[0]
    for fault in (Refuse(500, "InternalError"), Refuse(403, "AccessDenied"), Reset()):
        injected = faulty_s3.proxy.inject(fault, on="GetObject", times=10**6)
        with pytest.raises(StorageError) as caught:
            dataset[INDEX_OF_BLOCK]
        assert injected.fired
        injected.left = 0
        assert re.search(f"{shard}.*: {SIZE} bytes from byte {OFFSET} on cannot be read: ", str(caught.value))
        assert s3_server.secret_key not in "".join(traceback.format_exception(caught.value))
    assert dataset[INDEX_OF_BLOCK][0] == TOKENS[INDEX_OF_BLOCK * 2048], "once the server is well"
