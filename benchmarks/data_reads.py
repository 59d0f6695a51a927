"""Reads of a token store by several processes, beside plain ranged reads of the same bytes, and behind a slow network.

python -m benchmarks.data_reads [--url URL | --local] [--tokens 200000000] [--seq-len 128 2048 8192] [--readers 4]
    [--cache-mib 256] [--disk-cache] [--rounds 3] [--first-batch] [--json PATH]

`--url`: an empty folder, or one on S3, for the store; `--local`: a temporary folder; default: the S3 server of the
tests, started for this. Each reader is a process that reads an epoch's part as a worker does: the microbatches of its
rank, with a cache of `--cache-mib` in memory. `--disk-cache`: the readers of a round share a cache on disk, which is
empty at first; it has an effect on a remote store. Plain readers fetch the same byte ranges with as many threads, and
check, cache and decode nothing. Both are timed in turns, and their CPU seconds stand beside. With fewer tokens than a
window of the order (67 million) every reader needs every block.

Then, on the server that was started, the demo's model trains in a plain loop with 50 ms before every request, and the
time that it waits for data counts. `--first-batch` measures the first batch after a resumption instead, at positions
10^9 and 10^12 of such a store. Each is measured in a new process, which has imported the package before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plain_storage
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, TokenDataset, sample_ids
from raysharded.data.order import Blocks
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Index, Kind
from raysharded.data.store.store_source import StoreSource
from raysharded.data.store.writer import StoreWriter
from tests.s3.proxy import Exchange, FaultyProxy
from tests.s3.server import running_server

BATCH = 32
ORDER = 2
THREADS = 8
CACHE_MIB = 256
"""Default of `TokenDataset`."""
DISK_BYTES = 8 << 30
WARM_STEPS = 2
POSITIONS = (10**9, 10**12)

Range = tuple[str, int, int]
"""(shard, first byte, end)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One process's part of an epoch."""

    url: str
    seq_len: int
    rank: int
    readers: int
    cache_bytes: int
    disk: str = ""
    """Folder of the cache on disk; empty: none."""

    def dataset(self) -> TokenDataset:
        return TokenDataset(
            self.url,
            seq_len=self.seq_len,
            cache_bytes=self.cache_bytes,
            disk_cache=self.disk or None,
            disk_cache_bytes=DISK_BYTES if self.disk else 0,
        )

    def batch(self) -> BatchConfig:
        return BatchConfig(global_batch_size=BATCH, microbatch_size=BATCH // self.readers, seed=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Reads of one process."""

    wall_s: float
    cpu_s: float
    bytes: int
    requests: int
    tokens: int
    block_bytes: int = 0
    """Memory for blocks at the end."""


def read_store(work: Work, ready: Barrier) -> Read:
    """The samples of a rank, through the loader that workers have."""
    dataset = work.dataset()
    loader = MicrobatchLoader(dataset, work.batch(), prefetch=True)
    loader.skip((), ORDER, (dataset.samples_per_block, BATCH))
    steps = range(1, len(dataset) // BATCH + 1)
    ready.wait()
    began, cpu = time.monotonic(), time.process_time()
    for step in steps:
        loader.plan([(step, work.rank)])
        loader.load(step, work.rank)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    reader = dataset._reader
    assert isinstance(reader, StoreSource)
    block_bytes = reader.blocks.num_bytes
    loader.close()
    return Read(
        wall_s=wall_s,
        cpu_s=cpu_s,
        bytes=sum(one.num_bytes for one in reader.readers),
        requests=sum(one.num_requests for one in reader.readers),
        tokens=len(steps) * work.batch().microbatch_size * work.seq_len,
        block_bytes=block_bytes,
    )


def read_plain(work: Work, ready: Barrier) -> Read:
    """The bytes of the blocks that a rank needs, each once, in the order of their first use."""
    ranges = list(_ranges(work))
    ready.wait()
    began, cpu = time.monotonic(), time.process_time()
    fetch = _s3_fetch(work.url) if work.url.startswith("s3://") else _local_fetch(work.url)
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(pool.map(fetch, ranges))
    return Read(
        wall_s=time.monotonic() - began,
        cpu_s=time.process_time() - cpu,
        bytes=sum(sizes),
        requests=len(ranges),
        tokens=0,
    )


def _ranges(work: Work) -> Iterator[Range]:
    dataset = work.dataset()
    (store,) = find_stores([work.url])
    blocks, batch = Blocks(dataset.samples_per_block, BATCH), work.batch()
    first = work.rank * batch.microbatch_size
    steps = np.arange(len(dataset) // BATCH)[:, None] * BATCH
    positions = (steps + np.arange(first, first + batch.microbatch_size)).reshape(-1)
    numbers = sample_ids(batch.seed, positions, len(dataset), ORDER, blocks) // blocks.samples
    for number in dict.fromkeys(numbers.tolist()):
        start = number * blocks.samples * work.seq_len
        stop = min((number + 1) * blocks.samples, len(dataset)) * work.seq_len + 1
        yield from _of_tokens(store.index, start, stop)


def _of_tokens(index: Index, start: int, stop: int) -> Iterator[Range]:
    begins = 0
    for shard in index.shards:
        first, last = max(start - begins, 0), min(stop - begins, shard.num_tokens)
        if first < last:
            pages = range(first // index.kind.page_tokens, -(-last // index.kind.page_tokens))
            offset, size = shard.byte_range(index.kind, pages)
            yield shard.name, offset, offset + size
        begins += shard.num_tokens


def _s3_fetch(url: str) -> Callable[[Range], int]:
    client, bucket, prefix = plain_storage.client_of(url)

    def fetch(wanted: Range) -> int:
        name, start, stop = wanted
        answer = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", Range=f"bytes={start}-{stop - 1}")
        return len(answer["Body"].read())

    return fetch


def _local_fetch(url: str) -> Callable[[Range], int]:
    def fetch(wanted: Range) -> int:
        name, start, stop = wanted
        with open(os.path.join(url, name), "rb", buffering=0) as file:
            return len(os.pread(file.fileno(), stop - start, start))

    return fetch


def in_processes(read: Callable[[Work, Barrier], Read], works: Sequence[Work]) -> list[Read]:
    """All at once, each in a process that has loaded everything before the clock starts."""
    context = get_context("spawn")
    ready, results = context.Barrier(len(works)), context.SimpleQueue()
    processes = [context.Process(target=_put, args=(read, work, ready, results)) for work in works]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _put(read: Callable[[Work, Barrier], Read], work: Work, ready: Barrier, results: Any) -> None:
    results.put(read(work, ready))


class Late:
    """Every request reaches the server some time later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, exchange: Exchange) -> None:
        time.sleep(self._seconds)
        exchange.send(exchange.forward())


def train(work: Work, steps: int, results: Any) -> None:
    """(Seconds that the demo's model trained, seconds that it waited for data), after the first steps."""
    import torch

    from raysharded.demo.model import ByteGPT

    torch.set_num_threads(1)
    task = ByteGPT(dropout=0.0)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    dataset = work.dataset()
    loader = MicrobatchLoader(dataset, work.batch(), prefetch=True)
    loader.skip((), ORDER, (dataset.samples_per_block, BATCH))
    waited, began = 0.0, time.monotonic()
    for step in range(1, steps + WARM_STEPS + 1):
        if step == WARM_STEPS + 1:
            waited, began = 0.0, time.monotonic()
        loader.plan([(step, 0), (step + 1, 0)])
        asked = time.monotonic()
        samples = loader.load(step, 0).samples
        waited += time.monotonic() - asked
        loss = task.loss(model, torch.from_numpy(np.stack(samples)))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    results.put((time.monotonic() - began, waited))
    loader.close()


def behind(work: Work, endpoint_url: str, latency_s: float, steps: int) -> tuple[float, float]:
    """Result of `train` with this latency before the server."""
    context = get_context("spawn")
    with FaultyProxy(endpoint_url) as proxy:
        proxy.inject(Late(latency_s), times=1 << 30)
        results = context.SimpleQueue()
        late = replace(work, url=work.url.replace(endpoint_url, proxy.endpoint_url))
        process = context.Process(target=train, args=(late, steps, results))
        process.start()
        found: tuple[float, float] = results.get()
        process.join()
    return found


@contextlib.contextmanager
def server() -> Iterator[tuple[str, str]]:
    """(URL of an empty folder, endpoint) on a new server."""
    import boto3

    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder) / "ceph") as server:
        os.environ.update(
            AWS_ACCESS_KEY_ID=server.access_key,
            AWS_SECRET_ACCESS_KEY=server.secret_key,
            AWS_DEFAULT_REGION="us-east-1",
        )
        boto3.client("s3", endpoint_url=server.endpoint_url).create_bucket(Bucket="reads")
        yield f"s3://reads/store?endpoint_url={server.endpoint_url}", server.endpoint_url


def first_batch(work: Work, position: int, results: Any) -> None:
    """Seconds until the batch at a position is there, bytes of blocks, and the growth of the process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    began, cpu = time.monotonic(), time.process_time()
    dataset = work.dataset()
    dataset.validate()
    loader = MicrobatchLoader(dataset, work.batch(), prefetch=True)
    loader.skip((), ORDER, (dataset.samples_per_block, BATCH))
    step = position // BATCH + 1
    loader.plan([(step, 0)])
    loader.load(step, 0)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    assert isinstance(dataset._reader, StoreSource)
    block_bytes = dataset._reader.blocks.num_bytes
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    results.put({"wall_s": wall_s, "cpu_s": cpu_s, "block_bytes": block_bytes, "grown_bytes": largest - resident})
    loader.close()


def first_batches(work: Work) -> dict[str, Any]:
    """Results of `first_batch` at all positions."""
    context = get_context("spawn")
    found: dict[str, Any] = {}
    for position in POSITIONS:
        results = context.SimpleQueue()
        process = context.Process(target=first_batch, args=(work, position, results))
        process.start()
        found[f"first_batch_at_10^{len(str(position)) - 1}"] = results.get()
        process.join()
    return found


def write(url: str, tokens: int) -> Kind:
    """Write a store of random tokens."""
    rng, kind = np.random.default_rng(0), Kind(tokenizer="bytes", vocab_size=257)
    with StoreWriter(url, kind, 1 << 24) as writer:
        for _ in range(0, tokens, 1 << 22):
            writer.write(rng.integers(0, 257, 1 << 22, dtype=np.uint32))
    return kind


def measure(works: Sequence[Work], kind: Kind, num_rounds: int, *, on_disk: bool) -> dict[str, Any]:
    """The figures of plain and own reads, round by round. `on_disk`: each round with an empty cache on disk."""
    rounds: dict[str, list[list[Read]]] = {"plain": [], "own": []}
    for number in range(num_rounds):
        order = ("plain", "own") if number % 2 == 0 else ("own", "plain")
        for name in order:
            with tempfile.TemporaryDirectory() as disk:
                of_round = [replace(work, disk=disk if on_disk else "") for work in works]
                rounds[name].append(in_processes(read_plain if name == "plain" else read_store, of_round))
    own, plain = rounds["own"], rounds["plain"]
    tokens = sum(one.tokens for one in own[0])

    def per_million(of: Sequence[Sequence[Read]], value: Callable[[Read], float]) -> float:
        return statistics.median(sum(map(value, reads)) for reads in of) / tokens * 1e6

    return {
        "tokens": tokens,
        "bytes_read_over_used": sum(one.bytes for one in own[0]) / (tokens * kind.token_bytes),
        "requests": sum(one.requests for one in own[0]),
        "requests_per_million_tokens": per_million(own, lambda one: one.requests),
        "plain_requests": sum(one.requests for one in plain[0]),
        "plain_requests_per_million_tokens": per_million(plain, lambda one: one.requests),
        "rate_over_plain": statistics.median(_seconds(a) / _seconds(b) for a, b in zip(plain, own, strict=True)),
        "mb_per_s": [sum(one.bytes for one in reads) / _seconds(reads) / 1e6 for reads in own],
        "plain_mb_per_s": [sum(one.bytes for one in reads) / _seconds(reads) / 1e6 for reads in plain],
        "million_tokens_per_s": [tokens / _seconds(reads) / 1e6 for reads in own],
        "cpu_s_per_million_tokens": per_million(own, lambda one: one.cpu_s),
        "plain_cpu_s_per_million_tokens": per_million(plain, lambda one: one.cpu_s),
        "block_mib_of_a_reader": max(one.block_bytes for one in own[0]) / (1 << 20),
        "load": os.getloadavg()[0],
        "rounds": {name: [[asdict(one) for one in reads] for reads in of] for name, of in rounds.items()},
    }


def _seconds(reads: Sequence[Read]) -> float:
    return max(one.wall_s for one in reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048])
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--cache-mib", type=int, default=CACHE_MIB)
    parser.add_argument("--disk-cache", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--first-batch", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        url, endpoint_url = args.url, ""
        if args.local:
            url = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "store")
        elif not url:
            url, endpoint_url = stack.enter_context(server())
        kind = write(url, args.tokens)

        def work(seq_len: int, rank: int = 0, readers: int = 1) -> Work:
            return Work(url=url, seq_len=seq_len, rank=rank, readers=readers, cache_bytes=args.cache_mib << 20)

        for seq_len in args.seq_len:
            if args.first_batch:
                found[f"{seq_len}"] = first_batches(work(seq_len))
            else:
                works = [work(seq_len, rank, args.readers) for rank in range(args.readers)]
                found[f"{seq_len}"] = measure(works, kind, args.rounds, on_disk=args.disk_cache)
            for name, value in found[f"{seq_len}"].items():
                if name != "rounds":
                    print(f"{seq_len} {name}: {value}", flush=True)
        if endpoint_url and not args.first_batch:
            trained_s, waited_s = behind(work(128), endpoint_url, args.latency_ms / 1e3, args.steps)
            found |= {"trained_s": trained_s, "waited_s": waited_s, "waited_share": waited_s / trained_s}
            print(f"trained {trained_s:.1f} s, waited {waited_s:.4f} s of them", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
