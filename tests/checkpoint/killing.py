"""Processes that save without end, killed by SIGKILL at random moments; the remains are checked after each kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection

import pytest

from raysharded.checkpoint import Claims, Keep, Storage, list_checkpoints, newest_complete, open_storage, prune
from raysharded.checkpoint.storage import BytesLike
from raysharded.checkpoint.storage.local import LocalStorage
from tests.checkpoint.samples import State, bytes_of, raw, read_all, save, with_index
from tests.forked import server

DEADLINE_S = 60.0


@dataclass(kw_only=True, slots=True)
class Killed:
    """The effects of the kills."""

    in_a_save: int = 0
    """Processes that had begun a save and not ended it."""
    files_found: set[int] = field(default_factory=set)
    """Numbers of files that the broken saves had written."""
    whole: int = 0
    """Saves that were committed by then, although their process had not reported it."""
    dangling: int = 0
    """Unfinished writes that were found, and discarded."""


def state_of(step: int, rows: int) -> State:
    """Different at every step."""
    return {"w": raw("float32", rows, 100, seed=step), "step": raw("int64", seed=step)}


def save_once(storage: Storage, step: int, rows: int, chunk: int) -> str:
    """A new driver owns the run and saves once; the save's prefix."""
    claims = Claims(storage, "driver")
    generation = claims.own(1)
    return _save(storage, claims, generation, step, rows, chunk)


def kill_savers(url: str, *, kills: int, rows: int, chunk: int, environment: Mapping[str, str] | None = None) -> Killed:
    """Kills `kills` processes in the middle of a save to `url`, and checks after each that nothing was lost.

    Every save has digest tables, a box index, three data files, and its claim.
    """
    with pytest.MonkeyPatch.context() as patch:
        with_index(patch)
        _write_slowly(patch)
        return _kill_savers(url, kills, rows, chunk, environment or {})


def _kill_savers(url: str, kills: int, rows: int, chunk: int, environment: Mapping[str, str]) -> Killed:
    chance, storage, killed = random.Random(0), open_storage(url), Killed()
    save_once(storage, 1, rows, chunk)
    began_s = time.monotonic()
    save_once(storage, 2, rows, chunk)
    newest, took_s = 2, time.monotonic() - began_s
    for _ in range(3 * kills):
        if killed.in_a_save == kills:
            break
        began, ended = _kill_one(url, newest + 1, rows, chunk, environment, chance.uniform(0, took_s))
        killed.in_a_save += began > ended
        newest = _check(storage, rows, max(newest, ended), began, killed)
    killed.dangling += len(storage.unfinished())
    last = save_once(storage, newest + 1, rows, chunk)
    prune(storage, Keep(last=1), now=True)
    assert storage.unfinished() == []
    step, save_id = last.rsplit("-", 2)[1:]
    assert all(f"/step-{step}-{save_id}/" in key for key in storage.list("checkpoints"))
    assert _newest(storage, rows) == newest + 1
    return killed


def _kill_one(
    url: str, first: int, rows: int, chunk: int, environment: Mapping[str, str], after_s: float
) -> tuple[int, int]:
    """(the newest save that was begun, the newest that was ended)."""
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_save_forever, args=(url, first, rows, chunk, dict(environment), theirs))
    process.start()
    theirs.close()
    said: list[tuple[str, int]] = []
    assert ours.poll(DEADLINE_S)
    said.append(ours.recv())
    began = time.monotonic()
    while (left := began + after_s - time.monotonic()) > 0 and ours.poll(left):
        said.append(ours.recv())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    while True:  # its output before it died
        try:
            said.append(ours.recv())
        except EOFError:
            break
    begun = max(step for what, step in said if what == "begin")
    return begun, max((step for what, step in said if what == "end"), default=0)


def _save_forever(
    url: str, first: int, rows: int, chunk: int, environment: Mapping[str, str], parent: Connection
) -> None:
    os.environ.update(environment)
    patch = pytest.MonkeyPatch()
    with_index(patch)
    _write_slowly(patch)
    storage = open_storage(url)
    claims = Claims(storage, f"driver from step {first} on")
    generation = claims.own(1)
    for step in count(first):
        parent.send(("begin", step))
        _save(storage, claims, generation, step, rows, chunk)
        parent.send(("end", step))


class _SlowParts(list[BytesLike]):
    def __iter__(self) -> Iterator[BytesLike]:
        for number, part in enumerate(super().__iter__()):
            yield part
            if number == 0:
                time.sleep(0.003)


def _write_slowly(patch: pytest.MonkeyPatch) -> None:
    """Have kills hit unfinished files of a local folder too, which may take no time to write."""
    write = LocalStorage.write
    patch.setattr(LocalStorage, "write", lambda self, key, parts: write(self, key, _SlowParts(parts)))


def _save(storage: Storage, claims: Claims, generation: int, step: int, rows: int, chunk: int) -> str:
    state, save_id = state_of(step, rows), f"g{generation:06d}"
    return save(storage, state, step=step, save_id=save_id, generation=generation, chunk=chunk, claims=claims)


def _check(storage: Storage, rows: int, ended: int, began: int, killed: Killed) -> int:
    """The newest committed step: the last finished one, or the one in progress."""
    newest = _newest(storage, rows)
    assert newest in (ended, began)
    killed.whole += newest > ended
    for ref in list_checkpoints(storage):
        if ref.step > newest:
            assert not ref.complete
            killed.files_found.add(len(ref.keys))
    dangling = len(storage.unfinished())
    prune(storage, Keep(last=2))
    killed.dangling += max(0, dangling - len(storage.unfinished()))
    return newest


def _newest(storage: Storage, rows: int) -> int:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert read_all(checkpoint) == bytes_of(state_of(checkpoint.step, rows))
    return checkpoint.step
