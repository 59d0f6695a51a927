"""The benchmarks' one workload: a GPT of 5M parameters, 16 sequences of 128 bytes a step as 8 microbatches of 2."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import raysharded as rs
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER
from raysharded.checkpoint.storage import BytesLike
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.config import BatchConfig
from raysharded.data.order import sample_ids
from raysharded.demo.model import ByteGPT

SEQ_LEN = 128
BATCH = BatchConfig(global_batch_size=16, microbatch_size=2, seed=0)
NUM_SAMPLES = 1 << 20


class RandomBytes:
    """Samples, each a pure function of its index: a random walk over bytes, so that there is something to learn."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        steps = np.random.default_rng(index).integers(-2, 3, SEQ_LEN + 1)
        return np.asarray(np.cumsum(steps) % 256, dtype=np.int64)


def write_order(path: str | Path, steps: int) -> None:
    """The ids of the samples of the first `steps` steps as a `.npy` file, for `benchmarks.model.Samples`."""
    positions = np.arange(steps * BATCH.global_batch_size, dtype=np.int64)
    np.save(path, sample_ids(BATCH.seed, positions, NUM_SAMPLES))


SHAPES = {"5M": {"layers": 6, "width": 256, "heads": 4}, "50M": {"layers": 16, "width": 512, "heads": 8}}
"""Shapes by the number of parameters."""


def task(parameters: str = "5M", save_s: float = 0.0) -> ByteGPT:
    kind: type[ByteGPT] = SlowlySaved if save_s else ByteGPT
    made = kind(**SHAPES[parameters], seq_len=SEQ_LEN, dropout=0.1, warmup_steps=10, total_steps=1000)
    if isinstance(made, SlowlySaved):
        made.save_s = save_s
    return made


class SlowlySaved(ByteGPT):
    """The task, on a storage that takes `save_s` for each file of a checkpoint's data, of which a worker writes one."""

    save_s = 0.0

    def build_model(self) -> Any:
        """As always; from here on the worker's storage is slow."""
        write, save_s = LocalStorage.write, self.save_s

        def slowly(storage: LocalStorage, key: str, parts: Iterable[BytesLike]) -> None:
            if key.startswith(f"{CHECKPOINTS_FOLDER}/"):
                time.sleep(save_s)
            write(storage, key, parts)

        if not getattr(LocalStorage, "is_slow", False):
            LocalStorage.is_slow, LocalStorage.write = True, slowly  # type: ignore[attr-defined, method-assign, assignment]
        return super().build_model()


def trainer(
    name: str,
    workers: int | tuple[int, int],
    folder: str,
    *,
    steps: int = 1_000_000,
    checkpoint: rs.CheckpointConfig | None = None,
    engine: rs.EngineConfig | None = None,
    parameters: str = "5M",
    patience_s: float | None = None,
    save_s: float = 0.0,
    **scaling: Any,
) -> rs.ElasticTrainer:
    """A run of this workload, without checkpoints unless `checkpoint` is given; `scaling`: options of `ScalingConfig`.

    `save_s`: as in `SlowlySaved`. `patience_s`: silence is not a sign of a fault for so long; None: the defaults hold.
    """
    waits: dict[str, Any] = {}
    if patience_s is not None:
        failure = rs.FailureConfig(hang_timeout_s=patience_s, progress_timeout_s=patience_s, orphan_wait_s=patience_s)
        waits = {"failure": failure, "lease_s": patience_s}
    return rs.ElasticTrainer(
        task=task(parameters, save_s),
        data=RandomBytes(),
        batch=BATCH,
        scaling=rs.ScalingConfig(num_workers=workers, **scaling),
        run=rs.RunConfig(
            name=name,
            storage_path=folder,
            max_steps=steps,
            checkpoint=checkpoint or rs.CheckpointConfig(at_end=False),
            **waits,
        ),
        engine=engine,
    )
