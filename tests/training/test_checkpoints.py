"""Checkpoints of real workers: late, failing, damaged, requested, on leaving; training is never disturbed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import raysharded as rs
from raysharded.actors.shards import saver
from raysharded.actors.shards.store import ShardBuffer
from raysharded.actors.step.step import Steps
from raysharded.checkpoint import SigningKey, Storage, open_storage, write_shard
from raysharded.checkpoint.format.paths import parse_save_folder
from raysharded.checkpoint.retention.catalog import list_checkpoints, newest_complete
from raysharded.checkpoint.retention.policy import Keep
from raysharded.checkpoint.storage import local_files
from raysharded.driver.driver import Driver
from raysharded.driver.state.state import State
from raysharded.errors import CheckpointError, RunFailed, RunOwnedElsewhere
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.protocol.job import Job
from raysharded.protocol.messages import FromCheckpoint
from tests import patches
from tests.cases import tried_each_time
from tests.ray.leftovers import wait_until
from tests.training.harness import (
    VOCABULARY,
    Collector,
    GptTask,
    Outcome,
    SmallTask,
    make_driver,
    make_job,
    make_limits,
    train,
)

pytestmark = pytest.mark.procs
WAIT_S = 60.0
NO_MIRRORS = rs.EngineConfig(mirrors=False)
MICROBATCHES = 4


def small_job(url: str, **settings: Any) -> Job:
    """A run in the folder at `url`, with few microbatches."""
    return make_job(url, **{"microbatches": MICROBATCHES, **settings, "task": settings.get("task") or SmallTask()})


class Slow(SmallTask):
    """Slow enough for something to happen while a step is computed."""

    def lr_scale(self, step: int) -> float:
        time.sleep(0.05)
        return super().lr_scale(step)


class Storing(Slow):
    """In the workers, each part of a checkpoint waits for the file `go`, if a file `wait` exists. It fails if a file
    `fail<step>` exists, which each worker uses up once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build_model(self) -> nn.Module:
        patches.replace(saver, "write_shard", self._write)  # of this worker's process
        return super().build_model()

    def _write(self, storage: Storage, prefix: str, *, writer: str, **arguments: Any) -> Any:
        named = parse_save_folder(prefix.rpartition("/")[2])
        assert named is not None
        deadline = time.monotonic() + WAIT_S
        while (self._folder / "wait").exists() and not (self._folder / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        used = self._folder / f"failed{named[0]}-{writer}"
        if (self._folder / f"fail{named[0]}").exists() and not used.exists():
            used.touch()
            raise OSError("no space left on device")
        return write_shard(storage, prefix, writer=writer, **arguments)


class Failing(Storing):
    """Applies no step before the failed checkpoint of the one before is reported, and its other part is written; or
    before it is reported as left out."""

    def lr_scale(self, step: int) -> float:
        before = step - 1
        if (self._folder / f"fail{before}").exists():
            wait_until(lambda: self._is_over(before), "the checkpoint has not failed", WAIT_S)
        return super().lr_scale(step)

    def _is_over(self, step: int) -> bool:
        failed = [self._folder / f"seen{step}", self._folder / f"wrote{step}"]
        return all(file.exists() for file in failed) or (self._folder / f"late{step}").exists()

    def _write(self, storage: Storage, prefix: str, *, writer: str, **arguments: Any) -> Any:
        written = super()._write(storage, prefix, writer=writer, **arguments)
        named = parse_save_folder(prefix.rpartition("/")[2])
        assert named is not None
        (self._folder / f"wrote{named[0]}").touch()
        return written


class Saved(SmallTask):
    """Applies no step before the checkpoint of the one before is complete: while one is written, none is made."""

    def __init__(self, url: str) -> None:
        self._url = url

    def lr_scale(self, step: int) -> float:
        wait_until(lambda: step == 1 or step - 1 in complete(self._url), "the checkpoint is not complete", WAIT_S)
        return super().lr_scale(step)


def complete(url: str) -> list[int]:
    """The steps of the complete checkpoints."""
    return [ref.step for ref in list_checkpoints(open_storage(url)) if ref.complete]


class Listening(Collector):
    """Sets an event when an entry has come; calls `act` then, once, in the driver's thread, before the next step."""

    def __init__(self, at: Callable[[str, Mapping[str, Any]], bool] = lambda *_: False) -> None:
        super().__init__()
        self._at = at
        self.reached = threading.Event()
        self.do: Callable[[], object] = lambda: None

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if self._at(kind, fields) and not self.reached.is_set():
            self.do()
            self.reached.set()

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields for entry, fields in self.entries if entry == kind]


