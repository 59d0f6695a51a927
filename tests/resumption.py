"""`--passed FILE`: tests that passed before are left out, so that a long run resumes where it was interrupted."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

_OPTION = "--passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest's hook."""
    parser.addoption(_OPTION, type=Path, help="leave out the tests that this file names, and add those that pass")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest's hook."""
    file: Path | None = config.getoption(_OPTION)
    if file is not None and file.exists():
        passed = set(file.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """pytest's hook: it is no failure if all have passed before."""
    if session.config.getoption(_OPTION) is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """pytest's hook, called where the test runs."""
    report = yield
    file: Path | None = item.config.getoption(_OPTION)
    if file is not None and report.when == "call" and report.passed:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(f"{item.nodeid}\n")
    return report
