"""Pruning deletes unneeded data alone, never data that someone may need, and can be interrupted anywhere."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import Best, Claims, Keep, Storage, list_checkpoints, newest_complete, open_storage, prune
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.retention.pins import pin, unpin
from raysharded.checkpoint.retention.tombstone import TOMBSTONE_NAME
from raysharded.checkpoint.retention.two_phase_delete import remove_unmarked, retire
from raysharded.checkpoint.storage import BytesLike, Unfinished, storage_error
from raysharded.checkpoint.stored_claims import Claim, claim_key
from raysharded.errors import IncompleteCheckpoint, StorageError
from raysharded.testing.storages import CountingStorage, FailingStorage, save_rows
from tests.cases import tried_each_time
from tests.checkpoint.retention.runs import Run, ref_of, save_v1, states, storage as storage, storage_of


def _folders(storage: Storage) -> set[str]:
    """The saves of which there is any file."""
    return {part for key in storage.list("checkpoints") for part in key.split("/") if part.startswith("step-")}


def _name(prefix: str) -> str:
    return prefix.rsplit("/", 1)[1]


def _moved(run: Path, prefix: str, elsewhere: Path) -> None:
    """Move the folder to another place, and link it back."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(run / prefix, elsewhere / _name(prefix))
    (run / prefix).symlink_to(elsewhere / _name(prefix))


def test_a_checkpoint_behind_a_link_is_found_and_never_deleted(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    run = Run(storage)
    prefixes = [run.save(step) for step in (1, 2, 3)]
    for prefix in (prefixes[0], prefixes[2]):
        _moved(tmp_path / "run", prefix, tmp_path / "elsewhere")
    before = sorted(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file())
    assert states(storage) == [(1, "committed"), (2, "committed"), (3, "committed")]
    found = newest_complete(storage)
    assert (found.checkpoint and found.checkpoint.step, found.skipped) == (3, ())
    prefixes.append(run.save(4))
    for _ in range(2):
        pruned = prune(storage, Keep(last=1), now=True)
    assert states(storage) == [(1, "committed"), (3, "committed"), (4, "committed")]
    assert (pruned.retired, pruned.removed) == ((), ())
    assert not retire(storage, ref_of(storage, prefixes[0]), number=9)
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()) == before


@pytest.mark.parametrize("state", ["unfinished", "unclaimed", "retired"])
def test_what_no_one_needs_stays_behind_a_link_and_is_named(tmp_path: Path, state: str) -> None:
    storage = open_storage(str(tmp_path / "run"))
    run = Run(storage)
    match state:
        case "unfinished":
            prefix = run.unfinished(1)
        case "unclaimed":
            prefix = run.unclaimed(1)
        case _:
            prefix = run.save(1)
            run.save(2)
            assert retire(storage, ref_of(storage, prefix), number=2)
    _moved(tmp_path / "run", prefix, tmp_path / "elsewhere")
    run.save(3)
    assert ref_of(storage, prefix).state == state
    before = sorted(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file())
    for dry_run in (True, False):
        pruned = prune(storage, Keep(last=1), now=True, dry_run=dry_run)
        assert [(left.prefix, "is a link" in left.reason) for left in pruned.left] == [(prefix, True)]
        assert prefix not in (*pruned.removed, *pruned.debris)
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()) == before


