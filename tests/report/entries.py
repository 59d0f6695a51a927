"""Journal entries as a driver makes them, and runs on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysharded.checkpoint import open_storage
from raysharded.config import BatchConfig
from raysharded.data.ledger import expected_digest
from raysharded.journal.log import Journal

BATCH = BatchConfig(global_batch_size=4, microbatch_size=2, seed=3)
NUM_SAMPLES = 50
Entry = tuple[str, dict[str, Any]]


class ManualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


def started(resumed_after_step: int = 0, **fields: Any) -> Entry:
    batch = {"global_batch_size": 4, "microbatch_size": 2, "seed": 3}
    about = {"driver": "d", "run": "tiny", "resumed_after_step": resumed_after_step, "max_steps": 6, "batch": batch}
    return "started", {**about, "reduction": "exact", "versions": {"python": "3.11.9", "torch": "2.9.0"}, **fields}


def data() -> Entry:
    return "data", {"num_samples": NUM_SAMPLES}


def generation(number: int, members: list[int], step: int, source: str = "memory") -> list[Entry]:
    """The entries of a generation that is decided and formed."""
    fields = {"generation": number, "members": members, "step": step, "source": source}
    return [
        ("generation", fields),
        ("formed", {"generation": number, "seconds": {}, "bytes_received": 10, "bytes_read": 0}),
    ]


def step(number: int, workers: int = 2, gen: int = 1, **fields: Any) -> Entry:
    low, high = expected_digest(number, BATCH, NUM_SAMPLES)
    return "step", {
        "generation": gen,
        "step": number,
        "workers": workers,
        "loss": 5.0 / number,
        "weight": 32.0,
        "gradient_norm": 1.0,
        "lr": 0.1,
        "digest": [f"{low:016x}", f"{high:016x}"],
        "reads": 4,
        "seconds": {"compute": 0.75, "apply": 0.25},
        **fields,
    }


def lost(worker: int, at_step: int) -> Entry:
    return "worker_lost", {"worker": worker, "step": at_step, "reason": "the process died"}


def avoided(at_step: int) -> Entry:
    fields = {"node": "4f6ad2aa" * 7, "host": "trainer-7", "step": at_step, "failures": 3}
    return "node_avoided", {**fields, "reasons": ["died", "died", "died again"]}


def recovery(worker: int, resumed_after_step: int, steps_redone: int = 0, **fields: Any) -> Entry:
    return "recovery", {
        "lost": [worker],
        "reasons": ["the process died"],
        "workers_before": 3,
        "workers_after": 2,
        "found_at": 12.5,
        "abort_s": 0.05,
        "reshard_s": 0.25,
        "first_step_s": 0.4,
        "total_s": 0.7,
        "steps_redone": steps_redone,
        "source": "memory",
        "resumed_after_step": resumed_after_step,
        **fields,
    }


def checkpoint(at_step: int) -> Entry:
    prefix = f"checkpoints/step-{at_step:010d}-g000001"
    return "checkpoint", {"step": at_step, "prefix": prefix, "fingerprint": f"{at_step:032x}"}


def late(at_step: int, writing: int) -> Entry:
    return "checkpoint_late", {"step": at_step, "writing": writing, "since_s": 42.0}


def failed_save(at_step: int) -> Entry:
    return "checkpoint_failed", {"step": at_step, "error": "disk full"}


def failing(at_step: int, newest: int, failed: int = 3) -> Entry:
    return "checkpoints_failing", {"step": at_step, "failed": failed, "newest": newest, "error": "disk full"}


def finished(at_step: int) -> Entry:
    return "finished", {"step": at_step, "fingerprint": "f" * 32}


def run_with_a_loss() -> list[Entry]:
    """Three workers, one lost after step 3 with step 3 to be computed again, one joining after step 4."""
    return [
        started(),
        ("worker_ready", {"worker": 0, "pid": 10, "node": "n", "start_cpu_s": 2.5}),
        data(),
        *generation(1, [0, 1, 2], 0, "start"),
        step(1, 3),
        step(2, 3),
        step(3, 3),
        lost(1, 3),
        *generation(2, [0, 2], 2),
        step(3, 2, 2),
        recovery(1, 2, steps_redone=1),
        checkpoint(3),
        step(4, 2, 2),
        *generation(3, [0, 2, 3], 4),
        step(5, 3, 3, evaluation={"loss": 1.5}, metrics={"accuracy": 0.5}),
        step(6, 3, 3),
        checkpoint(6),
        finished(6),
    ]


def with_times(entries: Iterable[Entry], seconds_between: float = 2.0) -> list[dict[str, Any]]:
    """The entries as the journal returns them."""
    clock = ManualClock()
    found = []
    for kind, fields in entries:
        found.append({"kind": kind, "at": clock.wall(), **fields})
        clock.now += seconds_between
    return found


def write_run(folder: Path, *drivers: list[Entry], seconds_between: float = 2.0) -> str:
    """Write a journal, by one driver after the other; returns the run's URL."""
    clock = ManualClock()
    for number, entries in enumerate(drivers):
        journal = Journal(open_storage(str(folder)), clock, f"driver{number}")
        for kind, fields in entries:
            journal.append(kind, fields, durable=kind != "step")
            clock.now += seconds_between
        journal.flush()
        clock.now += 1000
    return str(folder)
