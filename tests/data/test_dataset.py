from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.data.convert import convert
from raysharded.data.dataset import Dataset, TokenDataset
from raysharded.data.pack import pack
from raysharded.data.packed.packed_dataset import PackedDataset
from raysharded.data.text.token_file import TokenHeader, token_dtype
from raysharded.data.text.token_reader import TokenReader
from raysharded.errors import ConfigError, DataError, RayshardedError
from tests.cases import examples


def _write(
    path: Path | str,
    tokens: list[int],
    *,
    header: TokenHeader | None = None,
    metadata: dict[str, str] | None = None,
    column: str = "tokens",
    kind: pa.DataType = None,
    per_row_group: int = 100,
    **options: object,
) -> None:
    header = header or TokenHeader(tokenizer="bytes", vocab_size=257, num_tokens=len(tokens))
    schema = pa.schema(
        [pa.field(column, kind or pa.uint16())], metadata=header.to_metadata() if metadata is None else metadata
    )
    with fsspec.open(str(path), "wb") as handle:
        pq.write_table(pa.table([tokens], schema=schema), handle, row_group_size=per_row_group, **options)


def _random_tokens(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 257, count).tolist()
    return tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three token files with 1000 tokens in all, in row groups of 100."""
    stream = _random_tokens(1000)
    for number, (start, stop) in enumerate([(0, 330), (330, 331), (331, 1000)]):
        _write(tmp_path / f"part-{number}.parquet", stream[start:stop], write_page_checksum=True)
    return tmp_path


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) >= 2),
    per_row_group=st.integers(1, 15),
    data=st.data(),
)
@settings(max_examples=examples(20, of=40), deadline=None)
def test_sample_i_is_its_slice_of_all_files_streams(
    lengths: list[int], per_row_group: int, data: st.DataObject
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    stream = _random_tokens(sum(lengths))
    ends = np.cumsum(lengths).tolist()
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        _write(f"{root}/{number}.parquet", stream[end - length : end], per_row_group=per_row_group)
    seq_len = data.draw(st.integers(1, len(stream) - 1))
    dataset = TokenDataset(f"{root}/*.parquet", seq_len=seq_len, cache_bytes=1)
    assert len(dataset) == (len(stream) - 1) // seq_len
    for i in data.draw(st.permutations(range(len(dataset)))):
        assert dataset[i].tolist() == stream[i * seq_len : i * seq_len + seq_len + 1]
        assert dataset[i].dtype == np.int64


def test_files_folders_globs_and_urls_find_the_same_data_in_any_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TokenDataset(str(folder), seq_len=10)
    assert (len(whole), whole.vocab_size, whole.num_tokens) == (99, 257, 1000)
    files: list[str | Path] = [folder / f"part-{number}.parquet" for number in (2, 0, 1)]
    monkeypatch.chdir(folder.parent)
    ways: list[str | Path | list[str | Path]] = [
        folder,
        f"{folder}/",
        f"{folder}/part-*.parquet",
        f"file://{folder}/*.parquet",
        files,
        [*files, str(folder)],
        folder.name,
    ]
    for paths in ways:
        dataset = TokenDataset(paths, seq_len=10)
        assert [dataset[i].tolist() for i in range(99)] == [whole[i].tolist() for i in range(99)]


def test_it_is_a_dataset_and_iterates_once_over_its_samples(folder: Path) -> None:
    dataset = TokenDataset(str(folder), seq_len=300)
    assert isinstance(dataset, Dataset)
    assert [sample.shape for sample in iter(dataset)] == [(301,)] * 3
    with pytest.raises(IndexError, match="sample 3 of 3"):
        dataset[3]
    with pytest.raises(IndexError):
        dataset[-1]


def test_a_pickled_copy_opens_the_files_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    unopened = TokenDataset(folder.name, seq_len=7)
    monkeypatch.chdir("/")
    copies = [pickle.loads(pickle.dumps(unopened))]
    assert unopened[3].shape == (8,)
    copies.append(pickle.loads(pickle.dumps(unopened)))
    for copy in copies:
        assert len(copy) == len(unopened)
        assert copy[100].tolist() == unopened[100].tolist()


def test_a_copy_that_knows_the_footers_keeps_to_them_when_files_are_added(folder: Path) -> None:
    dataset = TokenDataset(str(folder), seq_len=7)
    length = len(dataset)
    pickled = pickle.dumps(dataset)
    _write(folder / "part-0a.parquet", _random_tokens(50))
    copy = pickle.loads(pickled)
    assert len(copy) == length
    assert copy[length - 1].tolist() == dataset[length - 1].tolist()
    copy.validate()
    assert len(copy) > length


def test_many_threads_read_the_same_samples(folder: Path) -> None:
    dataset = TokenDataset(str(folder), seq_len=7, cache_bytes=500)
    expected = [dataset[i].tolist() for i in range(len(dataset))]
    results: dict[int, list[list[int]]] = {}

    def read(worker: int) -> None:
        results[worker] = [dataset[i].tolist() for i in range(len(dataset))]

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[worker] for worker in range(4)] == [expected] * 4


def test_decoded_row_groups_stay_within_the_given_memory(folder: Path) -> None:
    dataset = TokenDataset(str(folder), seq_len=7)
    index = dataset._opened()
    reader = TokenReader(index.files, np.diff(index.starts), cache_bytes=500)
    out = np.empty(50, dtype=np.int64)
    for offset in (0, 280, 150, 0):
        reader.read(0, offset, out)
        assert 0 < reader.cached_bytes <= 500


@pytest.mark.parametrize(
    "arguments", [{"seq_len": 0}, {"seq_len": True}, {"seq_len": 2.5}, {"seq_len": 4, "cache_bytes": 0}]
)
def test_bad_numbers_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a whole number"):
        TokenDataset("nowhere", **arguments)


@pytest.mark.parametrize("paths", ["", [], ["a", ""], 3, [b"a"]])
def test_paths_that_are_invalid_are_refused_at_once(paths: list[str]) -> None:
    with pytest.raises((ConfigError, TypeError), match=r"TokenDataset.paths|not iterable"):
        TokenDataset(paths, seq_len=4)


def _refused(paths: object, *words: str, seq_len: int = 4) -> None:
    dataset = TokenDataset(paths, seq_len=seq_len)  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        dataset.validate()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    with pytest.raises(DataError):
        len(dataset)


def test_nothing_there_is_named(tmp_path: Path) -> None:
    _refused(f"{tmp_path}/*.parquet", f"{tmp_path}/*.parquet", "no file matches")
    _refused(f"{tmp_path}/gone.parquet", "gone.parquet", "no such file")
    _refused(str(tmp_path), str(tmp_path), "the folder has neither a token store nor a file that ends with '.parquet'")
    _refused("memory://nowhere/*.parquet", "memory://nowhere/*.parquet", "no file matches")
    _refused("nosuchprotocol://bucket/x", "nosuchprotocol://bucket/x", "install the package")


def test_a_file_that_is_missing_between_those_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 50)
    pack(tmp_path / "a.txt", tmp_path / "out", tokens_per_file=10, layout="parquet")
    (tmp_path / "out" / "part-00002.parquet").unlink()
    _refused(tmp_path / "out", "part-00002.parquet is missing", "Restore it")
    assert TokenDataset(f"{tmp_path}/out/*.parquet", seq_len=4).num_tokens == 41
    (tmp_path / "out" / "part-00001.parquet").unlink()
    (tmp_path / "out" / "part-00000.parquet").unlink()
    assert TokenDataset(tmp_path / "out", seq_len=4).num_tokens == 21


def test_damaged_files_are_named_with_what_is_wrong(folder: Path) -> None:
    good = (folder / "part-0.parquet").read_bytes()
    bad = folder / "part-1.parquet"
    for content, *words in (
        (b"", "empty"),
        (good[:3], "not a Parquet file"),
        (good[: len(good) // 2], "truncated", "Copy it again"),
        (good[:-1], "truncated"),
        (b"once upon a time" * 20, "not a Parquet file", "once", "`raysharded data pack`"),
    ):
        bad.write_bytes(content)
        _refused(str(folder), str(bad), *words)


def test_files_of_another_format_are_named_with_what_is_wrong(folder: Path) -> None:
    bad = folder / "part-1.parquet"
    tokens = _random_tokens(50)
    good = TokenHeader(tokenizer="bytes", vocab_size=257, num_tokens=50).to_metadata()
    _write(bad, tokens, metadata={})
    _refused(str(folder), str(bad), "without the metadata", "`raysharded data pack`")
    _write(bad, tokens, metadata=good | {"raysharded.format_version": "2"})
    _refused(str(folder), str(bad), "version '2'", "Upgrade")
    _write(bad, tokens, metadata={k: v for k, v in good.items() if k != "raysharded.vocab_size"})
    _refused(str(folder), str(bad), "vocab_size", "incomplete")
    _write(bad, tokens, metadata=good | {"raysharded.num_tokens": "many"})
    _refused(str(folder), str(bad), "many")
    _write(bad, tokens, metadata=good | {"raysharded.num_tokens": "51"})
    _refused(str(folder), str(bad), "51", "50 rows")
    _write(bad, tokens, column="text")
    _refused(str(folder), str(bad), "needs a column 'tokens'", "text: uint16")
    _write(bad, tokens, kind=pa.int64())
    _refused(str(folder), str(bad), "uint8, uint16 or uint32", "tokens: int64")


def test_files_that_do_not_fit_together_are_both_named(folder: Path) -> None:
    first, bad = folder / "part-0.parquet", folder / "part-1.parquet"
    _write(bad, [1, 2], header=TokenHeader(tokenizer="sha256:0", vocab_size=257, num_tokens=2))
    _refused(str(folder), str(first), str(bad), "tokenizer", "'sha256:0'", "'bytes'")
    _write(bad, [1, 2], header=TokenHeader(tokenizer="bytes", vocab_size=99, num_tokens=2))
    _refused(str(folder), str(first), str(bad), "vocab_size", "99", "257")


def test_too_few_tokens_for_one_sample_are_refused(folder: Path) -> None:
    _refused(str(folder), "part-0.parquet", "1000 tokens", "seq_len + 1 = 1001", seq_len=1000)
    assert len(TokenDataset(str(folder), seq_len=999)) == 1


def test_damage_behind_a_whole_footer_is_named_when_it_is_read(folder: Path) -> None:
    path = folder / "part-2.parquet"
    content = bytearray(path.read_bytes())
    end_of_group_3 = pq.ParquetFile(path).metadata.row_group(4).column(0).dictionary_page_offset
    content[end_of_group_3 - 20] ^= 0xFF
    path.write_bytes(content)
    dataset = TokenDataset(str(folder), seq_len=9)
    dataset.validate()
    assert dataset[0].shape == (10,)
    with pytest.raises(DataError, match=r"part-2\.parquet: row group 3 cannot be read.*Restore"):
        dataset[(331 + 350) // 9]


def test_a_file_cut_short_or_gone_or_replaced_after_its_footer_was_read_is_named(folder: Path) -> None:
    path = folder / "part-2.parquet"
    _write(path, _random_tokens(60_000), per_row_group=10_000)  # far more than a file object buffers
    dataset = TokenDataset(str(folder), seq_len=9)
    assert dataset[90].shape == (10,)
    os.truncate(path, 300)  # the file that is open
    with pytest.raises(DataError, match=r"part-2\.parquet: row group 4 cannot be read"):
        dataset[5000]
    with pytest.raises(DataError, match=r"part-2\.parquet: .*truncated"):
        pickle.loads(pickle.dumps(dataset))[5000]
    path.unlink()
    with pytest.raises(DataError, match=r"part-2\.parquet: the file is missing"):
        pickle.loads(pickle.dumps(dataset))[5000]
    _write(path, [1, 2, 3])
    with pytest.raises(DataError, match=r"part-2\.parquet: it has 3 tokens, but had 60000"):
        pickle.loads(pickle.dumps(dataset))[5000]


def test_tokens_that_the_vocabulary_does_not_have_and_nulls_are_refused(tmp_path: Path) -> None:
    header = TokenHeader(tokenizer="bytes", vocab_size=257, num_tokens=5)
    _write(tmp_path / "a.parquet", [1, 2, 257, 3, 4], header=header)
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 .*maximum 257"):
        TokenDataset(str(tmp_path), seq_len=4)[0]
    _write(tmp_path / "a.parquet", [1, 2, None, 3, 4], header=header)  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 .*1 nulls"):
        TokenDataset(str(tmp_path), seq_len=4)[0]


def test_the_smallest_integer_type_is_chosen() -> None:
    sizes = [token_dtype(vocab).itemsize for vocab in (1, 256, 257, 2**16, 2**16 + 1, 2**32)]
    assert sizes == [1, 1, 2, 2, 4, 4]


def test_a_fresh_pack_is_read_back_through_any_storage() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{root}/in/a.txt", b"hello world")
    pack(f"{root}/in", f"{root}/out", layout="parquet")
    assert TokenDataset(f"{root}/out", seq_len=11)[0].tolist() == [*b"hello world", 256]


@pytest.mark.parametrize("url", ["memory://me:secret@host/none", "s3://me:secret@host/none"])
def test_no_error_and_no_text_of_data_shows_a_password(url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    calls: list[Callable[[], Any]] = [
        lambda: TokenDataset(url, seq_len=8).validate(),
        lambda: TokenDataset(f"{url}/*.parquet", seq_len=8).validate(),
        lambda: PackedDataset(url, seq_len=8).validate(),
        lambda: pack(url, tmp_path / "out"),
        lambda: pack(tmp_path / "a.txt", tmp_path / "out", tokenizer=url),
        lambda: pack(tmp_path / "a.txt", url, layout="parquet") if url.startswith("s3") else convert(url, tmp_path),
    ]
    for call in calls:
        with pytest.raises(RayshardedError) as error:
            call()
        assert "secret" not in str(error.value)
    for data in (TokenDataset(url, seq_len=8), PackedDataset(url, seq_len=8)):
        assert "secret" not in repr(data)
        assert "me:***@host" in repr(data)
