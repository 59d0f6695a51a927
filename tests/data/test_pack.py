from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings, strategies as st

from raysharded.actors.process.os_processes import start_ticks
from raysharded.data import document_lengths as counting
from raysharded.data.dataset import TokenDataset
from raysharded.data.pack import pack as pack_either
from raysharded.data.store import progress
from raysharded.data.store.progress import PackProgress
from raysharded.data.text import documents
from raysharded.data.text.files import find_files
from raysharded.errors import ConfigError, DataError, StorageError, UnreadableData
from tests.cases import examples, tried_each_time
from tests.cli.test_commands import invoke

END = 256
pack = partial(pack_either, layout="parquet")


def _stream(folder: Path | str) -> list[int]:
    """All tokens, read with nothing but public Parquet tools."""
    with fsspec.open_files(f"{folder}/part-*.parquet", "rb") as handles:
        return [token for handle in handles for token in pq.read_table(handle).column("tokens").to_pylist()]


def _bytes(*documents: bytes) -> list[int]:
    return [token for document in documents for token in (*document, END)]


def _json_lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "<|endoftext|>": 70_000, "stop": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_text_files_become_bytes_and_an_end_in_the_order_of_their_names(tmp_path: Path) -> None:
    texts = tmp_path / "in"
    (texts / "deep" / "er").mkdir(parents=True)
    (texts / "b.txt").write_bytes(b"bb\xff\x00")
    (texts / "a.txt").write_bytes(b"a")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "deep" / "er" / "c.md").write_bytes("ü".encode())
    (texts / ".hidden").write_bytes(b"not this")
    (texts / "deep" / "_SUCCESS").write_bytes(b"nor this")
    (texts / "deep" / "_temporary").mkdir()
    (texts / "deep" / "_temporary" / "d.txt").write_bytes(b"nor this")
    (texts / "deep" / "__init__.txt").write_bytes(b"i")
    report = pack(texts, tmp_path / "out")
    assert _stream(tmp_path / "out") == _bytes(b"a", b"bb\xff\x00", b"i", "ü".encode())
    assert report.skipped == (".hidden", "deep/_SUCCESS", "deep/_temporary/d.txt")
    size = (tmp_path / "out" / "part-00000.parquet").stat().st_size
    assert (report.files, report.documents, report.tokens, report.bytes) == (1, 4, 12, size)


