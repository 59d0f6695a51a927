"""What a storage promises, on a folder, on fsspec's memory, and on a backend without exclusive create."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import raysharded
from raysharded.checkpoint import NoSuchKey, Storage, check_writable, open_storage
from raysharded.checkpoint.retry import MAX_ATTEMPTS, with_retries
from raysharded.checkpoint.storage import TEMPORARY_MARK
from raysharded.checkpoint.storage_fsspec import FsspecStorage, _creates_exclusively, _open
from raysharded.checkpoint.storage_local import LocalStorage
from raysharded.errors import StorageError


class CarelessFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Overwrites whatever it is told to create, as some backends do; loses connections on request."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012  # fsspec's own way to share it between instances
    pseudo_dirs = [""]  # noqa: RUF012
    failures: list[Exception] = []  # noqa: RUF012
    effect_before_failure = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("careless://", "memory://")))

    def exists(self, path: str, **kwargs: Any) -> bool:
        found = bool(super().exists(path))
        time.sleep(0.0005)  # the window in which others may write
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.failures and not self.effect_before_failure:
            raise self.failures.pop()
        super().pipe_file(path, value)
        if self.failures:
            raise self.failures.pop()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return bytes(super().cat_file(path, start, end))


fsspec.register_implementation("careless", CarelessFileSystem, clobber=True)


@pytest.fixture(params=["local", "memory", "careless"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield open_storage(str(tmp_path / "run"))
        return
    opened = open_storage(f"{request.param}://{tmp_path.name}/run")
    yield opened
    opened.delete(opened.list())


def test_what_is_written_is_read_whole_or_in_part(storage: Storage) -> None:
    storage.write("a/b/data", [b"0123", memoryview(b"456"), bytearray(b"789")])
    assert storage.read("a/b/data") == b"0123456789"
    assert storage.read("a/b/data", 3, 4) == b"3456"
    assert storage.read("a/b/data", 8, 100) == b"89"
    assert storage.read("a/b/data", 4) == b"456789"
    assert storage.read("a/b/data", 4, 0) == b""
    assert storage.size("a/b/data") == 10
    storage.write("a/b/data", [b"new"])
    assert storage.read("a/b/data") == b"new"


def test_keys_are_listed_below_a_folder_at_any_depth(storage: Storage) -> None:
    assert storage.list() == storage.list("a") == []
    for key in ("a/x", "a/b/c/y", "ab/z", "top"):
        storage.write(key, [b"1"])
    assert storage.list() == ["a/b/c/y", "a/x", "ab/z", "top"]
    assert storage.list("a") == ["a/b/c/y", "a/x"]
    assert storage.list("a/b") == ["a/b/c/y"]
    assert storage.list("nothing") == []


def test_deleting_is_idempotent(storage: Storage) -> None:
    storage.write("a/b/x", [b"1"])
    storage.delete(["a/b/x", "a/b/x", "never/there"])
    assert storage.list() == []
    storage.write("a/b/x", [b"2"])
    assert storage.read("a/b/x") == b"2"


def test_a_missing_key_is_told_apart_from_other_failures(storage: Storage) -> None:
    for operation in (storage.read, storage.size):
        with pytest.raises(NoSuchKey, match="no/such"):
            operation("no/such")
    with pytest.raises(NoSuchKey):
        storage.read("no/such", 1, 1)


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../../b", "a/./b", "a/", "a\\b", "s3://a"])
def test_a_key_cannot_leave_the_storage(storage: Storage, key: str) -> None:
    with pytest.raises(StorageError):
        storage.read(key) if key else LocalStorage("/tmp").read(key)


def test_the_first_put_wins_and_later_ones_change_nothing(storage: Storage) -> None:
    assert storage.put_if_absent("claims/1", b"first") is True
    assert storage.put_if_absent("claims/1", b"second") is False
    assert storage.put_if_absent("claims/1", b"first") is False
    assert storage.read("claims/1") == b"first"
    assert storage.list("claims") == ["claims/1"]


def test_of_racing_threads_exactly_one_wins_every_claim(storage: Storage) -> None:
    claims, threads = 25, 8
    wins: list[tuple[int, int]] = []
    gate = threading.Barrier(threads)

    def race(me: int) -> None:
        for claim in range(claims):
            gate.wait()
            if storage.put_if_absent(f"claims/{claim}", b"%d" % me):
                wins.append((claim, me))

    running = [threading.Thread(target=race, args=(me,)) for me in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert sorted(claim for claim, _ in wins) == list(range(claims))
    assert all(storage.read(f"claims/{claim}") == b"%d" % me for claim, me in wins)


_RACER = """
import sys
from raysharded.checkpoint import open_storage
storage = open_storage(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for claim in range(200):
    if storage.put_if_absent(f"claims/{claim}", sys.argv[2].encode()):
        print(claim, flush=True)
"""


def test_of_racing_processes_exactly_one_wins_every_claim(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path), str(me)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(raysharded.__file__).parents[1],
            text=True,
        )
        for me in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    wins = [[int(line) for line in racer.communicate(timeout=60)[0].split()] for racer in racers]
    assert sorted(claim for won in wins for claim in won) == list(range(200))
    storage = open_storage(str(tmp_path))
    assert all(storage.read(f"claims/{claim}") == b"%d" % me for me, won in enumerate(wins) for claim in won)
    assert not [key for key in storage.list() if TEMPORARY_MARK in key]


def test_storages_can_be_sent_to_workers(storage: Storage) -> None:
    copy: Storage = pickle.loads(pickle.dumps(storage))
    storage.write("a", [b"1"])
    assert copy == storage
    assert copy.read("a") == b"1"


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


def test_deleting_the_last_file_of_a_local_folder_removes_the_folder(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    storage.write("a/b/c", [b"1"])
    storage.delete(["a/b/c"])
    assert list((tmp_path / "run").iterdir()) == []


def test_urls_open_the_storage_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = LocalStorage(str(tmp_path / "a b"))
    assert open_storage(f"file://{tmp_path}/a%20b/") == here
    assert open_storage(str(tmp_path / "a b") + "/") == here
    assert open_storage("a b") == here
    assert open_storage("memory://x/y/") == FsspecStorage("memory://x/y")


def test_a_writable_storage_is_left_as_it_was(storage: Storage) -> None:
    check_writable(storage)
    assert storage.list() == []


def test_an_unwritable_path_ends_in_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"file/run cannot be written to: .* choose another storage_path"):
        check_writable(open_storage(str(tmp_path / "file" / "run")))


def test_a_path_where_no_folder_can_be_made_ends_in_one_clear_message() -> None:
    with pytest.raises(StorageError, match="/proc/raysharded cannot be written to"):
        check_writable(open_storage("/proc/raysharded"))


def test_an_unknown_protocol_is_a_storage_error_that_names_it() -> None:
    with pytest.raises(StorageError, match="nosuch"):
        check_writable(open_storage("nosuch://bucket/run"))


def test_lost_connections_are_tried_again_a_bounded_number_of_times() -> None:
    waits: list[float] = []
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        with_retries(fails, sleep=waits.append)
    assert len(calls) == MAX_ATTEMPTS
    assert len(waits) == MAX_ATTEMPTS - 1
    assert all(0 <= wait <= 8 for wait in waits)


def test_what_cannot_pass_by_itself_is_not_tried_again() -> None:
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        with_retries(fails, sleep=lambda _: None)
    assert len(calls) == 1


@pytest.mark.parametrize("effect", [False, True])
def test_a_put_whose_connection_is_lost_knows_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: bool
) -> None:
    storage = open_storage(f"careless://{tmp_path.name}")
    assert not _creates_exclusively(*_open(storage.url))  # the fallback is what is tried here
    storage.put_if_absent("probe", b"")  # so that the failure meets the put, not the probing of the backend
    monkeypatch.setattr(CarelessFileSystem, "failures", [ConnectionResetError("gone")])
    monkeypatch.setattr(CarelessFileSystem, "effect_before_failure", effect)
    assert storage.put_if_absent("claim", b"mine") is True
    assert CarelessFileSystem.failures == []
    assert storage.read("claim") == b"mine"
    assert storage.put_if_absent("claim", b"yours") is False


def test_a_lost_connection_does_not_end_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"careless://{tmp_path.name}")
    storage.write("a", [b"1"])
    monkeypatch.setattr(CarelessFileSystem, "failures", [TimeoutError("slow")])
    assert storage.read("a") == b"1"
    assert CarelessFileSystem.failures == []
