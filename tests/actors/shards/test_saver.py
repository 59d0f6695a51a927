"""A checkpoint is written from the snapshot itself, in the background: nothing is overwritten, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raysharded.actors.numerics.step_consensus import Flags
from raysharded.actors.shards.saver import Decision, Saver, decide
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.storage import BytesLike
from raysharded.errors import StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import StateSpec, TensorSpec
from raysharded.protocol.messages import save_prefix

LAYOUT = GenerationId(3)
SPEC = StateSpec(
    tensors=(
        TensorSpec(name="buffer.b", dtype="float32", shape=(4,), replicated=True),
        TensorSpec(name="model.w", dtype="float32", shape=(10, 3)),
    )
)
WAIT_S = 20.0


class HeldUp:
    """A storage whose writes wait until they are let through, and then fail on request."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.writing, self.may_go = threading.Event(), threading.Event()
        self.fails = False

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        self.writing.set()
        assert self.may_go.wait(WAIT_S)
        if self.fails:
            raise StorageError("the disk is full")
        self._storage.write(key, parts)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def snapshot(store: ShardStore, step: int, layout: GenerationId = LAYOUT) -> ShardBuffer:
    """The next snapshot of the only worker; all of its bytes contain the step."""
    buffer = store.begin(step, layout, "snapshot", 1, 0, SPEC)
    buffer.data.fill_(step)
    buffer.complete = True
    return buffer


def held_up(folder: Path) -> tuple[HeldUp, Saver]:
    storage = HeldUp(open_storage(str(folder)))
    return storage, Saver(storage)  # type: ignore[arg-type]  # all of a storage's methods, found by name


def files_of(folder: Path, step: int) -> bytes:
    (file,) = (folder / save_prefix(step, LAYOUT)).glob("*.safetensors")
    return file.read_bytes()


def test_what_is_written_is_the_step_that_was_begun_however_far_training_goes_meanwhile(tmp_path: Path) -> None:
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    saver.begin(snapshot(store, 7), LAYOUT)
    assert storage.writing.wait(WAIT_S)
    for step in range(8, 20):
        snapshot(store, step)
    storage.may_go.set()
    saved = saver.collect(LAYOUT, 7, WAIT_S)
    assert saved.error is None
    assert saved.step == 7
    assert files_of(tmp_path, 7).endswith(bytes([7]) * 120)


def test_a_save_needs_one_more_buffer_and_later_ones_no_further(tmp_path: Path) -> None:
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    shard = snapshot(store, 1).data.numel()
    used: set[int] = set()
    for step in range(2, 30):
        buffer = snapshot(store, step)
        used.add(buffer.data.data_ptr())
        if step % 5 == 0:
            saver.begin(buffer, LAYOUT)
        if step % 5 == 4 and step > 5:
            storage.may_go.set()
            assert saver.collect(LAYOUT, step - 4, WAIT_S).error is None
            storage.may_go.clear()
    storage.may_go.set()
    assert store.size_bytes == 3 * shard
    assert len(used) <= 3


def test_a_snapshot_that_is_being_saved_still_counts_as_held(tmp_path: Path) -> None:
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    saver.begin(snapshot(store, 5), LAYOUT)
    for step in (6, 7, 8):
        snapshot(store, step)
    assert [held.step for held in store.held(WorkerId(0))] == [5, 7, 8]
    storage.may_go.set()
    assert saver.collect(LAYOUT, 5, WAIT_S).error is None


def test_a_save_outlives_the_layout_that_its_snapshot_belongs_to(tmp_path: Path) -> None:
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    saver.begin(snapshot(store, 5), LAYOUT)
    assert storage.writing.wait(WAIT_S)
    later = GenerationId(LAYOUT + 1)
    snapshot(store, 5, later)
    store.drop_other_layouts(later)
    for step in (6, 7, 8):
        snapshot(store, step, later)
    storage.may_go.set()
    assert saver.collect(LAYOUT, 5, WAIT_S).error is None
    assert files_of(tmp_path, 5).endswith(bytes([5]) * 120)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_releases_its_snapshot_when_it_has_ended_either_way(tmp_path: Path, fails: bool) -> None:
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    storage.fails = fails
    buffer = snapshot(store, 5)
    saver.begin(buffer, LAYOUT)
    assert saver.busy
    assert buffer.is_read
    storage.may_go.set()
    saved = saver.collect(LAYOUT, 5, WAIT_S)
    assert saved.error == ("StorageError: the disk is full" if fails else None)
    assert not saver.busy
    assert not buffer.is_read


def test_waiting_for_a_save_ends_when_it_is_abandoned(tmp_path: Path) -> None:
    storage, saver = held_up(tmp_path)
    saver.begin(snapshot(ShardStore(), 5), LAYOUT)
    assert not saver.wait_until_idle(lambda: True)
    storage.may_go.set()
    assert saver.wait_until_idle(lambda: False)


