"""A watch that is no parent reports the cause of a death: from the kernel, since Linux 6.15, and from signs alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raysharded.actors.process.death_watch import DeathWatch
from raysharded.actors.process.os_processes import start_ticks
from raysharded.ids import WorkerId
from raysharded.protocol.death import Death
from raysharded.protocol.descriptors import in_use
from raysharded.ray_backend.agents import OwnNode
from tests.actors.process.kernels import kernel_tells_endings
from tests.paths import ROOT

_MEMORY = Path("/sys/fs/cgroup/memory")
_LIMIT = 96 << 20

BEGIN = """
    import ctypes, faulthandler, os, signal, sys
    from raysharded.actors.telemetry import position_record
    faulthandler.enable()
    position_record.begin()
    position_record.note_place(7, 31, 5)
    position_record.note_samples([40, 2])
    position_record.note_phase("forward")
    print("ready", flush=True)
    sys.stdin.readline()
    print("last words", file=sys.stderr, flush=True)
"""

PARENT = """
import signal, subprocess
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(subprocess.Popen({child!r}).pid, flush=True)
signal.pause()
"""


def death_of(end: str, folder: Path, *, asks_kernel: bool = True, group: Path | None = None) -> Death:
    """The report of a watch on a process that ends in this way; its parent discards its status."""
    stderr = folder / "worker.err"
    child = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(end)]
    script = PARENT.format(child=child)
    with stderr.open("w") as errors:
        errors.write("before\n")
        errors.flush()
        parent = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        told = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert "ready" in told
        (pid,) = (int(line) for line in told if line != "ready")
        if group is not None:
            (group / "cgroup.procs").write_text(str(pid))
        watch = DeathWatch(asks_kernel=asks_kernel)
        assert watch.watch(pid, start_ticks(pid) or 0)
        parent.stdin.write("die\n")
        parent.stdin.flush()
        death = watch.explain(pid)
        assert watch.explain(pid) is None
        parent.kill()
    assert death is not None
    return death


EXIT, CRASH, KILL = "os._exit(3)", "ctypes.string_at(0)", "os.kill(os.getpid(), signal.SIGKILL)"


UNTOLD = (None, "", False)
"""Status, signal, and whether its own code ended it: of a death that left no sign."""


@pytest.mark.parametrize(
    ("end", "by_kernel", "by_signs"),
    [
        (EXIT, (3, "", True), (3, "", True)),
        (CRASH, (None, "SIGSEGV", True), (None, "SIGSEGV", True)),
        ("os.abort()", (None, "SIGABRT", True), (None, "SIGABRT", True)),
        (KILL, (None, "SIGKILL", False), UNTOLD),
        ("os.kill(os.getpid(), signal.SIGTERM)", (None, "SIGTERM", False), UNTOLD),
        ("ctypes.CDLL(None)._exit(9)", (9, "", True), UNTOLD),  # not Python's own
        ("sys.exit(0)", (0, "", False), UNTOLD),
    ],
)
@pytest.mark.parametrize("asks_kernel", [True, False])
def test_status_and_signal_are_told_by_the_kernel_and_on_an_older_one_by_signs(
    end: str,
    by_kernel: tuple[int | None, str, bool],
    by_signs: tuple[int | None, str, bool],
    asks_kernel: bool,
    tmp_path: Path,
) -> None:
    death = death_of(end, tmp_path, asks_kernel=asks_kernel)
    expected = by_kernel if asks_kernel and kernel_tells_endings() else by_signs
    assert (death.status, death.signal, death.is_its_own) == expected
    assert (death.generation, death.step, death.phase) == (7, 31, "forward")
    assert (death.microbatch, death.samples) == (5, (40, 2))
    assert death.stderr[0] == "last words"
    assert death.stderr_file == str(tmp_path / "worker.err")


def test_a_process_that_is_another_one_by_now_is_not_watched() -> None:
    assert not DeathWatch().watch(os.getpid(), (start_ticks(os.getpid()) or 0) + 1)


def test_one_that_lives_has_no_cause_and_watches_leave_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysharded.actors.process.death_watch._ENDS_WITHIN_S", 0.01)
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    assert watch.watch(os.getpid(), start_ticks(os.getpid()) or 0)
    assert watch.explain(os.getpid()) is None
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def group() -> Iterator[Path]:
    """An own memory cgroup with a limit (version 1), which takes root."""
    folder = _MEMORY / f"raysharded-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(_LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup (version 1) can be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_kernels_memory_killer_is_named_with_the_limit(group: Path, tmp_path: Path) -> None:
    death = death_of("taken = bytearray(512 << 20)", tmp_path, group=group)
    assert (death.signal, death.is_its_own) == ("SIGKILL" if kernel_tells_endings() else "", False)
    assert death.cause == ("was killed: the kernel's memory killer ended it at the limit of its cgroup, 96.0 MiB")


@pytest.mark.skipif(not kernel_tells_endings(), reason="this kernel does not report how a process ended (Linux 6.15)")
def test_a_process_that_its_parent_reaps_a_moment_later_is_explained() -> None:
    watch, child = DeathWatch(), subprocess.Popen(["sleep", "60"])
    assert watch.watch(child.pid, start_ticks(child.pid) or 0)
    with ThreadPoolExecutor(1) as pool:
        child.kill()
        explained = pool.submit(watch.explain, child.pid)
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        time.sleep(0.05)  # the kernel has no status yet
        child.wait()
        death = explained.result()
    assert death is not None
    assert death.signal == "SIGKILL"


def test_the_watches_of_a_driver_s_own_node_end_with_it() -> None:
    before, node = in_use(), OwnNode()
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]
    for child in children:
        node.watch("", child.pid, start_ticks(child.pid) or 0)
    assert in_use() != before
    node.close(1.0)
    assert in_use() == before
    for child in children:
        child.kill()
        child.wait()


def test_a_driver_keeps_no_thread_of_a_death_that_is_explained() -> None:
    node = OwnNode()
    for worker in range(20):
        node.ask_cause(WorkerId(worker), "", os.getpid())  # it is not watched
        node._waiting[-1].join()
    assert len(node._waiting) == 1
    node.close(1.0)


def test_progress_bars_are_no_last_words(tmp_path: Path) -> None:
    end = r"""
        from tqdm import tqdm
        for total in (3, None):
            bar = tqdm(range(3), total=total, desc="Loading weights", mininterval=0)
            for _ in bar:
                print("a warning\r\n" if total else "", end="", file=sys.stderr, flush=True)
        print("\r 50%|#  | 1/2 [00:01<00:01]ValueError: behind a bar", file=sys.stderr)
        print("\r 60%|#  | 3/5 [00:01<00:01]   behind a shorter bar", file=sys.stderr)
        tqdm(total=9, desc="unfinished").update()
        sys.stderr.flush()
        os._exit(3)
    """
    assert death_of(end, tmp_path).stderr == (
        "last words",
        *["a warning"] * 3,
        "ValueError: behind a bar",
        "behind a shorter bar",
    )
