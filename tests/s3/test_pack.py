"""Packing from an S3 server to it: the bytes of a local packing, also after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysharded.checkpoint import open_storage
from raysharded.data.dataset import TokenDataset
from raysharded.data.pack import pack
from raysharded.data.text.files import find_files, open_file
from raysharded.errors import DataError
from raysharded.locations import join_url
from tests.cli.test_commands import invoke
from tests.data.test_pack import KILLED
from tests.s3.fixtures import FaultyS3

pytestmark = pytest.mark.s3
SHARD = 9_000  # as in `KILLED`


def inputs(folder: Path) -> Path:
    """Files of all formats, one of them in a folder inside."""
    (folder / "more").mkdir(parents=True)
    texts = [f"hello {'world ' * (number % 37)} {number}" for number in range(1000)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts[:200]}), folder / "more" / "b.parquet", row_group_size=90)
    (folder / "c.txt").write_text("world\n" * 500)
    (folder / ".hidden").write_text("not packed")
    return folder


def test_text_on_the_server_is_packed_there_and_continued_after_a_kill(s3_url: str, tmp_path: Path) -> None:
    source, target = join_url(s3_url, "in"), join_url(s3_url, "out")
    local = inputs(tmp_path / "in")
    uploaded = open_storage(source)
    for path in local.rglob("*.*"):
        if path.is_file():
            uploaded.write(path.relative_to(local).as_posix(), [path.read_bytes()])
    whole = pack(local, tmp_path / "whole", tokens_per_file=SHARD)
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), source, target, "4", "1"]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    store = open_storage(target)
    assert len([key for key in store.list() if key.endswith(".tokens")]) == 4
    told = invoke("data", "pack", "--tokens-per-file", SHARD, source, target)
    assert told.exit_code == 0, told.output
    assert told.output.startswith("5 shards,"), "four of them are there"
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {key: store.read(key) for key in store.list()} == expected
    assert len([key for key in expected if key.endswith(".tokens")]) == whole.files > 4
    ours, theirs = TokenDataset(target, seq_len=64, disk_cache_bytes=0), TokenDataset(tmp_path / "whole", seq_len=64)
    assert np.array_equal(ours[len(ours) - 1], theirs[len(theirs) - 1])


def test_files_on_the_server_are_found_by_folders_and_globs_and_missing_ones_are_named(s3_url: str) -> None:
    storage = open_storage(join_url(s3_url, "texts"))
    for key in ("a.txt", "b.txt", "below/c.txt", "d.json"):
        storage.write(key, [key.encode() * 3])
    folder = join_url(s3_url, "texts")
    path, _, options = folder.partition("?")

    def names(pattern: str, **how: bool) -> list[str]:
        found = [file.name.partition("?") for file in find_files(pattern, **how)]  # type: ignore[arg-type]
        assert {own for _, _, own in found} == {options}
        return [name.removeprefix(f"{path}/") for name, _, _ in found]

    assert names(folder) == ["a.txt", "b.txt", "d.json"]
    assert names(folder, recursive=True) == ["a.txt", "b.txt", "below/c.txt", "d.json"]
    assert names(f"{path}/*.txt?{options}") == names(f"{path}/?.txt?{options}") == ["a.txt", "b.txt"]
    assert names(f"{path}/a.txt?{options}") == ["a.txt"]
    (file,) = find_files(f"{path}/below/c.txt?{options}")
    with open_file(file) as opened:
        opened.seek(3)
        assert opened.read(5) == b"ow/c."
        assert opened.read() == (b"below/c.txt" * 3)[8:]
    for missing in ("none.txt", "none/*.txt", "nothing/"):
        with pytest.raises(DataError, match="no such file, and no file matches it"):
            pack(f"{path}/{missing}?{options}", join_url(s3_url, "out"))
    storage.delete(["below/c.txt"])
    with (
        pytest.raises(DataError, match=r"below/c\.txt\?endpoint_url=\S+: the file is missing"),
        open_file(file) as gone,
    ):
        gone.read()


def test_equal_names_on_two_servers_are_two_files(faulty_s3: FaultyS3, tmp_path: Path) -> None:
    open_storage(faulty_s3.direct_url).write("a.txt", [b"a document"])
    files = [join_url(url, "a.txt") for url in (faulty_s3.url, faulty_s3.direct_url)]
    assert pack(files, tmp_path / "out").documents == 2
    assert pack([files[0], files[0]], tmp_path / "once").documents == 1
