"""A fork begins with its parent's checkpoint, which stays until the fork has saved one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from raysharded.checkpoint import Keep, Storage, fork, list_pins, newest_complete, open_storage, pin, prune
from raysharded.checkpoint.retention.fork_reference import REFERENCE_NAME, encode_reference, read_reference
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, StorageError
from raysharded.testing.storages import FailingStorage
from tests.checkpoint.retention.runs import Run, ref_of, states


@pytest.fixture(params=["local", "memory"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Storage]:
    """The storage of a run, by name."""
    return lambda name: open_storage(f"{'' if request.param == 'local' else 'memory://'}{tmp_path}/{name}")


def test_a_fork_begins_with_its_parents_checkpoint(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    prefix = Run(parent).save(5)
    made = fork(parent, ref_of(parent, prefix), run, wall=lambda: 1.0)
    found = newest_complete(run).checkpoint
    assert found is not None
    assert (found.storage.url, found.prefix, found.step, found.digest) == (parent.url, prefix, 5, made.manifest_digest)
    found.verify()
    assert states(run) == [(5, "reference")]
    assert [(made_pin.tag, made_pin.prefix) for made_pin in list_pins(parent)] == [(made.pin, prefix)]
    assert made.pin.startswith("fork-child-")


def test_the_parent_keeps_the_checkpoint_until_the_fork_has_saved_one(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    driver = Run(parent)
    prefix = driver.save(5)
    made = fork(parent, ref_of(parent, prefix), run)
    driver.save(6)
    assert prune(parent, Keep(last=1), now=True).removed == ()
    child = Run(run)
    child.unfinished(7)
    assert prune(run, Keep(last=1)).references == ()
    own = child.save(8)
    pruned = prune(run, Keep(last=1))
    assert pruned.references == (made.folder,)
    assert [ref for ref in run.list("checkpoints") if REFERENCE_NAME in ref] == []
    found = newest_complete(run).checkpoint
    assert found is not None
    assert found.prefix == own
    assert list_pins(parent) == []
    assert prune(parent, Keep(last=1), now=True).removed == (prefix,)


def test_a_fork_that_was_interrupted_anywhere_is_finished_by_the_same_call(at: Callable[[str], Storage]) -> None:
    parent = at("parent")
    ref = ref_of(parent, Run(parent).save(5))
    for fail_at in range(20):
        run = at(f"child {fail_at}")
        failing_parent, failing_run = FailingStorage(parent, fail_at=fail_at), FailingStorage(run, fail_at=fail_at)
        for on_parent, on_run in ((failing_parent, run), (parent, failing_run)):
            with suppress(StorageError):
                fork(on_parent, ref, on_run)
        made = fork(parent, ref, run)
        assert read_reference(run, made.folder).is_same(made)
        assert newest_complete(run).checkpoint is not None
        assert made.pin in [found.tag for found in list_pins(parent)]
        if not failing_parent.fired and not failing_run.fired:
            return
    raise AssertionError("never without a failure")


def test_chains_and_cycles_are_refused(at: Callable[[str], Storage]) -> None:
    parent, run, other = at("parent"), at("child"), at("other")
    made = fork(parent, ref_of(parent, Run(parent).save(5)), run)
    with pytest.raises(CheckpointError, match=f"is itself a reference, to {made.prefix} of {parent.url}"):
        fork(run, ref_of(run, made.folder), other)
    with pytest.raises(CheckpointError, match="fork of itself"):
        fork(parent, ref_of(parent, made.prefix), parent)
    from dataclasses import replace

    chained = replace(made, parent=run.url, prefix=made.folder)
    other.write(f"{chained.folder}/{REFERENCE_NAME}", [encode_reference(chained)])
    with pytest.raises(CheckpointError, match="is itself a reference"):
        newest_complete(other)
    circular = replace(made, parent=at("circle").url)
    at("circle").write(f"{circular.folder}/{REFERENCE_NAME}", [encode_reference(circular)])
    with pytest.raises(CheckpointError, match="refers to its own run"):
        newest_complete(at("circle"))


def test_only_a_new_run_can_be_a_fork_and_only_of_a_committed_checkpoint(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    driver = Run(parent)
    committed, broken = driver.save(5), driver.unfinished(6)
    with pytest.raises(CheckpointError, match=r"not committed \(unfinished\)"):
        fork(parent, ref_of(parent, broken), run)
    Run(run).save(1)
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        fork(parent, ref_of(parent, committed), run)
    assert list_pins(parent) == []


def test_a_reference_stands_for_the_very_checkpoint_that_was_meant(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    prefix = Run(parent).save(5)
    made = fork(parent, ref_of(parent, prefix), run)
    key = f"{made.folder}/{REFERENCE_NAME}"
    good = run.read(key)
    run.write(key, [good.replace(b'"step":5', b'"step":6')])
    with pytest.raises(CorruptCheckpoint, match=r"reference\.json"):
        newest_complete(run)
    run.write(key, [good])
    parent.delete(ref_of(parent, prefix).keys)
    with pytest.raises(IncompleteCheckpoint, match=r"reference\.json refers to a checkpoint that cannot be used"):
        newest_complete(run)
    assert newest_complete(run, skip_damaged=True).skipped[0].damaged


def test_references_are_pinned_in_their_own_run_alone(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    made = fork(parent, ref_of(parent, Run(parent).save(5)), run)
    with pytest.raises(CheckpointError, match="pin it there"):
        pin(run, "a", ref_of(run, made.folder))


def test_a_parent_that_was_deleted_does_not_stop_the_forks_pruning(at: Callable[[str], Storage]) -> None:
    parent, run = at("parent"), at("child")
    made = fork(parent, ref_of(parent, Run(parent).save(5)), run)
    parent.delete(parent.list())
    Run(run).save(6)
    assert prune(run, Keep(last=1)).references == (made.folder,)


@pytest.mark.parametrize("name", ["parent", "child"])
def test_a_fork_and_its_parent_have_no_password_because_files_would_hold_it(name: str, tmp_path: Path) -> None:
    urls = {other: f"memory://{tmp_path}/{other}" for other in ("parent", "child")}
    urls[name] = f"memory://me:hunter2@host{tmp_path}/{name}"
    parent, run = open_storage(urls["parent"]), open_storage(urls["child"])
    ref = ref_of(parent, Run(parent).save(5))
    with pytest.raises(CheckpointError, match=r"me:\*\*\*@host.* has a password in it.*in files"):
        fork(parent, ref, run)
    assert (run.list(), list_pins(parent)) == ([], [])
