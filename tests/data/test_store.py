"""Token stores: what is written is read, from any storage, in few requests; damage is noticed; caches stay bounded."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, TokenDataset, sample_ids
from raysharded.data.convert import convert
from raysharded.data.mixtures.mixture import Mixture
from raysharded.data.order import WINDOW_BLOCKS, Blocks
from raysharded.data.pack import Layout, pack
from raysharded.data.packed.packed_dataset import PackedDataset
from raysharded.data.parts import DatasetPart, split
from raysharded.data.store import find
from raysharded.data.store.block_cache import BlockCache
from raysharded.data.store.disk_cache import FILE_BYTES, DiskCache, default_folder
from raysharded.data.store.layout import (
    HEADER_BYTES,
    INDEX,
    Bytes,
    Index,
    Kind,
    Shard,
    from_bytes,
    paged,
    to_bytes,
    unpaged,
)
from raysharded.data.store.store_source import READ_AHEAD_BLOCKS, StoreSource
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError, DataError
from tests.cases import tried_each_time
from tests.forked import in_a_fork

Tokens = npt.NDArray[np.uint32]
KIND = Kind(tokenizer="bytes", vocab_size=257)


def _tokens(number: int, vocab_size: int = 257, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocab_size, number, dtype=np.uint32)


def _written(folder: object, tokens: Tokens, *, per_shard: int = 1 << 26, kind: Kind = KIND) -> str:
    with StoreWriter(str(folder), kind, per_shard) as writer:
        for part in np.array_split(tokens, 7):
            writer.write(part)
    assert writer.num_tokens == len(tokens)
    return str(folder)


def _shards(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.tokens"))


def _source(dataset: TokenDataset) -> StoreSource:
    dataset[0]
    assert isinstance(dataset._reader, StoreSource)
    return dataset._reader


@given(
    vocab_size=st.sampled_from([1, 2, 256, 257, 65_536, 65_537, 1 << 24, (1 << 24) + 1, 1 << 32]),
    number=st.integers(1, 300),
    page_tokens=st.sampled_from([1, 7, 64]),
    data=st.data(),
)
def test_tokens_of_every_width_come_back_and_any_other_bit_is_noticed(
    vocab_size: int, number: int, page_tokens: int, data: st.DataObject
) -> None:
    kind = Kind(tokenizer="bytes", vocab_size=vocab_size, page_tokens=page_tokens)
    tokens = _tokens(number, vocab_size)
    plain = to_bytes(tokens, kind.token_bytes)
    key = bytes(range(32))
    pages = np.frombuffer(b"".join(paged(plain, 5, kind, key)), np.uint8)
    found = unpaged(pages, 5, kind, key)
    assert found is not None
    assert np.array_equal(from_bytes(found, kind.token_bytes), tokens)
    assert unpaged(pages, 6, kind, key) is None, "other pages of the shard"
    assert unpaged(pages, 5, kind, bytes(32)) is None, "pages of another shard"
    damaged = pages.copy()
    damaged[data.draw(st.integers(0, len(pages) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unpaged(damaged, 5, kind, key) is None


@pytest.mark.parametrize("vocab_size", [257, 100_000])
@pytest.mark.parametrize("seq_len", [3, 128, 5000])
def test_samples_are_slices_of_the_stream_across_shards_and_blocks(
    tmp_path: Path, vocab_size: int, seq_len: int
) -> None:
    kind = Kind(tokenizer="bytes", vocab_size=vocab_size)
    tokens = _tokens(200_000, vocab_size)
    folder = _written(tmp_path / "store", tokens, per_shard=70_001, kind=kind)
    dataset = TokenDataset(folder, seq_len=seq_len)
    dataset.validate()
    assert (dataset.num_tokens, dataset.vocab_size) == (len(tokens), vocab_size)
    assert len(dataset) == (len(tokens) - 1) // seq_len
    for index in {0, 1, len(dataset) // 3, len(dataset) // 2, len(dataset) - 1}:
        sample = dataset[index]
        assert sample.dtype == np.int64
        assert np.array_equal(sample, tokens[index * seq_len : index * seq_len + seq_len + 1])
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy[1], dataset[1])
    whole_and_parts: list[TokenDataset | DatasetPart] = [dataset, *split(dataset)]
    for data in whole_and_parts:
        some = [len(data) - 1, 0, len(data) // 3, 0, *range(len(data) // 2)][:70]  # more than are read at once
        rows = data.read_rows(some)
        assert rows is not None
        assert np.array_equal(rows, [data[index] for index in some])
        assert data.read_rows([0, len(data)]) is None, "the read of the single sample explains it"


class Shifted(TokenDataset):
    """Other samples than those of the store."""

    def __getitem__(self, index: int, /) -> npt.NDArray[np.int64]:
        return super().__getitem__(index) + 1


def test_samples_of_a_derived_class_are_its_own(tmp_path: Path) -> None:
    folder = _written(tmp_path / "store", _tokens(10_000))
    batch = BatchConfig(global_batch_size=8, microbatch_size=4, seed=1)
    derived, plain = (MicrobatchLoader(kind(folder, seq_len=100), batch) for kind in (Shifted, TokenDataset))
    for step in (1, 2):
        found, stored = derived.load(step, 1), plain.load(step, 1)
        assert np.array_equal(found.samples, np.asarray(stored.samples) + 1)
        assert found.digest == stored.digest


def test_several_stores_are_one_stream_in_the_order_of_the_paths(tmp_path: Path) -> None:
    tokens = _tokens(10_000)
    one, two = _written(tmp_path / "b", tokens[:4_001]), _written(tmp_path / "a", tokens[4_001:])
    dataset = TokenDataset([one, two], seq_len=100)
    assert np.array_equal(np.concatenate([dataset[i][:-1] for i in range(len(dataset))]), tokens[:9_900])


def test_the_same_tokens_give_the_same_bytes_however_they_are_written(tmp_path: Path) -> None:
    tokens = _tokens(100_000)
    one = _written(tmp_path / "one", tokens, per_shard=30_000)
    with StoreWriter(str(tmp_path / "two"), KIND, 30_000) as writer:
        for token in np.array_split(tokens, 1000):
            writer.write(token)
    for path in Path(one).iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_store_at_a_url_is_read_as_one_in_a_folder(tmp_path: Path) -> None:
    tokens = _tokens(50_000)
    url = _written("memory://stores/one", tokens, per_shard=20_000)
    dataset = TokenDataset(url, seq_len=64, disk_cache=tmp_path / "cache")
    dataset.validate()
    assert np.array_equal(dataset[500], tokens[500 * 64 : 501 * 64 + 1])
    assert _source(dataset).readers[0].num_requests <= 4


def test_a_failed_writer_leaves_nothing_and_a_second_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def interrupted() -> None:
        with StoreWriter(str(folder), KIND, 1000) as writer:
            writer.write(_tokens(5_000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not folder.exists()
    with pytest.raises(DataError, match="token 300 is outside"), StoreWriter(str(folder), KIND, 1000) as writer:
        writer.write(np.asarray([1, 300]))
    assert not folder.exists()
    _written(folder, _tokens(5_000))
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match="already has a token store"), StoreWriter(str(folder), KIND, 1000):
        pass
    assert sorted(folder.iterdir()) == before


def test_a_writer_whose_shards_an_interrupted_one_removed_makes_no_store(tmp_path: Path) -> None:
    folder, tokens = str(tmp_path / "store"), _tokens(5_000)

    def interrupted() -> None:
        with StoreWriter(folder, KIND, 1_000) as writer:
            writer.write(tokens)
            raise KeyboardInterrupt

    def whole() -> None:
        with StoreWriter(folder, KIND, 1_000) as writer:
            writer.write(tokens)
            with pytest.raises(KeyboardInterrupt):
                interrupted()

    with pytest.raises(ConfigError, match=r"has removed shard-00000-\w+\.tokens\. Write them again"):
        whole()
    _written(folder, tokens, per_shard=1_000)
    TokenDataset(folder, seq_len=128).validate()


def test_a_block_has_at_most_65536_tokens(tmp_path: Path) -> None:
    folder = _written(str(tmp_path / "store"), _tokens(5_000))
    sizes = {length: TokenDataset(folder, seq_len=length).samples_per_block for length in (128, 1000, 2048, 3000, 4999)}
    assert sizes == {128: 512, 1000: 64, 2048: 32, 3000: 16, 4999: 8}


def test_of_two_writers_in_one_folder_one_wins_and_keeps_its_shards(tmp_path: Path) -> None:
    folder, tokens = str(tmp_path / "store"), _tokens(5_000)

    def raced() -> None:
        with StoreWriter(folder, KIND, 2_000) as slow:
            slow.write(_tokens(5_000, seed=1))
            _written(folder, tokens, per_shard=2_000)

    with pytest.raises(ConfigError, match="from someone else meanwhile"):
        raced()
    dataset = TokenDataset(folder, seq_len=1000)
    dataset.validate()
    assert np.array_equal(dataset[2], tokens[2_000:3_001])
    assert len(_shards(folder)) == 3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "the shard is missing"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "the shard has .* bytes instead of"),
    ],
)
def test_a_shard_that_is_missing_or_truncated_is_noticed_before_training(
    tmp_path: Path, damage: object, words: str
) -> None:
    folder = _written(tmp_path / "store", _tokens(5_000), per_shard=2_000)
    assert callable(damage)
    damage(_shards(folder)[1])
    with pytest.raises(DataError, match=words) as caught:
        TokenDataset(folder, seq_len=10).validate()
    assert "shard-00001" in str(caught.value)


def test_a_shard_of_another_store_is_noticed_before_training_with_its_tokenizer(tmp_path: Path) -> None:
    kinds = {
        "own": KIND,
        "same": KIND,
        "words": Kind(tokenizer=f"sha256:{'0' * 64}", vocab_size=257),
        "larger": Kind(tokenizer="bytes", vocab_size=300),
    }
    folders = {
        name: _written(tmp_path / name, _tokens(5000, seed=len(name)), per_shard=1000, kind=kind)
        for name, kind in kinds.items()
    }
    dataset = TokenDataset(folders["own"], seq_len=16)
    dataset.validate()
    for name, message in (
        ("words", r"the shard's tokenizer is 'sha256:0+', but that of the store is 'bytes': it is a shard of another"),
        ("larger", "the shard's vocab_size is 300, but that of the store is 257"),
        ("same", "the shard was replaced: it has the id"),
    ):
        _shards(folders["own"])[3].write_bytes(_shards(folders[name])[3].read_bytes())
        with pytest.raises(DataError, match=message) as raised:
            dataset.validate()
        assert str(raised.value).startswith(str(_shards(folders["own"])[3]))


def test_of_many_shards_64_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TokenDataset(_written(tmp_path, _tokens(1500), per_shard=10), seq_len=4)
    looked_at: list[str] = []
    monkeypatch.setattr(find, "_check_header", lambda *given: looked_at.append(given[-1].name))
    dataset.validate()
    assert len(set(looked_at)) == len(looked_at) == 50, "each third of 150"


def test_a_damaged_byte_a_replaced_shard_and_a_truncated_one_are_noticed_at_the_read(tmp_path: Path) -> None:
    folder = _written(tmp_path / "store", _tokens(5_000), per_shard=2_000)
    other = _written(tmp_path / "other", _tokens(5_000, seed=1), per_shard=2_000)
    path = _shards(folder)[1]
    good = path.read_bytes()

    def refused(words: str) -> None:
        dataset = TokenDataset(folder, seq_len=100)
        with pytest.raises(DataError, match=words):
            dataset[25]

    path.write_bytes(good[: HEADER_BYTES + 9] + bytes([good[HEADER_BYTES + 9] ^ 1]) + good[HEADER_BYTES + 10 :])
    refused("do not fit their digests: the shard is damaged")
    path.write_bytes(_shards(other)[1].read_bytes())
    refused("the shard was replaced: it has the id")
    path.write_bytes(good[:-100])
    refused("the shard is truncated")
    path.write_bytes(b"x" * len(good))
    refused("not a shard of a token store")
    path.write_bytes(good)
    TokenDataset(folder, seq_len=100)[25]


def test_an_index_that_is_damaged_or_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = _written(tmp_path / "store", _tokens(5_000))
    index = tmp_path / "store" / INDEX
    text = index.read_text()
    for changed, words in (
        (text[:50], "damaged"),
        (text.replace('"version": 1', '"version": 2'), "this raysharded reads version 1"),
        (text.replace('"num_tokens": 5000,', '"num_tokens": 5001,', 1), "promises 5001 tokens"),
        (text.replace("shard-", "../shard-"), "damaged"),
        ("[]", "not of a token store"),
    ):
        index.write_text(changed)
        with pytest.raises(DataError, match=words):
            TokenDataset(folder, seq_len=10).validate()


def test_stores_of_different_tokenizers_and_a_store_beside_files_are_refused(tmp_path: Path) -> None:
    one = _written(tmp_path / "one", _tokens(500))
    two = _written(tmp_path / "two", _tokens(500), kind=Kind(tokenizer="sha256:0", vocab_size=257))
    with pytest.raises(DataError, match=r"its tokenizer is 'sha256:0', but that of .*one is 'bytes'"):
        TokenDataset([one, two], seq_len=10).validate()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no token store, but .*one is one"):
        TokenDataset([one, tmp_path / "folder"], seq_len=10).validate()


@pytest.mark.parametrize("seq_len", tried_each_time([128], [128, 2048, 8192]))
def test_an_epoch_reads_each_byte_about_once_in_few_requests(
    tmp_path: Path, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of the default window and of the default cache, and data of three such windows."""
    monkeypatch.setattr("raysharded.data.order.WINDOW_BLOCKS", WINDOW_BLOCKS // 16)
    window = (WINDOW_BLOCKS // 16) << 16
    tokens = _tokens(3 * window + 100_000, 257)
    url = _written(f"memory://epoch/{seq_len}", tokens, per_shard=1 << 22)
    dataset = TokenDataset(url, seq_len=seq_len, cache_bytes=16 << 20, disk_cache_bytes=0)
    batch = 32
    num_samples = len(dataset)
    blocks = Blocks(dataset.samples_per_block, batch)
    source = _source(dataset)
    for start in range(0, num_samples, 8192):
        ids = sample_ids(3, np.arange(start, min(start + 8192, num_samples)), num_samples, 2, blocks)
        dataset.read_ahead(ids)
        for number in (ids // blocks.samples).tolist():
            source.blocks.get(number)
    (reader,) = source.readers
    used = num_samples * seq_len * KIND.token_bytes
    assert reader.num_bytes / used < 1.1
    assert reader.num_requests / (num_samples * seq_len / 1e6) < 20
    assert source.blocks.num_bytes <= 16 << 20


class Counted:
    """Blocks of ten bytes, each read when it is released."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.began = threading.Semaphore(0)

    def __call__(self, number: int) -> npt.NDArray[np.uint8]:
        with self.lock:
            self.reads.append(number)
        self.began.release()
        assert self.released.wait(30)
        if number == 99:
            raise DataError("99 cannot be read")
        return np.full(10, number, dtype=np.uint8)


def test_reading_ahead_is_bounded_and_in_order_and_a_block_is_read_once() -> None:
    counted = Counted()
    cache = BlockCache(counted, limit_bytes=100, ahead_bytes=30, num_readers=2)
    cache.expect([1, 2, 3, 4, 5, 6])
    for _ in range(2):
        assert counted.began.acquire(timeout=30)
    assert sorted(counted.reads) == [1, 2], "as many as there are readers"
    counted.released.set()
    assert cache.get(1)[0] == 1
    assert cache.get(2)[0] == 2
    for number in range(3, 7):
        assert cache.get(number)[0] == number
    assert sorted(counted.reads) == [1, 2, 3, 4, 5, 6]
    assert cache.num_bytes == 60
    cache.close()


def test_blocks_ahead_that_nobody_used_stop_further_reading_and_are_given_up_after_a_change() -> None:
    counted = Counted()
    counted.released.set()
    cache = BlockCache(counted, limit_bytes=1000, ahead_bytes=30, num_readers=1)
    cache.get(0)
    cache.expect(range(1, 50))
    for _ in range(4):
        assert counted.began.acquire(timeout=30)
    for _ in range(2):  # after the read in progress, and after one that it might have begun
        assert cache._threads is not None
        cache._threads.submit(int).result(30)
    assert counted.reads == [0, 1, 2, 3]
    cache.forget()
    cache.expect(range(60, 63))
    for _ in range(3):
        assert counted.began.acquire(timeout=30)
    assert counted.reads == [0, 1, 2, 3, 60, 61, 62]
    cache.close()


def test_a_read_that_failed_is_raised_where_it_is_used_and_tried_again_then() -> None:
    counted = Counted()
    counted.released.set()
    cache = BlockCache(counted, limit_bytes=1000, ahead_bytes=100, num_readers=2)
    cache.expect([98, 99])
    for _ in range(2):
        with pytest.raises(DataError, match="99 cannot be read"):
            cache.get(99)
    assert cache.get(98)[0] == 98
    cache.close()


def test_memory_stays_within_its_limit_and_what_was_used_last_is_kept() -> None:
    counted = Counted()
    counted.released.set()
    cache = BlockCache(counted, limit_bytes=50, ahead_bytes=20, num_readers=2)
    for number in range(20):
        cache.get(number)
        cache.get(0)
        assert cache.num_bytes <= 50
    assert counted.reads.count(0) == 1
    assert cache.get(1)[0] == 1
    assert counted.reads.count(1) == 2
    cache.close()


def test_a_closed_cache_ends_its_threads_keeps_nothing_and_lets_those_who_wait_have_their_blocks() -> None:
    counted = Counted()
    cache = BlockCache(counted, limit_bytes=100, ahead_bytes=50, num_readers=2)
    with ThreadPoolExecutor(2) as callers:
        waiting = [callers.submit(cache.get, number) for number in (1, 2)]
        for _ in waiting:
            assert counted.began.acquire(timeout=30)
        cache.close()
        counted.released.set()
        assert [one.result(30)[0] for one in waiting] == [1, 2]
    assert cache.get(3)[0] == 3
    assert cache._threads is not None
    cache._threads.shutdown(wait=True)
    assert cache.num_bytes == 0
    assert sorted(counted.reads) == [1, 2, 3]


def test_a_block_whose_thread_cannot_be_started_raises_and_is_read_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted()
    counted.released.set()
    cache = BlockCache(counted, limit_bytes=100, ahead_bytes=50, num_readers=2)
    real, fails = threading.Thread.start, [True]

    def start(thread: threading.Thread) -> None:
        if fails and thread.name.startswith("raysharded-blocks"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cache.get(1)
    cache.expect([2, 3])  # nothing is read ahead then, and nothing fails
    fails.clear()
    with ThreadPoolExecutor(1) as caller:
        assert caller.submit(lambda: [cache.get(number)[0] for number in (1, 2, 3)]).result(30) == [1, 2, 3]
    assert sorted(counted.reads) == [1, 2, 3]
    cache.close()


def _read_all(url: str, cache: Path, **limits: int) -> StoreSource:
    dataset = TokenDataset(url, seq_len=2048, disk_cache=cache, **limits)
    for index in range(len(dataset)):
        dataset[index]
    return _source(dataset)


def test_a_restarted_process_reads_from_the_disk_and_a_damaged_entry_is_read_again(tmp_path: Path) -> None:
    tokens = _tokens(500_000)
    url = _written("memory://stores/disk", tokens)
    first = _read_all(url, tmp_path).readers[0]
    assert (first.num_disk_hits, first.num_requests) == (0, 8)
    second = _read_all(url, tmp_path).readers[0]
    assert (second.num_disk_hits, second.num_requests) == (8, 0)
    kept = next(path for path in tmp_path.rglob("*-*") if path.is_file())
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    third = _read_all(url, tmp_path).readers[0]
    assert (third.num_disk_hits, third.num_requests) == (7, 1)
    assert _read_all(url, tmp_path).readers[0].num_requests == 0
    os.truncate(kept, HEADER_BYTES + 7 * KIND.page_bytes)
    os.truncate(kept, 2 * FILE_BYTES)  # it ends with a hole
    last = _read_all(url, tmp_path).readers[0]
    assert last.num_disk_hits + last.num_requests == 8
    assert last.num_requests > 0
    assert _read_all(url, tmp_path).readers[0].num_requests == 0
    assert _read_all(url, tmp_path, disk_cache_bytes=0).readers[0].num_requests == 8


def _page(number: int, size: int = 4096) -> Bytes:
    return np.full(size, number, dtype=np.uint8)


def _on_disk(folder: Path) -> int:
    """Bytes that the files of a disk cache take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*-*") if path.is_file())


def _is_kept(cache: DiskCache, number: int) -> bool:
    """Whether the cache has the page that was put alone into a file."""
    found = cache.get("aa", number * FILE_BYTES, 4096)
    assert found is None or np.array_equal(found, _page(number))
    return found is not None


def test_the_disk_cache_is_bounded_and_removes_what_was_not_used_longest(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 81_920)
    for number in range(100):
        cache.put("aa", number * FILE_BYTES, _page(number))
        os.utime(tmp_path / "aa" / f"aa-{number}", (number, number))
        assert _on_disk(tmp_path) <= 81_920 + 81_920 // 16
    assert not _is_kept(cache, 0)
    assert _is_kept(cache, 99)
    assert (tmp_path / "aa" / "aa-99").stat().st_mtime > 99, "it was used now"
    assert _is_kept(DiskCache(str(tmp_path), 81_920), 99)
    larger = DiskCache(str(tmp_path), 163_840)
    DiskCache(str(tmp_path), 8_192)
    assert _is_kept(cache, 99), "the largest limit of a process counts"
    del cache, larger
    DiskCache(str(tmp_path), 8_192)
    assert _on_disk(tmp_path) <= 8_192


def test_reads_of_one_file_of_the_disk_cache_lie_in_it_each_at_its_place(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1 << 20)
    offsets = [FILE_BYTES - 4096, 0, 3 * 4096, 40_000]  # the first one ends in the next file's part
    for number, offset in enumerate(offsets, 1):
        assert cache.get("aa", offset, 8192) is None, "a hole, or the file's end"
        cache.put("aa", offset, _page(number, 8192))
    assert [path.name for path in tmp_path.rglob("aa*") if path.is_file()] == ["aa-0"]
    for number, offset in enumerate(offsets, 1):
        assert np.array_equal(cache.get("aa", offset, 8192), _page(number, 8192))  # type: ignore[arg-type]
    assert cache.get("aa", FILE_BYTES, 4096) is None, "it is looked for in the next file"


@pytest.mark.parametrize("name", ["a[1]", "a*", "in?b=c"])
def test_a_folder_whose_name_looks_like_a_glob_has_a_store_as_any_other(tmp_path: Path, name: str) -> None:
    tokens = _tokens(1000)
    folder = _written(tmp_path / name, tokens)
    dataset = TokenDataset(folder, seq_len=16)
    dataset.validate()
    assert np.array_equal(dataset[3], tokens[48:65])


def test_options_of_a_url_are_no_glob(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(find, "read_index", lambda storage: looked.append(storage.url))
    server = "s3://bucket/corpus?endpoint_url=http://[::1]:9000"
    for path in (server, "s3://bucket/a?.parquet", "s3://bucket/part-[0-9]", "s3://bucket/*?region=eu"):
        assert find.find_stores([path]) == ()
    assert looked == [server]


def test_a_digest_of_the_stores_is_kept_whatever_is_made_of_them(tmp_path: Path) -> None:
    tokens, end = _tokens(3000, 256), replace(KIND, end_of_document=256)
    one, other, cut = (
        _written(tmp_path / name, some, per_shard=shard, kind=end)
        for name, some, shard in (("one", tokens, 1000), ("other", tokens[::-1], 1000), ("cut", tokens, 999))
    )

    def digests(*paths: str) -> list[str]:
        data = TokenDataset(paths, seq_len=16)
        packed = PackedDataset(paths[0], seq_len=16, packing="concatenate")
        return [
            data.stores_digest,
            split(data)[0].stores_digest,
            Mixture({"web": data, "list": [1, 2]}, {"web": 1.0, "list": 1.0}).stores_digest,
            packed.stores_digest,
        ]

    assert digests(one) == digests(one)
    assert all(digests(one))
    for paths in ((other,), (cut,), (one, other), (other, one)):
        assert all(mine != theirs for mine, theirs in zip(digests(one)[:3], digests(*paths)[:3], strict=True))
    assert digests(one, other)[:3] != digests(other, one)[:3], "the order of the stores is that of the tokens"
    pack(__file__, tmp_path / "files", layout="parquet", input_format="text")
    assert TokenDataset(tmp_path / "files", seq_len=16).stores_digest == ""
    assert Mixture({"list": [1, 2]}, {"list": 1.0}).stores_digest == ""


def test_many_caches_of_a_process_in_one_folder_have_one_limit_together(tmp_path: Path) -> None:
    caches = [DiskCache(str(tmp_path), 81_920) for _ in range(20)]  # as of the sources of a mixture
    for number in range(100):
        caches[number % len(caches)].put("aa", number * FILE_BYTES, _page(number))
        assert _on_disk(tmp_path) <= 81_920 + 81_920 // 16


def test_the_default_cache_is_kept_from_others_whatever_the_umask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0o002)  # of ordinary users, on many systems
    try:
        assert DiskCache(default_folder(), 1000).keeps
    finally:
        os.umask(before)
    above = Path(default_folder()).parent
    assert stat.S_IMODE(above.stat().st_mode) == 0o700
    above.chmod(0o775)  # as an earlier version made it
    assert DiskCache(default_folder(), 1000).keeps


def test_what_somebody_put_in_a_file_s_place_is_neither_read_nor_written(tmp_path: Path) -> None:
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        cache = DiskCache(str(tmp_path), 1 << 20)
        cache.put("aa", 0, _page(1))
        file = tmp_path / "aa" / "aa-0"
        file.unlink()
        put(file)
        assert cache.get("aa", 0, 4096) is None
        cache.put("aa", 0, _page(1))
        assert not cache.keeps
        file.rmdir() if file.is_dir() else file.unlink()


def test_a_disk_cache_that_cannot_be_written_keeps_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    url = _written("memory://stores/readonly", _tokens(300_000))
    (tmp_path / "file").write_text("no folder")
    assert _read_all(url, tmp_path / "file").readers[0].num_requests == 5
    for_others = tmp_path / "open"
    for_others.mkdir()
    for_others.chmod(0o777)
    (for_others / "aa").mkdir()
    (for_others / "aa" / "aa-0").write_bytes(b"of others")
    open_to_others = DiskCache(str(for_others), 1000)
    assert not open_to_others.keeps, "others could put something there"
    assert open_to_others.get("aa", 0, 9) is None, "and may have"
    replaceable = DiskCache(str(for_others / "mine"), 1000)
    assert not replaceable.keeps, "others could put another folder in its place"
    assert replaceable.get("aa", 0, 9) is None
    for_others.chmod(0o1777)
    assert DiskCache(str(for_others / "mine"), 1000).keeps, "a sticky folder lets nobody"
    gone = DiskCache(str(tmp_path / "gone"), 1000)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "gone").write_text("no folder")
    gone.put("aa", 0, _page(1, 1))
    assert not gone.keeps
    assert gone.get("aa", 0, 1) is None


def _put_on_a_full_disk(folder: str) -> tuple[bool, bool, bool]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    cache = DiskCache(folder, 1 << 20)
    cache.put("aa", 0, _page(0))
    kept = cache.keeps
    cache.put("aa", 4096, _page(1))  # a part of it fits
    return kept, cache.keeps, cache.get("aa", 4096, 4096) is None


def test_a_disk_cache_on_a_full_disk_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to write more, as on a full disk."""
    assert in_a_fork(_put_on_a_full_disk, str(tmp_path)) == (True, False, True)
    assert _is_kept(DiskCache(str(tmp_path), 1 << 20), 0)
    there = os.statvfs(tmp_path)
    nearly_full = os.statvfs_result((*there[:3], *(there.f_blocks // 1000,) * 2, *there[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: nearly_full)
    cache = DiskCache(str(tmp_path), 1 << 20)
    assert not cache.keeps, "a disk with less than a twentieth left is left to others"
    cache.put("aa", 3 * FILE_BYTES, _page(3))
    assert not _is_kept(cache, 3)


def _use_together(folder: str, own: int) -> int:
    """The number of pages that came back otherwise than they were put there, by this process or another."""
    cache, wrong = DiskCache(folder, 327_680), 0
    for number in range(200):
        page, size = number % 50, 4096
        cache.put(f"{own}a", page * FILE_BYTES // 4, _page(page, size))
        for process in range(3):
            found = cache.get(f"{process}a", page * FILE_BYTES // 4, size)
            wrong += found is not None and not np.isin(found, (0, page)).all()  # 0: not written yet
    assert cache.keeps
    return wrong


def test_processes_share_a_disk_cache_within_its_bound(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(partial(in_a_fork, _use_together, str(tmp_path)), range(3))) == [0, 0, 0]
    assert 0 < _on_disk(tmp_path) <= 327_680 + 3 * (327_680 // 16 + 4096)


def test_a_loader_that_reads_ahead_gives_the_same_as_one_that_does_not(tmp_path: Path) -> None:
    tokens = _tokens(300_000)
    folder = _written(tmp_path / "store", tokens, per_shard=100_000)
    batch = BatchConfig(global_batch_size=8, microbatch_size=2, seed=3)
    loaders = []
    for prefetch in (False, True):
        dataset = TokenDataset(folder, seq_len=64)
        loader = MicrobatchLoader(dataset, batch, prefetch=prefetch)
        loader.skip(((3, 16),), 2, (dataset.samples_per_block, 8))
        loaders.append(loader)
    plain, ahead = loaders
    for own in ([0, 1, 2, 3], [1], [2, 3]):  # as for other numbers of workers
        for step in (1, 2, 3, 4, 900, 901, 2):
            ahead.plan([(step, index) for index in own])
            for index in own:
                one, two = plain.load(step, index), ahead.load(step, index)
                assert one.ids.tolist() == two.ids.tolist()
                assert one.digest == two.digest
                assert all(np.array_equal(a, b) for a, b in zip(one.samples, two.samples, strict=True))
    reader = dataset._reader
    assert isinstance(reader, StoreSource)
    for loader in loaders:
        loader.close()
    assert dataset._reader is None
    assert reader.blocks.num_bytes == 0, "the loader's end is that of its threads and blocks"
    assert np.array_equal(dataset[7], tokens[7 * 64 : 8 * 64 + 1])


@pytest.mark.parametrize("position", tried_each_time([10**12], [10**9, 10**12]))
def test_the_first_batch_after_a_resumption_needs_little_time_and_memory(tmp_path: Path, position: int) -> None:
    """15,000 shards of 2^26 tokens, 10^12 in all, of which the pages exist that the batch needs."""
    kind, batch, seq_len, per_block = Kind(tokenizer="bytes", vocab_size=50_257), 32, 128, 512
    shards = tuple(Shard(name=f"{number}.tokens", num_tokens=1 << 26, id=f"{number:064x}") for number in range(15_000))
    (tmp_path / INDEX).write_bytes(Index(kind=kind, shards=shards).to_json())
    step = position // batch + 1
    num_samples = ((15_000 << 26) - 1) // seq_len
    positions = np.arange((step - 1) * batch, step * batch)
    expected = sample_ids(0, positions, num_samples, 2, Blocks(per_block, batch))
    for number in set((expected // per_block).tolist()):
        _write_tokens(tmp_path, shards, kind, number * per_block * seq_len, per_block * seq_len + 1)
    dataset = pickle.loads(pickle.dumps(TokenDataset(tmp_path, seq_len=seq_len)))
    began = time.process_time()
    loader = MicrobatchLoader(dataset, BatchConfig(global_batch_size=batch, microbatch_size=batch), prefetch=True)
    loader.skip((), 2, (dataset.samples_per_block, batch))
    loader.plan([(step, 0)])
    microbatch = loader.load(step, 0)
    took_s = time.process_time() - began
    assert microbatch.ids.tolist() == expected.tolist()
    assert all(
        sample[0] == index * seq_len % 50_257 for index, sample in zip(expected, microbatch.samples, strict=True)
    )
    assert took_s < 2
    assert dataset._reader.blocks.num_bytes <= (32 + READ_AHEAD_BLOCKS) * 131_074
    assert len(pickle.dumps(dataset)) < 4 << 20, "what a worker is sent, and about what the index takes"
    loader.close()


def _write_tokens(folder: Path, shards: tuple[Shard, ...], kind: Kind, start: int, number: int) -> None:
    """Token t of the stream is t modulo the vocabulary, in the pages that have these tokens."""
    stop = start + number
    while start < stop:
        of, within = divmod(start, 1 << 26)
        until = min(stop - (of << 26), 1 << 26)
        pages = range(within // kind.page_tokens, -(-until // kind.page_tokens))
        tokens = ((of << 26) + np.arange(pages.start * kind.page_tokens, pages.stop * kind.page_tokens)) % 50_257
        with open(folder / shards[of].name, "ab") as file:  # makes it
            os.truncate(file.fileno(), shards[of].size_bytes(kind))
        with open(folder / shards[of].name, "r+b") as file:
            file.seek(shards[of].byte_range(kind, pages)[0])
            file.write(b"".join(paged(to_bytes(tokens, kind.token_bytes), pages.start, kind, shards[of].key)))
        start += until - within


def test_what_is_packed_into_a_store_is_what_is_packed_into_files_and_converts_to_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text(name * 10_000)
    packed = pack(tmp_path / "in", tmp_path / "store", tokens_per_file=7_000)
    assert (packed.files, packed.documents, packed.tokens) == (3, 2, 20_002)
    assert packed.bytes == sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    pack(tmp_path / "in", tmp_path / "files", tokens_per_file=9_000, layout="parquet")
    done = convert(tmp_path / "files", tmp_path / "converted", tokens_per_file=7_000)
    assert (done.files, done.tokens, done.bytes) == (packed.files, packed.tokens, packed.bytes)
    for path in (tmp_path / "store").iterdir():
        assert path.read_bytes() == (tmp_path / "converted" / path.name).read_bytes()
    store, files = (TokenDataset(tmp_path / name, seq_len=100) for name in ("store", "files"))
    assert all(np.array_equal(store[i], files[i]) for i in range(len(files)))
    assert store.samples_per_block == files.samples_per_block, "a run may go on with the converted data"


def test_pack_refuses_a_folder_with_packed_data_of_either_layout(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    pack(tmp_path / "a.txt", tmp_path / "store")
    pack(tmp_path / "a.txt", tmp_path / "files", layout="parquet")
    layouts: tuple[Layout, ...] = ("store", "parquet")
    for layout in layouts:
        with pytest.raises(ConfigError, match="already has a token store"):
            pack(tmp_path / "a.txt", tmp_path / "store", layout=layout)
        with pytest.raises(ConfigError, match="already has 1 Parquet file"):
            pack(tmp_path / "a.txt", tmp_path / "files", layout=layout)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="Nothing to pack"):
        pack(tmp_path / "empty.jsonl", tmp_path / "none")
    assert not (tmp_path / "none").exists()