def test_a_link_to_a_folder_above_is_no_endless_listing(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    prefix = Run(storage).save(1)
    (tmp_path / "run" / "checkpoints" / "step-0000000002-x").symlink_to(tmp_path / "run")
    (tmp_path / "run" / prefix / "up").symlink_to(tmp_path / "run")
    assert (1, "committed") in states(storage)
    prune(storage, Keep(last=1), now=True)
    assert storage.list("claims")
    assert (1, "committed") in states(storage)


def test_a_run_without_saves_has_nothing_to_prune(storage: Storage) -> None:
    assert prune(storage, Keep(last=1)) == prune(storage, None)
    assert storage.list() == []


def test_what_no_rule_keeps_is_invisible_at_once_and_its_data_goes_after_the_next_commit(storage: Storage) -> None:
    run = Run(storage)
    prefixes = [run.save(step) for step in (1, 2, 3)]
    pruned = prune(storage, Keep(last=2))
    assert (pruned.retired, pruned.removed) == ((prefixes[0],), ())
    assert states(storage) == [(1, "retired"), (2, "committed"), (3, "committed")]
    again = prune(storage, Keep(last=2))
    assert (again.retired, again.removed) == ((), ())
    assert [(left.prefix, "nothing was committed since" in left.reason) for left in again.left] == [(prefixes[0], True)]
    last = run.save(4)
    pruned = prune(storage, Keep(last=2))
    assert (pruned.retired, pruned.removed) == ((prefixes[1],), (prefixes[0],))
    assert _folders(storage) == {_name(prefix) for prefix in (*prefixes[1:], last)}


def test_who_opened_a_checkpoint_before_it_was_deleted_reads_it_to_the_end(storage: Storage) -> None:
    run = Run(storage)
    run.save(1)
    reader = newest_complete(storage).checkpoint
    assert reader is not None
    run.save(2)
    prune(storage, Keep(last=1))
    assert newest_complete(storage).checkpoint != reader
    reader.verify()
    run.save(3)
    prune(storage, Keep(last=1))
    with pytest.raises(IncompleteCheckpoint, match=r"missing"):
        reader.read("w", [0], [20])


def test_now_means_that_the_data_goes_at_once(storage: Storage) -> None:
    run = Run(storage)
    prefixes = [run.save(step) for step in (1, 2)]
    prune(storage, Keep(last=1))
    third = run.save(3)
    pruned = prune(storage, Keep(last=1), now=True)
    assert (pruned.retired, pruned.removed) == ((), tuple(prefixes))
    assert _folders(storage) == {_name(third)}


@dataclass
class Full(CountingStorage):
    """A disk that is full until a data file is deleted, as far as tombstones go."""

    room: list[str] = field(default_factory=list)

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        if key.endswith(TOMBSTONE_NAME) and not self.room:
            cause = OSError(errno.ENOSPC, "No space left on device")
            raise storage_error(self.url, "write", key, cause) from cause
        super().write(key, parts)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            super().delete([key])
            self.room.extend([key] if key.endswith(".safetensors") else [])


def test_a_full_disk_is_freed_with_now_and_the_way_is_shown_without(tmp_path: Path) -> None:
    storage = Full(open_storage(str(tmp_path)))
    run = Run(storage)
    prefixes = [run.save(step) for step in (1, 2, 3)]
    with pytest.raises(StorageError, match=r"No space left.* --keep-last and --now"):
        prune(storage, Keep(last=1))
    assert states(storage) == [(1, "committed"), (2, "committed"), (3, "committed")]
    assert prune(storage, Keep(last=1), now=True).removed == tuple(prefixes[:2])
    assert _folders(storage) == {_name(prefixes[2])}
    assert storage.room[0].startswith(prefixes[0])


def test_a_pinned_checkpoint_stays_also_on_a_full_disk(tmp_path: Path) -> None:
    storage = Full(open_storage(str(tmp_path)))
    run = Run(storage)
    run.save(1)
    [ref] = list_checkpoints(storage)
    pin(storage, "best", ref)
    assert not remove_unmarked(storage, ref)
    assert states(storage) == [(1, "committed")]


def test_a_dry_run_lists_what_would_be_done_and_does_nothing(storage: Storage) -> None:
    run = Run(storage)
    for step in (1, 2, 3):
        run.save(step)
    prune(storage, Keep(last=2))
    run.save(4)
    run.unfinished(2)  # of step 2: overtaken; but its folder is the committed one's
    following = Run(storage)
    following.unfinished(9)
    before = storage.list()
    for now in (False, True):
        told = prune(storage, Keep(last=1), now=now, dry_run=True)
        assert storage.list() == before
    assert prune(storage, Keep(last=1), now=True) == told


def test_without_rules_no_checkpoint_is_deleted(storage: Storage) -> None:
    run = Run(storage)
    for step in (1, 2, 3):
        run.save(step)
    assert prune(storage, None).retired == ()
    assert len(states(storage)) == 3


def test_the_best_by_a_metric_stay(storage: Storage) -> None:
    run = Run(storage)
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        run.save(step, metrics={"loss": loss})
    prune(storage, Keep(last=1, best=Best(metric="loss", mode="min", count=2)))
    assert [step for step, state in states(storage) if state == "committed"] == [2, 3, 5]


def test_a_metric_too_large_to_compare_or_a_truth_is_never_the_best(storage: Storage) -> None:
    run = Run(storage)
    for step, loss in enumerate([3.0, -(10**400), False, 4.0, 5.0], start=1):
        run.save(step, metrics={"loss": loss})
    prune(storage, Keep(last=1, best=Best(metric="loss", mode="min")))
    assert [step for step, state in states(storage) if state == "committed"] == [1, 5]


def test_prefixes_in_flight_are_left_alone(storage: Storage) -> None:
    run = Run(storage)
    read, other = run.save(1), run.save(2)
    written = run.unfinished(2 + 1)
    run.save(4)
    pruned = prune(storage, Keep(last=1), in_flight={read, written})
    assert pruned.retired == (other,)
    assert [left.prefix for left in pruned.left] == [written]
    run.save(5)
    assert ref_of(storage, read).complete


def test_what_was_committed_last_stays_also_if_it_is_of_an_earlier_step(storage: Storage) -> None:
    Run(storage).save(100)
    last = Run(storage).save(50)
    assert prune(storage, Keep(last=1), now=True).removed == ()
    assert ref_of(storage, last).complete
    assert states(storage) == [(50, "committed"), (100, "committed")]


def test_a_damaged_newest_does_not_count_among_those_kept(storage: Storage) -> None:
    run = Run(storage)
    run.save(1)
    good, bad = run.save(2), run.save(3)
    storage.delete(key for key in ref_of(storage, bad).keys if "w0000" in key)
    assert prune(storage, Keep(last=1)).retired == ("checkpoints/step-0000000001-g000001",)
    newest = newest_complete(storage, skip_damaged=True).checkpoint
    assert newest is not None
    assert newest.prefix == good
    newest.verify()


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_newest_with_a_file_that_was_cut_off_does_not_count_among_those_kept(tmp_path: Path, kind: str) -> None:
    storage = storage_of(kind, tmp_path)
    run = Run(storage)
    run.save(1)
    good, bad = run.save(2), run.save(3)
    storage.write(next(key for key in ref_of(storage, bad).keys if key.endswith(".safetensors")), [b""])
    assert prune(storage, Keep(last=1), now=True).removed == ("checkpoints/step-0000000001-g000001",)
    with pytest.raises(IncompleteCheckpoint, match="has 0 bytes instead of"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True).checkpoint
    assert newest is not None
    assert newest.prefix == good


def test_without_a_usable_checkpoint_none_is_deleted(storage: Storage) -> None:
    run = Run(storage)
    for step in (1, 2, 3):
        storage.write(f"{run.save(step)}/manifest.json", [b"torn"])
    before = storage.list()
    assert prune(storage, Keep(last=1), now=True).retired == ()
    assert storage.list() == before


@pytest.mark.parametrize("storage", ["local", "memory"], indirect=True)
def test_checkpoints_of_version_1_are_pruned_like_others(storage: Storage) -> None:
    old = [save_v1(storage, step) for step in (1, 2, 3)]
    assert prune(storage, Keep(last=2)).retired == (old[0],)
    assert prune(storage, Keep(last=2)).removed == (), "nothing was committed since"
    run = Run(storage)
    run.save(4)
    pruned = prune(storage, Keep(last=1))
    assert (pruned.retired, pruned.removed) == ((old[1], old[2]), (old[0],))


# -- debris --


def test_saves_that_were_overtaken_are_removed_and_all_others_are_left_with_a_reason(storage: Storage) -> None:
    old = Run(storage)
    dead, claimed_not = old.unfinished(1), old.unclaimed(2)
    run = Run(storage)
    overtaken = run.unfinished(5)
    run.save(6)
    same, later = run.unfinished(6 + 1), run.unclaimed(9)
    pruned = prune(storage, None)
    assert pruned.debris == (dead, claimed_not, overtaken)
    assert [left.prefix for left in pruned.left] == [same, later]
    assert all("may still be written" in left.reason for left in pruned.left)
    assert _folders(storage) == {_name(prefix) for prefix in (same, later, ref_of(storage, same).prefix)} | {
        "step-0000000006-g000002"
    }


def test_before_anything_is_claimed_nothing_is_debris(storage: Storage) -> None:
    run = Run(storage)
    prefix = run.unfinished(1)
    storage.delete([claim_key(1)])
    assert [(left.prefix, "no claim at all" in left.reason) for left in prune(storage, None).left] == [(prefix, True)]


def test_a_save_of_which_no_one_knows_the_generation_is_left(storage: Storage) -> None:
    storage.write("checkpoints/step-0000000001-9f0c2ab41d77/w0000.safetensors", [b"?"])
    run = Run(storage)
    run.save(5)
    run = Run(storage)
    run.save(6)
    pruned = prune(storage, Keep(last=2))
    assert pruned.debris == ()
    assert "neither its name nor a manifest states" in pruned.left[0].reason


def test_a_save_whose_manifest_was_lost_is_no_debris(storage: Storage) -> None:
    run = Run(storage)
    lost = run.save(1)
    for step in range(2, 40):
        run.claims.commit(1, step, f"checkpoints/gone-{step}", "0" * 64)
    following = Run(storage)
    following.save(50)
    storage.delete([f"{lost}/manifest.json"])
    pruned = prune(storage, Keep(last=1), now=True)
    assert (pruned.debris, pruned.removed) == ((), ())
    assert "claims/0000000002.json commits it" in pruned.left[0].reason


def test_a_claim_that_cannot_be_read_may_commit_what_looks_like_debris(storage: Storage) -> None:
    run = Run(storage)
    lost = run.save(1)
    storage.delete([f"{lost}/manifest.json"])
    storage.write(claim_key(2), [b"torn"])
    Run(storage)
    pruned = prune(storage, None)
    assert pruned.debris == ()
    assert "cannot be read" in pruned.left[0].reason


@pytest.mark.parametrize("number", [2, 3])
def test_a_claim_that_is_missing_in_the_sequence_may_commit_what_looks_like_debris(
    storage: Storage, number: int
) -> None:
    run = Run(storage)
    for step in (1, 2, 3):
        run.save(step)
    storage.delete([claim_key(number)])
    Run(storage).save(9)
    pruned = prune(storage, Keep(last=1), now=True)
    assert (pruned.debris, len(pruned.removed)) == ((), 2)
    assert f"claims/{number:010d}.json" in pruned.left[0].reason
    assert (number - 1, "damaged") in states(storage)


def test_without_the_claims_of_before_a_new_driver_deletes_no_checkpoint_of_before(storage: Storage) -> None:
    run = Run(storage)
    before = [run.save(step) for step in (1, 2, 3)]
    storage.delete(storage.list("claims"))
    Claims(storage, "b").own(1)
    following = Claims(storage, "c")
    generation = following.own(1)
    for step in (7, 8):
        _save_as("c", storage, following, generation, step)
    pruned = prune(storage, Keep(last=1), now=True)
    assert pruned.debris == ()
    assert [left.prefix for left in pruned.left] == before
    assert all("not of this run's claims" in left.reason for left in pruned.left)
    assert [state for _, state in states(storage)] == ["damaged"] * 3 + ["committed"]


def test_another_runs_checkpoint_that_was_put_among_a_runs_own_stays(storage: Storage, tmp_path: Path) -> None:
    other = open_storage(str(tmp_path / "other"))
    theirs, claims = Run(other).save(3), Claims(storage, "another driver")
    for key in other.list("checkpoints"):
        storage.write(key, [other.read(key)])
    generation = claims.own(1)
    for step in (10, 20):
        _save_as("another driver", storage, claims, generation, step)
    pruned = prune(storage, Keep(last=1), now=True)
    assert [(left.prefix, "not of this run's claims" in left.reason) for left in pruned.left] == [(theirs, True)]
    open_checkpoint(storage, theirs).verify()


def _save_as(writer: str, storage: Storage, claims: Claims, generation: int, step: int) -> None:
    save_rows(
        storage,
        {"w": np.zeros(4, np.float32)},
        step=step,
        save_id=f"g{generation:06d}",
        num_writers=1,
        generation=generation,
        claims=claims,
        writer=writer,
    )


def test_what_a_user_put_into_a_folder_of_his_own_below_checkpoints_stays(storage: Storage) -> None:
    run = Run(storage)
    gone = run.save(1)
    for key in ref_of(storage, gone).keys:
        storage.write(key.replace("checkpoints/", "checkpoints/best/", 1), [storage.read(key)])
    copies = storage.list("checkpoints/best")
    run.save(2)
    assert prune(storage, Keep(last=1), now=True).removed == (gone,)
    assert copies
    assert storage.list("checkpoints/best") == copies


class WithUploads(CountingStorage):
    """Has unfinished writes, as S3 has multipart uploads."""

    def __init__(self, inner: Storage, keys: list[str]) -> None:
        super().__init__(inner)
        self.uploads = [Unfinished(key=key, token=str(at)) for at, key in enumerate(keys)]

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        return [upload for upload in self.uploads if upload.key.startswith(f"{prefix}/")]

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        gone = list(unfinished)
        self.uploads = [upload for upload in self.uploads if upload not in gone]


def test_claims_whose_writers_died_in_them_leave_nothing_behind_once_their_numbers_are_taken(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    run = Run(storage)
    run.save(1)
    run.save(2)
    newest = max(int(key.removesuffix(".json").rpartition("/")[2]) for key in storage.list("claims"))
    for number in (1, newest, newest + 1):
        (tmp_path / f"{claim_key(number)}.tmp-0123456789ab").write_bytes(b"half")
    prune(storage, None, dry_run=True)
    assert len(storage.unfinished()) == 3
    prune(storage, None)
    assert [write.key for write in storage.unfinished()] == [claim_key(newest + 1)]  # it may still be made


def test_unfinished_writes_of_debris_are_discarded_also_where_nothing_else_is_left(tmp_path: Path) -> None:
    inner = open_storage(str(tmp_path))
    old = Run(inner)
    dead = old.unfinished(1)
    run = Run(inner)
    kept, live = run.save(5), run.unfinished(6)
    only_upload = "checkpoints/ab/step-0000000003-g000001/w0007.safetensors"
    keys = [f"{prefix}/w0009.safetensors" for prefix in (dead, kept, live)]
    storage = WithUploads(inner, [*keys, only_upload, "other/upload"])
    pruned = prune(storage, Keep(last=1))
    assert pruned.debris == (dead, "checkpoints/step-0000000003-g000001")
    assert [upload.key for upload in storage.uploads] == [*keys[1:], "other/upload"]


def test_a_killed_writers_temporary_file_goes_with_its_save(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    dead = Run(storage).unfinished(1)
    left_behind = tmp_path / dead / "w0000.safetensors.tmp-0123456789ab"
    left_behind.write_bytes(b"half")
    assert [write.token for write in storage.unfinished()] == [f"{dead}/{left_behind.name}"]
    Run(storage)
    assert prune(storage, None).debris == (dead,)
    assert not (tmp_path / dead).exists()


# -- interrupted --


@pytest.mark.parametrize(  # the state after an operation that took effect is the next one's state before it
    ("now", "took_effect", "every"),
    tried_each_time([(False, True, 2)], of=[(False, True, 2), *product([False, True], [False, True], [1])]),
)
def test_a_pruning_that_is_interrupted_anywhere_is_finished_by_the_next(
    tmp_path: Path, now: bool, took_effect: bool, every: int
) -> None:
    for fail_at in range(0, 100, every):
        storage = open_storage(f"memory://{tmp_path}/{fail_at}")
        old = Run(storage)
        for step in (1, 2, 3):
            old.save(step)
        old.unfinished(4)
        prune(storage, Keep(last=2))
        run = Run(storage)
        last = run.save(5)
        failing = FailingStorage(storage, fail_at=fail_at, took_effect=took_effect)
        with suppress(StorageError):
            prune(failing, Keep(last=1), now=now)
        newest = newest_complete(storage)
        assert newest.checkpoint is not None
        assert newest.checkpoint.prefix == last
        for ref in list_checkpoints(storage):
            if ref.complete:
                open_checkpoint(storage, ref.prefix).verify()  # none has lost a file
        prune(storage, Keep(last=1), now=now)
        if not now:
            last = run.save(6)
            prune(storage, Keep(last=1))
            last = run.save(7)
            prune(storage, Keep(last=1))
            assert _folders(storage) == {_name(last), "step-0000000006-g000002"}
        else:
            assert _folders(storage) == {_name(last)}
        storage.delete(storage.list())
        if not failing.fired:
            assert fail_at > 10
            return
    raise AssertionError("pruning never came to its end")


def test_a_deletion_that_was_marked_and_not_done_leaves_the_checkpoint_usable_until_it_is_done(
    storage: Storage,
) -> None:
    run = Run(storage)
    marked, last = run.save(1), run.save(2)
    storage.write(f"{marked}/{TOMBSTONE_NAME}", [b"torn"])
    assert ref_of(storage, marked).marked
    assert ref_of(storage, marked).complete
    storage.delete(ref_of(storage, last).keys)
    found = newest_complete(storage, skip_damaged=True).checkpoint
    assert found is not None
    found.verify()
    run.save(3)
    assert prune(storage, Keep(last=1)).retired == (marked,)


def test_a_tombstone_that_cannot_be_read_keeps_the_data_until_it_is_requested_now(storage: Storage) -> None:
    run = Run(storage)
    gone = run.save(1)
    run.save(2)
    prune(storage, Keep(last=1))
    storage.write(f"{gone}/{TOMBSTONE_NAME}", [b"torn"])
    run.save(3)
    pruned = prune(storage, None)
    assert pruned.removed == ()
    assert "its tombstone is damaged" in pruned.left[0].reason
    assert prune(storage, None, now=True).removed == (gone,)


def test_a_pinned_checkpoint_that_was_to_go_is_not_counted_nor_the_newest_and_goes_when_it_is_unpinned(
    storage: Storage,
) -> None:
    run = Run(storage)
    prefixes = [run.save(step) for step in (2, 4, 6)]
    newest = ref_of(storage, prefixes[2])
    pin(storage, "good", newest)
    assert not retire(storage, newest, number=3)
    assert _opened_step(storage) == 4
    assert prune(storage, Keep(last=2)).retired == ()
    assert _opened_step(storage) == 4
    later = Run(storage).save(5)
    assert prune(storage, Keep(last=2)).retired == (prefixes[0],)
    unpin(storage, "good")
    assert prune(storage, Keep(last=2)).retired == (prefixes[2],)
    assert [ref.prefix for ref in list_checkpoints(storage) if ref.complete] == [prefixes[1], later]


def test_the_only_checkpoint_is_used_though_it_was_to_go(storage: Storage) -> None:
    prefix = Run(storage).save(2)
    pin(storage, "good", ref_of(storage, prefix))
    assert not retire(storage, ref_of(storage, prefix), number=1)
    assert _opened_step(storage) == 2


def _opened_step(storage: Storage) -> int:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    return checkpoint.step


def test_a_checkpoint_is_requested_again_just_before_it_is_retired(storage: Storage) -> None:
    run = Run(storage)
    prefixes = [run.save(step) for step in (2, 4, 6)]
    assert prune(storage, Keep(last=1), may_go=lambda prefix: prefix != prefixes[0]).retired == (prefixes[1],)


@pytest.mark.parametrize("now", [False, True])
def test_nothing_is_deleted_or_marked_behind_linked_checkpoints(tmp_path: Path, now: bool) -> None:
    theirs = Run(open_storage(str(tmp_path / "theirs")))
    saves = [theirs.save(step) for step in (1, 2, 3)]
    theirs.unfinished(4)
    theirs.save(5)
    (tmp_path / "theirs" / saves[0] / "NOTES.txt").write_text("mine")
    ours = open_storage(str(tmp_path / "ours"))
    shutil.copytree(tmp_path / "theirs" / "claims", tmp_path / "ours" / "claims")
    (tmp_path / "ours" / "checkpoints").symlink_to(tmp_path / "theirs" / "checkpoints")
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()}
    pruned = prune(ours, Keep(last=1), now=now)
    assert (pruned.retired, pruned.removed, pruned.references) == ((), (), ())
    assert {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()} == before
    assert newest_complete(ours).checkpoint is not None


def test_no_storage_operation_deletes_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "in").mkdir(parents=True)
    (tmp_path / "theirs" / "in" / "file").write_text("mine")
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "run" / "a" / "file").symlink_to(tmp_path / "theirs" / "in" / "file")
    storage = open_storage(str(tmp_path / "run"))
    for key in ("a/link/in/file", "a/link/none"):
        with pytest.raises(StorageError, match=r"a/link.*behind a link to a folder, where nothing is deleted"):
            storage.delete([key])
        with pytest.raises(StorageError, match="behind a link"):
            storage.discard([Unfinished(key=key, token=key)])
    storage.delete(["a/file", "a/none", "none/file"])
    assert (tmp_path / "theirs" / "in" / "file").read_text() == "mine"
    assert not (tmp_path / "run" / "a" / "file").is_symlink()


def test_claims_that_were_read_before_are_used_unless_another_run_has_taken_the_folder(tmp_path: Path) -> None:
    read: dict[int, Claim] = {}
    claimers = set[str]()
    for number in (1, 2):
        storage = CountingStorage(open_storage(str(tmp_path / "run")))
        run = Run(storage)
        prefixes = [run.save(step) for step in range(number, number + 30)]
        pin(storage, "first", list_checkpoints(storage)[0])
        assert prune(storage, Keep(last=2), read_before=read).retired == tuple(prefixes[1:-2])
        claimers |= {claim.id for claim in read.values()}
        assert len(claimers) == number, "none of the run before is left"
        storage.reads.clear()
        prune(storage, Keep(last=2), read_before=read)
        assert sum(key.startswith("claims/") for key, _, _ in storage.reads) == 16
        shutil.rmtree(tmp_path / "run")
