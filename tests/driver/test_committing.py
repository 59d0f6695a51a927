"""The commits of a driver's saves: in order, by its owner alone, and with the data that a resume needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from raysharded.checkpoint import ShardTensor, SigningKey, Storage, open_checkpoint, open_storage, write_shard
from raysharded.checkpoint.retention.catalog import list_checkpoints, newest_complete
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.retention.pins import pin
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver.checkpoints.committer import Committer, ManifestContext, RunFiles, data_position
from raysharded.driver.checkpoints.protected import ProtectedCheckpoints
from raysharded.driver.startup.resume_point import find, resumed
from raysharded.driver.state.commands import CommitSave
from raysharded.driver.state.events import CommitFailed, Committed, Deleted, LeadershipLost, Overtaken
from raysharded.driver.state.state import State
from raysharded.errors import RefusedCheckpoint, StorageError
from raysharded.ids import GenerationId
from raysharded.layout import StateSpec, TensorSpec, partial, shard_map
from raysharded.protocol.messages import Saved, save_prefix
from raysharded.testing.storages import CountingStorage
from tests.driver.scripted import LIMITS

SPEC = StateSpec(tensors=(TensorSpec(name="model.w", dtype="float32", shape=(6, 4)),))
WORKERS = 2
WAIT_S = 20.0
KEY, OTHER_KEY = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
Told = Committed | CommitFailed | Overtaken | LeadershipLost | Deleted


class Stops:
    """A storage that stops at the first put of a kind until it is continued, as a suspended process does."""

    def __init__(self, storage: Storage, at: Callable[[str], bool]) -> None:
        self._storage, self._at = storage, at
        self.reached, self.may_go = threading.Event(), threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._at(key) and not self.reached.is_set():
            self.reached.set()
            assert self.may_go.wait(WAIT_S)
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


class Refuses:
    """A storage that refuses the first put of a kind."""

    def __init__(self, storage: Storage, at: Callable[[str], bool]) -> None:
        self._storage, self._at, self._refused = storage, at, False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._at(key) and not self._refused:
            self._refused = True
            raise StorageError(f"put_if_absent {key} failed")
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


class Driver:
    """A committer, and its messages."""

    def __init__(self, storage: Storage, name: str, *, keep: Keep | None = None, key: SigningKey | None = None) -> None:
        self.name = name
        self.told: SimpleQueue[Told] = SimpleQueue()
        self.in_use: list[str] = []
        self.spared: Callable[[], ProtectedCheckpoints] = lambda: ProtectedCheckpoints(prefixes=frozenset(self.in_use))
        self.files = RunFiles(
            name="run", storage=storage, keep=keep or Keep(last=9), metadata={}, global_batch_size=4, key=key
        )
        self.committer = Committer(self.files, name, SystemClock(), self.told.put, self._spared)

    def _spared(self) -> ProtectedCheckpoints:
        return self.spared()

    def own(self) -> int:
        return self.committer.claims.own(1)

    def begin_commit(self, step: int, generation: int, parts: tuple[Saved, ...] | None = None) -> None:
        parts = parts or write_parts(self.files.storage, step, generation, self.name)
        command = CommitSave(generation=GenerationId(generation), step=step, parts=parts, measured={"loss": 1.0 / step})
        self.committer.commit(command, ManifestContext(arithmetic={"cpu": "x"}, num_samples=10))

    def begin(self, step: int, generation: int) -> None:
        self.committer.begin(GenerationId(generation), step)

    def commit(self, step: int, generation: int, parts: tuple[Saved, ...] | None = None) -> Told:
        self.begin_commit(step, generation, parts)
        return self.told.get(timeout=WAIT_S)

    def finish_work(self) -> None:
        """Return when the committer has done all that it was given; a commit may give its pruning thread work."""
        for lane in (self.committer._committing, self.committer._pruning):
            done = threading.Event()
            lane.do(done.set)
            assert done.wait(WAIT_S)


def write_parts(storage: Storage, step: int, generation: int, driver: str) -> tuple[Saved, ...]:
    """The workers' parts of a state whose bytes all contain the step."""
    parts = []
    for rank in range(WORKERS):
        pieces = shard_map(SPEC, WORKERS, rank)
        data = np.full(pieces.size_bytes, step, np.uint8)
        tensors = [
            ShardTensor(
                name=piece.tensor.name,
                dtype=piece.tensor.dtype,
                shape=piece.tensor.shape,
                offsets=piece.offsets,
                sizes=piece.sizes,
                data=data[piece.place],
            )
            for piece in pieces.pieces(SPEC)
        ]
        prefix = save_prefix(step, GenerationId(generation), driver)
        files = write_shard(storage, prefix, writer=f"rank{rank:05d}", tensors=tensors)
        part = partial(SPEC, pieces, data, count_replicated=rank == 0)
        saved = Saved(generation=GenerationId(generation), step=step, files=tuple(files), fingerprint=part, spec=SPEC)
        parts.append(saved)
    return tuple(parts)


