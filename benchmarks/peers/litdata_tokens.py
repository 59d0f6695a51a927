"""Tokens as litData writes and reads them.

Write: `litdata_tokens.py write TOKENS.npy --seq-len 2048 --shard-tokens 4194304 s3://BUCKET/FOLDER`.
Otherwise a reader, see `benchmarks.epochs`. A chunk is tokens of uint16 one after the other. Several processes that
share an epoch are its ranks: WORLD_SIZE and GLOBAL_RANK are in their environment. AWS_ENDPOINT_URL names the server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import boto3
import litdata
import numpy as np
import torch
from litdata.streaming import downloader

from benchmarks.epochs import Order, run

_SAMPLES_PER_INPUT = 64


def pieces(start: int, *, path: str, size: int) -> Iterator[torch.Tensor]:
    """The tokens from this one on, as a text that was tokenized."""
    tokens = np.load(path, mmap_mode="r")
    yield torch.from_numpy(np.array(tokens[start : start + size]))


def write(options: argparse.Namespace) -> None:
    """A store of the array's samples, uncompressed."""
    size = _SAMPLES_PER_INPUT * options.seq_len
    num_tokens = len(np.load(options.tokens, mmap_mode="r"))
    with TemporaryDirectory() as folder:
        litdata.optimize(
            fn=partial(pieces, path=options.tokens, size=size),
            inputs=list(range(0, num_tokens, size)),
            output_dir=folder,
            chunk_size=options.shard_tokens,
            item_loader=litdata.TokensLoader(),
            num_workers=1,
            reorder_files=False,
        )
        client, url = boto3.client("s3"), urlsplit(options.url)
        for path in Path(folder).iterdir():
            client.upload_file(str(path), url.netloc, f"{url.path.strip('/')}/{path.name}")


def open_epoch(order: Order, url: str) -> AbstractContextManager[Iterable[torch.Tensor]]:
    """Batches of a shuffled epoch; what is not given has its default."""
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = (
        True  # it refuses a server without TLS, and has no argument for it
    )
    dataset = litdata.StreamingDataset(
        input_dir=url,
        cache_dir=os.path.join(order.cache, os.path.basename(url), str(order.rank)),  # ranks race for the index
        item_loader=litdata.TokensLoader(block_size=order.seq_len),
        shuffle=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=order.batch, num_workers=order.workers)
    return nullcontext(batch.to(torch.int64) for batch in loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(write, open_epoch)
