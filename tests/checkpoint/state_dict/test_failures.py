"""A save that fails leaves no checkpoint, and a failure of one rank is an error on all of them, soon."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from raysharded.checkpoint import api
from raysharded.checkpoint.format.paths import MANIFEST_NAME
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.sharded_io.coordinator import Coordinator, PeerFailed
from raysharded.checkpoint.sharded_io.load import Options, load_into
from raysharded.checkpoint.sharded_io.save import About, Target, content_of, write
from raysharded.checkpoint.state_dict.matching import Chosen
from raysharded.checkpoint.storage import BytesLike, Storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint, StorageError
from raysharded.testing.storages import FailingStorage
from tests.cases import tried_each_time
from tests.checkpoint.state_dict.kills import kill_one
from tests.checkpoint.state_dict.ranks import Killed, outcomes, run_ranks

SOON_S = 20.0
"""Much less than the wait for a silent rank, even on a busy machine."""
PATIENCE_S = 100.0


def state_of() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    return {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "r": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": torch.arange(3),
    }


def save_through(storage: Storage, state: Any, timeout_s: float = PATIENCE_S) -> Any:
    coordinator = Coordinator.of(None, timeout_s)
    with coordinator.guarded():
        return write(content_of(state), Target(uri="c", storage=storage, prefix="c"), About(step=1), coordinator)


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """(its result or its error, seconds)."""
    began = time.monotonic()
    try:
        found = act()
    except Exception as error:  # noqa: BLE001 - the result
        found = error
    return found, time.monotonic() - began


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def save_with_failing_storage(rank: int, folder: str, failing: int) -> tuple[Any, float]:
    local = LocalStorage(folder)
    storage: Storage = FailingStorage(local, fail_at=0) if rank == failing else local
    return timed(lambda: save_through(storage, state_of()))


@pytest.mark.procs
@pytest.mark.parametrize("failing", tried_each_time([2], of=[0, 2]))
def test_a_failing_upload_of_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    found = outcomes(4, save_with_failing_storage, str(tmp_path), failing)
    for rank, (error, seconds) in enumerate(found):
        assert isinstance(error, StorageError)
        assert isinstance(error, PeerFailed) == (rank != failing)
        assert "this storage was set to fail" in str(error)
        assert seconds < SOON_S
    assert files_in(tmp_path) in ([], [f"rank{failing:05d}.safetensors"])  # its storage takes no deletion either


@dataclass(slots=True)
class DeadlyStorage:
    """Its process is killed in its first write."""

    inner: Storage

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def save_with_a_deadly_storage(rank: int, folder: str, dying: int) -> tuple[Any, float]:
    local: Any = LocalStorage(folder)
    return timed(lambda: save_through(DeadlyStorage(local) if rank == dying else local, state_of(), timeout_s=4.0))


def save_again(rank: int, folder: str) -> Any:
    return save_through(LocalStorage(folder), {"w": torch.ones(3)})


@pytest.mark.procs
@pytest.mark.parametrize("dying", tried_each_time([3], of=[0, 3]))
def test_a_rank_that_is_killed_in_a_save_is_an_error_on_the_others_within_the_time(tmp_path: Path, dying: int) -> None:
    found = outcomes(4, save_with_a_deadly_storage, str(tmp_path), dying)
    for rank, outcome in enumerate(found):
        if rank == dying:
            assert isinstance(outcome, Killed)
            continue
        error, seconds = outcome
        assert isinstance(error, CheckpointError)
        assert seconds < SOON_S
        if dying == 3:
            named = "1 of 4 ranks sent no message within 4 s: 3" in str(error)
            late = rank > 0 and "rank 0 sent no message within 4 s" in str(error)  # its wait began later
            assert named or late
    with pytest.raises(IncompleteCheckpoint):
        api.open(tmp_path / "c")
    run_ranks(2, save_again, str(tmp_path))
    assert torch.equal(api.open(tmp_path / "c").read("w"), torch.ones(3))


class InThreads(Coordinator):
    """The coordinator of a rank that is a thread: all of them share one store."""

    def _open_store(self) -> Store:
        return self._store  # type: ignore[no-any-return]


class Interrupted(InThreads):
    """Its rank is interrupted as soon as its report of what it wrote is sent to rank 0."""

    gathers = 0

    def gather(self, value: Any) -> Any:
        found = super().gather(value)
        self.gathers += 1
        if self.gathers == 2:
            raise SystemExit("SIGTERM")
        return found


def test_a_rank_that_is_interrupted_as_its_report_is_sent_deletes_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    store = HashStore()

    def save(kind: type[Coordinator], rank: int) -> Any:
        coordinator = kind(PrefixStore("save", store), rank, 2, PATIENCE_S)
        target = Target(uri="c", storage=LocalStorage(str(tmp_path)), prefix="c")
        with coordinator.guarded():
            return write(content_of({f"w{rank}": torch.full((5,), float(rank))}), target, About(step=1), coordinator)

    with ThreadPoolExecutor(2) as ranks:
        ours, others = ranks.submit(save, InThreads, 0), ranks.submit(save, Interrupted, 1)
        assert isinstance(others.exception(), SystemExit)
        assert ours.result().step == 1
    for rank in range(2):
        assert torch.equal(api.open(tmp_path / "c").read(f"w{rank}"), torch.full((5,), float(rank)))


def load_with_failing_storage(rank: int, folder: str, failing: int) -> tuple[Any, float]:
    storage = FailingStorage(LocalStorage(folder), fail_at=1000)
    checkpoint, state = open_checkpoint(storage, "c"), state_of()
    if rank == failing:
        storage.fail_at = storage.operations
    options = Options(chosen=Chosen.of(None), strict=True, cast=False)

    def load() -> Any:
        coordinator = Coordinator.of(None, PATIENCE_S)
        with coordinator.guarded():
            return load_into(checkpoint, state, options, coordinator, None)

    return timed(load)


def save_well(rank: int, folder: str) -> None:
    save_through(LocalStorage(folder), state_of())


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `c`; tests leave it unchanged."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, save_well, str(folder))
    return folder


@pytest.mark.procs
@pytest.mark.parametrize("failing", tried_each_time([1], of=[0, 1]))
def test_a_failing_reader_is_an_error_on_all_and_nobody_waits_for_its_bytes(saved_by_four: Path, failing: int) -> None:
    for rank, (error, seconds) in enumerate(outcomes(4, load_with_failing_storage, str(saved_by_four), failing)):
        assert isinstance(error, StorageError)
        assert isinstance(error, PeerFailed) == (rank != failing)
        assert seconds < SOON_S


def load_from(rank: int, uri: str) -> tuple[Any, float]:
    return timed(lambda: api.load(uri, state_of()))


@pytest.mark.procs
def test_that_there_is_none_yet_can_be_caught_on_all_ranks(tmp_path: Path) -> None:
    for error, seconds in outcomes(4, load_from, str(tmp_path / "c")):
        assert isinstance(error, NoCheckpoint)
        assert seconds < SOON_S


@pytest.mark.procs
def test_a_changed_byte_is_an_error_on_all_ranks(saved_by_four: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_by_four, tmp_path, dirs_exist_ok=True)
    file = max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = outcomes(4, load_from, str(tmp_path / "c"))
    errors = [error for error, _ in found]
    assert all(isinstance(error, CorruptCheckpoint) for error in errors)
    assert all(file.name in str(error) for error in errors)
    assert all(seconds < SOON_S for _, seconds in found)


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_storage_that_goes_away_at_any_operation_leaves_all_or_nothing(tmp_path: Path, took_effect: bool) -> None:
    state: dict[str, Any] = {"w": torch.arange(6.0), "scattered": torch.arange(6.0).reshape(2, 3).t(), "n": 3}
    for number in range(100):
        local = LocalStorage(str(tmp_path / str(number)))
        storage = FailingStorage(local, fail_at=number, took_effect=took_effect)
        error, _ = timed(lambda storage=storage: save_through(storage, state))  # type: ignore[misc]  # bound now
        if not storage.fired:
            break
        assert type(error) is StorageError
        if local.list("c").count(f"c/{MANIFEST_NAME}"):
            assert took_effect
            loaded = dict(state, w=torch.zeros(6), scattered=torch.zeros(3, 2))
            api.load(f"{local.url}/c", loaded)
            assert torch.equal(loaded["w"], state["w"])
        else:
            with pytest.raises(IncompleteCheckpoint):
                api.open(f"{local.url}/c")
    assert number > 4


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    api.save(tmp_path / "c", {"w": torch.zeros(3)}, step=1)
    before = files_in(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        api.save(tmp_path / "c", {"w": torch.ones(3)}, step=2)
    assert files_in(tmp_path) == before
    assert api.open(tmp_path / "c").step == 1


@dataclass(slots=True)
class Overtaken:
    """Just before its manifest is put, another save puts one there."""

    inner: Storage
    overtake: Callable[[], Any]

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.overtake()
        return self.inner.put_if_absent(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("name", ["c", "step-0000000001-abc"])
def test_of_two_saves_that_race_for_a_uri_one_wins_and_the_other_learns_it(tmp_path: Path, name: str) -> None:
    local: Any = LocalStorage(str(tmp_path))

    def save(storage: Any, value: float) -> Any:
        target = Target(uri=name, storage=storage, prefix=name)
        coordinator = Coordinator.of(None, 1.0)
        return write(content_of({"w": torch.full((4,), value)}), target, About(step=1), coordinator)

    with pytest.raises(CheckpointError, match="another save was committed there in the meantime"):
        save(Overtaken(local, lambda: save(local, 1.0)), 2.0)
    assert torch.equal(api.open(tmp_path / name).read("w"), torch.ones(4))
    assert len(list((tmp_path / name).rglob("*.safetensors"))) == 1  # the other's files were deleted


@pytest.mark.parametrize("state", [{"e": torch.empty(0, 2**60)}, {"w": torch.ones(2), "l": list(range(2000))}])
def test_content_that_readers_would_reject_is_rejected_before_anything_is_written(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysharded.checkpoint.format.encoding.MAX_VALUES", 1000)
    with pytest.raises(CheckpointError, match="the state cannot be stored: ") as raised:
        api.save(tmp_path / "c", state)
    assert type(raised.value) is CheckpointError
    assert list(tmp_path.rglob("*.*")) == []


def test_a_folder_that_is_named_after_another_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is named after step 4, but this is step 5"):
        api.save(tmp_path / "step-0000000004-abc", {"w": torch.zeros(1)}, step=5)


def save_differing(rank: int, uri: str) -> Any:
    return timed(lambda: api.save(uri, {"w": torch.zeros(2 + rank)}))


def save_a_part(rank: int, uri: str) -> Any:
    mesh = init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    return timed(lambda: api.save(uri, {"w": tensor} if rank != 1 else {}))


def save_partial(rank: int, uri: str) -> Any:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (3,))
    return timed(lambda: api.save(uri, {"a": {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}}))


@pytest.mark.procs
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (save_differing, "tensor 'w' is float32 [2] on rank 0 and float32 [3] on rank 1"),
        (save_a_part, "tensor 'w' of shape [6, 2]: no rank holds [2, 0]"),
        (save_partial, "a.w: its placement P(sum) holds no final values"),
    ],
)
def test_states_that_do_not_fit_together_are_refused_on_all_ranks(
    tmp_path: Path, act: Callable[..., Any], said: str
) -> None:
    for error, seconds in outcomes(3, act, str(tmp_path / "c")):
        assert said in str(error)
        assert seconds < SOON_S
    assert files_in(tmp_path) == []


@pytest.mark.procs
@pytest.mark.long  # a test above kills a rank in its save
@pytest.mark.parametrize("count", [2, 60])
def test_a_rank_that_is_killed_at_any_moment_of_the_start_and_of_a_save_is_survived(tmp_path: Path, count: int) -> None:
    hits = kill_one(tmp_path, count, seed=count)
    assert sum(hits.survivors.values()) == 3 * count
    assert hits.at_work > 0, "no kill came before its rank was done"
