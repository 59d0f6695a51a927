"""Promises of every storage: a folder, S3, fsspec's memory, a backend without exclusive create, S3 through fsspec."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysharded.checkpoint import NoSuchKey, Storage, check_writable, open_storage
from raysharded.checkpoint.storage.local import LocalStorage, size_of_listed
from raysharded.checkpoint.storage.optional_operations import list_folders, list_sizes, list_times
from raysharded.errors import IncompleteCheckpoint, StorageError
from tests.checkpoint.storage import careless as careless
from tests.paths import ROOT

_ON_S3 = [pytest.param(kind, marks=pytest.mark.s3) for kind in ("s3", "fsspec+s3")]


@pytest.fixture(params=["local", "memory", "careless", *_ON_S3])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    match request.param:
        case "local":
            yield open_storage(str(tmp_path / "run"))
            return
        case "s3":
            yield open_storage(request.getfixturevalue("s3_url"))
            return
        case "fsspec+s3":
            url = request.getfixturevalue("s3_url").partition("?")[0]
            server = request.getfixturevalue("s3_server")
            request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
            yield open_storage(f"fsspec+{url}")
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


def test_reads_go_into_the_memory_they_are_given_and_stop_at_the_end(storage: Storage) -> None:
    storage.write("a", [b"0123456789"])
    first, second = bytearray(3), bytearray(b"....")
    assert storage.read_into("a", 2, [memoryview(first), memoryview(second)]) == 7
    assert bytes(first + second) == b"2345678"
    first, second = bytearray(3), bytearray(b"....")
    assert storage.read_into("a", 6, [memoryview(first), memoryview(second)]) == 4
    assert bytes(first + second) == b"6789..."
    assert storage.read_into("a", 10, [memoryview(first)]) == 0
    assert storage.read_into("a", 99, [memoryview(first)]) == 0
    with pytest.raises(NoSuchKey):
        storage.read_into("no/such", 0, [memoryview(first)])


def test_parts_of_any_shape_are_written_as_their_bytes(storage: Storage) -> None:
    words = memoryview(b"0123456789ab").cast("I", (3, 1))
    storage.write("a", [b"", words, bytearray(b"x")])
    assert storage.read("a") == b"0123456789abx"
    storage.write("empty", [])
    assert (storage.read("empty"), storage.size("empty")) == (b"", 0)
    assert storage.read("empty", 0, 1 << 28) == storage.read("a", 13) == storage.read("a", 13, 1 << 28) == b""


class Unreadable:
    """Parts that are read from elsewhere, where a connection was lost."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[bytes]:
        self.times += 1
        yield b"first"
        raise IncompleteCheckpoint("the source is cut off.") from ConnectionError("lost")


def test_an_error_of_what_is_written_passes_through_and_leaves_nothing(storage: Storage) -> None:
    parts = Unreadable()
    with pytest.raises(IncompleteCheckpoint, match=r"^the source is cut off\.$"):
        storage.write("a", parts)
    assert (storage.list(), parts.times) == ([], 1)


def test_keys_are_listed_below_a_folder_at_any_depth(storage: Storage) -> None:
    assert storage.list() == storage.list("a") == []
    for key in ("a/x", "a/b/c/y", "ab/z", "top"):
        storage.write(key, [b"1"])
    assert storage.list() == ["a/b/c/y", "a/x", "ab/z", "top"]
    assert storage.list("a") == ["a/b/c/y", "a/x"]
    assert storage.list("a/b") == ["a/b/c/y"]
    assert storage.list("nothing") == []


def test_keys_are_listed_with_their_sizes(storage: Storage) -> None:
    assert dict(list_sizes(storage, "a")) == {}
    for key, size in (("a/x", 3), ("a/b/y", 0), ("top", 1)):
        storage.write(key, [b"1" * size])
    listed = list_sizes(storage, "a")
    assert [(key, size_of_listed(storage, key, listed[key])) for key in listed] == [("a/b/y", 0), ("a/x", 3)]


def test_the_times_of_files_of_a_name_are_listed(storage: Storage) -> None:
    assert dict(list_times(storage, "x")) == {}
    for key in ("a/b/x", "a/x", "a/xx", "top"):
        storage.write(key, [b"1"])
    times = list_times(storage, "x")
    assert list(times) == ["a/b/x", "a/x"]
    assert all(at is not None and abs(at - time.time()) < 600 for at in times.values())
    assert list(list_times(storage, "x", "a/b")) == ["a/b/x"]


def test_the_folders_right_in_it_are_named_and_no_other(storage: Storage) -> None:
    assert list_folders(storage) == []
    for key in ("b/x", "a/b/c/y", "ab/z", "top"):
        storage.write(key, [b"1"])
    assert list_folders(storage) == ["a", "ab", "b"]


def test_deleting_is_idempotent(storage: Storage) -> None:
    storage.write("a/b/x", [b"1"])
    storage.delete(["a/b/x", "a/b/x", "never/there"])
    assert storage.list() == []
    storage.write("a/b/x", [b"2"])
    assert storage.read("a/b/x") == b"2"


def test_a_missing_key_is_distinguished_from_other_failures(storage: Storage) -> None:
    for operation in (storage.read, storage.size):
        with pytest.raises(NoSuchKey, match="no/such"):
            operation("no/such")
    with pytest.raises(NoSuchKey):
        storage.read("no/such", 1, 1)


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../../b", "a/./b", "a/", "a\0b", "s3://a"])
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
for claim in range(int(sys.argv[3])):
    if storage.put_if_absent(f"claims/{claim}", sys.argv[2].encode()):
        print(claim, flush=True)
"""


@pytest.mark.parametrize(("kind", "claims"), [("local", 200), pytest.param("s3", 30, marks=pytest.mark.s3)])
def test_of_racing_processes_exactly_one_wins_every_claim(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, claims: int
) -> None:
    url = str(tmp_path) if kind == "local" else request.getfixturevalue("s3_url")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, url, str(me), str(claims)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
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
    assert sorted(claim for won in wins for claim in won) == list(range(claims))
    storage = open_storage(url)
    assert all(storage.read(f"claims/{claim}") == b"%d" % me for me, won in enumerate(wins) for claim in won)
    assert not storage.unfinished()


def test_storages_can_be_sent_to_workers(storage: Storage) -> None:
    copy: Storage = pickle.loads(pickle.dumps(storage))
    storage.write("a", [b"1"])
    assert copy == storage
    assert copy.read("a") == b"1"


def test_a_writable_storage_is_left_as_it_was(storage: Storage) -> None:
    check_writable(storage)
    assert storage.list() == []
