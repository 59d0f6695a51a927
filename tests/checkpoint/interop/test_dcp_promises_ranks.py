"""The promises of `dcp_promises_ranks` and `dcp_promises_states`, by torch's own storage and by ours.

All of one storage are tried in one set of rank processes. torch's own storage is the longer half of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoint.interop.dcp_promises_ranks import BETWEEN, LONG_ON_FOUR, NOT_TRIED, ON_FOUR, Promise, play
from tests.checkpoint.interop.dcp_promises_states import LONG_STATES, STATES
from tests.checkpoint.interop.dcp_promises_storages import KINDS, Kind
from tests.checkpoint.interop.ranks import run_ranks

_ALL: tuple[Promise, ...] = (*ON_FOUR, *STATES)
_LONG: tuple[Promise, ...] = (*LONG_ON_FOUR, *LONG_STATES)

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore")]
storages = pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.name, marks=[] if kind.is_ours else [pytest.mark.long]) for kind in KINDS]
)


@cache
def _on_four(kind: Kind, folder: Path, promises: tuple[Promise, ...]) -> list[dict[str, str]]:
    """The findings of four ranks. A set of processes that did not end well is not started again for each promise."""
    try:
        return run_ranks(folder, 4, play, kind.name, promises, folder)
    except AssertionError as error:
        return [{promise.__name__: str(error) for promise in promises}]


def _assert_kept(promise: str, outcomes: list[dict[str, str]]) -> None:
    if all(found[promise] == NOT_TRIED for found in outcomes):
        pytest.skip(NOT_TRIED)  # the other failure is the one to read
    for rank, found in enumerate(outcomes):
        assert not found[promise], f"rank {rank}: {found[promise]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("promises")


def _place(folder: Path, kind: Kind) -> Path:
    (folder / kind.name).mkdir(exist_ok=True)
    return folder / kind.name


@storages
@pytest.mark.parametrize("promise", [promise.__name__ for promise in _ALL])
def test_on_four_ranks(folder: Path, kind: Kind, promise: str) -> None:
    _assert_kept(promise, _on_four(kind, _place(folder, kind), _ALL))


@storages
@pytest.mark.long
@pytest.mark.parametrize("promise", [promise.__name__ for promise in _LONG])
def test_on_four_ranks_in_every_way(folder: Path, kind: Kind, promise: str) -> None:
    _assert_kept(promise, _on_four(kind, _place(folder, kind), _LONG))


@storages
def test_four_ranks_to_two_to_four(folder: Path, kind: Kind) -> None:
    place = _place(folder, kind)
    _on_four(kind, place, _ALL)  # saves the state that is loaded here
    for size in (2, 4):
        for rank, found in enumerate(run_ranks(place, size, play, kind.name, BETWEEN, place)):
            assert not any(found.values()), f"rank {rank} of {size}: {found}"


@storages
@pytest.mark.long
def test_async_save_in_a_separate_process(tmp_path: Path, kind: Kind) -> None:
    """Its ranks are separate programs: torch starts a daemon below each."""
    command = [sys.executable, "-m", "tests.checkpoint.interop.dcp_promises_process", kind.name, str(tmp_path)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
