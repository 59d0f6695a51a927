"""The benchmarks' one workload: a GPT of 5M parameters, 16 sequences of 128 bytes a step as 8 microbatches of 2."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raysharded.config import BatchConfig
from raysharded.demo.model import ByteGPT

SEQ_LEN = 128
BATCH = BatchConfig(global_batch_size=16, microbatch_size=2, seed=0)
NUM_SAMPLES = 1 << 20


class RandomBytes:
    """Sample `i` is a pure function of `i`: a random walk over bytes, so that there is something to learn."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        steps = np.random.default_rng(index).integers(-2, 3, SEQ_LEN + 1)
        return np.asarray(np.cumsum(steps) % 256, dtype=np.int64)


def task() -> ByteGPT:
    return ByteGPT(layers=6, width=256, heads=4, seq_len=SEQ_LEN, dropout=0.1, warmup_steps=10, total_steps=1000)