def test_json_lines_and_parquet_give_the_same_stream_as_their_texts(tmp_path: Path) -> None:
    texts = ["one", "", "zwei ü\n", "3"]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n" + _json_lines(*({"body": text, "id": 1} for text in texts))[:-1])
    pq.write_table(pa.table({"body": texts, "id": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2)
    expected = _bytes(*(text.encode() for text in texts if text))
    for source in (lines, tmp_path / "a.parquet"):
        report = pack(source, tmp_path / source.suffix[1:], text_field="body")
        assert _stream(tmp_path / source.suffix[1:]) == expected
        assert report.documents == 3


@given(
    documents=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6),
    per_file=st.integers(1, 50),
    per_row_group=st.integers(1, 20),
    compression=st.sampled_from(["zstd", "none"]),
)
@settings(max_examples=examples(15, of=30), deadline=None)
def test_the_stream_does_not_depend_on_how_it_is_cut(
    documents: list[bytes], per_file: int, per_row_group: int, compression: Any
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    for number, document in enumerate(documents):
        fsspec.filesystem("memory").pipe_file(f"{root}/in/{number}.txt", document)
    report = pack(
        f"{root}/in/*.txt",
        f"{root}/out",
        tokens_per_file=per_file,
        tokens_per_row_group=per_row_group,
        compression=compression,
    )
    stream = _bytes(*documents)
    assert _stream(f"{root}/out") == stream
    assert report.tokens == len(stream)
    assert report.files == -(-len(stream) // per_file)
    assert TokenDataset(f"{root}/out", seq_len=1).num_tokens == len(stream)


def test_the_same_input_gives_the_same_files_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(os.urandom(5000))
    digests = []
    for name in ("one", "two"):
        pack(tmp_path / "a.txt", tmp_path / name, tokens_per_file=2000, tokens_per_row_group=300)
        digests.append([hashlib.sha256(p.read_bytes()).digest() for p in sorted((tmp_path / name).iterdir())])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3


def test_files_have_the_documented_format(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 250)
    pack(tmp_path / "a.txt", tmp_path / "out", tokens_per_file=200, tokens_per_row_group=60)
    first = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet")
    metadata = {k.decode(): v.decode() for k, v in first.metadata.metadata.items() if k.startswith(b"raysharded.")}
    assert metadata == {
        "raysharded.format": "raysharded.tokens",
        "raysharded.format_version": "1",
        "raysharded.tokenizer": "bytes",
        "raysharded.vocab_size": "257",
        "raysharded.num_tokens": "200",
    }
    assert first.schema_arrow.field("tokens") == pa.field("tokens", pa.uint16(), nullable=False)
    assert [first.metadata.row_group(i).num_rows for i in range(first.num_row_groups)] == [60, 60, 60, 20]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["part-00000.parquet", "part-00001.parquet"]


def test_a_long_file_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 7)
    content = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.jsonl").write_text(_json_lines({"text": "long line " * 20}, {"text": "short"}))
    pack([tmp_path / "b.jsonl", tmp_path / "a.txt"], tmp_path / "out", tokens_per_row_group=64)
    assert _stream(tmp_path / "out") == _bytes(b"long line " * 20, b"short", content)


def test_a_long_file_is_packed_a_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 1 << 16)
    size = 256 << 16
    (tmp_path / "a.txt").write_bytes(bytes(size))
    tracemalloc.start()
    try:
        pack_either(tmp_path / "a.txt", tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size // 2


def test_a_packing_whose_input_cannot_be_read_for_a_while_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(_json_lines(*({"text": f"{name}{number}"} for number in range(2000))))
    inputs, real = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], LocalFileSystem._open

    def fails(fs: LocalFileSystem, path: str, *how: Any, **others: Any) -> Any:
        if path.endswith("b.jsonl"):
            raise OSError(errno.EIO, "the disk does not answer")
        return real(fs, path, *how, **others)

    whole = pack_either(inputs, tmp_path / "whole", tokens_per_file=1000)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "_open", fails)
        for shards in (10, 10):
            with pytest.raises(UnreadableData, match=r"b\.jsonl: cannot open: OSError: .*does not answer"):
                pack_either(inputs, tmp_path / "out", tokens_per_file=1000)
            assert len(list((tmp_path / "out").glob("*.tokens"))) == shards
    assert pack_either(inputs, tmp_path / "out", tokens_per_file=1000) == whole
    assert _bytes_of(tmp_path / "out") == _bytes_of(tmp_path / "whole")
    assert isinstance(pickle.loads(pickle.dumps(UnreadableData("as from another process"))), DataError)


