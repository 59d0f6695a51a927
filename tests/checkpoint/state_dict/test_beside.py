"""Saves in the background: the saved state is that at the call, and nothing piles up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raysharded.checkpoint import api
from raysharded.checkpoint.async_save.host_copy import HostCopy
from raysharded.checkpoint.sharded_io import checkpoint_uri
from raysharded.checkpoint.storage import BytesLike, Storage, open_storage
from raysharded.errors import CheckpointError, ConfigError, StorageError
from raysharded.testing.storages import FailingStorage
from tests.checkpoint.state_dict.ranks import run_ranks

DEADLINE_S = 60.0


class GatedStorage:
    """Writes wait until the gate is open. `reached` is set when one waits."""

    def __init__(self, inner: Storage, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        self._gate.waiting += 1
        self._gate.reached.set()
        assert self._gate.opened.wait(DEADLINE_S)
        self._inner.write(key, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Gate:
    """While it is closed, every save waits in its first write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.waiting = 0
        """Writes that have come to it."""
        monkeypatch.setattr(checkpoint_uri, "open_storage", lambda url: GatedStorage(open_storage(url), self))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, gate: Gate) -> None:
    state: dict[str, Any] = {"w": torch.ones(1000), "scattered": torch.ones(6, 4).t(), "n": [1]}
    with api.AsyncSaver() as saver:
        pending = saver.save(tmp_path / "c", state, step=3, metrics={"loss": 1.0})
        assert gate.reached.wait(DEADLINE_S)
        assert not pending.done
        state["w"].zero_()
        state["scattered"].zero_()
        state["n"][0] = 2
        with pytest.raises(TimeoutError, match="step 3"):
            pending.result(0.001)
        gate.opened.set()
        saved = pending.result(DEADLINE_S)
    assert (saved.step, pending.done, pending.skipped) == (3, True, False)
    back = api.open(tmp_path / "c").state()
    assert bool(back["w"].all())
    assert bool(back["scattered"].all())
    assert back["n"] == [1]


def test_what_is_reported_of_a_state_is_as_it_was_at_the_call(tmp_path: Path, gate: Gate) -> None:
    data: dict[str, Any] = {"samples": 32, "shards": [1]}
    metadata: dict[str, Any] = {"seeds": {"a": 1}}
    with api.AsyncSaver() as saver:
        pending = saver.save(tmp_path / "c", {"w": torch.ones(1)}, data=data, metadata=metadata)
        assert gate.reached.wait(DEADLINE_S)
        data["samples"] = torch.ones(1)
        data["shards"].append(2)
        metadata["seeds"]["a"] = 2
        gate.opened.set()
        pending.result(DEADLINE_S)
    opened = api.open(tmp_path / "c")
    assert (opened.data, opened.metadata) == ({"samples": 32, "shards": [1]}, {"seeds": {"a": 1}})


@pytest.mark.parametrize(
    "state",
    [{"epoch": 3}, {"w": torch.empty(0)}, {"w": torch.empty(0, 4, dtype=torch.float8_e5m2), "n": 1}],
    ids=["values", "empty", "empty float8"],
)
def test_a_state_without_elements_is_saved(tmp_path: Path, state: dict[str, Any]) -> None:
    with api.AsyncSaver() as saver:
        assert saver.prepare(state) == 0
        saver.save(tmp_path / "c", state).result(DEADLINE_S)
    assert str(api.open(tmp_path / "c").state()) == str(state)


