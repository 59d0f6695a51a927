"""Tokens as MosaicML Streaming writes and reads them.

Write: `mosaic_streaming.py write TOKENS.npy --seq-len 2048 --shard-tokens 4194304 s3://BUCKET/FOLDER`.
Otherwise a reader, see `benchmarks.epochs`. A sample is a fixed array of uint16. Several processes that share an epoch
are its ranks: RANK, WORLD_SIZE and the others are in their environment. S3_ENDPOINT_URL names the server.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks.epochs import Order, run


def write(options: argparse.Namespace) -> None:
    """A store of the array's samples, uncompressed, without hashes."""
    tokens = np.load(options.tokens, mmap_mode="r").reshape(-1, options.seq_len)
    columns = {"tokens": f"ndarray:uint16:{options.seq_len}"}
    limit = options.shard_tokens * 2 + (options.shard_tokens // options.seq_len) * 8 + 4096
    with _streaming().MDSWriter(out=options.url, columns=columns, size_limit=limit) as writer:
        for sample in tokens:
            writer.write({"tokens": np.ascontiguousarray(sample)})


def open_epoch(order: Order, url: str) -> AbstractContextManager[Iterable[torch.Tensor]]:
    """Batches of a shuffled epoch; what is not given has its default."""
    streaming = _streaming()
    dataset = streaming.StreamingDataset(
        remote=url, local=os.path.join(order.cache, os.path.basename(url)), shuffle=True, batch_size=order.batch
    )
    for stream in dataset.streams:
        stream._downloader.clean_up()  # forked processes would share its connection, and take each other's answers
    loader = streaming.StreamingDataLoader(dataset, batch_size=order.batch, num_workers=order.workers)
    return nullcontext(batch["tokens"].to(torch.int64) for batch in loader)


def _streaming() -> Any:
    """The package. It imports torchvision, whose wheels of PyPI need a torch for CUDA: beside another one, two names
    that it registers are missing. Reading tokens uses none of it."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
    return importlib.import_module("streaming")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(write, open_epoch)