def test_a_save_that_another_is_in_the_way_of_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysharded.actors.shards.saver.BEGIN_TIMEOUT_S", 0.3)
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    saver.begin(snapshot(store, 5), LAYOUT)
    answers: list[str | None] = []
    asked = threading.Thread(target=lambda: answers.append(saver.collect(LAYOUT, 6, WAIT_S).error))
    asked.start()
    asked.join(0.5)  # longer than the delay of an undisturbed save
    assert asked.is_alive()
    storage.may_go.set()
    assert saver.wait_until_idle(lambda: False)
    saver.begin(snapshot(store, 6), LAYOUT)
    asked.join(WAIT_S)
    assert answers == [None]
    assert "was not begun" in str(saver.collect(LAYOUT, 9, WAIT_S).error)


@pytest.mark.parametrize(("limit", "most"), [("_RESULTS_KEPT", 2), ("_RESULTS_BYTES", 1)])
def test_a_request_for_a_save_that_newer_ones_followed_is_answered_at_once(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"raysharded.actors.shards.saver.{limit}", most)
    store = ShardStore()
    storage, saver = held_up(tmp_path)
    storage.may_go.set()
    for step in range(1, 6):
        saver.begin(snapshot(store, step), LAYOUT)
        assert saver.wait_until_idle(lambda: False)
    storage.may_go.clear()
    saver.begin(snapshot(store, 6), LAYOUT)  # may be written for any time
    for generation, step in [(LAYOUT, 1), (LAYOUT, 3), (GenerationId(LAYOUT - 1), 9)]:
        saved = saver.collect(generation, step, 1e9)
        assert saved.unknown
        assert saved.error is not None
    assert saver.collect(LAYOUT, 5, WAIT_S).error is None
    storage.may_go.set()
    assert not saver.collect(LAYOUT, 6, WAIT_S).unknown


# -- requests about a checkpoint --


@given(busy=st.booleans(), now=st.booleans(), due=st.booleans(), last=st.booleans())
def test_one_checkpoint_at_a_time_and_none_is_queued(busy: bool, now: bool, due: bool, last: bool) -> None:
    decision = decide(Flags(save_busy=busy, save_now=now), due=due, last=last)
    assert not (decision.start and decision.late)
    assert decision.start == ((due or now) and (last or not busy))
    assert decision.late == (due and busy and not last)
    assert decision.asked == (decision.start and now)


def test_nothing_is_done_without_a_reason() -> None:
    assert decide(Flags(), due=False, last=True) == Decision()


# -- the buffers, under any order of events --


class Memory(RuleBasedStateMachine):
    """A worker's snapshots: filled step by step, abandoned, read and released, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ShardStore()
        self.layout = GenerationId(1)
        self.step = 0
        self.reading: list[tuple[ShardBuffer, int]] = []
        self.complete: dict[GenerationId, int] = {}

    @rule()
    def train(self) -> None:
        self.step += 1
        snapshot(self.store, self.step, self.layout)
        self.complete[self.layout] = self.step

    @rule()
    def abort_a_step(self) -> None:
        self.store.begin(self.step + 1, self.layout, "snapshot", 1, 0, SPEC).data.fill_(255)
        self.store.drop_incomplete()

    @precondition(lambda self: self.step in self.complete.values() and len(self.reading) < 1)
    @rule()
    def begin_a_save(self) -> None:
        buffer = self.store.newest_own()
        assert buffer is not None
        buffer.hold()
        self.reading.append((buffer, buffer.step))

    @precondition(lambda self: self.reading)
    @rule()
    def end_a_save(self) -> None:
        self.reading.pop()[0].release()

    @precondition(lambda self: self.step > 0)
    @rule()
    def change_layout(self) -> None:
        self.layout = GenerationId(self.layout + 1)
        snapshot(self.store, self.step, self.layout)
        self.store.drop_other_layouts(self.layout)
        self.complete = {self.layout: self.step}

    @invariant()
    def what_is_read_stays_as_it_is(self) -> None:
        for buffer, step in self.reading:
            assert buffer.step == step
            assert bool((buffer.data == step % 256).all())

    @invariant()
    def the_newest_complete_step_is_held(self) -> None:
        for layout, step in self.complete.items():
            assert bool((self.store.find(step, layout, "snapshot").data == step % 256).all())

    @invariant()
    def memory_is_bounded(self) -> None:
        one = 192 if self.step or self.store.size_bytes else 0
        assert self.store.size_bytes <= 3 * one


TestMemory = Memory.TestCase


def test_the_bytes_that_are_written_are_those_of_the_buffer_and_not_a_copy(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(HeldUp):
        def write(self, key: str, parts: Iterable[BytesLike]) -> None:
            seen.extend(np.frombuffer(part, np.uint8).ctypes.data for part in parts)

    saver = Saver(Watching(open_storage(str(tmp_path))))  # type: ignore[arg-type]  # as above
    buffer = snapshot(ShardStore(), 5)
    saver.begin(buffer, LAYOUT)
    assert saver.collect(LAYOUT, 5, WAIT_S).error is None
    inside = range(buffer.data.data_ptr(), buffer.data.data_ptr() + buffer.data.numel())
    assert len([address for address in seen if address in inside]) == len(SPEC.tensors)
    assert torch.equal(buffer.data, torch.full_like(buffer.data, 5))
