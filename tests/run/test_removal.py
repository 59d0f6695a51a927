"""A removed run no longer exists, its forks keep what they need, and a half removed run is not taken for a run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from raysharded.actors.compilation.ahead_of_join import Call
from raysharded.checkpoint import (
    Claims,
    Storage,
    fork,
    list_checkpoints,
    list_pins,
    newest_complete,
    open_storage,
    pin,
    unpin,
)
from raysharded.checkpoint.removal_mark import REMOVAL_KEY, encode_mark, is_marked, new_mark, read_mark, refuse_removed
from raysharded.checkpoint.retention.run_removal import RunRemoval
from raysharded.checkpoint.stored_claims import find_newest
from raysharded.clock import SystemClock
from raysharded.errors import CheckpointError, ConfigError, RayshardedError, RunOwnedElsewhere, StorageError
from raysharded.journal.log import Journal
from raysharded.ownership import leadership
from raysharded.ownership.lease import Holder, encode, lease_key
from raysharded.ownership.process_identity import this_process
from raysharded.report import load
from raysharded.report.overview import find_runs
from raysharded.run.attach import attach
from raysharded.run.offline import StoredRun
from raysharded.run.removal import execution as removal
from raysharded.run.removal.execution import carry_out, planned, remove_run
from raysharded.run.removal.plan import RemovalPlan
from raysharded.testing.storages import FailingStorage, StorageAround
from tests.cases import tried_each_time
from tests.checkpoint.retention.interleaving import every_order
from tests.checkpoint.retention.runs import Run, ref_of
from tests.report.entries import data, generation, run_with_a_loss, started, step, write_run

FOLDERS = ("journal", "lease")
HOW = ["torn", "untouched", "took effect"]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A storage that fails is not tried for a minute, nor is one waited for that ended. No cluster is found."""
    monkeypatch.setattr(leadership, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(removal, "_LEASE_S", 0.2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))


def make_run(folder: Path, *, saves: tuple[int, ...] = (5, 6)) -> Run:
    """A run that has ended, with checkpoints and a journal."""
    write_run(folder, run_with_a_loss())
    run = Run(open_storage(str(folder)))
    for number in saves:
        run.save(number)
    return run


def make_fork(parent: Run, folder: Path, at: int = 5) -> Storage:
    [ref] = [ref for ref in list_checkpoints(parent.storage) if ref.step == at]
    child = open_storage(str(folder))
    fork(parent.storage, ref, child)
    return child


def names(folder: Path) -> list[str]:
    return [run.name if run.num_segments else os.path.basename(run.url) for run in find_runs(str(folder))]


# -- what is removed --


