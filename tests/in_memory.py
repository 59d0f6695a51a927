"""`--in-memory`: the files of tests are in memory, where there is enough of it.

Tests write tens of thousands of small files. On a disk with ext4, a file that replaces another waits for the disk, and
so does every fsync: that took a third of the time of the tests of storage.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_OPTION = "--in-memory"
_FOLDER = Path("/dev/shm")
_NEEDED_BYTES = 3 << 30
"""Several times what the tests of one `make test` leave."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest's hook."""
    parser.addoption(_OPTION, action="store_true", help=f"put the files of tests into {_FOLDER} if it has enough space")


def pytest_configure(config: pytest.Config) -> None:
    """pytest's hook. Processes that run a part of the tests get a folder in that of the first one."""
    if config.getoption(_OPTION) and "PYTEST_DEBUG_TEMPROOT" not in os.environ and _is_usable():
        root = _FOLDER / f"raysharded-tests-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)  # pytest keeps the last three there


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """pytest's hook. Files stay for tests that failed."""
    config = session.config
    if exitstatus == 0 and config.getoption(_OPTION) and not hasattr(config, "workerinput"):
        base: Path | None = config._tmp_path_factory._basetemp  # type: ignore[attr-defined]  # None: nothing was made
        if base is not None and base.is_relative_to(_FOLDER):
            shutil.rmtree(base, ignore_errors=True)


def _is_usable() -> bool:
    try:
        found = os.statvfs(_FOLDER)
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    [available] = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")] or [0]
    if found.f_flag & os.ST_NOEXEC:  # some tests run what they make
        return False
    return min(found.f_bavail * found.f_frsize, available) >= _NEEDED_BYTES
