"""Pipes, devices, sockets and folders in place of files that a user names: an error at once, and no wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from raysharded.checkpoint import SigningKey
from raysharded.checkpoint.interop.names import NameMap
from raysharded.cli.checkpoint import convert
from raysharded.cli.settings import read_settings
from raysharded.data.dataset import TokenDataset
from raysharded.data.pack import pack
from raysharded.data.text.tokenizer import FileTokenizer
from raysharded.errors import RayshardedError
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