def committed_steps(storage: Storage) -> list[int]:
    return [ref.step for ref in list_checkpoints(storage) if ref.complete]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.mark.parametrize("stops_at", ["manifest.json", "claims/"])
def test_a_driver_that_was_stopped_while_it_commits_commits_nothing_once_another_has_taken_over(
    storage: Storage, stops_at: str
) -> None:
    stopping = Stops(storage, lambda key: stops_at in key and not key.endswith("0000000001.json"))
    zombie = Driver(stopping, "zombie")  # type: ignore[arg-type]  # all of a storage's methods, found by name
    assert zombie.own() == 1
    written = write_parts(storage, 6, 1, "zombie")  # now: the heir deletes what can never be committed
    zombie.begin_commit(5, 1)
    assert stopping.reached.wait(WAIT_S)

    heir = Driver(storage, "heir")
    first = heir.own()
    assert first == 2
    assert committed_steps(storage) == []
    assert isinstance(heir.commit(3, first), Committed)

    stopping.may_go.set()
    told = zombie.told.get(timeout=WAIT_S)
    assert isinstance(told, LeadershipLost)
    assert "this one (zombie) ends" in told.reason
    assert committed_steps(storage) == [3]
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert newest.step == 3
    assert isinstance(heir.commit(4, first), Committed)
    assert isinstance(zombie.commit(6, 1, written), LeadershipLost)
    assert committed_steps(storage) == [3, 4]


def test_a_driver_that_stopped_after_its_claim_has_committed(storage: Storage) -> None:
    first = Driver(storage, "first")
    first.own()
    assert isinstance(first.commit(5, 1), Committed)
    written = write_parts(storage, 6, 1, "first")  # before it can be known to be debris
    second = Driver(storage, "second")
    second.own()
    assert committed_steps(storage) == [5]
    assert isinstance(first.commit(6, 1, written), LeadershipLost)
    assert second.committer.owns()
    assert not first.committer.owns()