def test_a_save_while_one_is_written_is_skipped_with_a_notice(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    saver = api.AsyncSaver()
    first = saver.save(tmp_path / "1", {"w": torch.ones(10)}, step=1)
    with caplog.at_level(logging.WARNING, "raysharded.checkpoint"):
        second = saver.save(tmp_path / "2", {"w": torch.ones(10)}, step=2)
    assert second.skipped
    assert second.done
    assert "step 2 is not saved" in caplog.text
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        second.result()
    gate.opened.set()
    first.result(DEADLINE_S)
    third = saver.save(tmp_path / "3", {"w": torch.ones(10)}, step=3)
    saver.close()
    assert third.done
    assert third.result().step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_a_saver_that_waits_skips_nothing(tmp_path: Path) -> None:
    with api.AsyncSaver(when_busy="wait") as saver:
        pending = [saver.save(tmp_path / str(step), {"w": torch.full((9,), step)}, step=step) for step in range(4)]
    assert [save.result().step for save in pending] == [0, 1, 2, 3]
    for step in range(4):
        assert api.open(tmp_path / str(step)).read("w").tolist() == [step] * 9


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With one thread copies are C's, with more torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_the_buffer_is_made_once() -> None:
    copy = HostCopy()
    state = {"w": torch.ones(1000), "b": torch.ones(3, dtype=torch.bool)}
    assert copy.make_room(state) == 4000 + 32 + 64  # each begins at a multiple of 64
    places = set()
    for step in range(3):
        state["w"].fill_(step)
        held = copy.take(state)
        assert [one.local.tolist() for one in held] == [[step] * 1000, [True] * 3]
        places.add(held[0].local.data_ptr())
    assert len(places) == 1
    assert state["w"].data_ptr() not in places


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    "later",
    [
        {"b": torch.full((4,), 2.0), "a": torch.full((4,), 3.0)},
        {"a": torch.full((2, 2), 2.0), "b": torch.full((4,), 3.0)},
        {"a": torch.full((4,), 2, dtype=torch.int32), "b": torch.full((4,), 3.0)},
        {"a": torch.full((4,), 2.0), "b": torch.full((4,), 3.0), "c": torch.full((400,), 4.0)},
        {"a": torch.full((4,), 2.0)},
        {"a": torch.zeros(0), "b": torch.full((4,), 3.0)},
        {"a": torch.tensor(2.0, dtype=torch.bfloat16), "b": torch.nn.Parameter(torch.full((4,), 3.0))},
        {"a": torch.full((8,), 2.0)[::2], "b": torch.view_as_complex(torch.ones(4, 2)).conj().imag},
    ],
    ids=["order", "shape", "dtype", "more", "fewer", "empty", "scalar", "strides"],
)
def test_a_copy_follows_the_state_when_its_layout_changes(later: dict[str, torch.Tensor]) -> None:
    copy = HostCopy()
    copy.take({"a": torch.zeros(4), "b": torch.ones(4)})
    held = copy.take(later)
    assert [one.name for one in held] == list(later)
    for one, tensor in zip(held, later.values(), strict=True):
        assert (one.shape, one.local.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert one.local.tolist() == tensor.tolist()


def test_a_failed_save_is_in_the_log_and_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = api.AsyncSaver(when_busy="wait")
    monkeypatch.setattr(checkpoint_uri, "open_storage", lambda url: FailingStorage(open_storage(url), fail_at=0))
    failed = saver.save(tmp_path / "1", {"w": torch.ones(10)}, step=1)
    monkeypatch.undo()
    good = saver.save(tmp_path / "2", {"w": torch.ones(10)}, step=2)
    saver.close()
    with pytest.raises(StorageError, match="set to fail"):
        failed.result()
    assert "the save of step 1 to" in caplog.text
    assert good.result().step == 2


def test_a_state_that_cannot_be_stored_is_refused_at_the_call(tmp_path: Path) -> None:
    with api.AsyncSaver() as saver:
        with pytest.raises(CheckpointError, match="cannot be stored"):
            saver.save(tmp_path / "c", {"w": object()})
        assert not saver.save(tmp_path / "c", {"w": torch.ones(1)}).skipped


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 'skip' or 'wait'"):
        api.AsyncSaver(when_busy="queue")  # type: ignore[arg-type]  # that is the point


def save_one_row(rank: int, uri: str) -> None:
    row = distribute_tensor(torch.ones(1, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    with api.AsyncSaver(timeout_s=DEADLINE_S) as saver:
        saver.save(uri, {"row": row}).result(DEADLINE_S)


@pytest.mark.procs
def test_a_rank_that_holds_nothing_saves_with_the_others(tmp_path: Path) -> None:
    run_ranks(2, save_one_row, str(tmp_path / "c"))
    assert api.open(tmp_path / "c").read("row").tolist() == [[1.0] * 3]


def save_often(rank: int, folder: str) -> list[bool]:
    """Rank 2's storage is slow: the others are done long before."""
    skipped = []
    with api.AsyncSaver(timeout_s=DEADLINE_S) as saver:
        for step in range(6):
            pending = saver.save(
                f"{folder}/{step}", {"w": torch.full((100,), step), f"own{rank}": torch.ones(10)}, step=step
            )
            skipped.append(pending.skipped)
            if step == 3 and not pending.skipped:
                pending.result(DEADLINE_S)
    return skipped


@pytest.mark.procs
def test_all_ranks_skip_the_same_saves(tmp_path: Path) -> None:
    found = run_ranks(3, save_often, str(tmp_path))
    assert found[0] == found[1] == found[2]
    for step, skipped in enumerate(found[0]):
        assert (tmp_path / str(step) / "manifest.json").exists() == (not skipped)


def fail_on_one(rank: int, folder: str) -> list[str]:
    said = []
    with api.AsyncSaver(when_busy="wait", timeout_s=DEADLINE_S) as saver:
        state: Any = {"w": torch.ones(5)}
        for step, bad in ((0, False), (1, True), (2, False)):
            given = {"w": object()} if bad and rank == 1 else state
            try:
                saver.save(f"{folder}/{step}", given, step=step).result(DEADLINE_S)
                said.append("saved")
            except CheckpointError as error:
                said.append(type(error).__name__)
    return said


@pytest.mark.procs
def test_an_error_of_one_rank_reaches_all_and_the_next_save_works(tmp_path: Path) -> None:
    assert run_ranks(3, fail_on_one, str(tmp_path)) == [
        ["saved", "PeerFailed", "saved"],
        ["saved", "CheckpointError", "saved"],
        ["saved", "PeerFailed", "saved"],
    ]