def test_a_removed_run_leaves_nothing_and_its_neighbours_everything(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    other = make_run(tmp_path / "runs" / "b")
    beside = sorted((tmp_path / "runs" / "b").rglob("*"))
    run.unfinished(7)
    torn = next((tmp_path / "runs" / "a" / "checkpoints").glob("step-*5-g*")) / "w0007.tmp-0123456789ab"
    torn.write_text("torn")
    (tmp_path / "runs" / "a" / "journal" / "00000099.jsonl.tmp-0123456789ab").write_text("torn")
    call = Call.of("block", (), {})
    assert call is not None
    call.tell(run.storage)
    done = remove_run(str(tmp_path / "runs" / "a"))
    assert done.num_files > 10
    assert (done.forks, done.copied, done.links, done.left) == ((), (), (), ())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["b"]
    assert sorted((tmp_path / "runs" / "b").rglob("*")) == beside
    assert newest_complete(other.storage).checkpoint is not None
    with pytest.raises(StorageError, match="there is no run at"):
        remove_run(str(tmp_path / "runs" / "a"))


def test_a_run_on_another_kind_of_storage_is_removed_too(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{tmp_path}/run")
    Run(storage).save(5)
    remove_run(storage.url)
    assert storage.list() == []
    assert find_runs(f"memory://{tmp_path}") == []


def test_what_users_put_into_the_folder_stays_and_so_does_a_run_inside(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    inner = make_run(tmp_path / "a" / "inner")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "checkpoints" / "best").mkdir()
    (tmp_path / "a" / "checkpoints" / "best" / "model.bin").write_text("mine")
    done = remove_run(str(tmp_path / "a"))
    assert done.left == ("checkpoints/best/model.bin",)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoints", "inner", "notes.txt"]
    assert (tmp_path / "a" / "checkpoints" / "best" / "model.bin").read_text() == "mine"
    assert newest_complete(inner.storage).checkpoint is not None
    assert names(tmp_path / "a") == ["tiny"]


def test_nothing_behind_a_link_is_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    elsewhere = make_run(tmp_path / "elsewhere")
    kept = sorted((tmp_path / "elsewhere").rglob("*"))
    theirs = next((tmp_path / "elsewhere" / "checkpoints").glob("step-*-g*"))
    (tmp_path / "a" / "checkpoints" / "step-0000000009-linked").symlink_to(theirs)
    inside = next((tmp_path / "a" / "checkpoints").glob("step-*5-g*"))
    (inside / "deep").mkdir()
    (inside / "deep" / "link").symlink_to(tmp_path / "elsewhere")
    (inside / "file").symlink_to(theirs / "manifest.json")
    done = remove_run(run.storage.url)
    assert [os.path.basename(link) for link in done.links] == ["link", "step-0000000009-linked"]
    assert not (tmp_path / "a").exists()
    assert sorted((tmp_path / "elsewhere").rglob("*")) == kept
    assert newest_complete(elsewhere.storage).checkpoint is not None


@pytest.mark.parametrize("linked", ["", "checkpoints", "claims", "journal"])
def test_a_run_that_is_a_link_or_whose_folder_is_one_stays(tmp_path: Path, linked: str) -> None:
    make_run(tmp_path / "a")
    folder = tmp_path / "a" / linked if linked else tmp_path / "a"
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    kept = sorted((tmp_path / "moved").rglob("*"))
    with pytest.raises(ConfigError, match="link"):
        remove_run(str(tmp_path / "a"))
    assert sorted((tmp_path / "moved").rglob("*")) == kept


# -- what keeps a run --


def test_a_fork_that_needs_a_checkpoint_keeps_the_run_and_is_named(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    with pytest.raises(ConfigError, match=f"its fork {child.url} needs its checkpoint of step 5, since 20") as error:
        remove_run(parent.storage.url)
    assert "--with-forks" in str(error.value)
    assert "--copy-into-forks" in str(error.value)
    assert not is_marked(parent.storage)
    Run(child).save(6)
    with pytest.raises(ConfigError, match="its fork"):  # until it has dropped the reference
        remove_run(parent.storage.url)


def test_a_fork_whose_pin_was_made_by_an_older_version_is_found_beside_its_parent(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    [made] = list_pins(parent.storage)
    assert made.fork == child.url
    unpin(parent.storage, made.tag)
    pin(parent.storage, made.tag, ref_of(parent.storage, made.prefix))
    assert list_pins(parent.storage)[0].fork == ""
    with pytest.raises(ConfigError, match=f"its fork {child.url} needs"):
        remove_run(parent.storage.url)
    assert remove_run(parent.storage.url, with_forks=True).forks == (child.url,)


def test_forks_and_their_forks_are_removed_with_the_run(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    grandchild = make_fork(make_run_in(child), tmp_path / "grandchild", at=8)
    with pytest.raises(ConfigError, match=f"its fork {grandchild.url} needs its checkpoint of step 8"):
        remove_run(child.url)
    done = remove_run(parent.storage.url, with_forks=True)
    assert done.forks == (grandchild.url, child.url)
    assert list(tmp_path.iterdir()) == []


def make_run_in(storage: Storage) -> Run:
    run = Run(storage)
    run.save(8)
    return run


def test_a_removed_fork_gives_back_its_pin(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    remove_run(child.url)
    assert not (tmp_path / "child").exists()
    assert list_pins(parent.storage) == []
    remove_run(parent.storage.url)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_whose_parent_is_gone_is_removed(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    shutil.rmtree(tmp_path / "parent")
    remove_run(child.url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["prepared", "with a journal"])
def test_a_fork_with_a_copy_needs_its_parent_no_more(tmp_path: Path, kind: str) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    if kind == "with a journal":
        write_run(tmp_path / "child", [started(), data(), *generation(7, [0, 1], 5), step(6)])
    before = newest_complete(child).checkpoint
    assert before is not None
    weights = before.read("w", [0], [20]).tobytes()
    done = remove_run(parent.storage.url, copy_into_forks=True)
    assert done.copied == (child.url,)
    assert not (tmp_path / "parent").exists()
    after = newest_complete(child).checkpoint
    assert after is not None
    assert after.storage.url == child.url
    assert (after.step, after.read("w", [0], [20]).tobytes()) == (5, weights)
    assert (after.manifest.metadata, after.manifest.tree) == (before.manifest.metadata, before.manifest.tree)
    after.verify()
    assert [(ref.step, ref.state) for ref in list_checkpoints(child)] == [(5, "committed")]
    assert after.manifest.generation >= (8 if kind == "with a journal" else 1)
    Run(child).save(6)
    assert newest_complete(child).checkpoint is not None


def test_a_fork_that_has_its_own_checkpoint_gets_no_copy(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    own = Run(child).save(6)
    remove_run(parent.storage.url, copy_into_forks=True)
    assert [(ref.prefix, ref.state) for ref in list_checkpoints(child)] == [(own, "committed")]


def test_a_checkpoint_that_cannot_be_copied_keeps_the_run(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    [file] = list((tmp_path / "parent").glob("checkpoints/step-*5-*/w0001.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"w0001\.safetensors: chunk"):
        remove_run(parent.storage.url, copy_into_forks=True)
    assert not is_marked(parent.storage)
    assert [ref.state for ref in list_checkpoints(child) if ref.complete] == ["reference"]


@pytest.mark.slow
@pytest.mark.parametrize("every", tried_each_time([4], [4, 1]))
def test_a_copy_that_stops_anywhere_is_made_by_the_next_call(tmp_path: Path, every: int) -> None:
    parent = make_run(tmp_path / "w" / "parent", saves=(5,))
    child = make_fork(parent, tmp_path / "w" / "child")
    shutil.copytree(tmp_path / "w", tmp_path / "as before")
    fail_at, fired = 0, True
    while fired:
        shutil.rmtree(tmp_path / "w")
        shutil.copytree(tmp_path / "as before", tmp_path / "w")
        plan = planned(parent.storage.url, with_forks=False, copy_into_forks=True)
        [wanted] = plan.copy
        failing = FailingStorage(child, fail_at=fail_at)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StorageError):
            patch.setattr("raysharded.checkpoint.open_storage", lambda _, failing=failing: failing, raising=False)
            from raysharded.run.removal.execution import _copy_into

            _copy_into(wanted, print)
        found = newest_complete(child).checkpoint
        assert found is not None
        found.verify()
        remove_run(parent.storage.url, copy_into_forks=True)
        after = newest_complete(child).checkpoint
        assert after is not None
        assert after.storage.url == child.url
        after.verify()
        fail_at, fired = fail_at + every, failing.fired
    assert fail_at > 20


def test_pins_keep_the_run_and_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    pin(run.storage, "best", list_checkpoints(run.storage)[0], wall=lambda: 0.0)
    with pytest.raises(ConfigError, match=r"step 5 is pinned as 'best', since 1970-01-01 00:00:00 UTC") as error:
        remove_run(run.storage.url, with_forks=True)
    assert f"`raysharded checkpoint unpin {run.storage.url} best`" in str(error.value)
    unpin(run.storage, "best")
    remove_run(run.storage.url)


def test_the_pin_of_a_fork_that_is_gone_is_a_pin(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_fork(parent, tmp_path / "child")
    shutil.rmtree(tmp_path / "child")
    with pytest.raises(ConfigError, match=f"for a fork at {child.url} that does not refer to it"):
        remove_run(parent.storage.url, with_forks=True)


def hold(run: Run, **lease: object) -> None:
    holder = Holder(driver="driver", host="node-1", process=this_process(), since=1.0, lease_s=15.0)
    run.storage.write(lease_key("driver"), [encode(replace(holder, **lease))])  # type: ignore[arg-type]  # its fields


def test_a_driver_at_work_keeps_the_run(tmp_path: Path) -> None:
    run = Run(open_storage(str(tmp_path / "a")))
    run.save(5)
    hold(run)
    with pytest.raises(ConfigError, match=r"it is new, held by driver driver \(process \d+ on node-1\)"):
        remove_run(run.storage.url)
    Journal(run.storage, SystemClock(), "driver").append("started", started()[1], durable=True)
    with pytest.raises(ConfigError, match="it is running, held by driver driver"):
        remove_run(run.storage.url)
    hold(run, ended=True)
    remove_run(run.storage.url)
    assert not (tmp_path / "a").exists()


def test_a_driver_that_shows_itself_while_the_removal_waits_keeps_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    elsewhere = replace(this_process(), machine="another machine")
    plan = planned(run.storage.url, with_forks=False, copy_into_forks=False)
    hold(run, process=elsewhere)
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        hold(run, process=elsewhere, beat=2)

    with pytest.raises(RunOwnedElsewhere, match=r"which is alive\. Wait for it, or end it; then repeat this\."):
        carry_out(plan, say)
    assert "may still hold" in told[0]
    assert newest_complete(run.storage).checkpoint is not None


def test_workers_that_outlive_their_driver_keep_the_run(tmp_path: Path) -> None:
    import platform

    program = "import sys; print('up', flush=True); sys.stdin.read()"
    worker = subprocess.Popen(
        ["ray::Tenant", "-c", program], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"up\n"
        ready = {"worker": 0, "pid": worker.pid, "node": platform.node(), "node_id": "n", "start_cpu_s": 1.0}
        journal = Journal(open_storage(str(tmp_path / "a")), SystemClock(), "driver0")
        for kind, fields in [started(), ("worker_ready", ready), *generation(1, [0], 0), step(1)]:
            journal.append(kind, fields, durable=True)
        with pytest.raises(ConfigError, match=f"its worker processes are still there: {worker.pid} on this machine"):
            remove_run(str(tmp_path / "a"))
    finally:
        worker.communicate()
    remove_run(str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


# -- at any moment --


def _half_removed(tmp_path: Path) -> Storage:
    run = make_run(tmp_path / "a")
    RunRemoval(run.storage, FOLDERS).begin(lambda: False)
    return run.storage


def test_what_is_left_of_a_run_is_not_taken_for_one(tmp_path: Path) -> None:
    storage = _half_removed(tmp_path)
    url, again = storage.url, r"is being removed, or its removal was interrupted.*`raysharded rm .*/a` again"
    assert find_runs(str(tmp_path)) == []
    parent = make_run(tmp_path / "parent")
    calls: list[Callable[[], object]] = [
        lambda: find_runs(url),
        lambda: load(url),
        lambda: attach(url),
        lambda: StoredRun("a", url).status(),
        lambda: newest_complete(storage),
        lambda: list_checkpoints(storage),
        lambda: fork(parent.storage, list_checkpoints(parent.storage)[0], storage),
        lambda: fit_in(tmp_path / "a"),
    ]
    for call in calls:
        with pytest.raises(RayshardedError, match=again):
            call()
    with pytest.raises(StorageError, match="there is no run at") as error:
        load(str(tmp_path / "b"))
    assert f"{url}" not in str(error.value).replace(f"{tmp_path}/b", "")
    remove_run(url)
    assert not (tmp_path / "a").exists()


def fit_in(folder: Path) -> object:
    import raysharded as rs
    from tests.training.harness import GptTask, Tokens

    trainer = rs.ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(name=folder.name, storage_path=str(folder.parent), max_steps=1),
    )
    return trainer.fit()


@pytest.mark.parametrize("file", ["runs", "runs/removed", "runs/removed/claims"])
def test_a_file_where_a_folder_of_the_run_belongs_is_no_removal(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("a file")
    with pytest.raises(StorageError, match="A file and a folder have the same path there"):
        is_marked(open_storage(str(tmp_path / "runs" / "removed")))


def test_a_driver_that_begins_meanwhile_gives_way(tmp_path: Path) -> None:
    """It has passed the first check: the one after its claim refuses it."""
    storage = _half_removed(tmp_path)
    claims = Claims(storage, "driver1")
    held = leadership.RunLeadership(
        "a",
        storage,
        claims,
        SystemClock(),
        leadership.LeaseTerms(take_over=True),
        print,
        print,
        where=("", ""),
        has_ended=lambda _cluster, _job: False,
    )
    with pytest.raises(RunOwnedElsewhere, match="is being removed"):
        held.acquire()
    assert storage.list("lease") == []


@pytest.mark.parametrize("rival", ["pin", "driver"])
def test_a_pin_or_a_driver_that_was_faster_keeps_the_run_whole(tmp_path: Path, rival: str) -> None:
    run = make_run(tmp_path / "a")
    claims = Claims(run.storage, "removal_x")
    claims.own(1)
    whole = set(run.storage.list())
    if rival == "pin":
        pin(run.storage, "best", list_checkpoints(run.storage)[0])
    else:
        Claims(run.storage, "driver2").own(1)
    with pytest.raises((CheckpointError, RunOwnedElsewhere)):
        RunRemoval(run.storage, FOLDERS).begin(lambda: claims.find_rival() is not None)
    assert not is_marked(run.storage)
    assert whole <= set(run.storage.list())


def begun_in(storage: Storage) -> Callable[[Storage], object]:
    """The begin of a removal, of a run that it owns."""
    claims = Claims(storage, "removal_x")
    claims.own(1)

    def begin(stepped: Storage) -> bool:
        def is_rivalled() -> bool:
            _, newest = find_newest(stepped)
            return newest is None or newest.id != claims.id

        RunRemoval(stepped, FOLDERS).begin(is_rivalled)
        return True

    return begin


@pytest.mark.parametrize("rival", tried_each_time(["pin"], ["pin", "driver"]))
def test_in_every_order_of_a_removal_and_a_rival_one_gives_way(tmp_path: Path, rival: str) -> None:
    made = 0

    def make() -> Storage:
        nonlocal made
        made += 1
        storage = open_storage(f"memory://{tmp_path}/{made}")
        Run(storage).save(5)
        return storage

    def calls(storage: Storage) -> list[Callable[[Storage], object]]:
        [ref] = list_checkpoints(storage)

        def claim(stepped: Storage) -> bool:
            Claims(stepped, "driver2").own(1)
            refuse_removed(stepped, RunOwnedElsewhere)
            return True

        def put_pin(stepped: Storage) -> bool:
            pin(stepped, "best", ref)
            return True

        return [begun_in(storage), put_pin if rival == "pin" else claim]

    seen = set()
    for ran in every_order(make, calls):
        removed, other = (outcome is True for outcome in ran.outcomes)
        assert not (removed and other)
        assert removed or all(isinstance(outcome, (bool, RayshardedError)) for outcome in ran.outcomes)
        mark = read_mark(ran.storage)
        assert (mark is not None and mark.begun) == removed
        assert removed or mark is None
        assert removed or newest_complete(ran.storage).checkpoint is not None
        seen.add((removed, other))
    assert seen == {(True, False), (False, True), (False, False)}, "each can win, and both can give way"


def test_a_pin_after_the_mark_gives_way(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    ref = list_checkpoints(run.storage)[0]
    run.storage.write(REMOVAL_KEY, [encode_mark(new_mark(lambda: 0.0))])
    with pytest.raises(CheckpointError, match="is being removed"):
        pin(run.storage, "best", ref)
    assert list_pins(run.storage) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "every"),
    tried_each_time([("torn", 3), ("took effect", 5)], [("torn", 3), ("took effect", 5), *product(HOW, [1])]),
)
def test_a_removal_that_stops_anywhere_leaves_the_run_or_what_is_none_and_is_finished(
    tmp_path: Path, how: str, every: int
) -> None:
    parent = make_run(tmp_path / "w" / "parent", saves=(5,))
    run = make_run_in(make_fork(parent, tmp_path / "w" / "runs" / "a"))
    write_run(tmp_path / "w" / "runs" / "a", run_with_a_loss()[:5])
    whole = set(run.storage.list())
    shutil.copytree(tmp_path / "w", tmp_path / "as before")
    fail_at, fired, half = 0, True, 0
    while fired:
        shutil.rmtree(tmp_path / "w")
        shutil.copytree(tmp_path / "as before", tmp_path / "w")
        failing = FailingStorage(
            run.storage, fail_at=fail_at, took_effect=how == "took effect", untouched=how == "untouched"
        )
        with contextlib.suppress(StorageError):
            carry_out(RemovalPlan(storage=failing, name="a", glance=None))
        if is_marked(run.storage):
            half += 1
            assert names(tmp_path / "w" / "runs") == []
            with pytest.raises(CheckpointError, match="is being removed"):
                newest_complete(run.storage)
            begun = read_mark(run.storage)
            assert begun is not None
            assert begun.begun or whole <= set(run.storage.list())
            remove_run(run.storage.url)
        elif failing.fired and any(key.startswith("journal") for key in run.storage.list()):
            assert whole <= set(run.storage.list())
            assert newest_complete(run.storage).checkpoint is not None
            remove_run(run.storage.url)
        assert find_runs(str(tmp_path / "w" / "runs")) == []
        assert run.storage.list() == []
        assert list_pins(parent.storage) == []
        fail_at, fired = fail_at + every, failing.fired
    assert half > 20 / every


def test_two_removals_at_once_are_one_and_a_refusal(tmp_path: Path) -> None:
    """Whichever is second finds the first at work, or the run gone."""
    run = make_run(tmp_path / "a")
    plan = planned(run.storage.url, with_forks=False, copy_into_forks=False)
    begins = threading.Barrier(2)
    outcomes: list[object] = []

    def remove() -> None:
        begins.wait(30.0)
        try:
            outcomes.append(carry_out(plan))
        except RayshardedError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(outcomes) == 2
    assert sum(not isinstance(outcome, Exception) for outcome in outcomes) >= 1
    assert run.storage.list() == []
    assert not (tmp_path / "a").exists()


@dataclass(slots=True)
class Interrupting(StorageAround):
    """A storage that runs a call before operation number `at` of the thread that made it, and then continues.

    With `stands_still` operations of other threads wait meanwhile, as if the process did not run: its lease expires.
    """

    call: Callable[[], object]
    at: int
    stands_still: bool
    operations: int = 0
    thread: threading.Thread = field(default_factory=threading.current_thread)
    may_go: threading.Event = field(default_factory=threading.Event)

    def _do(self, operation: str, act: Callable[[], Any]) -> Any:
        if threading.current_thread() is not self.thread:
            self.may_go.wait(30.0)
            return act()
        self.operations += 1
        if self.operations == self.at + 1:
            if self.stands_still:
                self.may_go.clear()
            self.call()
        self.may_go.set()
        return act()


@pytest.mark.parametrize(
    ("stands_still", "every"),
    tried_each_time([(False, 5), (True, 5)], [(False, 5), (True, 5), (False, 1), (True, 1)]),
)
def test_a_removal_at_any_moment_of_another_leaves_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands_still: bool, every: int
) -> None:
    """The second is refused, takes over, or finds nothing. The files of both, their leases too, are deleted.

    There are some fifty moments; at many of them, one waits for a lease.
    """
    monkeypatch.setattr(removal, "_LEASE_S", 0.05)
    outcomes: list[object] = []

    def attempt(plan: RemovalPlan) -> None:
        try:
            outcomes.append(carry_out(plan))
        except RayshardedError as error:
            outcomes.append(error)

    for at in itertools.count(step=every):
        run = make_run(tmp_path / "a", saves=(5,))
        plan = planned(run.storage.url, with_forks=False, copy_into_forks=False)
        outcomes.clear()
        around = Interrupting(run.storage, functools.partial(attempt, plan), at, stands_still)
        attempt(replace(plan, storage=around))
        if around.operations <= at:
            break
        assert len(outcomes) == 2
        assert any(not isinstance(outcome, Exception) for outcome in outcomes), (at, outcomes)
        assert run.storage.list() == [], (at, outcomes)
        assert not (tmp_path / "a").exists(), (at, outcomes)
    assert at > 20


def test_a_removal_that_stood_still_deletes_nothing_of_a_later_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    first, second = RunRemoval(run.storage, FOLDERS), RunRemoval(run.storage, FOLDERS)
    first.begin(lambda: False)
    second.begin(lambda: False)
    second.delete(lambda: None)
    later = make_run(tmp_path / "a")
    whole = set(later.storage.list())
    with pytest.raises(ConfigError, match="another process has taken over the removal"):
        first.delete(lambda: None)
    assert set(later.storage.list()) == whole


def test_a_run_can_begin_where_another_was_removed(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    remove_run(str(tmp_path / "a"))
    run = make_run(tmp_path / "a", saves=(3,))
    found = newest_complete(run.storage).checkpoint
    assert found is not None
    assert found.step == 3
    assert names(tmp_path) == ["tiny"]


def test_a_damaged_pin_keeps_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.storage.write("checkpoints/pins/best.json", [b"{}"])
    with pytest.raises(CheckpointError, match=r"pins/best\.json"):
        remove_run(run.storage.url)
    assert not is_marked(run.storage)
