"""The promises of `dcp_promises_ranks` and `dcp_promises_states`, by torch's own storage and by ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.checkpoint.exchange.dcp_promises_ranks import BETWEEN, ON_FOUR, play
from tests.checkpoint.exchange.dcp_promises_storages import KINDS, Kind
from tests.checkpoint.exchange.ranks import run_ranks

pytestmark = [
    pytest.mark.procs,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name),
]


@cache
def _on_four(kind: Kind, folder: Path) -> list[dict[str, str]]:
    """What each of four ranks found, of all promises in one set of processes."""
    return run_ranks(folder, 4, play, kind.name, ON_FOUR, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("promises")


def _place(folder: Path, kind: Kind) -> Path:
    (folder / kind.name).mkdir(exist_ok=True)
    return folder / kind.name


@pytest.mark.parametrize("promise", [promise.__name__ for promise in ON_FOUR])
def test_on_four_ranks(folder: Path, kind: Kind, promise: str) -> None:
    for rank, found in enumerate(_on_four(kind, _place(folder, kind))):
        assert not found[promise], f"rank {rank}: {found[promise]}"


def test_four_ranks_to_two_to_four(folder: Path, kind: Kind) -> None:
    place = _place(folder, kind)
    _on_four(kind, place)
    for size in (2, 4):
        for rank, found in enumerate(run_ranks(place, size, play, kind.name, BETWEEN, place)):
            assert not any(found.values()), f"rank {rank} of {size}: {found}"