def test_a_save_that_newer_ones_overtook_is_refused_and_the_run_is_still_owned(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    driver.own()
    written = write_parts(storage, 3, 1, driver.name)
    driver.in_use.append(save_prefix(3, GenerationId(1), driver.name))  # or else it would be deleted
    assert isinstance(driver.commit(4, 2), Committed)
    told = driver.commit(3, 1, written)
    assert isinstance(told, Overtaken)
    assert (told.generation, told.step) == (1, 3)
    assert "StaleGeneration" in told.reason
    assert driver.committer.owns()


def test_a_storage_that_fails_fails_the_save_and_nothing_else(storage: Storage) -> None:
    class Failing(Stops):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key.endswith("g000001_driver/manifest.json"):
                raise StorageError("the disk is full")
            return super().put_if_absent(key, data)

    driver = Driver(Failing(storage, lambda _: False), "driver")  # type: ignore[arg-type]  # as above
    driver.own()
    told = driver.commit(1, 1)
    assert isinstance(told, CommitFailed)
    assert "the disk is full" in told.error
    assert isinstance(driver.commit(2, 2), Committed)


def test_saves_are_committed_in_the_order_they_are_given(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    driver.own()
    for step in range(1, 6):
        driver.begin_commit(step, 1)
    told = [driver.told.get(timeout=WAIT_S) for _ in range(5)]
    assert [event.step for event in told if isinstance(event, Committed)] == [1, 2, 3, 4, 5]
    driver.committer.close(WAIT_S)


def test_old_checkpoints_go_but_not_those_in_use(storage: Storage) -> None:
    driver = Driver(storage, "driver", keep=Keep(last=1))
    driver.own()
    driver.in_use.append(save_prefix(1, GenerationId(1), driver.name))
    for step in (1, 2, 3):
        assert isinstance(driver.commit(step, 1), Committed)
    driver.committer.close(WAIT_S)
    assert 1 in committed_steps(storage)
    assert 3 in committed_steps(storage)


def test_old_checkpoints_go_with_a_later_commit_if_the_ones_to_keep_were_not_known(storage: Storage) -> None:
    driver = Driver(storage, "driver", keep=Keep(last=1))
    driver.own()
    asked = threading.Event()

    def failing() -> ProtectedCheckpoints:
        asked.set()
        raise RuntimeError("not now")

    driver.spared = failing
    assert isinstance(driver.commit(1, 1), Committed)
    assert asked.wait(WAIT_S)
    driver.spared = ProtectedCheckpoints
    assert isinstance(driver.commit(2, 1), Committed)
    assert isinstance(driver.told.get(timeout=WAIT_S), Deleted)
    assert committed_steps(storage) == [2]


def test_a_driver_that_was_stopped_while_it_deletes_deletes_nothing_once_another_has_taken_over(
    storage: Storage,
) -> None:
    """The other one may have gone back to what this one had no need of."""
    zombie = Driver(storage, "zombie", keep=Keep(last=1))
    zombie.own()
    assert isinstance(zombie.commit(1, 1), Committed)
    zombie.finish_work()
    asked, may_go = list[int](), threading.Event()

    def spared() -> ProtectedCheckpoints:
        asked.append(1)
        if len(asked) == 2:  # just before the deletion
            assert may_go.wait(WAIT_S)
        return ProtectedCheckpoints()

    zombie.spared = spared
    assert isinstance(zombie.commit(2, 1), Committed)
    heir = Driver(storage, "heir")
    heir.own()
    may_go.set()
    zombie.finish_work()
    assert len(asked) == 2
    assert committed_steps(storage) == [1, 2]


def test_a_driver_that_another_has_followed_deletes_nothing_at_its_end_and_distrusts_nothing(storage: Storage) -> None:
    zombie = Driver(storage, "zombie", keep=Keep(last=1))
    zombie.spared = lambda: ProtectedCheckpoints(prefixes=frozenset(ref.prefix for ref in list_checkpoints(storage)))
    zombie.own()
    prefixes = []
    for step in (1, 2, 3):
        told = zombie.commit(step, 1)
        assert isinstance(told, Committed)
        prefixes.append(told.prefix)
    zombie.finish_work()
    Driver(storage, "heir").own()
    zombie.committer.distrust(prefixes[2:])
    zombie.committer.close(WAIT_S, ended=True)
    assert committed_steps(storage) == [1, 2, 3]


def test_a_prune_reads_no_old_claim_again_though_an_old_checkpoint_is_pinned(storage: Storage) -> None:
    counting = CountingStorage(storage)
    driver = Driver(counting, "driver", keep=Keep(last=1))
    driver.own()
    assert isinstance(driver.commit(1, 1), Committed)
    driver.finish_work()
    pin(storage, "first", list_checkpoints(storage)[0])
    for step in range(2, 60):
        assert isinstance(driver.commit(step, 1), (Committed, Deleted))
    driver.finish_work()
    for step in (60, 61):
        counting.reads.clear()
        driver.begin_commit(step, 1)
        driver.finish_work()
        assert sum(key.startswith("claims/") for key, _, _ in counting.reads) <= 2 * 16
        assert committed_steps(storage)[0] == 1
        assert committed_steps(storage)[-1] == step


class KeepsManifests:
    """A storage that deletes no manifest while `fails`, and counts its refusals."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.fails, self.refused = storage, True, 0

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if self.fails and any(key.endswith("manifest.json") for key in keys):
            self.refused += 1
            raise StorageError("the server does not answer")
        self._storage.delete(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


@pytest.mark.parametrize("ended", [False, True])
def test_undone_checkpoints_that_could_not_be_deleted_go_later_and_no_good_one_before_them(
    storage: Storage, ended: bool
) -> None:
    failing = KeepsManifests(storage)
    driver = Driver(failing, "driver", keep=Keep(last=3))  # type: ignore[arg-type]  # as above
    driver.own()
    committed = [driver.commit(step, 1) for step in (10, 20, 30)]
    driver.finish_work()
    driver.committer.distrust([told.prefix for told in committed[1:] if isinstance(told, Committed)])
    driver.finish_work()
    assert isinstance(driver.commit(11, 2), Committed)
    driver.finish_work()
    assert failing.refused == 2
    assert committed_steps(storage) == [10, 11, 20, 30]

    failing.fails = False
    if ended:
        driver.committer.close(WAIT_S)
        assert committed_steps(storage) == [10, 11]
        return
    for step, left in ((12, [10, 11, 12]), (13, [11, 12, 13])):
        assert isinstance(driver.commit(step, 2), Committed)
        driver.finish_work()
        assert committed_steps(storage) == left


def test_a_manifest_has_the_data_position_and_the_numbers_of_its_step(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    driver.own()
    told = driver.commit(8, 1)
    assert isinstance(told, Committed)
    manifest = open_checkpoint(storage, told.prefix, digest=told.digest).manifest
    assert dict(manifest.data) == {"samples": 32, "epoch": 3, "samples_per_epoch": 10}
    assert manifest.metadata["metrics"] == {"loss": 0.125}
    assert manifest.metadata["fingerprint"] == told.fingerprint
    assert manifest.metadata["workers"] == WORKERS


def test_the_data_position_of_an_unknown_number_of_samples_has_no_epoch() -> None:
    assert data_position(3, 4, None) == {"samples": 12}


def test_a_resumed_driver_knows_the_digests_of_its_checkpoints(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    driver.own()
    digests = {}
    for step in (1, 2, 3):
        told = driver.commit(step, 1)
        assert isinstance(told, Committed)
        digests[step] = told.digest
    state = resumed(State(limits=LIMITS), driver.files, find(driver.files))
    assert state.checkpoint is not None
    assert (state.checkpoint.step, state.checkpoint.digest) == (3, digests[3])
    assert [(older.step, older.digest) for older in state.older_checkpoints] == [(1, digests[1]), (2, digests[2])]
    assert (state.num_samples, state.arithmetic) == (10, {"cpu": "x"})


def test_a_run_continues_only_with_the_key_that_it_was_signed_with(storage: Storage) -> None:
    unsigned = Driver(storage, "unsigned")
    unsigned.own()
    assert isinstance(unsigned.commit(1, 1), Committed)
    signed = Driver(storage, "signed", key=KEY)
    first = signed.own()
    with pytest.raises(RefusedCheckpoint, match="not signed"):
        find(signed.files)  # beginning again at the start would lose the run
    assert isinstance(signed.commit(2, first), Committed)
    newest = find(signed.files).newest.checkpoint
    assert newest is not None
    assert (newest.step, newest.signed) == (2, True)
    with pytest.raises(RefusedCheckpoint, match="another key"):
        find(Driver(storage, "other", key=OTHER_KEY).files)
    with pytest.raises(RefusedCheckpoint, match="has no signing key"):
        find(Driver(storage, "forgetful").files)


def test_what_the_key_refuses_is_never_deleted(storage: Storage) -> None:
    other = Driver(storage, "other", key=OTHER_KEY)
    first = other.own()
    for step in (1, 2):
        assert isinstance(other.commit(step, first), Committed)
    signed = Driver(storage, "signed", key=KEY)
    first = signed.own()
    for step in (3, 4, 5):
        assert isinstance(signed.commit(step, first), Committed)
    prune(storage, Keep(last=1), key=KEY)
    assert committed_steps(storage) == [1, 2, 5]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_a_run_that_has_ended_leaves_no_more_checkpoints_than_it_keeps(storage: Storage, keep_last: int) -> None:
    driver = Driver(storage, "driver", keep=Keep(last=keep_last))
    driver.own()
    driver.in_use.append(save_prefix(1, GenerationId(1), driver.name))  # needed until the end
    for step in range(1, 6):
        driver.begin_commit(step, 1)
    driver.committer.close(WAIT_S, ended=True)
    assert committed_steps(storage) == list(range(6 - keep_last, 6))
    data = {key.split("/")[1][:15] for key in storage.list("checkpoints")}
    kept = {f"step-{step:010d}" for step in range(6 - keep_last, 6)}
    being_read = {"step-0000000004"} if keep_last == 1 else set()  # the newest until the last commit
    assert kept <= data <= kept | being_read


def saved_steps(storage: Storage) -> list[int]:
    """Steps of which files of a save are there."""
    return [ref.step for ref in list_checkpoints(storage)]


def test_files_of_a_save_that_the_driver_abandoned_are_deleted_when_a_later_one_begins(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    generation = driver.own()
    driver.in_use = [save_prefix(6, GenerationId(generation), "driver")]  # it is written for long
    for step in (5, 6, 7):
        driver.begin(step, generation)
        write_parts(storage, step, generation, "driver")
    driver.begin(8, generation)
    driver.finish_work()
    assert saved_steps(storage) == [6]
    write_parts(storage, 5, generation, "driver")  # a slow worker
    driver.in_use = []
    driver.begin(2, generation + 1)  # after a rewind
    driver.finish_work()
    assert saved_steps(storage) == []


def test_a_save_whose_commit_failed_is_not_deleted_also_if_it_is_repeated(storage: Storage) -> None:
    fails = Refuses(storage, lambda key: "manifest.json" in key)
    driver = Driver(fails, "driver")  # type: ignore[arg-type]
    generation = driver.own()
    driver.begin(5, generation)
    parts = write_parts(storage, 5, generation, "driver")
    assert isinstance(driver.commit(5, generation, parts), CommitFailed)  # storage may have it all the same
    driver.begin(5, generation)  # once more, with the same files
    driver.begin(6, generation)
    driver.finish_work()
    assert saved_steps(storage) == [5]
    assert isinstance(driver.commit(5, generation, parts), Committed)
    assert committed_steps(storage) == [5]


def test_abandoned_files_do_not_keep_old_checkpoints_from_being_deleted(storage: Storage) -> None:
    driver = Driver(storage, "driver", keep=Keep(last=1))
    generation = driver.own()
    assert isinstance(driver.commit(4, generation), Committed)
    driver.finish_work()
    busy, may_go = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        assert may_go.wait(WAIT_S)

    driver.committer._pruning.do(keep_busy)
    assert busy.wait(WAIT_S)
    for step in (5, 6):
        driver.begin(step, generation)  # that of 5 is abandoned: its deletion waits
    assert isinstance(driver.commit(6, generation), Committed)
    may_go.set()
    driver.finish_work()
    assert committed_steps(storage) == [6]


def test_files_of_another_driver_and_of_earlier_claims_stay(storage: Storage) -> None:
    driver = Driver(storage, "driver")
    generation = driver.own()
    assert isinstance(driver.commit(4, generation), Committed)
    write_parts(storage, 5, generation, "other")
    driver.begin(5, generation)
    write_parts(storage, 5, generation, "driver")
    driver.begin(6, generation)
    driver.finish_work()
    assert [(ref.step, "other" in ref.prefix) for ref in list_checkpoints(storage)] == [(4, False), (5, True)]