@cache
def undisturbed(steps: int) -> Outcome:
    return train(1, task=SmallTask(), microbatches=MICROBATCHES, steps=steps)


def fingerprint(state: State) -> str | None:
    return state.result_fingerprint


def test_while_storage_is_slow_checkpoints_are_left_out_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    job = small_job(f"{tmp_path}/run", task=Storing(tmp_path), steps=6, save_every=1)
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == 3)

    def let_go() -> None:
        assert listener.reached.wait(WAIT_S)
        (tmp_path / "go").touch()

    threading.Thread(target=let_go).start()
    state = make_driver(job, make_limits(job, 1), listener).run()
    late = [fields["step"] for fields in listener.of("checkpoint_late")]
    assert late[:2] == [2, 3]
    assert all(fields["writing"] == 1 and fields["since_s"] > 0 for fields in listener.of("checkpoint_late")[:2])
    written = [fields["step"] for fields in listener.of("checkpoint")]
    assert (written[0], written[-1]) == (1, 6)
    assert fingerprint(state) == undisturbed(6).fingerprint


def test_checkpoints_that_fail_disturb_nothing_and_leave_no_files_and_the_last_one_is_written_again(
    tmp_path: Path,
) -> None:
    for step in range(1, 7):  # at least every other one is written
        (tmp_path / f"fail{step}").touch()
        (tmp_path / f"failed{step}-rank00000").touch()  # the other worker's part alone fails
    job = small_job(f"{tmp_path}/run", task=Failing(tmp_path), steps=6, save_every=1)

    def is_third(kind: str, fields: Mapping[str, Any]) -> bool:
        if kind == "checkpoint_late":
            (tmp_path / f"late{fields['step']}").touch()
        if kind != "checkpoint_failed":
            return False
        (tmp_path / f"seen{fields['step']}").touch()
        return len(listener.of(kind)) == 3

    listener = Listening(is_third)

    def wait_for_deletion() -> None:
        first = listener.of("checkpoint_failed")[0]["step"]
        storage = open_storage(job.run_url)
        wait_until(lambda: first not in {ref.step for ref in list_checkpoints(storage)}, "its files stay", WAIT_S)

    listener.do = wait_for_deletion
    state = make_driver(job, make_limits(job, 2, last_save_backoff_s=0.1), listener).run()
    assert listener.reached.is_set()
    failed = {fields["step"] for fields in listener.of("checkpoint_failed")}
    assert 6 in failed
    assert all("no space left" in fields["error"] for fields in listener.of("checkpoint_failed"))
    assert len(listener.of("checkpoints_failing")) >= (1 if {1, 2, 3} <= failed else 0)
    assert state.checkpoint is not None
    assert state.checkpoint.step == 6
    assert fingerprint(state) == undisturbed(6).fingerprint


def write_run(tmp_path: Path, *, steps: int, save_every: int, workers: int = 2, key: SigningKey | None = None) -> str:
    """A finished run with several checkpoints; its URL."""
    url = f"{tmp_path}/engine"
    job = small_job(url, task=Saved(url), steps=steps, save_every=save_every)
    make_driver(job, make_limits(job, workers), Listening(), keep=Keep(last=9), key=key).run()
    return job.run_url


def resume(
    url: str,
    workers: int,
    *,
    steps: int,
    key: SigningKey | None = None,
    task: rs.Task | None = None,
    engine: rs.EngineConfig | None = None,
    take_over: bool = False,
    data: Any = None,
    prepare: Mapping[WorkerId, Callable[[], None]] | None = None,
) -> tuple[State, Listening]:
    job = small_job(url, steps=steps, task=task, engine=engine, data=data)
    listener = Listening()
    driver = make_driver(job, make_limits(job, workers), listener, key=key, take_over=take_over, prepare=prepare)
    driver.restore()
    return driver.run(), listener


