"""One of four ranks, killed at random moments of the start of its process group and of a save.

`python -m tests.checkpoint.state_dict.kills FOLDER COUNT [SEED]` prints the effects of the kills. Checks: survivors end
within their time-outs; the older checkpoint is whole, and the newer one is atomic; a save works then.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from raysharded.checkpoint import api
from raysharded.errors import CheckpointError, IncompleteCheckpoint
from tests.checkpoint.state_dict.ranks import Killed, outcomes, run_ranks

WORLD_SIZE = 4
TIMEOUT_S = 2.0
"""Time-out of the group's start, and of each wait for another rank in a save."""
UNDISTURBED_S = 60.0
"""Time-out of saves without a kill: only a hang reaches it."""
ENDED_WITHIN_S = 40.0
"""A survivor waits for the group's start, for rank 0, and once for a load's files."""
ROWS = 40_000


@dataclass(kw_only=True, slots=True)
class Hits:
    """The effects of the kills."""

    survivors: Counter[str] = field(default_factory=Counter)
    """The type of a survivor's error, or "saved"."""
    at_work: int = 0
    """Kills of a rank that was not done."""
    committed: int = 0
    """Saves that were complete all the same."""
    slowest_s: float = 0.0
    """From the kill to the end of the last survivor."""


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    whole = torch.full((ROWS, 16), float(step))
    return {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "r": distribute_tensor(whole[:9], mesh, [Replicate()]),
        "step": step,
    }


def save(_rank: int, folder: str, step: int, timeout_s: float = TIMEOUT_S) -> int:
    return api.save(f"{folder}/step-{step}", state_of(step), step=step, timeout_s=timeout_s).step


def kill_one(folder: Path, count: int, seed: int = 0) -> Hits:
    """Raises AssertionError, or TimeoutError for a survivor that hangs."""
    hits, chance = Hits(), random.Random(seed)
    run_ranks(WORLD_SIZE, save, str(folder / "warm"), 0, UNDISTURBED_S)  # the fork server has to start too
    shutil.rmtree(folder / "warm")
    began = time.monotonic()
    run_ranks(WORLD_SIZE, save, str(folder), 0, UNDISTURBED_S)
    undisturbed_s = time.monotonic() - began
    for step in range(1, count + 1):
        share = chance.random() if step > 1 else 0.0  # the first hits a rank that has just started, on any machine
        killed, after_s = chance.randrange(WORLD_SIZE), share * undisturbed_s
        began = time.monotonic()
        found = outcomes(
            WORLD_SIZE,
            save,
            str(folder),
            step,
            timeout_s=ENDED_WITHIN_S,
            group_timeout_s=TIMEOUT_S,
            kill=(killed, after_s),
        )
        hits.slowest_s = max(hits.slowest_s, time.monotonic() - began - after_s)
        hits.at_work += isinstance(found[killed], Killed)
        for rank, outcome in enumerate(found):
            if rank != killed:
                assert not isinstance(outcome, Killed), f"rank {rank} died too"
                hits.survivors[type(outcome).__name__ if isinstance(outcome, BaseException) else "saved"] += 1
        _look(folder, step, hits)
    return hits


def _look(folder: Path, step: int, hits: Hits) -> None:
    """Check the older checkpoint and the newer; a missing one can be saved by a retry."""
    assert api.open(folder / "step-0").read("w").eq(0).all()
    newer = folder / f"step-{step}"
    try:
        assert api.open(newer).read("w").eq(step).all()
        hits.committed += 1
    except IncompleteCheckpoint:
        assert api.open(folder).step == 0
        api.save(newer, {"w": torch.full((4,), float(step))}, step=step)
    assert api.open(folder).step == step
    shutil.rmtree(newer)


def main(folder: str, count: str, seed: str = "0") -> None:
    """Writes the results to stdout."""
    try:
        hits = kill_one(Path(folder), int(count), int(seed))
    except CheckpointError as error:
        sys.exit(f"a checkpoint was lost: {error}")
    sys.stdout.write(f"{hits}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