def test_inputs_keep_the_given_order_and_count_once(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    pack([tmp_path / "c.txt", f"{tmp_path}/*.txt"], tmp_path / "out")
    assert _stream(tmp_path / "out") == _bytes(b"c", b"a", b"b")


def test_any_tokenizer_file_works_and_is_named_in_the_footer(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world what")
    pack(tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer_file)
    dataset = TokenDataset(str(tmp_path / "out"), seq_len=3)
    assert dataset[0].tolist() == [1, 2, 0, 70_000]
    assert dataset.vocab_size == 70_001
    footer = pq.read_metadata(tmp_path / "out" / "part-00000.parquet").metadata
    assert (
        footer[b"raysharded.tokenizer"].decode() == f"sha256:{hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()}"
    )
    pack(tmp_path / "a.txt", tmp_path / "out2", tokenizer=str(tokenizer_file), end_of_document="stop")
    assert _stream(tmp_path / "out2") == [1, 2, 0, 4]


def test_tokenizer_files_that_cannot_be_used_are_named(tmp_path: Path, tokenizer_file: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"hello \xff")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 at byte 6"):
        pack(text, tmp_path / "out", tokenizer=tokenizer_file)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: its vocabulary has no <end>"):
        pack(text, tmp_path / "out", tokenizer=tokenizer_file, end_of_document="<end>")
    with pytest.raises(DataError, match=r"a\.txt: not a tokenizer file"):
        pack(text, tmp_path / "out", tokenizer=text)
    with pytest.raises(DataError, match=r"none\.json: the file is missing"):
        pack(text, tmp_path / "out", tokenizer=tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n\n{"body": "y"}\n', r"a\.jsonl, line 3: no field 'text' in an object with 'body'"),
        ("a.jsonl", '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}", r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl, line 1: no field 'text' in \[1, 2\]"),
        ("a.jsonl", '{"text": null}\n', r"a\.jsonl, line 1: 'text' is None, not text"),
        ("a.jsonl", '{"text": "\\ud800"}\n', r"a\.jsonl, line 1: 'text' has half a surrogate pair"),
        ("a.parquet", "PAR1 no", r"a\.parquet: cannot read as Parquet: "),
        ("a.txt", "", r"a\.txt: no text in it"),
    ],
)
def test_malformed_input_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        pack(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_malformed_parquet_is_named_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; it has body: string, n: int64"):
        pack(path, tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.parquet: column 'n' is no text"):
        pack(path, tmp_path / "out", text_field="n")
    pq.write_table(pa.table({"text": ["x", None]}), path)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: 'text' is None"):
        pack(path, tmp_path / "out")


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file"):
        pack(tmp_path / "gone.txt", tmp_path / "out")


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("x")
    for arguments in (
        {"tokens_per_file": 0},
        {"tokens_per_row_group": True},
        {"input_format": "csv"},
        {"compression": "x"},
    ):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            pack(text, tmp_path / "out", **arguments)
    with pytest.raises(ConfigError, match="has inputs in it"):
        pack(text, tmp_path)
    (tmp_path / "b.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"b\.bin: .*'\.bin' does not determine the format. .*--format`, or `input"):
        pack(tmp_path / "b.bin", tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing is left of a call that failed
    assert pack(tmp_path / "b.bin", tmp_path / "out", input_format="text").documents == 1


def test_an_output_that_has_data_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    pack(tmp_path / "a.txt", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ConfigError, match="already has 1 Parquet file\\."):
        pack(tmp_path / "a.txt", tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("where", ["local", "memory"])
def test_of_two_calls_into_one_folder_one_wins_and_its_files_stay(tmp_path: Path, where: str) -> None:
    (tmp_path / "a.jsonl").write_text(_json_lines(*({"text": "x" * 50} for _ in range(20))))
    (tmp_path / "b.txt").write_text("short")
    output = str(tmp_path / "out") if where == "local" else f"memory://{uuid.uuid4().hex}"
    outcomes: list[str] = []

    def meanwhile(chunks: Iterator[Any]) -> Iterator[Any]:
        for number, chunk in enumerate(chunks):
            if number == 10:
                try:
                    outcomes.append(f"{pack(tmp_path / 'b.txt', output).tokens} tokens")
                except ConfigError as error:
                    outcomes.append(str(error))
            yield chunk

    with pytest.MonkeyPatch.context() as patch:
        original = documents._json_lines
        patch.setattr(documents, "_json_lines", lambda *some: meanwhile(original(*some)))
        if where == "local":
            with pytest.raises(ConfigError, match=r"got part-00000\.parquet from someone else meanwhile"):
                pack(tmp_path / "a.jsonl", output, tokens_per_file=100)
        else:
            pack(tmp_path / "a.jsonl", output, tokens_per_file=100)
    assert len(outcomes) == 1
    winner = _bytes(b"short") if where == "local" else _bytes(*[b"x" * 50] * 20)
    assert _stream(output) == winner
    assert outcomes[0] == "6 tokens" if where == "local" else "already has" in outcomes[0]
    fs, path = fsspec.core.url_to_fs(output)
    assert len(fs.find(path)) == (1 if where == "local" else 11)


def _while_reading(do: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """From here on something happens before the first line of a JSON Lines file is read."""
    original = documents._json_lines

    def reading(*some: Any) -> Iterator[Any]:
        do()
        yield from original(*some)

    patch.setattr(documents, "_json_lines", reading)


def test_a_name_that_is_taken_by_a_link_to_nothing_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(_json_lines({"text": "x"}))
    (tmp_path / "out").mkdir()
    taken = tmp_path / "out" / "part-00000.parquet"
    _while_reading(lambda: taken.symlink_to(tmp_path / "elsewhere"), monkeypatch)
    with pytest.raises(ConfigError, match=r"got part-00000\.parquet from someone else meanwhile"):
        pack(tmp_path / "a.jsonl", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [taken]
    assert taken.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("stopped_at", [1, 2])
def test_ctrl_c_while_the_files_get_their_names_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int
) -> None:
    (tmp_path / "a.txt").write_text("x" * 25)
    moved: list[str] = []
    original = LocalFileSystem.mv

    def stopping(self: Any, path1: str, path2: str, **options: Any) -> None:
        moved.append(path2)
        if len(moved) == stopped_at:
            raise KeyboardInterrupt
        original(self, path1, path2, **options)

    monkeypatch.setattr(LocalFileSystem, "mv", stopping)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "a.txt", tmp_path / "out", tokens_per_file=10)
    assert len(moved) == stopped_at
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(StorageError, match="taken: cannot write token files"):
        pack(tmp_path / "a.txt", tmp_path / "taken")


@pytest.mark.parametrize("where", ["local", "memory"])
def test_packing_that_fails_late_leaves_no_file_and_shows_none_before_the_end(tmp_path: Path, where: str) -> None:
    (tmp_path / "a.jsonl").write_text(_json_lines(*({"text": "x" * 50} for _ in range(20))) + "broken")
    output = str(tmp_path / "out") if where == "local" else f"memory://{uuid.uuid4().hex}"
    fs, path = fsspec.core.url_to_fs(output)
    seen: list[list[str]] = []

    def watch(chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            seen.append([p for p in fs.find(path) if p.endswith(".parquet")])
            yield chunk

    with pytest.MonkeyPatch.context() as patch:
        original = documents._json_lines
        patch.setattr(documents, "_json_lines", lambda *some: watch(original(*some)))
        with pytest.raises(DataError, match="line 21"):
            pack(tmp_path / "a.jsonl", output, tokens_per_file=100)
    assert len(seen) == 20
    assert where == "memory" or seen[-1] == []
    assert fs.find(path) == []


def _inputs(folder: Path) -> Path:
    """Some thousand documents in files of all formats, one of them in several parts."""
    folder.mkdir()
    texts = [f"hello {'world ' * (number % 37)} {number}" for number in range(3000)]
    (folder / "a.jsonl").write_text(_json_lines(*({"text": text} for text in texts)))
    pq.write_table(pa.table({"text": texts[:500]}), folder / "b.parquet", row_group_size=90)
    (folder / "c.txt").write_text("world\n" * 5000)
    (folder / "d.jsonl").write_text("")
    return folder


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30), step=st.integers(1, 50), closed=st.booleans())
@settings(max_examples=examples(20, of=60), deadline=None)
def test_parts_of_json_lines_have_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], step: int, closed: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": "x" * length + str(number)}) for number, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + ("\n" if closed else ""))
    (file,) = find_files(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PART_BYTES", step)
        parts = list(documents.parts_of(file, None))
    assert len(parts) == -(-path.stat().st_size // step)
    found = [b"".join(one.chunks).decode() for part in parts for one in documents.documents(file, None, "text", part)]
    assert found == [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("tokenized", tried_each_time([True], [False, True]), ids="tokenizer={}".format)
def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path: Path, tokenizer_file: Path, tokenized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PART_BYTES", 20_000)
    settings: dict[str, Any] = {
        "tokenizer": tokenizer_file if tokenized else None,
        "tokens_per_file": 9_000,
        "layout": "store",
    }
    source = _inputs(tmp_path / "in")
    one = pack(source, tmp_path / "one", **settings)
    two = pack(source, tmp_path / "two", workers=2, **settings)
    assert (one.documents, one) == (3501, two)
    assert _bytes_of(tmp_path / "one") == _bytes_of(tmp_path / "two")
    (source / "e.jsonl").write_text(_json_lines(*({"text": "x"} for _ in range(3000))) + "[]\n")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"e\.jsonl, line 3001: no field 'text'"):
            pack(source, tmp_path / "wrong", workers=workers, **settings)
        assert not (tmp_path / "wrong").exists() or not _bytes_of(tmp_path / "wrong")


KILLED = """
import sys
from raysharded.data import pack
from raysharded.data.store.progress import PackProgress

def stop(found: PackProgress) -> None:
    if found.shards == int(sys.argv[3]):
        import multiprocessing, os, signal
        print(*(process.pid for process in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    pack.pack(sys.argv[1], sys.argv[2], tokens_per_file=9_000, workers=int(sys.argv[4]), on_progress=stop)
"""


def _wait_for_the_end_of(processes: list[int]) -> None:
    deadline = time.monotonic() + 60.0
    while any(start_ticks(pid) is not None for pid in processes):
        assert time.monotonic() < deadline, "they outlive the process that started them"
        time.sleep(0.01)


@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2]))
def test_a_packing_that_was_killed_is_continued_and_gives_the_same_bytes(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = _inputs(tmp_path / "in"), tmp_path / "out"
    whole = pack_either(source, tmp_path / "whole", tokens_per_file=9_000)
    (tmp_path / "killed.py").write_text(KILLED)
    for shards in (4, 30):
        command = [sys.executable, str(tmp_path / "killed.py"), str(source), str(output), str(shards), str(workers)]
        killed = subprocess.run(command, check=False, timeout=120, stdout=subprocess.PIPE)
        assert killed.returncode == -signal.SIGKILL
        processes = [int(pid) for pid in killed.stdout.split()]
        assert len(processes) == (workers if workers > 1 else 0)
        _wait_for_the_end_of(processes)
        assert (output / "unfinished.json").exists()
        assert len(list(output.glob("*.tokens"))) == shards
    with pytest.raises(ConfigError, match="unfinished packing of other inputs, or with other settings"):
        pack_either(source, output, tokens_per_file=8_000)
    told: list[PackProgress] = []
    assert pack_either(source, output, tokens_per_file=9_000, on_progress=told.append) == whole
    assert [one.shards for one in told] == list(range(31, whole.files + 1))
    assert _bytes_of(output) == _bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("layout", ["store", "parquet"])
def test_the_documents_of_data_are_counted_with_their_lengths_and_one_is_shown(
    tmp_path: Path, tokenizer_file: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_CHUNK_TOKENS", 7)
    texts = ["hello world", "world", " ".join(["hello"] * 30), "stop stop stop"]
    (tmp_path / "a.jsonl").write_text(_json_lines(*({"text": text} for text in texts)))
    for name, own in (("words", tokenizer_file), ("bytes", None)):
        settings: dict[str, Any] = {"layout": layout, "tokens_per_file": 9, "tokens_per_row_group": 4}
        pack_either(tmp_path / "a.jsonl", tmp_path / name, tokenizer=own, **settings)
        end = 70_000 if own and layout == "parquet" else None
        found = counting.document_lengths(tmp_path / name, tokenizer=own, end_of_document=end)
        lengths = sorted(len(text.split()) if own else len(text) for text in texts)
        assert (found.documents, found.shortest, found.longest) == (4, lengths[0], lengths[-1])
        assert (found.median, found.mean) == (sum(lengths[1:3]) / 2, sum(lengths) / 4)
        assert found.sample == "hello world"
    told = invoke("data", "info", tmp_path / "bytes", "--documents", "--json")
    assert json.loads(told.stdout)["documents"] == 4
    other = tmp_path / "other.json"
    other.write_text(tokenizer_file.read_text().replace("stop", "halt"))
    with pytest.raises(ConfigError, match="but the data have sha256:"):
        counting.document_lengths(tmp_path / "words", tokenizer=other)


def test_a_tokenizer_is_found_in_a_folder_and_under_a_name(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)  # without a network it tries for half a minute
    (tmp_path / "a.txt").write_text("hello world")
    by_file = pack_either(tmp_path / "a.txt", tmp_path / "one", tokenizer=tokenizer_file)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    assert pack_either(tmp_path / "a.txt", tmp_path / "two", tokenizer=tmp_path / "model").tokens == by_file.tokens
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer\.json in the folder"):
        pack_either(tmp_path / "a.txt", tmp_path / "three", tokenizer=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"neither a file nor a folder here, and no tokenizer\.json of that name"):
        pack_either(tmp_path / "a.txt", tmp_path / "three", tokenizer="nobody-has/this-model")
    refused = invoke("data", "pack", "--tokenizer", "nobody/others", tmp_path / "a.txt", tmp_path / "three")
    assert refused.exit_code == 1
    (message,) = refused.stderr.splitlines()
    assert "--tokenizer nobody/others: neither a file nor a folder here, and no tokenizer.json of that" in message


@pytest.mark.long  # the import of transformers
def test_a_tokenizer_is_found_in_a_folder_of_transformers(tmp_path: Path, tokenizer_file: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("hello world")
    by_file = pack_either(tmp_path / "a.txt", tmp_path / "one", tokenizer=tokenizer_file)
    assert pack_either(tmp_path / "a.txt", tmp_path / "two", tokenizer=tmp_path / "model").tokens == by_file.tokens


def test_a_name_of_the_hub_is_found_in_the_cache_without_a_network_by_every_process(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    model = tmp_path / "hub" / "models--nobody--words"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    source = _inputs(tmp_path / "in")
    expected = pack_either(source, tmp_path / "one", tokenizer=tokenizer_file, tokens_per_file=9_000)
    command = [sys.executable, "-m", "raysharded", "data", "pack", "--workers", "2", "--tokens-per-file", "9000"]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    whole = [*command, "--json", "--tokenizer", "nobody/words", str(source), str(tmp_path / "two")]
    done = subprocess.run(whole, check=False, timeout=120, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == expected.tokens
    assert _bytes_of(tmp_path / "one") == _bytes_of(tmp_path / "two")


@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2]))
def test_progress_has_the_share_of_the_input_also_between_shards_and_of_a_continued_packing(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PART_BYTES", 20_000)
    monkeypatch.setattr(progress, "_TOLD_EVERY_S", 0.0)
    source, told = _inputs(tmp_path / "in"), list[PackProgress]()

    def interrupted(found: PackProgress) -> None:
        told.append(found)
        if found.shards == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"tokens_per_file": 60_000, "workers": workers}
    with pytest.raises(KeyboardInterrupt):
        pack_either(source, tmp_path / "out", on_progress=interrupted, **settings)
    before = told[-1]
    assert len(told) > 2, "not for the shards alone"
    assert 0 < told[0].share < 0.2 < before.share < 0.5
    whole = pack_either(source, tmp_path / "out", on_progress=told.append, **settings)
    shares, tokens = [one.share for one in told], [one.tokens for one in told]
    assert shares == sorted(shares)
    assert tokens == sorted(tokens)
    assert (told[-1].share, told[-1].tokens, told[-1].shards) == (1.0, whole.tokens, whole.files)