class Wide(GptTask):
    """Large enough for the edges of chunks not to count."""

    def build_model(self) -> nn.Module:
        blocks = [nn.Linear(384, 384) for _ in range(4)]
        return nn.Sequential(nn.Embedding(VOCABULARY, 384), *blocks, nn.Linear(384, VOCABULARY))

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three workers, with one checkpoint."""
    folder = tmp_path_factory.mktemp("of three") / "run"
    job = small_job(str(folder), task=Wide(), steps=1)
    make_driver(job, make_limits(job, 3), Listening()).run()
    return folder


@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2, 4]))
def test_mirrors_and_what_all_hold_come_from_the_other_workers_and_not_from_storage(
    tmp_path: Path, of_three: Path, workers: int
) -> None:
    (ref,) = list_checkpoints(open_storage(str(of_three)))
    size = sum(open_storage(str(of_three)).size(key) for key in ref.keys if key.endswith(".safetensors"))
    formed = []
    for mirrors in (True, False):
        folder = tmp_path / f"mirrors {mirrors}"
        shutil.copytree(of_three, folder)
        engine = rs.EngineConfig(mirrors=mirrors)
        formed += resume(str(folder), workers, steps=2, task=Wide(), engine=engine)[1].of("formed")
    with_mirrors, without = formed
    assert with_mirrors["bytes_read"] == without["bytes_read"] < 2 * size
    replicated = without["bytes_received"]
    assert replicated < 0.01 * size
    assert with_mirrors["bytes_received"] == pytest.approx(size if workers > 1 else 0, rel=0.01)


def damage(url: str, step: int) -> None:
    """Flip a bit in the middle of one data file."""
    ref = next(ref for ref in list_checkpoints(open_storage(url)) if ref.step == step)
    file = Path(url, next(key for key in reversed(ref.keys) if key.endswith(".safetensors")))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose_on_disk(step: int) -> None:
    """In a worker's process: the disk gives no bytes of that step's data files."""
    read = local_files._read_fully

    def failing(handle: int, offset: int, outs: Sequence[memoryview]) -> int:
        if f"step-{step:010}" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, "Input/output error")
        return read(handle, offset, list(outs))

    patches.replace(local_files, "_read_fully", failing)


def test_damage_that_one_worker_finds_sends_all_to_the_checkpoint_before(tmp_path: Path) -> None:
    """A flipped bit in the newest checkpoint, and in the one before a file that a worker's disk has lost."""
    url = write_run(tmp_path, steps=3, save_every=1)
    assert complete(url) == [1, 2, 3]
    damage(url, 3)
    state, listener = resume(url, 2, steps=4, prepare={WorkerId(1): partial(lose_on_disk, 2)})
    skipped = listener.of("checkpoint_skipped")
    assert [fields["step"] for fields in skipped] == [3, 2]
    assert all(".safetensors" in fields["reason"] for fields in skipped)
    assert listener.of("generation")[-1]["step"] == 1
    assert fingerprint(state) == undisturbed(4).fingerprint


def test_a_worker_lost_while_the_others_hand_out_what_they_read_costs_no_bit() -> None:
    kills = [(1, 5, "backward"), (2, 5, "backward"), (3, 1, "transfer")]  # its first transfer is that of the checkpoint
    outcome = train(4, task=Slow(), microbatches=MICROBATCHES, steps=6, kills=kills, save_every=1)
    sources = [fields["source"] for kind, fields in outcome.entries if kind == "generation"]
    assert sources.count("checkpoint") >= 2
    assert outcome.bits == undisturbed(6).bits


def test_workers_read_only_the_manifest_that_the_driver_verified(tmp_path: Path) -> None:
    key = SigningKey(b"a secret of the driver")
    url = write_run(tmp_path, steps=2, save_every=1, workers=1, key=key)
    newest = newest_complete(open_storage(url), key=key).checkpoint
    assert newest is not None
    state, _ = resume(url, 1, steps=4, key=key)
    assert state.source == FromCheckpoint(step=2, prefix=newest.prefix, digest=newest.digest)
    assert fingerprint(state) == undisturbed(4).fingerprint


def acting(
    job: Job, workers: int, at_step: int, act: Callable[[Driver], object], **limits: Any
) -> tuple[State, Listening]:
    """Run to the end; `act` is called right after a step."""
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == at_step)
    driver = make_driver(job, make_limits(job, workers, **limits), listener, keep=Keep(last=9))
    listener.do = lambda: act(driver)
    return driver.run(), listener


@pytest.mark.long
def test_a_checkpoint_that_is_requested_is_of_the_next_step_and_changes_no_bit(tmp_path: Path) -> None:
    job, asked = small_job(f"{tmp_path}/run", task=Slow(), steps=6), []
    state, _ = acting(job, 2, 2, lambda driver: asked.append(driver.checkpoint()))
    step, prefix = asked[0].result(0)
    assert 2 < step < 6
    assert prefix in {ref.prefix for ref in list_checkpoints(open_storage(job.run_url)) if ref.complete}
    assert fingerprint(state) == undisturbed(6).fingerprint


