"""Folders of a network file system in trouble: replies are lost, files are stale, and too many are open."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from raysharded.checkpoint.storage import storage_error
from tests.faults import on_fake_nfs
from tests.faults.on_fake_nfs import EVERY, STEPS
from tests.paths import ROOT

Preloaded = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake, compiled. It is no part of Python: rename, link and open of the C library are what fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    built = tmp_path_factory.mktemp("fake") / "fake_nfs.so"
    source = Path(__file__).with_name("fake_nfs.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True, capture_output=True)
    return built


@pytest.fixture
def preloaded(library: Path, tmp_path: Path) -> Preloaded:
    """Environment of a process below whose folder `nfs` the file system is in trouble: one of so many calls fails."""

    def environment(**one_of: int) -> dict[str, str]:
        faults = {f"FAKE_NFS_{name.upper()}": str(count) for name, count in one_of.items()}
        fake = {"LD_PRELOAD": str(library), "FAKE_NFS_ROOT": f"{tmp_path}/nfs", "FAKE_NFS_LOG": f"{tmp_path}/log"}
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **fake, **faults}

    return environment


def happened(tmp_path: Path) -> Counter[str]:
    log = tmp_path / "log"
    return Counter(log.read_text()) if log.exists() else Counter()


def python(program: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_OPERATIONS = """
import os, sys
from raysharded.checkpoint import open_storage
storage = open_storage(sys.argv[1])
handles = len(os.listdir("/proc/self/fd"))
for number in range(12):
    key, data = f"a/{number % 3}/file", str(number).encode()
    storage.write(key, [data, b"."])
    assert storage.read(key) == data + b"."
    into = bytearray(len(data))
    assert storage.read_into(key, 0, [memoryview(into)]) == len(data) and into == data
    assert storage.put_if_absent(f"claims/{number}", data) is True
    assert storage.put_if_absent(f"claims/{number}", b"another's") is False
    assert storage.read(f"claims/{number}") == data
    assert storage.swap(key, b"other", b"no") is False
    assert storage.swap(key, data + b".", b"swapped") is True
    assert storage.read(key) == b"swapped" and storage.size(key) == 7
    assert f"claims/{number}" in storage.list()
storage.delete(storage.list("a"))
assert storage.list() == sorted(f"claims/{number}" for number in range(12)), storage.list()
assert storage.unfinished() == []
assert len(os.listdir("/proc/self/fd")) == handles
print(storage.retries)
"""


def test_every_operation_is_right_where_replies_are_lost_and_files_are_stale(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    retries = int(python(_OPERATIONS, tmp_path / "nfs", preloaded(lose=2, stale=7)))
    fired = happened(tmp_path)
    assert min(fired["r"], fired["l"], fired["s"]) >= 3, fired
    assert retries >= fired["s"] / 2
    assert not [path for path in (tmp_path / "nfs").rglob("*") if ".tmp-" in path.name]


_FOR_EVER = """
import sys, time
time.sleep = lambda _: None
from raysharded.checkpoint import open_storage
from raysharded.errors import StorageError
storage = open_storage(sys.argv[1])
write, put = (lambda: storage.write("a", [b"1"])), (lambda: storage.put_if_absent("a", b"1"))
for operation in (write, put, lambda: storage.read("b")):
    try:
        operation()
    except StorageError as error:
        print(error)
"""


def test_a_file_that_stays_stale_is_an_error_after_a_bounded_number_of_times(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "nfs").mkdir()
    (tmp_path / "nfs" / "b").write_text("x")
    told = python(_FOR_EVER, tmp_path / "nfs", preloaded(stale=1)).splitlines()
    assert len(told) == 3
    for line in told:
        assert "Stale file handle" in line
        assert "The file server has forgotten the folder" in line
        assert "credentials" not in line
    assert happened(tmp_path)["s"] == 3 * 8
    assert [path.name for path in (tmp_path / "nfs").iterdir()] == ["b"]


_FULL = """
import os, resource, sys
from raysharded.checkpoint import open_storage
from raysharded.errors import StorageError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
storage = open_storage(sys.argv[1])
storage.write("a", [b"1"])
taken = []
while True:
    try:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
for operation in (lambda: storage.write("a", [b"2"]), lambda: storage.put_if_absent("b/c", b"2"), storage.list):
    try:
        operation()
        print("done")
    except StorageError as error:
        print(error)
for handle in taken:
    os.close(handle)
assert (storage.list(), storage.unfinished(), storage.read("a"), storage.folders()) == (["a"], [], b"1", [])
storage.write("a", [b"3"])
assert len(os.listdir("/proc/self/fd")) == 4
"""


def test_too_many_open_files_says_how_many_are_open_and_allowed(tmp_path: Path) -> None:
    told = python(_FULL, tmp_path / "run").splitlines()
    assert len(told) == 3
    for line in told:
        assert "Too many open files" in line
        assert "This process has 64 files open, of 64 allowed: raise the limit before it starts (`ulimit -n`" in line
        assert "credentials" not in line


def test_advice_for_a_folder_is_about_folders() -> None:
    failed = OSError(errno.EIO, "Input/output error")
    at_folder = str(storage_error("/mnt/runs", "write", "a", failed))
    assert at_folder.endswith("`ls /mnt/runs`, `df /mnt/runs`, and the kernel's log (`dmesg`).")
    assert "with these credentials" in str(storage_error("sftp://host/runs", "write", "a", failed))


def test_too_many_open_files_are_found_behind_the_error_of_a_library() -> None:
    try:
        try:
            raise OSError(errno.ENFILE, "Too many open files in system")
        except OSError as cause:
            raise RuntimeError("no connection") from cause
    except RuntimeError as error:
        told = str(storage_error("sftp://host/runs", "write", "a", error))
    assert "All processes of this machine have" in told
    assert "fs.file-max" in told


@pytest.mark.procs
def test_a_run_on_a_folder_in_trouble_ends_with_equal_bits_and_gives_no_checkpoint_up(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    well = on_fake_nfs.train(str(tmp_path / "disk"), workers=1)
    command = [sys.executable, "-m", "tests.faults.on_fake_nfs", str(tmp_path / "nfs")]
    environment = preloaded(lose=2, stale=9)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [troubled] = json.loads(done.stdout.splitlines()[-1])
    assert troubled["fingerprint"] == well["fingerprint"]
    kinds = Counter(troubled["kinds"])
    assert kinds["checkpoint"] + kinds["checkpoint_late"] == STEPS // EVERY
    assert kinds["checkpoint"] >= 2
    assert not [kind for kind in troubled["kinds"] if "fail" in kind or kind in ("worker_lost", "recovery")]
    fired = happened(tmp_path)
    assert min(fired["r"], fired["l"], fired["s"]) >= 3, fired
    assert not [path for path in (tmp_path / "nfs").rglob("*") if ".tmp-" in path.name]
