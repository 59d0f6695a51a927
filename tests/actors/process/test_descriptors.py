"""Open files: processes raise their limit, the start reports the need, and the error at the limit has its name."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from raysharded.protocol import descriptors
from tests.paths import ROOT
from tests.training.harness import train


def in_a_process(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_process_raises_its_soft_limit_to_the_hard_one() -> None:
    script = """
import resource
from raysharded.protocol import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300))
print(descriptors.limit(), descriptors.raise_limit(), descriptors.limit(), descriptors.hard_limit())
"""
    assert in_a_process(script).split() == ["128", "300", "300", "300"]


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


def test_the_error_at_the_limit_is_no_error_of_the_task_and_another_processs_error_is() -> None:
    script = """
import os, resource
from raysharded.actors.process.stop_reason import ending_of
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
theirs = ending_of(ValueError("rank 3: Too many open files"), interrupted=False)
held = []
try:
    while True:
        held.append(open(os.devnull))
except OSError as error:
    failure = error
for one in held[:8]:
    one.close()
for error in (failure, RuntimeError("gloo: epoll_create: Too many open files")):
    found = ending_of(error, interrupted=False)
    print(type(found.error).__name__, found.error)
print(type(theirs.error).__name__)
"""
    first, second, theirs = in_a_process(script).splitlines()
    for line in (first, second):
        assert line.startswith("ClusterError this process has no open file left of the 96 that it may have (")
        assert "`ulimit -Hn 192`" in line
    assert "epoll_create" in second
    assert theirs == "TaskError"


def few() -> None:
    """Enough for the groups of one generation, and not for those of two."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (52, 52))


@pytest.mark.procs
def test_a_join_at_the_limit_is_made_without_a_preparation_and_no_process_dies() -> None:
    plain = train(3, steps=5)
    found = train(3, steps=5, kills=[(1, 2, "apply")], losses=1, prepare=few)
    assert found.bits == plain.bits
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
    plain = train(3, steps=4)
    found = train(3, steps=4, losses=2, prepare=fewest)
    assert found.bits == plain.bits
    assert found.of("worker_lost") == []
    assert found.of("preparation_failed") == []
    generation, *others = found.of("generation")
    assert others == []
    assert len(generation["members"]) == 2
    assert " files more, which connect 2 workers: raise the limit where its process starts" in generation["why"]