def test_a_checkpoint_that_is_requested_and_fails_is_answered_with_the_reason(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / f"fail{step}").touch()
    job, drivers, asked = small_job(f"{tmp_path}/run", task=Storing(tmp_path), steps=6), [], []

    def ask(driver: Driver) -> None:
        drivers.append(driver)
        asked.append(driver.checkpoint())

    state, _ = acting(job, 1, 2, ask)
    with pytest.raises(CheckpointError, match="no space left on device"):
        asked[0].result(0)
    assert fingerprint(state) == undisturbed(6).fingerprint
    with pytest.raises(RunFailed, match="ended before the checkpoint was committed"):
        drivers[0].checkpoint()


@pytest.mark.long
def test_a_run_that_stops_with_a_checkpoint_is_resumed_from_the_step_it_stopped_after(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=Slow(), steps=6)
    stopped, _ = acting(job, 2, 2, lambda driver: driver.stop(checkpoint_within_s=WAIT_S))
    assert stopped.result_fingerprint is None
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.step > 2
    state, listener = resume(job.run_url, 1, steps=6)
    assert listener.of("generation")[0]["step"] == stopped.checkpoint.step
    assert fingerprint(state) == undisturbed(6).fingerprint


def tell_to_leave(driver: Driver, rank: int) -> None:
    os.kill(driver.state.facts[driver.state.members[rank]].pid, signal.SIGTERM)


@pytest.mark.long
def test_without_mirrors_a_worker_that_is_requested_to_leave_leaves_after_a_checkpoint_and_the_others_continue(
    tmp_path: Path,
) -> None:
    job = small_job(f"{tmp_path}/run", task=Slow(), steps=9, engine=NO_MIRRORS)
    state, listener = acting(job, 3, 2, lambda driver: tell_to_leave(driver, 1), min_workers=2)
    assert [fields["worker"] for fields in listener.of("worker_lost")] == listener.of("generation")[0]["members"][1:2]
    committed = [ref.step for ref in list_checkpoints(open_storage(job.run_url)) if ref.complete]
    assert 2 < committed[0] < 9
    assert f"left after the checkpoint of step {committed[0]}" in listener.of("worker_lost")[0]["reason"]
    assert fingerprint(state) == undisturbed(9).fingerprint


def test_a_worker_that_is_requested_to_leave_stays_for_another_checkpoint_when_the_first_fails(tmp_path: Path) -> None:
    for step in range(1, 5):
        (tmp_path / f"fail{step}").touch()
    job = small_job(f"{tmp_path}/run", task=Storing(tmp_path), steps=10_000, engine=NO_MIRRORS)
    listener, lost = Listening(lambda kind, fields: kind == "step" and fields["step"] == 2), threading.Event()

    def listen(kind: str, fields: dict[str, Any]) -> None:
        listener(kind, fields)
        if kind == "worker_lost":
            lost.set()

    driver = make_driver(job, make_limits(job, 2, min_workers=1), listen, keep=Keep(last=9))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        assert listener.reached.wait(WAIT_S)
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGTERM)
        assert lost.wait(WAIT_S)
        driver.stop()
        running.result(WAIT_S)
    assert "left after the checkpoint" in listener.of("worker_lost")[0]["reason"]
    committed = [ref.step for ref in list_checkpoints(open_storage(job.run_url)) if ref.complete]
    assert committed
    assert committed[0] > 4


def test_the_last_step_is_reported_before_its_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    job = small_job(f"{tmp_path}/run", task=Storing(tmp_path), steps=4, save_every=3)
    limits = make_limits(job, 1, progress_timeout_s=3.0)
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == 4)
    driver = make_driver(job, limits, listener)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        assert listener.reached.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            running.result(2 * limits.progress_timeout_s)  # longer than training may be without progress
        (tmp_path / "go").touch()
        assert fingerprint(running.result(WAIT_S)) == undisturbed(4).fingerprint
    assert listener.of("worker_lost") == []
    assert len(listener.of("generation")) == 1


