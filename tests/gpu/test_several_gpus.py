"""NCCL itself, with a GPU for each worker."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from raysharded.actors.device import accelerator
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.gpu.shared_gpu import REHEARSES, needs
from tests.training.harness import Outcome, train

pytestmark = needs(2)
NUM_GPUS = 4
PATIENCE_S = 30.0
"""Time in which a killed process has ended."""


def take_a_gpu(folder: Path, gpus: int) -> None:
    """In a worker's process: see one GPU alone, which no living worker has."""
    if REHEARSES:
        accelerator.use(DoubleAccelerator())
        return
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for number in range(gpus):
            if takes(folder / str(number)):
                os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
                return
        time.sleep(0.01)
    raise AssertionError(f"all of {gpus} GPUs have workers")


def takes(owner: Path) -> bool:
    """True if this process is now the owner: there was none, or it has ended."""
    with contextlib.suppress(FileNotFoundError):
        pid = owner.read_text(encoding="ascii")
        if Path("/proc", pid).exists():
            return False
        owner.unlink()
    own = owner.with_suffix(f".{os.getpid()}")
    own.write_text(str(os.getpid()), encoding="ascii")
    with contextlib.suppress(FileExistsError):
        owner.hardlink_to(own)
        return True
    return False


def on_gpus(workers: int, folder: Path, kills: tuple[tuple[int, int, str], ...] = ()) -> Outcome:
    folder.mkdir()
    prepare = partial(take_a_gpu, folder, workers)
    return train(workers, use_gpu=True, prepare=prepare, steps=4, kills=kills)


@pytest.mark.parametrize("phase", ["", "backward", "apply", "snapshot"])
def test_workers_that_nccl_connects_give_the_bits_of_one_also_after_a_loss(phase: str, tmp_path: Path) -> None:
    gpus = NUM_GPUS if REHEARSES else min(NUM_GPUS, torch.cuda.device_count())
    found = on_gpus(gpus, tmp_path / "gpus", ((1, 3, phase),) if phase else ())
    assert found.bits == on_gpus(1, tmp_path / "gpu").bits
    assert len(found.of("worker_lost")) == (1 if phase else 0)
