"""Checkpoints against what the machine can do: a sharded state of 1.2 GB over 4 workers, saved and loaded.

python benchmarks/checkpoint.py [--storage FOLDER | s3://BUCKET/PREFIX?endpoint_url=...] [--rounds 5] [--layers 8]

Each line is a ratio: ours over the plain alternative in the same run, alternately. Saving: a plain write and fsync, or
a plain parallel boto3 upload, of as many bytes by as many processes. Loading with 3 and with 8 readers: a plain read
(after the page cache was dropped), or plain parallel ranged GETs, of just the bytes that each needs. Digests are made
and checked in all of ours. The stall of a save beside training is compared with one copy of the shard.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from benchmarks import plain_storage as plain
from raysharded.checkpoint import (
    AsyncSaver,
    FileRecord,
    Manifest,
    ShardTensor,
    TensorInfo,
    commit,
    new_save_id,
    open_checkpoint,
    open_storage,
    save_prefix,
    write_shard,
)
from raysharded.checkpoint.format.paths import key_of
from raysharded.checkpoint.pieces import BoxIndex
from raysharded.checkpoint.storage.urls import join_url

NUM_WRITERS = 4
READERS = (3, 8)
WIDTH = 1024


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A GPT of this width with AdamW: every parameter three times."""
    block = {"ln1": (WIDTH,), "qkv": (3 * WIDTH, WIDTH), "proj": (WIDTH, WIDTH), "ln2": (WIDTH,)}
    block |= {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    model = {f"blocks.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in block.items()}
    model["embed.weight"] = (256, WIDTH)
    state = {f"model.{name}": shape for name, shape in model.items()}
    return state | {f"optim.{name}.{key}": shape for name, shape in model.items() for key in ("exp_avg", "exp_avg_sq")}


def rows_of(rows: int, rank: int, world: int) -> tuple[int, int]:
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


@dataclass(slots=True)
class Worker:
    """One process: a shard, and what can be timed of it."""

    url: str
    layers: int
    rank: int
    world: int
    data: NDArray[np.uint8]
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    copy: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    saver: AsyncSaver | None = None

    @classmethod
    def of(cls, url: str, layers: int, rank: int, world: int) -> Worker:
        size = sum(math.prod(sizes) * 4 for _, _, sizes in cls._boxes(layers, rank, world))
        return cls(url, layers, rank, world, np.random.default_rng(rank).integers(0, 256, size, np.uint8))

    @staticmethod
    def _boxes(layers: int, rank: int, world: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        found = []
        for name, shape in shapes(layers).items():
            first, last = rows_of(shape[0], rank, world)
            if last > first:
                found.append((name, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
        return found

    def _placed(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], NDArray[np.uint8]]]:
        at, placed = 0, []
        for name, offsets, sizes in self._boxes(self.layers, self.rank, self.world):
            size = math.prod(sizes) * 4
            placed.append((name, offsets, sizes, self.data[at : at + size]))
            at += size
        return placed

    def save(self, prefix: str) -> list[FileRecord]:
        known = shapes(self.layers)
        tensors = [
            ShardTensor(name=name, dtype="float32", shape=known[name], offsets=offsets, sizes=sizes, data=data)
            for name, offsets, sizes, data in self._placed()
        ]
        return write_shard(open_storage(self.url), prefix, writer=f"rank{self.rank:05d}", tensors=tensors)

    def load(self, prefix: str) -> tuple[int, int]:
        """(bytes read, bytes wanted)"""
        return open_checkpoint(open_storage(self.url), prefix).read_many(self._placed()), len(self.data)

    def plain_save(self, name: str) -> None:
        plain.write(self.url, f"{name}-{self.rank}", self.data)

    def plan_plain_load(self, prefix: str) -> None:
        """Which bytes of which files the shard is, neighbours together."""
        checkpoint = open_checkpoint(open_storage(self.url), prefix)
        index, files = BoxIndex(checkpoint.manifest), checkpoint.manifest.files
        pieces = [
            piece for name, offsets, sizes, out in self._placed() for piece in index.pieces(name, offsets, sizes, out)
        ]
        self.ranges = []
        for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
            key = key_of(prefix, files[piece.file].path)
            last = self.ranges[-1] if self.ranges else ("", 0, 0)
            if last[0] == key and last[2] == piece.start:
                self.ranges[-1] = (key, last[1], piece.stop)
            else:
                self.ranges.append((key, piece.start, piece.stop))

    def plain_load(self) -> None:
        """The planned bytes, one after the other into the shard's memory."""
        plain.read(self.url, self.ranges, self.data)

    def connect(self, port: int) -> None:
        """Form a process group over a store on this machine."""
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def stall(self, step: int) -> float:
        """Seconds until a save beside training lets it go on; returns when the checkpoint is complete.

        The processes save one checkpoint together, in which each has tensors of its own.
        """
        state = {
            f"{self.rank}.{name}": torch.from_numpy(data.view(np.float32)).view(sizes)
            for name, _, sizes, data in self._placed()
        }
        if self.saver is None:
            self.saver = AsyncSaver()
            self.saver.prepare(state)
        dist.barrier()
        began = time.perf_counter()
        pending = self.saver.save(join_url(self.url, f"stall/{step}"), state)
        seconds = time.perf_counter() - began
        pending.result()
        return seconds

    def memcpy(self) -> float:
        """Seconds for one copy of the shard into memory that has been used before."""
        if not len(self.copy):
            self.copy = np.ones_like(self.data)
        dist.barrier()
        began = time.perf_counter()
        self.copy[:] = self.data
        return time.perf_counter() - began

    def peak_memory(self) -> int:
        """Bytes, the most since `reset_peak`."""
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    def reset_peak(self) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return self.peak_memory()


def serve(connection: Connection, *about: Any) -> None:
    torch.set_num_threads(1)
    worker = Worker.of(*about)
    connection.send(len(worker.data))
    while (call := connection.recv()) is not None:
        name, *arguments = call
        connection.send(getattr(worker, name)(*arguments))


class Group:
    """Worker processes that do the same thing at once."""

    def __init__(self, url: str, layers: int, world: int) -> None:
        context = mp.get_context("spawn")
        self.connections: list[Any] = []
        self._processes = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, url, layers, rank, world), daemon=True)
            process.start()
            self.connections.append(mine)
            self._processes.append(process)
        self.sizes: list[int] = [connection.recv() for connection in self.connections]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((name, *arguments))
        return [connection.recv() for connection in self.connections]

    def timed(self, name: str, *arguments: Any) -> tuple[float, list[Any]]:
        began = time.perf_counter()
        values = self.call(name, *arguments)
        return time.perf_counter() - began, values

    def close(self) -> None:
        for connection, process in zip(self.connections, self._processes, strict=True):
            connection.send(None)
            process.join()


def manifest_of(step: int, save_id: str, layers: int, files: list[FileRecord]) -> Manifest:
    return Manifest(
        run="bench",
        step=step,
        generation=1,
        save_id=save_id,
        writer="bench",
        created_at=time.time(),
        tensors={name: TensorInfo(dtype="float32", shape=shape) for name, shape in shapes(layers).items()},
        files=tuple(files),
    )


def time_saves(url: str, layers: int, rounds: int) -> tuple[dict[str, Any], str]:
    storage, group = open_storage(url), Group(url, layers, NUM_WRITERS)
    ours, theirs, extra, prefix = [], [], [], ""
    for step in range(1, rounds + 2):

        def save(step: int = step) -> float:
            nonlocal prefix
            save_id = new_save_id()
            prefix = save_prefix(step, save_id)
            before = group.call("reset_peak")
            began = time.perf_counter()
            files = [record for records in group.call("save", prefix) for record in records]
            assert commit(storage, prefix, manifest_of(step, save_id, layers, files))
            seconds = time.perf_counter() - began
            grown = max(after - was for was, after in zip(before, group.call("peak_memory"), strict=True))
            extra.append(grown / group.sizes[0])
            return seconds

        def plain_save(step: int = step) -> float:
            return group.timed("plain_save", f"plain/{step}")[0]

        pair = in_turn(step, save, plain_save)
        if step > 1:  # the first warms up
            ours.append(pair[0])
            theirs.append(pair[1])
        kept = (f"plain/{step}-", prefix.rsplit("/", 1)[-1])
        storage.delete(key for key in storage.list() if not any(part in key for part in kept))
        settle(url)
    group.close()
    memory = {"extra_memory_over_shard": statistics.median(extra[1:])}
    return compared(ours, theirs) | memory | {"gigabytes": sum(group.sizes) / 1e9}, prefix


def time_stalls(url: str, layers: int, rounds: int) -> dict[str, Any]:
    """How long NUM_WRITERS processes stand still for a save beside training, against one copy of their shards."""
    storage, group = open_storage(url), Group(url, layers, NUM_WRITERS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.call("connect", store.port)
    ours, theirs = [], []
    for step in range(rounds + 1):
        pair = in_turn(
            step, functools.partial(slowest, group, "stall", step), functools.partial(slowest, group, "memcpy")
        )
        if step > 0:
            ours.append(pair[0])
            theirs.append(pair[1])
        storage.delete(storage.list("stall"))
        settle(url)
    group.close()
    return compared(ours, theirs)


def slowest(group: Group, name: str, *arguments: Any) -> float:
    seconds: list[float] = group.call(name, *arguments)
    return max(seconds)


def time_loads(url: str, layers: int, rounds: int, prefix: str, readers: int) -> dict[str, Any]:
    group = Group(url, layers, readers)
    group.call("plan_plain_load", prefix)
    ours, theirs, amplification = [], [], 0.0
    for turn in range(rounds + 1):

        def load() -> float:
            nonlocal amplification
            plain.drop_caches(url)
            seconds, read = group.timed("load", prefix)
            amplification = sum(bytes_read for bytes_read, _ in read) / sum(wanted for _, wanted in read)
            return seconds

        def plain_load() -> float:
            plain.drop_caches(url)
            return group.timed("plain_load")[0]

        pair = in_turn(turn, load, plain_load)
        if turn > 0:
            ours.append(pair[0])
            theirs.append(pair[1])
    group.close()
    return compared(ours, theirs) | {"amplification": amplification}


def in_turn(turn: int, a: Callable[[], float], b: Callable[[], float]) -> tuple[float, float]:
    """(seconds of a, of b), the one that begins changing from turn to turn."""
    if turn % 2:
        first = a()
        return first, b()
    second = b()
    return a(), second


def settle(url: str) -> None:
    """What earlier rounds wrote must not be flushed during the next."""
    if "://" not in url:
        os.sync()


def compared(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ours_s": statistics.median(ours),
        "plain_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="a folder (default: a temporary one) or an s3:// URL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="8: 1.2 GB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.storage or folder
        figures, prefix = time_saves(url, options.layers, options.rounds)
        results = {f"save by {NUM_WRITERS}": figures}
        show(results)
        for readers in READERS:
            line = {f"load by {readers}": time_loads(url, options.layers, options.rounds, prefix, readers)}
            show(line)
            results |= line
        stalls = {"stall of a save beside training": time_stalls(url, options.layers, options.rounds)}
        show(stalls)
        results |= stalls
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


def show(results: dict[str, dict[str, Any]]) -> None:
    for name, found in results.items():
        rest = ", ".join(f"{key} {value:.2f}" for key, value in found.items() if isinstance(value, float))
        print(f"{name}: {rest}; ratios {found['ratios']}", flush=True)


if __name__ == "__main__":
    main()
