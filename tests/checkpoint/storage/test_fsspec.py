"""Storage through fsspec."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import check_writable, open_storage
from raysharded.checkpoint.storage.fsspec import _creates_exclusively, _open, may_pass
from raysharded.errors import StorageError
from tests.checkpoint.storage.careless import CarelessFileSystem


class _Dies(list[bytes]):
    def __iter__(self) -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the writer dies")


@pytest.mark.parametrize("protocol", ["memory", pytest.param("fsspec+s3", marks=pytest.mark.s3)])
def test_a_write_that_fails_leaves_nothing_under_the_key(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    url = f"memory://{tmp_path.name}"
    if protocol == "fsspec+s3":
        path, _, endpoint = request.getfixturevalue("s3_url").partition("?endpoint_url=")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        url = f"fsspec+{path}"
    storage = open_storage(url)
    with pytest.raises(StorageError, match="the writer dies"):
        storage.write("a", _Dies())
    gc.collect()  # files that were not closed close themselves
    assert storage.list() == []


class _HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.code = status


@pytest.mark.parametrize(("status", "passes"), [(429, True), (503, True), (500, True), (403, False), (501, False)])
def test_a_backends_own_errors_are_judged_by_their_http_status(status: int, passes: bool) -> None:
    assert may_pass(_HttpError(status)) is passes
    hidden = OSError(5, "Input/output error")
    hidden.__cause__ = _HttpError(status)
    assert may_pass(hidden) is passes


def test_a_connection_that_aiohttp_loses_may_come_back() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    assert may_pass(aiohttp.ServerDisconnectedError())
    assert may_pass(aiohttp.ClientPayloadError())
    assert not may_pass(aiohttp.InvalidURL("x"))


def test_an_unknown_protocol_is_a_storage_error_that_names_it() -> None:
    with pytest.raises(StorageError, match="nosuch"):
        check_writable(open_storage("nosuch://bucket/run"))


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


def forks_during_a_put(url: str) -> None:
    """For a process that does nothing else: one with other threads is not forked safely."""
    storage = open_storage(url)
    storage.put_if_absent("probe", b"")
    under_way, may_go_on = threading.Event(), threading.Event()
    exists = CarelessFileSystem.exists

    def waits(self: CarelessFileSystem, path: str, **kwargs: Any) -> bool:
        under_way.set()
        may_go_on.wait()
        return exists(self, path)

    def puts() -> None:
        type.__setattr__(CarelessFileSystem, "exists", exists)
        assert storage.put_if_absent("b", b"") is True

    type.__setattr__(CarelessFileSystem, "exists", waits)
    putting = threading.Thread(target=storage.put_if_absent, args=("a", b""))
    putting.start()
    assert under_way.wait(30)
    child = multiprocessing.get_context("fork").Process(target=puts, daemon=True)
    child.start()
    child.join(30)
    child.kill()
    may_go_on.set()
    putting.join()
    assert child.exitcode == 0


def test_a_process_forked_during_a_put_can_put_itself(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=forks_during_a_put, args=(f"careless://{tmp_path.name}",)
    )
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
