"""Checkpoints against what the machine can do, and against torch.distributed.checkpoint: a sharded state of 1.2 GB over
4 processes, saved and loaded, on a local disk and on the S3 server of the tests.

Raw rates are measured in the same run, in turn: a plain write and fsync, or a plain parallel boto3 upload, of as many
bytes by as many processes; for loads by 3 and by 8 processes a plain read (after the page cache was dropped), or plain
parallel ranged GETs, of just the bytes that each needs. All digests of ours are made and checked.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save, save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import plain_storage as plain
from benchmarks.memory import peak_bytes, reset_peak
from benchmarks.result import Line, alternate, ratios
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

NAME = "checkpoints"
NUM_WRITERS = 4
READERS = (3, 8)
OURS, DCP, DCP_ASYNC = "raysharded", "torch.distributed.checkpoint", "torch.distributed.checkpoint, async_save"
_LAYERS, _QUICK_LAYERS = 8, 1
"""1.2 GB, and 0.15."""
_ASKED_LOAD = {False: "at most 1.5", True: "at most 1.3"}
"""On S3 or not."""
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
    stager: Any = None

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

    def stall(self, step: int) -> tuple[float, float]:
        """Seconds until a save beside training lets it go on, and until it is durable.

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
        return seconds, time.perf_counter() - began

    def _sharded(self) -> dict[str, Any]:
        """The state as FSDP2 has it."""
        mesh, known = init_device_mesh("cpu", (self.world,)), shapes(self.layers)
        found = dict[str, Any]()
        local = {name: (data, sizes) for name, _, sizes, data in self._placed()}
        for name, shape in known.items():
            data, sizes = local.get(name, (np.empty(0, np.uint8), (0, *shape[1:])))
            tensor = torch.from_numpy(data.view(np.float32)).view(sizes)
            stride = torch.empty(shape, device="meta").stride()
            found[name] = DTensor.from_local(
                tensor, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
        return found

    def _torch_writer(self, path: str) -> StorageWriter:
        if not self.url.startswith("s3://"):
            return FileSystemWriter(join_url(self.url, path))
        bucket, options = _fsspec(self.url)
        return FsspecWriter(f"{bucket}/{path}", **options)

    def torch_save(self, path: str) -> None:
        """By torch.distributed.checkpoint."""
        dcp_save(self._sharded(), storage_writer=self._torch_writer(path))

    def torch_load(self, path: str) -> None:
        """The same."""
        if self.url.startswith("s3://"):
            bucket, options = _fsspec(self.url)
            reader: StorageReader = FsspecReader(f"{bucket}/{path}", **options)
        else:
            reader = FileSystemReader(join_url(self.url, path))
        dcp_load(self._sharded(), storage_reader=reader)

    def torch_stall(self, path: str) -> tuple[float, float]:
        """As `stall`, by `async_save` into buffers that it keeps: the fastest that it has without CUDA."""
        if self.stager is None:
            self.stager = DefaultStager(StagingOptions(False, False, False, False))  # what else there is needs CUDA
        state = self._sharded()
        dist.barrier()
        began = time.perf_counter()
        pending: Any = dcp_async_save(state, storage_writer=self._torch_writer(path), async_stager=self.stager)
        seconds = time.perf_counter() - began
        pending.result()
        return seconds, time.perf_counter() - began

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
        return peak_bytes()

    def reset_peak(self) -> int:
        return reset_peak()


def serve(connection: Connection, environment: dict[str, str], *about: Any) -> None:
    """What a process does; those of the fork server have its environment, not that of who asks for them."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    worker = Worker.of(*about)
    connection.send(len(worker.data))
    while (call := connection.recv()) is not None:
        name, *arguments = call
        connection.send(getattr(worker, name)(*arguments))


class Group:
    """Worker processes that do the same thing at once."""

    def __init__(self, url: str, layers: int, world: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.checkpoints"])  # torch is loaded once
        keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.connections: list[Any] = []
        self._processes = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, keys, url, layers, rank, world), daemon=True)
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
            with suppress(BrokenPipeError):  # it has failed, and said why
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


@contextmanager
def group_of(url: str, layers: int, world: int) -> Iterator[Group]:
    """So many processes that can talk to each other."""
    group = Group(url, layers, world)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        group.call("connect", store.port)
        yield group
    finally:
        group.close()


def run(*, quick: bool) -> list[Line]:
    """All lines. Full: about ten minutes; quick: one, with a small state."""
    rounds, layers = (1, _QUICK_LAYERS) if quick else (5, _LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        lines = measured(folder, "local", rounds, layers)
    with s3_storage() as (url, why):
        if not url:
            absent = Line(benchmark=NAME, what="save, S3", subject=OURS, unit="MB/s", values=[], note=why)
            return [*lines, absent]
        return [*lines, *measured(url, "S3", rounds, layers)]


@contextmanager
def s3_storage() -> Iterator[tuple[str, str]]:
    """(a place on a server of its own, "") if the programs for one are there; or ("", why not)."""
    from tests.s3 import server

    if not server.is_installed():
        yield "", "the S3 server is not there: `make test-s3` unpacks it"
        return
    with tempfile.TemporaryDirectory() as folder, server.running_server(Path(folder, "server")) as running:
        import boto3

        os.environ.update(AWS_ACCESS_KEY_ID=running.access_key, AWS_SECRET_ACCESS_KEY=running.secret_key)
        client = boto3.client("s3", endpoint_url=running.endpoint_url, region_name="us-east-1")
        client.create_bucket(Bucket="bench")
        options = f"endpoint_url={running.endpoint_url}&region=us-east-1&addressing_style=path"
        yield f"s3://bench/checkpoints?{options}", ""


def measured(url: str, where: str, rounds: int, layers: int) -> list[Line]:
    """Everything at one place."""
    lines, prefix, torch_prefix = saves(url, where, rounds, layers)
    for readers in READERS:
        lines += loads(url, where, rounds, layers, prefix, torch_prefix, readers)
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    seconds: float
    """Until it is durable."""
    stall: float = 0.0
    memory: float = 0.0
    """At its most beyond what was there before, of the largest process, in sizes of its shard."""


def saves(url: str, where: str, rounds: int, layers: int) -> tuple[list[Line], str, str]:
    """Saving, at once and beside training; and the prefixes of the last saves."""
    storage, step, prefix, torch_prefix = open_storage(url), 0, "", ""
    with group_of(url, layers, NUM_WRITERS) as group:
        size = sum(group.sizes)

        def grown(before: list[Any]) -> float:
            after = group.call("peak_memory")
            return float(max(b - a for a, b in zip(before, after, strict=True)) / max(group.sizes))

        def ours() -> _Save:
            nonlocal prefix
            save_id = new_save_id()
            prefix = save_prefix(step, save_id)
            before = group.call("reset_peak")
            began = time.perf_counter()
            files = [record for records in group.call("save", prefix) for record in records]
            assert commit(storage, prefix, manifest_of(step, save_id, layers, files))
            return _Save(seconds=time.perf_counter() - began, memory=grown(before))

        def torchs() -> _Save:
            nonlocal torch_prefix
            torch_prefix = f"torch/{step}"
            before = group.call("reset_peak")
            return _Save(seconds=group.timed("torch_save", torch_prefix)[0], memory=grown(before))

        def beside(method: str, path: str) -> _Save:
            before = group.call("reset_peak")
            found = group.call(method, path)
            stall, durable = (max(one[k] for one in found) for k in (0, 1))
            return _Save(seconds=durable, stall=stall, memory=grown(before))

        def raw() -> _Save:
            return _Save(seconds=group.timed("plain_save", f"plain/{step}")[0])

        def copy() -> _Save:
            return _Save(seconds=max(group.call("memcpy")))

        def clean(then: Callable[[], _Save]) -> Callable[[], _Save]:
            def turn() -> _Save:
                nonlocal step
                step += 1
                kept = [part for part in (prefix.rsplit("/", 1)[-1], f"{torch_prefix}/") if part.strip("/")]
                storage.delete(key for key in storage.list() if not any(part in key for part in kept))
                settle(url)
                return then()

            return turn

        subjects = {
            "raw": clean(raw),
            OURS: clean(ours),
            DCP: clean(torchs),
            "copy": clean(copy),
            "beside": clean(lambda: beside("stall", str(step))),
            DCP_ASYNC: clean(lambda: beside("torch_stall", f"torch-async/{step}")),
        }
        alternate(subjects, 1)  # buffers, connections and caches are there from now on
        found = alternate(subjects, rounds)
    times = {name: [one.seconds for one in some] for name, some in found.items()}
    names = {OURS: OURS, DCP: DCP, "beside": f"{OURS}, AsyncSaver", DCP_ASYNC: DCP_ASYNC}
    over_raw = "times the raw write" if "://" not in url else "times the raw upload"
    asked = "at most 1.2"
    lines = [_line(f"raw write, {where}", "plain", "MB/s", [size / 1e6 / one for one in times["raw"]])]
    for key, name in names.items():
        own = ratios(times[key], times["raw"])
        rate = [size / 1e6 / one for one in times[key]]
        lines += [
            _line(f"durable, {where}", name, "s", times[key], ratio=own, against=over_raw),
            _line(f"rate, {where}", name, "MB/s", rate),
            _line(f"memory on top, {where}", name, "shards", [one.memory for one in found[key]]),
        ]
    for key in ("beside", DCP_ASYNC):
        stalls = [one.stall for one in found[key]]
        ratio = ratios(stalls, times["copy"])
        goal = asked if key == "beside" else None
        against = "times a copy of the shard"
        lines.append(_line(f"stall, {where}", names[key], "s", stalls, ratio=ratio, against=against, asked=goal))
    return sorted(lines, key=lambda line: line.what), prefix, torch_prefix


def loads(url: str, where: str, rounds: int, layers: int, prefix: str, torch_prefix: str, readers: int) -> list[Line]:
    """Loading by another number of processes."""
    amplification: list[float] = []
    with group_of(url, layers, readers) as group:
        group.call("plan_plain_load", prefix)

        def ours() -> float:
            plain.drop_caches(url)
            seconds, read = group.timed("load", prefix)
            amplification.append(sum(got for got, _ in read) / sum(wanted for _, wanted in read))
            return seconds

        def torchs() -> float:
            plain.drop_caches(url)
            return group.timed("torch_load", torch_prefix)[0]

        def raw() -> float:
            plain.drop_caches(url)
            return group.timed("plain_load")[0]

        subjects = {"plain": raw, OURS: ours, DCP: torchs}
        alternate(subjects, 1)
        found = alternate(subjects, rounds)
    what = f"load by {readers}, {where}"
    lines = [_line(what, "plain read", "s", found["plain"])]
    for name in (OURS, DCP):
        asked = _ASKED_LOAD["://" in url] if name == OURS else None
        ratio = ratios(found[name], found["plain"])
        lines.append(_line(what, name, "s", found[name], ratio=ratio, against="times the plain read", asked=asked))
    return [*lines, _line(f"{what}: bytes read over bytes needed", OURS, "", amplification[1:])]


def _line(what: str, subject: str, unit: str, values: list[float], **more: Any) -> Line:
    return Line(benchmark=NAME, what=what, subject=subject, unit=unit, values=values, **more)


def _fsspec(url: str) -> tuple[str, dict[str, Any]]:
    """(bucket and prefix as fsspec has it, its options)"""
    from urllib.parse import parse_qs, urlsplit

    parts = urlsplit(url)
    options = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return f"s3://{parts.netloc}{parts.path}", {"client_kwargs": {"endpoint_url": options["endpoint_url"]}}


def settle(url: str) -> None:
    """What earlier rounds wrote must not be flushed during the next."""
    if "://" not in url:
        os.sync()
