"""Open files: processes raise their limit, the start reports the need, and the error at the limit has its name."""

from __future__ import annotations

import os
import resource
from functools import cache
from typing import Any

import pytest

from raysharded.actors.process.stop_reason import ending_of
from raysharded.protocol import descriptors
from tests.forked import in_a_fork
from tests.training.harness import Outcome, SmallTask, samples, train


def raised() -> list[int | None]:
    """The limits before and after the process raises them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300))
    return [descriptors.limit(), descriptors.raise_limit(), descriptors.limit(), descriptors.hard_limit()]


def test_a_process_raises_its_soft_limit_to_the_hard_one() -> None:
    assert in_a_fork(raised) == [128, 300, 300, 300]


@pytest.mark.parametrize("workers", [1, 2, 121, 126, 1000])
def test_the_most_workers_are_those_that_need_no_more_than_there_is(workers: int) -> None:
    assert descriptors.most_workers(descriptors.needed(workers)) == workers
    assert descriptors.most_workers(descriptors.needed(workers) - 1) == max(1, workers - 1)


def test_a_run_that_is_too_large_for_the_hard_limit_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    assert descriptors.shortage(121) == ""
    assert descriptors.shortage(256) == (
        "A worker of a run of 256 workers needs up to 2104 open files, and processes here may have 1024, enough for "
        "121 workers. Raise the limit where processes start: `ulimit -Hn 2104` (limits.conf: nofile), or use fewer "
        "workers."
    )


def at_the_limit() -> tuple[str, str, str]:
    """Errors of a process that has no open file left, and before that the kind of another process's error."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    theirs = ending_of(ValueError("rank 3: Too many open files"), interrupted=False)
    held: list[int] = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        failure = error
    for one in held[:8]:
        os.close(one)
    own = [
        ending_of(error, interrupted=False).error
        for error in (failure, RuntimeError("gloo: epoll_create: Too many open files"))
    ]
    first, second = (f"{type(error).__name__} {error}" for error in own)
    return first, second, type(theirs.error).__name__


def test_the_error_at_the_limit_is_no_error_of_the_task_and_another_processs_error_is() -> None:
    first, second, theirs = in_a_fork(at_the_limit)
    for line in (first, second):
        assert line.startswith("ClusterError this process has no open file left of the 96 that it may have (")
        assert "`ulimit -Hn 192`" in line
    assert "epoll_create" in second
    assert theirs == "TaskError"


SETTINGS: dict[str, Any] = {"steps": 5, "task": SmallTask(), "data": samples()}


@cache
def alone() -> Outcome:
    """The undisturbed run."""
    return train(1, **SETTINGS)


def few() -> None:
    """Enough for the groups of one generation, and not for those of two."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (52, 52))


@pytest.mark.procs
def test_a_join_at_the_limit_is_made_without_a_preparation_and_no_process_dies() -> None:
    found = train(3, kills=[(1, 2, "apply")], losses=1, prepare=few, **SETTINGS)
    assert found.bits == alone().bits
    assert [one["worker"] for one in found.of("worker_lost")] == [1]
    failures = found.of("preparation_failed")
    assert failures
    assert all("open files that it may have" in one["reason"] for one in failures)


def fewest() -> None:
    """Enough for the groups of two workers, and not for those of three."""
    now = descriptors.in_use()
    assert now is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 30, now + 30))


@pytest.mark.procs
def test_a_run_goes_on_with_as_many_workers_as_their_open_files_connect_and_says_so() -> None:
    found = train(3, losses=2, prepare=fewest, **SETTINGS)
    assert found.bits == alone().bits
    assert found.of("worker_lost") == []
    assert found.of("preparation_failed") == []
    generation, *others = found.of("generation")
    assert others == []
    assert len(generation["members"]) == 2
    assert " files more, which connect 2 workers: raise the limit where its process starts" in generation["why"]
