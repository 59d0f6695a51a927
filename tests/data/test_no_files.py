"""Pipes, devices, sockets, folders and unreadable files in place of files that a user names: an error at once."""

from __future__ import annotations

import builtins
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import SigningKey
from raysharded.checkpoint.interop.names import NameMap
from raysharded.cli.checkpoint import convert
from raysharded.cli.settings import read_settings
from raysharded.data.dataset import TokenDataset
from raysharded.data.pack import pack
from raysharded.data.store.layout import INDEX
from raysharded.data.text.tokenizer import FileTokenizer
from raysharded.errors import DataError, RayshardedError
from raysharded.planning.models.hf_config import read_config

KINDS = ["pipe", "device", "socket", "folder"]
OPENS: dict[str, Callable[[Path], object]] = {
    "text.txt": lambda path: pack(path, path.parent / "out"),
    "tokens.parquet": lambda path: TokenDataset(path, seq_len=4).num_tokens,
    "tokenizer.json": lambda path: FileTokenizer(str(path)),
    "signing.key": SigningKey.from_file,
    "map.json": lambda path: NameMap.from_file(str(path)),
    "config.json": read_config,
    "settings.yaml": lambda path: read_settings(str(path), []),
    "export.json": lambda path: convert._content(str(path)),
}


def make(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "folder":
            path.mkdir()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPENS)
def test_what_is_no_file_is_an_error_at_once(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    make(kind, Path(name))
    with pytest.raises(RayshardedError) as caught:
        OPENS[name](Path(name).absolute())
    said = str(caught.value)
    assert name in said
    a_folder_is_searched = kind == "folder" and name in ("text.txt", "tokens.parquet")
    assert a_folder_is_searched or f"it is a {kind}, not a file" in said


def test_a_folder_with_nothing_but_hidden_files_has_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".cache").mkdir(parents=True)
    for name in (".a.txt", "_SUCCESS", ".cache/b.txt"):
        (folder / name).write_text("hidden")
    for read, message in (
        (lambda: pack(folder, tmp_path / "out"), "the folder has no file, apart from hidden ones. Check the path"),
        (
            lambda: TokenDataset(folder, seq_len=4).validate(),
            "neither a token store nor a file that ends with '.parquet'",
        ),
    ):
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert str(caught.value).startswith(f"{folder}: ")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "abc"}\n')
    store = tmp_path / "store"
    pack(text, store)
    (shard,) = store.glob("*.tokens")
    opened, refused = builtins.open, list[str]()

    def refusing(file: Any, *how: Any, **more: Any) -> Any:
        if file in refused:
            raise PermissionError(13, "Permission denied", file)
        return opened(file, *how, **more)

    monkeypatch.setattr(builtins, "open", refusing)  # root may read everything
    reads: list[tuple[Path, Callable[[], object]]] = [
        (text, lambda: pack(text, tmp_path / "out")),
        (text, lambda: pack(tmp_path / "a.*", tmp_path / "out", tokenizer=text)),
        (shard, lambda: TokenDataset(store, seq_len=1).validate()),
        (shard, lambda: TokenDataset(store, seq_len=1)[0]),
        (store / INDEX, lambda: TokenDataset(store, seq_len=1).validate()),
    ]
    for path, read in reads:
        refused[:] = [str(path)]
        with pytest.raises(RayshardedError, match="PermissionError") as caught:
            read()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
