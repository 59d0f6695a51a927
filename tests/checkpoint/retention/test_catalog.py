"""A run's checkpoints are listed from its files and claims; the newest complete one is found, broken ones are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import Claims, Manifest, SigningKey, Storage, list_checkpoints, newest_complete
from raysharded.checkpoint.claims import commit_claimed
from raysharded.checkpoint.retention.catalog import survey
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.retention.policy import Keep
from raysharded.checkpoint.storage import Keys, NoSuchKey
from raysharded.checkpoint.stored_claims import claim_key
from raysharded.errors import CorruptCheckpoint, IncompleteCheckpoint, StaleGeneration
from raysharded.testing.storages import CountingStorage, save_rows
from tests.checkpoint.retention.runs import Run, ref_of, save_v1, states, storage as storage


def _newest(storage: Storage, *, skip_damaged: bool = False) -> str | None:
    checkpoint = newest_complete(storage, skip_damaged=skip_damaged).checkpoint
    return checkpoint.prefix if checkpoint else None


def test_a_run_without_saves_has_none(storage: Storage) -> None:
    assert list_checkpoints(storage) == []
    assert newest_complete(storage).checkpoint is None


def test_saves_are_listed_oldest_first_among_any_other_files(storage: Storage) -> None:
    run = Run(storage)
    for step in (3, 20, 100):
        run.save(step)
    run.unfinished(50)
    for key in ("checkpoints/note.txt", "checkpoints/step-x/manifest.json", "journal/0", "other/step-0000000007-a/x"):
        storage.write(key, [b"?"])
    assert states(storage) == [(3, "committed"), (20, "committed"), (50, "unfinished"), (100, "committed")]
    assert [ref.complete for ref in list_checkpoints(storage)] == [True, True, False, True]


def test_a_save_has_all_its_files_wherever_they_lie(storage: Storage) -> None:
    prefix = Run(storage).save(5)
    ref = ref_of(storage, prefix)
    assert set(ref.keys) == set(storage.list("checkpoints"))
    assert len(ref.keys) == 3
    assert (f"{prefix}/w0000.safetensors" in ref.keys) == (not storage.traits.partitioned)


def test_steps_beyond_ten_digits_stay_in_order(storage: Storage) -> None:
    run = Run(storage)
    run.save(10**10 - 1)
    run.save(10**10)
    assert states(storage) == [(10**10 - 1, "committed"), (10**10, "committed")]


def test_of_saves_of_one_step_the_one_committed_last_is_newest(storage: Storage) -> None:
    first, second = Run(storage), Run(storage)
    second.generation = 10**6  # sorts before g000001 as text
    prefix = second.save(5)
    storage.delete(ref_of(storage, prefix).keys)
    third = Run(storage)
    older, newer = third.save(5), Run(storage).save(5)
    assert first.generation < second.generation < third.generation
    assert [ref.prefix for ref in list_checkpoints(storage)] == [older, newer]
    assert _newest(storage) == newer


def test_the_newest_complete_is_opened_and_what_was_never_committed_is_reported(storage: Storage) -> None:
    run = Run(storage)
    run.save(1)
    expected = run.save(2)
    broken, unclaimed = run.unfinished(3), run.unclaimed(4)
    newest = newest_complete(storage)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == expected
    newest.checkpoint.verify()
    assert [skip.ref.prefix for skip in newest.skipped] == [unclaimed, broken]
    assert "no claim names it" in newest.skipped[0].reason
    assert "it has no manifest.json" in newest.skipped[1].reason
    assert all("never committed" in skip.reason and not skip.damaged for skip in newest.skipped)


def test_a_manifest_put_by_an_owner_that_was_followed_is_no_checkpoint(storage: Storage) -> None:
    zombie, owner = Run(storage), Run(storage)
    expected = owner.save(5)
    with pytest.raises(StaleGeneration):
        zombie.save(9)
    assert states(storage) == [(5, "committed"), (9, "unclaimed")]
    assert _newest(storage) == expected


def test_a_damaged_newest_is_an_error_unless_skipping_is_allowed(storage: Storage) -> None:
    run = Run(storage)
    good, bad, lost = run.save(1), run.save(2), run.save(3)
    storage.write(f"{bad}/manifest.json", [b'{"digest":"torn'])
    storage.delete(key for key in storage.list("checkpoints") if lost.rsplit("/", 1)[1] in key and "w0001" in key)
    with pytest.raises(IncompleteCheckpoint, match=r"step 3: 1 of 2 data files .*w0001"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == good
    assert [(skip.ref.prefix, skip.damaged) for skip in newest.skipped] == [(lost, True), (bad, True)]
    storage.write(f"{lost}/manifest.json", [b'{"digest":"torn'])
    with pytest.raises(CorruptCheckpoint, match=lost):
        newest_complete(storage)


def test_a_committed_save_whose_manifest_was_lost_is_named_so(storage: Storage) -> None:
    run = Run(storage)
    good, lost = run.save(1), run.save(2)
    storage.delete([f"{lost}/manifest.json"])
    with pytest.raises(IncompleteCheckpoint, match=r"step 2 .* committed by claims/0000000003\.json, but has no"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == good
    [skipped] = newest.skipped
    assert (skipped.ref.state, skipped.damaged) == ("lost", True)


@pytest.mark.parametrize("all_files", [False, True])
def test_a_run_whose_only_checkpoint_was_lost_does_not_look_new(storage: Storage, all_files: bool) -> None:
    lost = Run(storage).save(1)
    storage.delete(ref_of(storage, lost).keys if all_files else [f"{lost}/manifest.json"])
    Run(storage)
    assert states(storage) == [(1, "lost")]
    with pytest.raises(IncompleteCheckpoint, match=r"step 1 .* committed by"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True)
    assert newest.checkpoint is None
    assert [skipped.damaged for skipped in newest.skipped] == [True]
    assert prune(storage, Keep(last=1), now=True).debris == ()


def test_a_run_whose_claims_were_lost_does_not_look_new(storage: Storage) -> None:
    run = Run(storage)
    prefixes = [run.save(step) for step in (1, 2)]
    storage.delete(storage.list("claims"))
    for _ in range(3):  # before any driver, and after one and two
        assert states(storage) == [(1, "damaged"), (2, "damaged")]
        with pytest.raises(CorruptCheckpoint, match=r"step 2 .* claims/ is missing .*restore it"):
            newest_complete(storage)
        newest = newest_complete(storage, skip_damaged=True)
        assert newest.checkpoint is None
        assert [(skip.ref.prefix, skip.damaged) for skip in newest.skipped] == [(p, True) for p in reversed(prefixes)]
        Claims(storage, "the next driver").own(1)


def test_a_save_committed_while_the_run_is_listed_is_not_called_lost(storage: Storage) -> None:
    run = Run(storage)
    first = run.save(1)
    for step in (2, 3):
        if step == 3:
            run.unfinished(3)
        beside = BetweenListings(storage, act=lambda step=step: run.save(step))  # type: ignore[misc]  # bound now
        newest = newest_complete(beside)
        assert beside.act is None
        assert newest.checkpoint is not None
        assert newest.checkpoint.step == step - 1
        assert not any(skipped.damaged for skipped in newest.skipped)
    assert states(storage) == [(1, "committed"), (2, "committed"), (3, "committed")]
    assert ref_of(storage, first).complete


def test_another_manifest_than_the_claimed_one_is_refused(storage: Storage) -> None:
    run = Run(storage)
    prefix = run.save(4)
    storage.delete(ref_of(storage, prefix).keys)
    run.unclaimed(4)
    again = newest_complete(storage).checkpoint
    assert again is not None, "the same bytes are the same manifest"
    storage.delete(ref_of(storage, prefix).keys)
    save_rows(storage, {"w": np.zeros(20, np.float32)}, step=4, save_id="g000001", num_writers=1)
    with pytest.raises(CorruptCheckpoint, match=r"claims/0000000002\.json committed"):
        newest_complete(storage)
    assert newest_complete(storage, skip_damaged=True).skipped[0].damaged


@pytest.mark.parametrize("storage", ["local", "memory"], indirect=True)
def test_checkpoints_of_version_1_need_no_claim(storage: Storage) -> None:
    old, older = save_v1(storage, 7), save_v1(storage, 5)
    assert [ref.prefix for ref in list_checkpoints(storage)] == [older, old]
    assert _newest(storage) == old
    run = Run(storage)
    new = run.save(9)
    assert states(storage) == [(5, "committed"), (7, "committed"), (9, "committed")]
    assert _newest(storage) == new
    storage.write(f"{old}/manifest.json", [b"torn"])
    assert ref_of(storage, old).state == "damaged"
    assert _newest(storage) == new
    later = save_v1(storage, 11)
    storage.write(f"{later}/manifest.json", [b"torn"])
    with pytest.raises(CorruptCheckpoint, match=later):
        newest_complete(storage)
    storage.delete(ref_of(storage, new).keys)
    assert _newest(storage, skip_damaged=True) == older


def test_a_save_whose_claim_cannot_be_read_is_not_passed_over_in_silence(storage: Storage) -> None:
    run = Run(storage)
    good = run.save(1)
    run.save(2)
    data = bytearray(storage.read(claim_key(3)))
    data[100] ^= 1
    storage.write(claim_key(3), [data])
    with pytest.raises(CorruptCheckpoint, match=r"step 2 .*claims/0000000003\.json"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == good
    assert newest.skipped[0].damaged


def test_unsigned_checkpoints_are_refused_when_a_key_is_set(storage: Storage) -> None:
    run, key = Run(storage), SigningKey(b"0123456789abcdef")
    run.save(1)
    prefix = run.unfinished(2)
    unsigned = newest_complete(storage).checkpoint
    assert unsigned is not None
    with pytest.raises(CorruptCheckpoint, match="not signed"):
        newest_complete(storage, key=key)
    manifest = Manifest(
        run="run", step=2, generation=1, save_id="g000001", writer="w", created_at=0.0, tensors={}, files=()
    )
    digest = commit_claimed(storage, run.claims, prefix, manifest, key=key)
    signed = newest_complete(storage, key=key).checkpoint
    assert signed is not None
    assert (signed.prefix, signed.digest) == (prefix, digest)


def test_listing_reads_few_claims_and_no_manifest_however_many_claims_there_are(tmp_path: Path) -> None:
    from raysharded.checkpoint import open_storage

    storage = open_storage(str(tmp_path))
    run = Run(storage)
    for step in range(1, 101):
        run.claims.commit(1, step, f"checkpoints/step-{step:010d}-gone", "0" * 64)
    prefixes = [run.save(200), run.save(300)]
    counting = CountingStorage(storage)
    assert [ref.prefix for ref in list_checkpoints(counting)] == prefixes
    assert len(counting.reads) <= 16
    assert all(key.startswith("claims/") for key, _, _ in counting.reads)
    run.unclaimed(400)
    found = survey(counting)
    assert found.refs[-1].state == "unclaimed"
    newest = found.history.newest()
    assert newest is not None
    assert newest.number == 103


def test_a_claim_that_is_missing_in_the_sequence_does_not_stop_the_reading(storage: Storage) -> None:
    run = Run(storage)
    first = run.save(1)
    run.save(2)
    run.save(3)
    storage.delete([claim_key(3)])
    assert states(storage) == [(1, "committed"), (2, "damaged"), (3, "committed")]
    assert ref_of(storage, first).claim is not None
    assert "claims/0000000003.json" in list_checkpoints(storage)[1].reason


def test_a_claim_that_goes_after_it_was_listed_is_as_one_that_is_missing(storage: Storage) -> None:
    run = Run(storage)
    run.save(1)
    run.save(2)
    beside = GoneWhenRead(storage, gone=claim_key(2))
    assert states(beside) == [(1, "damaged"), (2, "committed")]


def test_a_long_gap_in_the_claims_is_named_without_requesting_each(storage: Storage) -> None:
    Run(storage).unclaimed(1)
    far = Claims(storage, "driver")
    storage.write(claim_key(10**12), [b"torn"])
    far.own(7)
    counting = CountingStorage(storage)
    assert states(counting) == [(1, "damaged")]
    assert len(counting.reads) < 64


def test_an_unclaimed_save_is_distinguished_from_a_lost_claim_by_the_owners_name(storage: Storage) -> None:
    owner = Claims(storage, "a")
    owner.own(3)
    arrays = {"w": np.zeros(4, np.float32)}
    for step, writer, generation in ((1, "a", 2), (2, "a", 5), (3, "b", 3)):
        save_rows(storage, arrays, step=step, save_id="x", num_writers=1, generation=generation, writer=writer)
    assert states(storage) == [(1, "damaged"), (2, "unclaimed"), (3, "damaged")]


def test_commits_from_two_threads_are_one_after_the_other(storage: Storage) -> None:
    from concurrent.futures import ThreadPoolExecutor

    claims = Claims(storage, "driver")
    generation = claims.own(1)
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda at: claims.commit(generation, 7, f"p{at}", "0" * 64), range(12)))
    assert sorted(numbers) == list(range(2, 14))


@dataclass(slots=True)
class BetweenListings(CountingStorage):
    """Does something just before the claims are listed, once."""

    act: Callable[[], object] | None = None

    def list(self, prefix: str = "") -> Keys:
        if self.act is not None and prefix == "claims":
            act, self.act = self.act, None
            act()
        return self.inner.list(prefix)


@dataclass(slots=True)
class GoneWhenRead(CountingStorage):
    """Lists an object that is deleted before it is read."""

    gone: str = ""

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if key == self.gone:
            raise NoSuchKey(key)
        return self.inner.read(key, offset, size)


@dataclass(slots=True)
class Meanwhile(CountingStorage):
    """Does something just before a manifest's size is queried, once."""

    act: Callable[[], object] | None = None

    def size(self, key: str) -> int:
        if self.act is not None and key.endswith("manifest.json"):
            act, self.act = self.act, None
            act()
        return self.inner.size(key)


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_a_checkpoint_deleted_after_it_was_listed_gives_way_to_the_newer_ones(
    storage: Storage, skip_damaged: bool
) -> None:
    run = Run(storage)
    run.save(1)

    def commit_and_delete() -> None:
        run.save(2)
        prune(storage, Keep(last=1), now=True)

    beside = Meanwhile(storage, act=commit_and_delete)
    newest = _newest(beside, skip_damaged=skip_damaged)
    assert beside.act is None
    assert states(storage) == [(2, "committed")]
    assert newest == list_checkpoints(storage)[0].prefix


def test_an_unclaimed_save_that_is_deleted_after_it_was_listed_is_not_called_damaged(storage: Storage) -> None:
    run = Run(storage)
    prefix = run.unclaimed(1)
    run.save(2)
    beside = Meanwhile(storage, act=lambda: storage.delete(storage.list(prefix)))
    assert states(beside) == [(1, "unfinished"), (2, "committed")]
    assert beside.act is None
