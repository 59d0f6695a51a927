"""The memory of a machine and of a container, in control groups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raysharded.cli import machine
from raysharded.preflight import host_memory as module
from raysharded.preflight.host_memory import host_memory
from tests.cli.test_commands import fail, succeed
from tests.paths import ROOT

MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 100 kB\nHugePages_Total: 0\n"
NO_LIMIT_1 = str(2**63 - 4096)


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    found = host_memory(tree(tmp_path, {}))
    assert (found.machine, found.available, found.limit, found.usable) == (1024000, 102400, None, 1024000)
    assert host_memory(tmp_path / "none").usable is None


@pytest.mark.parametrize("path", ["/", "/docker/5e21", "/../elsewhere"])
def test_the_limit_of_a_container_of_version_2(tmp_path: Path, path: str) -> None:
    files = {"memory.max": "9000\n", "memory.current": "3000\n", "memory.stat": "anon 2000\ninactive_file 1000\n"}
    group = {"proc/self/cgroup": f"0::{path}\n", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    found = host_memory(tree(tmp_path, group))
    assert (found.limit, found.usable, found.available) == (9000, 9000, 7000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_memory(tmp_path).limit is None


def test_the_lowest_limit_of_those_above_counts(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "0::/pods/pod/box\n",
        "sys/fs/cgroup/pods/memory.max": "8000\n",
        "sys/fs/cgroup/pods/memory.current": "7900\n",
        "sys/fs/cgroup/pods/pod/memory.max": "5000\n",
        "sys/fs/cgroup/pods/pod/memory.current": "100\n",
        "sys/fs/cgroup/pods/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pods/pod/box/memory.current": "100\n",
    }
    found = host_memory(tree(tmp_path, groups))
    assert (found.limit, found.available) == (5000, 100)


@pytest.mark.parametrize("path", ["/", "/kubepods/pod5e21"])
def test_the_limit_of_a_container_of_version_1(tmp_path: Path, path: str) -> None:
    files = {"limit_in_bytes": "9000\n", "usage_in_bytes": "3000\n", "stat": "cache 1\ntotal_inactive_file 500\n"}
    controllers = f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/\n"
    group = {f"sys/fs/cgroup/memory/memory.{name}": text for name, text in files.items()}
    found = host_memory(tree(tmp_path, {"proc/self/cgroup": controllers, **group}))
    assert (found.limit, found.available) == (9000, 6500)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(NO_LIMIT_1)
    assert host_memory(tmp_path).limit is None


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group with a limit of 512 MiB, of the version that this machine has."""
    top = Path("/sys/fs/cgroup")
    above, name = (top / "memory", "memory.limit_in_bytes") if (top / "memory").is_dir() else (top, "memory.max")
    made = above / f"raysharded-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (made / name).write_text(str(512 << 20))
        yield made
    except OSError as error:
        pytest.skip(f"no limit can be set here: {error}")
    finally:
        made.rmdir()


def test_a_process_in_a_control_group_sees_its_limit(group: Path) -> None:
    program = "from raysharded.preflight.host_memory import host_memory; print(host_memory().limit)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(512 << 20)


def test_doctor_and_plan_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "300\n", "sys/fs/cgroup/memory.current": "0\n"}
    tree(tmp_path, files)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert machine.memory().found == "1000.0 KiB, 300 B available; limited to 300 B"
    told = fail("plan", "tests.preflight.tasks:loud", tmp_path / "runs", "--host-memory", "here")
    assert "of host memory per node of 270 B (10% left alone)" in told
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900000000 kB\nMemAvailable: 1 kB\n")
    assert "858.3 GiB per node's host" in succeed(
        "plan", "tests.preflight.tasks:loud", tmp_path, "--host-memory", "here"
    )
