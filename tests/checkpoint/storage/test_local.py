"""Storage in a folder."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysharded.checkpoint import check_writable, open_storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import StorageError


def test_a_local_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a", [b"old"])

    class Dies(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("the writer dies")

    with pytest.raises(RuntimeError):
        storage.write("a", Dies())
    assert storage.read("a") == b"old"
    assert storage.list() == ["a"]


def test_put_if_absent_works_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage = open_storage(str(tmp_path))
    assert storage.put_if_absent("a", b"1") is True
    assert storage.put_if_absent("a", b"2") is False
    assert (storage.read("a"), storage.list()) == (b"1", ["a"])


def test_a_disk_that_is_full_leaves_no_torn_claim_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def full_at_the_second(handle: int) -> None:  # the first is the temporary file
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", no_link)
    storage = open_storage(str(tmp_path))
    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(StorageError, match="Free some space"):
        storage.put_if_absent("a", b"1")
    assert len(synced) == 2
    assert storage.list() == []
    assert storage.put_if_absent("a", b"2") is True
    assert storage.read("a") == b"2"


def test_a_writer_whose_file_a_clean_up_removed_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))

    class Removed(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"x"
            storage.discard(storage.unfinished())

    def cleaned_up(source: str, target: str) -> None:
        os.unlink(source)
        link(source, target)

    link = os.link
    monkeypatch.setattr(os, "link", cleaned_up)
    with pytest.raises(StorageError, match=r"write .*/a/b failed.*let no clean-up run while a writer is alive"):
        storage.write("a/b", Removed())
    with pytest.raises(StorageError, match=r"put_if_absent .*/a/b failed.*let no clean-up run"):
        storage.put_if_absent("a/b", b"x")
    assert storage.list() == []


def test_deleting_the_last_file_of_a_local_folder_removes_the_folder(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    storage.write("a/b/c", [b"1"])
    storage.delete(["a/b/c"])
    assert list((tmp_path / "run").iterdir()) == []


def test_an_unwritable_path_ends_in_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"file/run cannot be written to: .* choose another folder or URL"):
        check_writable(open_storage(str(tmp_path / "file" / "run")))


def test_a_reader_without_permission_gets_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.write("a", [b"x"])
    (tmp_path / "a").chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read everything
    try:
        with pytest.raises(StorageError, match=r"read .*/a failed: PermissionError: .* Give this user read access"):
            storage.read("a")
    finally:
        os.seteuid(user)


def test_a_whole_disk_is_listed_without_the_folder_of_its_file_system(tmp_path: Path) -> None:
    """Nobody but the administrator may read `lost+found`, at the top of an ext4 volume."""
    storage = LocalStorage(str(tmp_path))
    storage.write("step-1/manifest.json", [b"1"])
    lost = tmp_path / "lost+found"
    lost.mkdir()
    (lost / "#123").write_bytes(b"2")
    lost.chmod(0)
    try:
        assert storage.list() == ["step-1/manifest.json"]
        assert storage.times("manifest.json").keys() == {"step-1/manifest.json"}
        assert storage.folders() == ["step-1"]
    finally:
        lost.chmod(0o700)


def test_a_path_where_no_folder_can_be_made_ends_in_one_clear_message() -> None:
    with pytest.raises(StorageError, match="/proc/raysharded cannot be written to"):
        check_writable(open_storage("/proc/raysharded"))


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    storage = LocalStorage(str(tmp_path))
    match kind:
        case "pipe":
            os.mkfifo(tmp_path / "a")
        case "device":
            (tmp_path / "a").symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(tmp_path / "a"))
        case "folder":
            (tmp_path / "a").mkdir()
    for read in (lambda: storage.read("a"), lambda: storage.read_into("a", 0, [memoryview(bytearray(4))])):
        with pytest.raises(StorageError, match=f"read {tmp_path}/a failed"):
            read()
    others: list[Callable[[], object]] = [lambda: storage.size("a"), lambda: storage.swap("a", b"x", b"y")]
    for other in others:
        with pytest.raises(StorageError, match=r"a failed: \w+Error: "):
            other()
    assert storage.put_if_absent("a", b"mine") is False
    if kind == "folder":
        changes: list[Callable[[], object]] = [lambda: storage.write("a", [b"mine"]), lambda: storage.delete(["a"])]
        for other in changes:
            with pytest.raises(StorageError, match=f"{tmp_path}/a failed: IsADirectoryError"):
                other()
    else:
        assert storage.list() == ["a"]
        storage.write("a", [b"mine"])
        assert storage.read("a") == b"mine"
    assert storage.unfinished() == []


def test_a_folder_that_was_made_for_a_file_goes_with_it_where_no_file_can_be_made(tmp_path: Path) -> None:
    """The file system takes one more name: that of the folder."""
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=2", "raysharded-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here: that takes root")
    try:
        storage = LocalStorage(str(tmp_path))
        for operation in (lambda: storage.write("b/c", [b"1"]), lambda: storage.put_if_absent("b/c", b"1")):
            with pytest.raises(StorageError, match="Free some space"):
                operation()
            assert list(tmp_path.iterdir()) == []
        storage.write("a", [b"1"])
        assert storage.read("a") == b"1"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_root_that_is_a_link_to_nothing_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "root").symlink_to(tmp_path / "unmounted")
    storage = open_storage(str(tmp_path / "root"))
    for operation in (storage.list, lambda: storage.write("a/b", [b"1"]), lambda: check_writable(storage)):
        with pytest.raises(StorageError, match=r"it is a link to '.*/unmounted', which is not there"):
            operation()
    (tmp_path / "unmounted").mkdir()
    storage.write("a/b", [b"1"])
    assert storage.list() == ["a/b"]
