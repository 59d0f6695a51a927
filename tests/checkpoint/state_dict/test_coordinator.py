"""Ranks agree or fail together, each within its time; here they are threads over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from raysharded.checkpoint.format.encoding import ForeignManifest
from raysharded.checkpoint.format.signing import Unsigned
from raysharded.checkpoint.sharded_io.coordinator import Coordinator, PeerFailed, _as_error
from raysharded.checkpoint.storage import NoSuchKey, NotAFile
from raysharded.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    NoCheckpoint,
    RayshardedError,
    RefusedCheckpoint,
    StorageError,
)

pytestmark = pytest.mark.alone

LONG_S = 60.0


def on_ranks(world_size: int, act: Callable[[Coordinator], Any], timeouts_s: Sequence[float] = ()) -> list[Any]:
    """Each rank's result, or its error. Without `timeouts_s`, one for each rank, they are long."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> Any:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        coordinator = Coordinator(
            PrefixStore("test", store), rank, world_size, (timeouts_s or [LONG_S] * world_size)[rank]
        )
        try:
            with coordinator.guarded():
                return act(coordinator)
        except Exception as error:  # noqa: BLE001 - the result
            return error

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(run, range(world_size)))
    left = (
        [key for key in server.list_keys() if "/test/" in key or key.startswith("test/")] if not errors(found) else []
    )
    assert left == []
    return found


def errors(found: list[Any]) -> list[Any]:
    return [one for one in found if isinstance(one, BaseException)]


def test_rank_0_receives_all_and_answers_each() -> None:
    def act(coordinator: Coordinator) -> Any:
        heard = []
        for round_ in range(3):
            everyone = coordinator.gather({"rank": coordinator.rank, "round": round_})
            answers = None if everyone is None else [{"for": rank, "of": everyone} for rank in range(3)]
            heard.append(coordinator.scatter(answers))
        return heard

    for rank, heard in enumerate(on_ranks(3, act)):
        for round_, answer in enumerate(heard):
            assert answer == {"for": rank, "of": [{"rank": r, "round": round_} for r in range(3)]}


def test_rounds_that_are_gathered_ahead_do_not_mix() -> None:
    def act(coordinator: Coordinator) -> Any:
        first, second = coordinator.gather([1, coordinator.rank]), coordinator.gather([2, coordinator.rank])
        return coordinator.scatter(None if first is None else [[first, second]] * 4)

    expected = [[[1, rank] for rank in range(4)], [[2, rank] for rank in range(4)]]
    assert on_ranks(4, act) == [expected] * 4


def test_messages_beyond_what_a_store_takes_at_once_arrive() -> None:
    import random

    noise = random.Random(3).randbytes(7 << 20).hex()  # 14 MiB of text that packs to 7 MiB or more

    def act(coordinator: Coordinator) -> Any:
        everyone = coordinator.gather(noise)
        return coordinator.scatter(None if everyone is None else [everyone[1] == noise, noise])

    assert on_ranks(2, act) == [True, noise]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_reaches_the_others_at_once(failing: int) -> None:
    def act(coordinator: Coordinator) -> Any:
        coordinator.phase = "writing"
        if coordinator.rank == failing:
            raise StorageError("the disk is full.")
        everyone = coordinator.gather(1)
        return coordinator.scatter(None if everyone is None else [0] * 4)

    began = time.monotonic()
    found = on_ranks(4, act)
    assert time.monotonic() - began < LONG_S / 4
    for rank, error in enumerate(found):
        if rank == failing:
            assert type(error) is StorageError
        else:
            assert isinstance(error, PeerFailed)
            assert isinstance(error, StorageError)
            assert (str(error), error.phase) == (f"rank {failing} failed: the disk is full.", "writing")


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (NoCheckpoint, NoCheckpoint),
        (ForeignManifest, CorruptCheckpoint),
        (RefusedCheckpoint, RefusedCheckpoint),
        (Unsigned, RefusedCheckpoint),
        (NoSuchKey, StorageError),
        (NotAFile, StorageError),
        (ConfigError, PeerFailed),
    ],
)
def test_an_error_of_one_rank_is_caught_as_what_it_is_on_all(
    kind: type[RayshardedError], caught: type[RayshardedError]
) -> None:
    def act(coordinator: Coordinator) -> Any:
        if coordinator.rank == 1:
            raise kind("it is not there.")
        return coordinator.gather(1)

    peer, failed = on_ranks(2, act)
    assert (type(failed), str(peer)) == (kind, "rank 1 failed: it is not there.")
    assert isinstance(peer, PeerFailed)
    assert isinstance(peer, caught)


@pytest.mark.parametrize(
    ("kind", "caught", "text"),
    [
        ("StorageError", StorageError, "rank 1 failed: it is not there."),
        ("ValueError", PeerFailed, "rank 1 failed: ValueError: it is not there."),
    ],
)
def test_a_rank_of_an_earlier_version_names_its_error_without_bases(kind: str, caught: type, text: str) -> None:
    found = _as_error(1, kind, "it is not there.", "reading")
    assert isinstance(found, caught)
    assert isinstance(found, StorageError) is (kind == "StorageError")
    assert str(found) == text


def test_errors_that_are_not_ours_are_named_with_their_type() -> None:
    def act(coordinator: Coordinator) -> Any:
        if coordinator.rank == 1:
            raise ValueError("wrong")
        return coordinator.gather(1)

    assert str(on_ranks(2, act)[0]) == "rank 1 failed: ValueError: wrong"


def test_a_silent_rank_is_named_within_the_time() -> None:
    """The time of rank 0 begins when rank 1 has sent its message, however slow that was."""
    released, told = threading.Event(), threading.Event()

    def act(coordinator: Coordinator) -> Any:
        if coordinator.rank == 2:
            released.wait(LONG_S)
            return None
        if coordinator.rank == 0:
            told.wait(LONG_S)
        try:
            everyone = coordinator.gather(1)
            told.set()
            return coordinator.scatter(None if everyone is None else [0] * 3)
        finally:
            if coordinator.rank == 1:
                released.set()

    began = time.monotonic()
    found = on_ranks(3, act, timeouts_s=(1.0, LONG_S, LONG_S))
    assert time.monotonic() - began < LONG_S / 2
    assert type(found[0]) is CheckpointError
    assert "1 of 3 ranks sent no message within 1 s: 2." in str(found[0])
    assert type(found[1]) is PeerFailed
    assert "sent no message" in str(found[1])


def test_a_silent_rank_0_is_an_error_within_the_time() -> None:
    store = HashStore()
    coordinator = Coordinator(PrefixStore("test", store), 1, 2, 0.5)
    coordinator.gather(1)
    with pytest.raises(CheckpointError, match=r"rank 0 sent no message within 0.5 s"):
        coordinator.scatter(None)


class BrokenStore(Store):
    """A store whose server has exited."""

    def clone(self) -> BrokenStore:
        return self

    def add(self, key: str, value: int) -> int:
        raise RuntimeError("Connection reset by peer")


def test_a_lost_store_is_explained() -> None:
    coordinator = Coordinator(BrokenStore(), 1, 2, 5.0)
    with pytest.raises(CheckpointError, match=r"the store of the process group failed: Connection reset by peer"):
        coordinator.gather(1)


def test_alone_nobody_is_queried() -> None:
    coordinator = Coordinator.of(None, 1.0)
    with coordinator.guarded():
        assert coordinator.gather("mine") == ["mine"]
        assert coordinator.scatter(["answer"]) == "answer"
