"""A pinned checkpoint stays, also when another process deletes at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint import Keep, Storage, list_pins, open_storage, pin, prune, unpin
from raysharded.checkpoint.retention.pins import PINS_FOLDER, Pin
from raysharded.checkpoint.retention.tombstone import TOMBSTONE_NAME
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.errors import CheckpointError, CorruptCheckpoint, StorageError
from raysharded.testing.storages import FailingStorage
from tests.cases import examples
from tests.checkpoint.retention.interleaving import every_order, run
from tests.checkpoint.retention.runs import Run, ref_of, save_v1, storage as storage

Call = Callable[[Storage], object]


def test_a_pin_names_a_checkpoint_until_it_is_removed(storage: Storage) -> None:
    prefix = Run(storage).save(5)
    ref = ref_of(storage, prefix)
    made = pin(storage, "best", ref, wall=lambda: 3.0)
    assert list_pins(storage) == [made]
    assert (made.prefix, made.step, made.manifest_digest, made.created_at) == (prefix, 5, ref.digest, 3.0)
    unpin(storage, "best")
    assert list_pins(storage) == []


def test_a_pinned_checkpoint_is_not_pruned_until_it_is_unpinned(storage: Storage) -> None:
    driver = Run(storage)
    prefixes = [driver.save(step) for step in (1, 2, 3)]
    pin(storage, "keep", ref_of(storage, prefixes[0]))
    assert prune(storage, Keep(last=1)).retired == (prefixes[1],)
    unpin(storage, "keep")
    assert prune(storage, Keep(last=1)).retired == (prefixes[0],)


def test_a_tag_names_one_checkpoint_and_may_be_given_again(storage: Storage) -> None:
    driver = Run(storage)
    one, other = ref_of(storage, driver.save(1)), ref_of(storage, driver.save(2))
    assert pin(storage, "a", one) == pin(storage, "a", one)
    with pytest.raises(CheckpointError, match=r"'a' in .* names step 1 .* already"):
        pin(storage, "a", other)
    assert [found.step for found in list_pins(storage)] == [1]


def test_mistakes_are_named(storage: Storage) -> None:
    driver = Run(storage)
    committed, unclaimed = driver.save(1), driver.unclaimed(2)
    with pytest.raises(CheckpointError, match=r"not committed \(unclaimed\)"):
        pin(storage, "a", ref_of(storage, unclaimed))
    for bad in ("", "a/b", "..", ".a", "a b", "x" * 129):
        with pytest.raises(CheckpointError, match="cannot be a tag"):
            pin(storage, bad, ref_of(storage, committed))
    pin(storage, "good", ref_of(storage, committed))
    with pytest.raises(CheckpointError, match=r"no tag 'bad' in .*; there are: good"):
        unpin(storage, "bad")


def test_a_checkpoint_that_is_being_deleted_cannot_be_pinned(storage: Storage) -> None:
    driver = Run(storage)
    ref = ref_of(storage, driver.save(1))
    storage.write(f"{ref.prefix}/{TOMBSTONE_NAME}", [b"?"])
    with pytest.raises(CheckpointError, match="is being deleted"):
        pin(storage, "late", ref)
    storage.delete([f"{ref.prefix}/{TOMBSTONE_NAME}", f"{ref.prefix}/manifest.json"])
    with pytest.raises(CheckpointError, match="has been deleted"):
        pin(storage, "late", ref)
    assert list_pins(storage) == []


def test_a_pin_that_a_deletion_gave_way_to_is_not_called_deleted(storage: Storage) -> None:
    driver = Run(storage)
    ref = ref_of(storage, driver.save(1))
    pin(storage, "held", ref)
    assert not retire(storage, ref, number=2)
    with pytest.raises(CheckpointError, match=r"has the tag 'held' already.*marked for deletion.*as long as") as caught:
        pin(storage, "held", ref)
    assert "deleted" not in str(caught.value)
    assert [found.tag for found in list_pins(storage)] == ["held"]
    assert not retire(storage, ref, number=2)


@pytest.mark.parametrize("storage", ["local", "memory"], indirect=True)
def test_a_checkpoint_of_version_1_can_be_pinned(storage: Storage) -> None:
    ref = ref_of(storage, save_v1(storage, 7))
    assert len(pin(storage, "old", ref).manifest_digest) == 64
    Run(storage).save(9)
    assert prune(storage, Keep(last=1)).retired == ()


def test_nothing_is_deleted_while_a_pin_cannot_be_read_and_it_can_be_removed(storage: Storage) -> None:
    driver = Run(storage)
    prefixes = [driver.save(step) for step in (1, 2)]
    storage.write(f"{PINS_FOLDER}/torn.json", [b"{"])
    with pytest.raises(CorruptCheckpoint, match=r"pins/torn\.json"):
        prune(storage, Keep(last=1))
    assert ref_of(storage, prefixes[0]).complete
    unpin(storage, "torn")
    assert prune(storage, Keep(last=1)).retired == (prefixes[0],)


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_pin_whose_reply_was_lost_is_made_by_the_same_call_again(storage: Storage, took_effect: bool) -> None:
    ref = ref_of(storage, Run(storage).save(1))
    for fail_at in range(5):
        failing = FailingStorage(storage, fail_at=fail_at, took_effect=took_effect)
        with suppress(StorageError):
            pin(failing, "a", ref)
        assert pin(storage, "a", ref).step == 1
        unpin(storage, "a")
        if not failing.fired:
            return
    raise AssertionError("never without a failure")


def _fresh(tmp_path: Path) -> Callable[[], Storage]:
    """Storages, each with the checkpoints of steps 1 and 2."""
    numbers = count()

    def make() -> Storage:
        storage = open_storage(f"memory://{tmp_path}/{next(numbers)}")
        driver = Run(storage)
        driver.save(1)
        driver.save(2)
        return storage

    return make


def _calls(storage: Storage, *, deleters: int) -> Sequence[Call]:
    [ref, _] = [ref_of(storage, prefix) for prefix in _prefixes(storage)]
    return [lambda stepped: pin(stepped, "p", ref), *[lambda stepped: retire(stepped, ref, number=3)] * deleters]


def _prefixes(storage: Storage) -> list[str]:
    return sorted({key.rsplit("/", 1)[0] for key in storage.list("checkpoints") if key.endswith("manifest.json")})


def _check(storage: Storage, pinned: object, deleted: Sequence[object], prefix: str) -> None:
    """Check that a made pin keeps its checkpoint, a refused one leaves nothing, and no other call fails."""
    there = f"{prefix}/manifest.json" in storage.list(prefix)
    assert all(type(outcome) is bool for outcome in deleted), deleted
    assert there == (True not in deleted)
    if isinstance(pinned, Pin):
        assert there
        assert [found.tag for found in list_pins(storage)] == ["p"]
    else:
        assert type(pinned) is CheckpointError
        assert list_pins(storage) == []


def test_in_every_order_of_a_pin_and_a_deletion_one_gives_way(tmp_path: Path) -> None:
    seen = set()
    for ran in every_order(_fresh(tmp_path), lambda storage: _calls(storage, deleters=1)):
        pinned, deleted = ran.outcomes
        _check(ran.storage, pinned, [deleted], "checkpoints/step-0000000001-g000001")
        seen.add((isinstance(pinned, Pin), deleted))
    assert seen == {(True, False), (False, True), (False, False)}, "each can win, and both can give way"


@pytest.mark.slow
@settings(max_examples=examples(20, of=60), deadline=None)
@given(order=st.lists(st.integers(0, 3), max_size=20))
def test_in_every_order_of_a_pin_and_three_deletions_a_pin_that_was_made_holds(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    storage = _fresh(tmp_path_factory.mktemp("run"))()
    pinned, *deleted = run(storage, _calls(storage, deleters=3), order).outcomes
    _check(storage, pinned, deleted, "checkpoints/step-0000000001-g000001")
    storage.delete(storage.list())  # data in fsspec's memory slows down all that follows


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(order=st.lists(st.integers(0, 2), max_size=60))
def test_in_every_order_of_a_pin_and_two_prunings_a_pin_that_was_made_holds(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    storage = _fresh(tmp_path_factory.mktemp("run"))()
    [call, _] = _calls(storage, deleters=1)
    prunings: list[Call] = [lambda stepped: prune(stepped, Keep(last=1), now=True)] * 2
    pinned, *pruned = run(storage, [call, *prunings], order).outcomes
    prefix = "checkpoints/step-0000000001-g000001"
    assert not any(isinstance(outcome, Exception) for outcome in pruned), pruned
    assert ref_of(storage, "checkpoints/step-0000000002-g000001").complete
    if isinstance(pinned, Pin):
        assert ref_of(storage, prefix).complete
    else:
        assert isinstance(pinned, CheckpointError)
    storage.delete(storage.list())
