"""Samples per second of one worker by the number of processes that read: decoded samples, fetched and tokenized ones.

Each step takes 10 ms besides its data, in which the machine is idle.
`python -c "from benchmarks.data_workers import main; main()"`: the processes that read import the classes from here.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader
from raysharded.data.access.reader_process import DataProcess, DataProcesses, ProcessReader

SAMPLES, SIDE, BATCH, STEPS, STEP_S = 512, 256, 8, 40, 0.01
FETCH_S = 0.02
"""Latency of a sample that is fetched."""


class Decoded:
    """Images that are decompressed and scaled: about 6 ms of one core for each."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 64, (3, SIDE, SIDE), dtype=np.uint8)
        self.packed = zlib.compress(pixels.tobytes(), 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        pixels = np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(3, SIDE, SIDE)
        return np.sqrt(pixels.astype(np.float32) + index)[:, ::2, ::2].copy()


class Fetched(Decoded):
    """Numbers that come after a wait, as from a server."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(FETCH_S)
        return np.full(1024, index, dtype=np.float32)


class Tokenized(Decoded):
    """Texts of 2,000 words that are tokenized when they are read: about 2 ms of one core for each."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(5000)]
        self.texts = [" ".join(self.words[place] for place in rng.integers(0, 5000, 2000)) for _ in range(64)]
        self._tokenizer: Any = None

    def __getitem__(self, index: int) -> Any:
        if self._tokenizer is None:  # once in each process
            import tokenizers

            model = tokenizers.models.WordLevel({word: place for place, word in enumerate(self.words)}, unk_token="a")
            self._tokenizer = tokenizers.Tokenizer(model)
            self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return np.asarray(self._tokenizer.encode(self.texts[index % len(self.texts)]).ids)


def nothing() -> None:
    """Settings of a process that computes nothing."""


def rate(data: Decoded, number: int) -> float:
    """Samples per second."""
    first = DataProcess([data], refuses=True, settings=nothing)
    processes = DataProcesses(first, number)
    reader = ProcessReader(processes, 0, "data")
    batch = BatchConfig(global_batch_size=BATCH, microbatch_size=BATCH)
    loader = MicrobatchLoader(reader, batch, prefetch=True, num_threads=number)
    try:
        began = 0.0
        for step in range(1, STEPS + number + 3):
            if step == number + 3:  # all processes have started, and what is ready is as in the long run
                began = time.monotonic()
            loader.plan([(step + ahead, 0) for ahead in range(number + 2)])
            loader.load(step, 0)
            time.sleep(STEP_S)
        return STEPS * BATCH / (time.monotonic() - began)
    finally:
        loader.close()


def main() -> None:
    """Print the rates."""
    for data in (Decoded(), Fetched(), Tokenized()):
        rates = ", ".join(f"{number}: {rate(data, number):.0f}" for number in (1, 2, 4))
        print(f"{type(data).__name__}: samples/s with processes {rates}", flush=True)
