"""A save that dies at any moment leaves the previous checkpoint loadable and no visible part of itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raysharded.checkpoint import Claims, Keep, Storage, newest_complete, open_storage, prune
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.testing.storages import save_rows
from tests.checkpoint.killing import kill_savers
from tests.checkpoint.samples import with_index
from tests.forked import server

OLD = {"w": np.arange(60, dtype=np.float32).reshape(12, 5), "step": np.array(1)}
NEW = {"w": OLD["w"] + 1, "step": np.array(2)}


def _save(storage: Storage, arrays: dict[str, NDArray[Any]], *, step: int, num_writers: int) -> str:
    """A new driver owns the run and saves once."""
    claims = Claims(storage, "driver")
    generation = claims.own(1)
    return save_rows(
        storage,
        arrays,
        step=step,
        save_id=f"g{generation:06d}",
        num_writers=num_writers,
        generation=generation,
        claims=claims,
    )


def _assert_newest_is(storage: Storage, arrays: dict[str, NDArray[Any]], step: int) -> None:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == step
    checkpoint.verify()
    for name, array in arrays.items():
        assert checkpoint.read(name, [0] * array.ndim, array.shape).tobytes() == array.tobytes()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _DiesAfterFirstPart(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        yield self[1][:8]
        _die()


def _linked(number: int, after: bool) -> Callable[[Any, Any], None]:
    link, calls = os.link, []

    def dying(a: Any, b: Any) -> None:
        calls.append(b)
        if len(calls) == number and not after:
            _die()
        link(a, b)
        if len(calls) == number:
            _die()

    return dying


def save_and_die(folder: str, moment: str) -> None:
    """A save, in a separate process, that is killed at a moment."""
    patch = pytest.MonkeyPatch()
    with_index(patch)
    storage = open_storage(folder)
    claims = Claims(storage, "driver")
    generation = claims.own(1)
    write = LocalStorage.write

    def dies_in(end: str, *more: bytes) -> None:
        def dying(self: LocalStorage, key: str, parts: Iterable[Any]) -> None:
            write(self, key, _DiesAfterFirstPart([*more, *parts]) if key.endswith(end) else parts)

        patch.setattr(LocalStorage, "write", dying)

    match moment:
        case "in a shard":
            dies_in("w0001.safetensors")
        case "in a digest table":
            dies_in(".b3", b"half")
        case "in the box index":
            dies_in(".parquet", b"half")
        case "before a shard has its name":
            patch.setattr(os, "replace", _die)
        case "before the manifest":
            patch.setattr(LocalStorage, "put_if_absent", _die)
        case _:
            what, when = moment.split(" has its name ")
            patch.setattr(os, "link", _linked({"manifest": 1, "claim": 2}[what], when == "after"))
    save_rows(
        storage,
        NEW,
        step=2,
        save_id=f"g{generation:06d}",
        num_writers=3,
        chunk_size_bytes=2,
        generation=generation,
        claims=claims,
    )


@pytest.mark.parametrize(
    ("moment", "committed"),
    [
        ("in a shard", False),
        ("in a digest table", False),
        ("in the box index", False),
        ("before a shard has its name", False),
        ("before the manifest", False),
        ("manifest has its name before", False),
        ("manifest has its name after", False),
        ("claim has its name before", False),
        ("claim has its name after", True),
    ],
)
def test_a_save_killed_by_sigkill_is_whole_or_invisible_and_its_debris_is_pruned(
    tmp_path: Path, moment: str, committed: bool
) -> None:
    storage = open_storage(str(tmp_path))
    _save(storage, OLD, step=1, num_writers=3)
    context = server()
    process = context.Process(target=save_and_die, args=(str(tmp_path), moment), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    _assert_newest_is(storage, *((NEW, 2) if committed else (OLD, 1)))
    last = _save(storage, NEW, step=3, num_writers=2)
    prune(storage, Keep(last=1), now=True)
    assert storage.list("checkpoints") == [
        f"{last}/manifest.json",
        f"{last}/w0000.safetensors",
        f"{last}/w0001.safetensors",
    ]
    assert storage.unfinished("checkpoints") == []


@pytest.mark.procs
@pytest.mark.long  # the test above kills at each moment, and that on S3 at random ones
@pytest.mark.parametrize("kills", [20, 100])
def test_processes_killed_in_the_middle_of_a_save_cost_nothing_but_that_save(tmp_path: Path, kills: int) -> None:
    """On S3: tests/s3/test_kills.py."""
    killed = kill_savers(str(tmp_path / "run"), kills=kills, rows=600, chunk=1024)
    assert killed.in_a_save == kills
    assert len(killed.files_found) > 3  # they were hit at different moments
    assert killed.dangling > 0  # temporary files of theirs were found, and deleted
