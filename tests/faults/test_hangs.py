"""Workers that hang are found, named and replaced, with real processes; the bits are those of the undisturbed run."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.data import TokenDataset, positions_of_microbatch, sample_ids
from raysharded.data.order import Blocks
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.training.harness import (
    SEQUENCE,
    VOCABULARY,
    Collector,
    Outcome,
    Tokens,
    make_driver,
    make_job,
    make_limits,
    train,
)

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 7
MICROBATCHES = 4
HANG_S = 2.0
"""The shortest deadline here; a step takes a tenth of a second."""
FOREVER_S = 120


class Hangs(Tokens):
    """The first worker to read its 18th sample, in step 3, never gets it: 6 are read at the start, 2 more in step 1."""

    def __init__(self, folder: Path, *, holds_lock: bool) -> None:
        super().__init__()
        self._marker, self._holds_lock, self._reads = str(folder / "hung"), holds_lock, 0

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if self._reads == 18:
            self._hang_once()
        return super().__getitem__(index)

    def _hang_once(self) -> None:
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self._holds_lock:
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
            for _ in range(2):  # like an extension that never releases the interpreter
                lock(mutex)
        else:
            time.sleep(FOREVER_S)


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES)


def stuck(outcome: Outcome) -> list[dict[str, Any]]:
    return [dict(fields) for kind, fields in outcome.entries if kind == "stuck"]


def recoveries(outcome: Outcome) -> list[dict[str, Any]]:
    return [dict(fields) for kind, fields in outcome.entries if kind == "recovery"]


@pytest.mark.parametrize("phase", tried_each_time(["agree"], ["forward", "backward", "agree", "apply", "snapshot"]))
def test_a_stopped_worker_is_abandoned_at_the_deadline_in_any_phase(phase: str) -> None:
    stopped = Fault(worker=WorkerId(1), step=3, phase=phase, kind="stop")
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, faults=[stopped], hang_timeout_s=HANG_S)
    (found,) = stuck(outcome)
    assert found["worker"] == 1
    assert "stopped or cut off" in found["reason"]
    (recovery,) = recoveries(outcome)
    assert (recovery["source"], recovery["lost"]) == ("memory", [1])
    assert outcome.bits == undisturbed().bits


@pytest.mark.parametrize("phase", tried_each_time(["transfer"], ["form", "transfer"]))
def test_a_worker_that_is_stopped_while_a_generation_forms_is_abandoned(phase: str) -> None:
    faults = [
        Fault(worker=WorkerId(2), step=3, phase="forward"),
        Fault(worker=WorkerId(0), step=3, phase=phase, kind="stop"),
    ]
    outcome = train(4, steps=STEPS, microbatches=MICROBATCHES, faults=faults, hang_timeout_s=HANG_S)
    assert 0 in [found["worker"] for found in stuck(outcome)]
    assert {recovery["source"] for recovery in recoveries(outcome)} == {"memory"}
    assert outcome.bits == undisturbed().bits


def test_who_alone_holds_a_shard_is_waited_for_while_a_generation_forms_and_nothing_is_lost(tmp_path: Path) -> None:
    faults = (
        Fault(worker=WorkerId(2), step=3, phase="forward"),  # the keeper of its mirror
        Fault(worker=WorkerId(1), step=3, phase="form", kind="wedge", seconds=8.0),
    )
    job = make_job(
        f"{tmp_path}/run", steps=STEPS, microbatches=MICROBATCHES, faults=FaultPlan(faults=faults, folder=str(tmp_path))
    )
    limits = make_limits(job, 4, min_workers=1, max_worker_losses=1, forming_patience_s=2.0)
    listener = Collector()
    state = make_driver(job, limits, listener).run()
    entries = [(kind, fields) for kind, fields in listener.entries if kind in ("stuck", "worker_lost", "generation")]
    assert [fields["worker"] for kind, fields in entries if kind == "worker_lost"] == [2]
    assert ["nobody else holds" in fields["reason"] for kind, fields in entries if kind == "stuck"] == [True]
    assert {fields["source"] for kind, fields in entries[1:] if kind == "generation"} == {"memory"}
    assert state.result_fingerprint == undisturbed().fingerprint


def test_a_worker_that_is_stopped_after_the_last_step_is_abandoned_and_the_others_write_the_checkpoint() -> None:
    stopped = Fault(worker=WorkerId(1), step=STEPS, phase="save", kind="stop")
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, faults=[stopped], hang_timeout_s=HANG_S)
    assert [found["worker"] for found in stuck(outcome)] == [1]
    assert outcome.bits == undisturbed().bits


@pytest.mark.parametrize("holds_lock", [False, True], ids=["reading", "holding the interpreter"])
def test_a_worker_that_is_stuck_in_the_users_data_code_is_named_with_the_line(holds_lock: bool, tmp_path: Path) -> None:
    data = Hangs(tmp_path, holds_lock=holds_lock)
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, data=data, losses=1, hang_timeout_s=HANG_S)
    assert (tmp_path / "hung").exists()
    (found,) = stuck(outcome)
    assert found["phase"] == "data"
    assert re.search(r"in _hang_once at Hangs\[\d+\]$", found["reason"])
    assert ("lock(mutex)" if holds_lock else "time.sleep(FOREVER_S)") in found["stack"]
    assert len(recoveries(outcome)) == 1
    assert outcome.bits == undisturbed().bits


def hang_in_a_read(shard: str, at: int) -> None:
    """In a worker's process: reads of the shard's bytes from `at` on never end."""
    read_into = LocalStorage.read_into

    def hanging(self: LocalStorage, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        if (key, offset) == (shard, at):
            time.sleep(FOREVER_S)
        return read_into(self, key, offset, outs)

    LocalStorage.read_into = hanging  # type: ignore[method-assign]  # for the rest of this process


def test_a_read_of_a_token_store_that_hangs_is_named_with_its_bytes_and_the_worker_is_replaced(tmp_path: Path) -> None:
    kind, store = Kind(tokenizer="bytes", vocab_size=VOCABULARY), tmp_path / "store"
    with StoreWriter(str(store), kind, 1 << 30) as writer:
        writer.write(np.random.default_rng(1).integers(0, VOCABULARY, 64 << 16, dtype=np.uint32))
    data = TokenDataset(store, seq_len=SEQUENCE)
    job = make_job(f"{tmp_path}/run", steps=STEPS, microbatches=2, data=data)
    size, per_block = job.batch.global_batch_size, data.samples_per_block
    order = Blocks(per_block, size)
    first, second = (
        sample_ids(job.batch.seed, positions, len(data), 2, order) // per_block
        for positions in (np.arange(3 * size), positions_of_microbatch(4, 1, size, size // 2))
    )
    block = next(number for number in second.tolist() if number and number not in first)
    (shard,) = find_stores([str(store)])[0].index.shards
    start, stop = block * per_block * SEQUENCE, (block + 1) * per_block * SEQUENCE + 1
    at, length = shard.byte_range(kind, range(start // kind.page_tokens, -(-stop // kind.page_tokens)))
    limits = make_limits(
        job, 2, min_workers=1, max_worker_losses=1, hang_timeout_s=HANG_S, replacement_wait_s=60.0, join_wait_s=60.0
    )
    listener, hangs = Collector(), {WorkerId(1): partial(hang_in_a_read, shard.name, at)}
    state = make_driver(job, limits, listener, prepare=hangs).run()
    (found,) = (fields for kind, fields in listener.entries if kind == "stuck")
    assert (found["worker"], found["phase"], found["step"]) == (1, "data", 4)
    assert found["reason"].endswith(f"the read of {store}/{shard.name}, {length} bytes from byte {at} on")
    (recovery,) = (fields for kind, fields in listener.entries if kind == "recovery")
    assert (recovery["lost"], recovery["workers_after"]) == ([1], 2), "another one took its place"
    alone = train(1, steps=STEPS, microbatches=2, data=data)
    assert [repr(listener.numbers[step]) for step in range(1, STEPS + 1)] == [repr(one) for one in alone.numbers]
    assert state.result_fingerprint == alone.fingerprint
