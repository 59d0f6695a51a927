"""Documents packed by best fit: the padding, the bytes that a read costs, and the time.

python -m benchmarks.data_packing [--url URL] [--tokens 150000000] [--seq-len 128 2048] [--median 400] [--json PATH]

Writes a store of random documents with a vocabulary of 50,257: at `--url`, an empty folder or one on S3, else into a
temporary folder. Their lengths have a log-normal distribution with this median; the deviation of the logarithm is 1.2.
Arranges it, and reads an epoch as one worker with 32 samples per step does. With fewer than 135 million tokens there
are fewer blocks than a window of the order has. `python -m tests.s3.server` serves S3 on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_reads import BATCH, ORDER
from raysharded.checkpoint.storage import open_storage
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, PackedDataset
from raysharded.data.packed.arrange import arrange
from raysharded.data.packed.plan_file import name_of_plan
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter

VOCABULARY = 50_257
END = VOCABULARY - 1
DEVIATION = 1.2


def write(url: str, tokens: int, median: float) -> None:
    """A store with about this many tokens."""
    rng = np.random.default_rng(0)
    kind = Kind(tokenizer="sha256:random", vocab_size=VOCABULARY, end_of_document=END)
    with StoreWriter(url, kind, 1 << 26) as store:
        while store.num_tokens < tokens:
            lengths = np.exp(rng.normal(np.log(median), DEVIATION, 1000)).astype(np.int64) + 2
            part = rng.integers(0, END, int(lengths.sum()), dtype=np.uint32)
            part[np.cumsum(lengths) - 1] = END
            store.write(part)


def measure(url: str, seq_len: int) -> dict[str, Any]:
    """The figures of arranging and reading a store."""
    began = time.process_time()
    facts = arrange(url, seq_len=seq_len)
    arranged_s = time.process_time() - began
    data = PackedDataset(url, seq_len=seq_len, disk_cache_bytes=0)
    loader = MicrobatchLoader(data, BatchConfig(global_batch_size=BATCH, microbatch_size=BATCH), prefetch=True)
    loader.skip((), ORDER, (data.samples_per_block, BATCH))
    steps = len(data) // BATCH
    opened = data._open()
    readers = opened._source.readers  # type: ignore[union-attr]  # best fit has a source
    began, targets = time.process_time(), 0
    for step in range(1, steps + 1):
        loader.plan([(step, 0)])
        samples = loader.load(step, 0).samples
        if step <= 100:
            targets += sum(int((sample["labels"] != -100).sum()) for sample in samples)
    read_s, requests, size = (
        time.process_time() - began,
        sum(one.num_requests for one in readers),
        sum(one.num_bytes for one in readers),
    )
    loader.close()
    used = facts.num_targets * steps * BATCH / len(data)
    return {
        "documents": facts.num_documents,
        "targets": facts.num_targets,
        "cuts": facts.num_cuts,
        "padding": facts.padding,
        "padding_of_the_first_steps": 1 - targets / (min(steps, 100) * BATCH * seq_len),
        "plan_bytes_per_million_tokens": len(open_storage(url).read(name_of_plan(seq_len))) / facts.num_targets * 1e6,
        "bytes_read_over_used": size / (used * 2),
        "requests_per_million_tokens": requests / used * 1e6,
        "cpu_s_per_million_tokens": read_s / used * 1e6,
        "arrange_cpu_s_per_million_tokens": arranged_s / facts.num_targets * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--tokens", type=int, default=150_000_000)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048])
    parser.add_argument("--median", type=float, default=400.0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found = {}
    with contextlib.ExitStack() as stack:
        url = args.url or f"{stack.enter_context(tempfile.TemporaryDirectory())}/store"
        write(url, args.tokens, args.median)
        for seq_len in args.seq_len:
            found[seq_len] = measure(url, seq_len)
            for name, value in found[seq_len].items():
                print(f"{seq_len} {name}: {value}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