class HangsInTheJournal:
    """The driver's storage, whose journal hangs while the test requests it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.hangs, self.hanging, self.may_go = threading.Event(), threading.Event(), threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.hangs.is_set() and key.startswith("journal/"):
            self.hanging.set()
            assert self.may_go.wait(WAIT_S)
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_a_run_that_must_end_soon_ends_in_time_though_its_storage_hangs(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=Slow(), steps=10_000, save_every=2)
    storage = HangsInTheJournal(open_storage(job.run_url))
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == 4)
    driver = make_driver(job, make_limits(job, 1), listener, storage=storage)  # type: ignore[arg-type]  # has all methods
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        assert listener.reached.wait(WAIT_S)
        storage.hangs.set()
        assert storage.hanging.wait(WAIT_S)
        before, deadline = driver.state.step, time.monotonic() + WAIT_S
        while driver.state.step == before:  # training continues meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.01)
        told = time.monotonic()
        driver.stop(checkpoint_within_s=1.0)
        state = running.result(WAIT_S)
        took = time.monotonic() - told
    storage.may_go.set()
    assert took < 10.0  # and not as long as storage hangs
    assert state.step > before


def test_training_continues_while_the_journal_hangs_and_all_of_it_is_written_later(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", steps=6, save_every=1)
    storage = HangsInTheJournal(open_storage(job.run_url))
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == 6)
    driver = make_driver(job, make_limits(job, 1), listener, storage=storage)  # type: ignore[arg-type]  # has all methods
    storage.hangs.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        assert listener.reached.wait(WAIT_S)
        assert listener.of("checkpoint") == []  # a checkpoint that is not in the journal is not committed
        storage.may_go.set()
        assert fingerprint(running.result(WAIT_S)) == undisturbed(6).fingerprint
    assert [entry["step"] for entry in read(open_storage(job.run_url)) if entry["kind"] == "step"] == list(range(1, 7))


def test_a_worker_that_is_requested_to_leave_does_not_stay_longer_than_its_grace_period(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    job = small_job(f"{tmp_path}/run", task=Storing(tmp_path), steps=6, grace_s=0.5, engine=NO_MIRRORS)
    listener = Listening(lambda kind, fields: kind == "step" and fields["step"] == 2)
    driver = make_driver(job, make_limits(job, 2, min_workers=1, max_worker_losses=0), listener)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        assert listener.reached.wait(WAIT_S)
        leaver = driver.state.members[0]
        os.kill(driver.state.facts[leaver].pid, signal.SIGTERM)
        lost = time.monotonic()
        while not listener.of("worker_lost"):
            assert time.monotonic() - lost < WAIT_S
            time.sleep(0.01)
        (tmp_path / "go").touch()
        state = running.result(WAIT_S)
    assert fingerprint(state) == undisturbed(6).fingerprint


class StopsAtClaim:
    """The storage of a driver that is suspended just before it claims its first commit."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.reached, self.may_go = threading.Event(), threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if b'"kind":"commit"' in data and not self.reached.is_set():
            self.reached.set()
            assert self.may_go.wait(WAIT_S)
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_a_driver_that_sleeps_through_a_takeover_commits_nothing_and_ends(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", steps=4, save_every=2)
    storage = StopsAtClaim(open_storage(job.run_url))
    sleeper = make_driver(job, make_limits(job, 1), Listening(), storage=storage)  # type: ignore[arg-type]  # has all methods
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(sleeper.run)
        assert storage.reached.wait(WAIT_S)
        state, _ = resume(job.run_url, 1, steps=4, take_over=True)
        storage.may_go.set()
        with pytest.raises(RunOwnedElsewhere):
            sleeping.result(WAIT_S)
    assert fingerprint(state) == undisturbed(4).fingerprint
    committed = [ref for ref in list_checkpoints(open_storage(job.run_url)) if ref.complete]
    assert all(ref.claim is not None and ref.claim.generation > 1 for ref in committed)
    newest = newest_complete(open_storage(job.run_url)).checkpoint
    assert newest is not None
    assert newest.manifest.metadata["fingerprint"] == state.result_fingerprint


def save_after_the_loss_of_a_worker() -> None:
    """In a worker's process: the first save begins when the state is mirrored, and on survivors when the generation has
    been aborted."""
    plain = Steps.save
    lost = threading.Event()

    def save(steps: Steps, own: ShardBuffer) -> None:
        around = steps.around
        steps.join_copies()
        if around.place.rank != 1 and not lost.is_set():
            wait_until(lambda: around.groups.aborted, "the generation is not aborted", WAIT_S)
            lost.set()
            with around.in_phase("save"):
                raise AssertionError("a phase of an aborted generation began")
        plain(steps, own)

    Steps.save = save  # type: ignore[method-assign,assignment]


def test_a_step_whose_save_a_loss_prevents_is_reported_and_not_computed_again() -> None:
    kills, steps = [(1, 2, "save")], 4
    settings: dict[str, Any] = {"task": SmallTask(), "microbatches": MICROBATCHES, "steps": steps, "save_every": 2}
    lost = train(2, kills=kills, prepare=save_after_the_loss_of_a_worker, **settings)
    assert lost.bits == undisturbed(steps).bits
    assert lost.of("generation")[1]["step"] == 2
