"""A store of very many shards on an S3 server, and a run whose data come from a server with latency.

python -m benchmarks.data_on_s3 [--only shards run] [--shards 15000] [--latency-ms 50] [--steps 60] [--json PATH]

Starts the S3 server of the tests on this machine. `shards`: so many shards of one block each, in one store. The first
batch after a resumption at positions 10^9 and 10^12 is measured in a new process, with the check of the shards before
training. `run`: two workers train the demo's model on a store behind this latency; the journal has the time that a
worker waited for data. Nothing is cached on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import raysharded as rs
from benchmarks.data_reads import CACHE_MIB, Late, Work, first_batches, server, write
from raysharded.checkpoint import open_storage
from raysharded.data.store.layout import INDEX, Index, Kind, Shard, header_of, paged, to_bytes
from raysharded.demo.model import ByteGPT
from raysharded.journal.log import read
from raysharded.locations import join_url
from raysharded.testing.processes import fit
from tests.s3.proxy import FaultyProxy

SHARD_TOKENS = 1 << 16
KIND = Kind(tokenizer="bytes", vocab_size=256)
THREADS = 8
SEQ_LEN = 2048
WORKERS = 2
WARM_STEPS = 2


def write_shards(url: str, number: int) -> int:
    """Write a store of so many small shards. Returns its size in bytes."""
    storage = open_storage(url)

    def put(place: int) -> Shard:
        tokens = to_bytes(np.random.default_rng(place).integers(0, 256, SHARD_TOKENS, dtype=np.uint32), 1)
        hasher = KIND.hasher()
        hasher.update(tokens.data)
        shard = Shard(name=f"shard-{place:05d}.tokens", num_tokens=SHARD_TOKENS, id=hasher.hexdigest())
        head = header_of(KIND, SHARD_TOKENS, shard.id)
        storage.write(shard.name, [head + b"".join(paged(tokens, 0, KIND, shard.key))])
        return shard

    with ThreadPoolExecutor(THREADS) as threads:
        shards = tuple(threads.map(put, range(number)))
    storage.write(INDEX, [Index(kind=KIND, shards=shards).to_json()])
    return sum(shard.size_bytes(KIND) for shard in shards)


def many_shards(url: str, number: int) -> dict[str, Any]:
    """Times of the first batch from a store of many shards."""
    began = time.monotonic()
    size = write_shards(url, number)
    found: dict[str, Any] = {"shards": number, "bytes": size, "written_s": time.monotonic() - began}
    work = Work(url=url, seq_len=SEQ_LEN, rank=0, readers=1, cache_bytes=CACHE_MIB << 20)
    return found | first_batches(work) | {"load": os.getloadavg()[0]}


def run_behind(url: str, endpoint_url: str, latency_s: float, steps: int) -> dict[str, Any]:
    """The share of the time that a worker of a run waits for data, by its journal."""
    write(url, 1 << 24)
    with FaultyProxy(endpoint_url) as proxy, tempfile.TemporaryDirectory() as folder:
        late = proxy.inject(Late(latency_s), times=1 << 30)
        data = rs.TokenDataset(url.replace(endpoint_url, proxy.endpoint_url), seq_len=128, disk_cache_bytes=0)
        trainer = rs.ElasticTrainer(
            task=ByteGPT(),
            data=data,
            batch=rs.BatchConfig(global_batch_size=32, microbatch_size=8, seed=1),
            scaling=rs.ScalingConfig(num_workers=WORKERS),
            run=rs.RunConfig(name="late", storage_path=folder, max_steps=steps + WARM_STEPS),
        )
        result = fit(trainer)
        entries = [entry for entry in read(open_storage(result.url)) if entry["kind"] == "step"]
    seconds = [entry["seconds"] for entry in entries if entry["step"] > WARM_STEPS]
    waited, total = (sum(of) for of in ([one["data"] for one in seconds], [sum(one.values()) for one in seconds]))
    return {
        "steps": len(seconds),
        "late_requests": late.fired,
        "trained_s": total,
        "waited_s": waited,
        "waited_share": waited / total,
        "waited_ms_at_most": 1e3 * max(one["data"] for one in seconds),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("shards", "run"), default=("shards", "run"))
    parser.add_argument("--shards", type=int, default=15_000)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with server() as (url, endpoint_url):
        if "run" in args.only:
            found["run"] = run_behind(join_url(url, "late"), endpoint_url, args.latency_ms / 1e3, args.steps)
            print(f"run: {found['run']}", flush=True)
        if "shards" in args.only:
            found["shards"] = many_shards(join_url(url, "many"), args.shards)
            print(f"shards: {found['shards']}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
