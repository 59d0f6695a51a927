"""The processes that hold a sharded state of a GPT, and what can be timed of each: saves and loads of ours, of
torch.distributed.checkpoint, and plain ones.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
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
from raysharded.checkpoint import (
    AsyncSaver,
    FileRecord,
    Manifest,
    ShardTensor,
    TensorInfo,
    open_checkpoint,
    open_storage,
    write_shard,
)
from raysharded.checkpoint.byte_ranges import BoxIndex
from raysharded.checkpoint.format.paths import key_of
from raysharded.locations import join_url

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
        """(bytes read, bytes wanted)."""
        return open_checkpoint(open_storage(self.url), prefix).read_many(self._placed()), len(self.data)

    def plain_save(self, name: str) -> None:
        plain.write(self.url, f"{name}-{self.rank}", self.data)

    def plan_plain_load(self, prefix: str) -> None:
        """Find the bytes of the files that make up the shard; neighbours are read together."""
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
        """Read the planned bytes, one after the other, into the shard's memory."""
        plain.read(self.url, self.ranges, self.data)

    def connect(self, port: int) -> None:
        """Form a process group over a store on this machine."""
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def stall(self, step: int) -> tuple[float, float]:
        """Seconds for which an asynchronous save blocks training, and until the save is durable.

        The processes save one checkpoint together, in which each has separate tensors.
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
        """The state in the form that FSDP2 has."""
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
        """Save by torch.distributed.checkpoint."""
        dcp_save(self._sharded(), storage_writer=self._torch_writer(path))

    def torch_load(self, path: str) -> None:
        """Load by torch.distributed.checkpoint."""
        if self.url.startswith("s3://"):
            bucket, options = _fsspec(self.url)
            reader: StorageReader = FsspecReader(f"{bucket}/{path}", **options)
        else:
            reader = FileSystemReader(join_url(self.url, path))
        dcp_load(self._sharded(), storage_reader=reader)

    def torch_stall(self, path: str) -> tuple[float, float]:
        """As `stall`, by torch's `async_save` into buffers that it keeps: its fastest way without CUDA."""
        if self.stager is None:
            self.stager = DefaultStager(StagingOptions(False, False, False, False))  # the other options need CUDA
        state = self._sharded()
        dist.barrier()
        began = time.perf_counter()
        pending: Any = dcp_async_save(state, storage_writer=self._torch_writer(path), async_stager=self.stager)
        seconds = time.perf_counter() - began
        pending.result()
        return seconds, time.perf_counter() - began

    def memcpy(self) -> float:
        """Seconds for one copy of the shard into memory that has been used before."""
        return self._copied([(self._room(), self.data)])

    def copy_tensors(self) -> float:
        """Seconds for one copy, tensor by tensor, as in real states: glibc copies 200 MB at once past the cache, and
        faster."""
        sizes = [len(tensor) for *_, tensor in self._placed()]
        cuts = np.cumsum(sizes)[:-1]
        return self._copied(list(zip(np.split(self._room(), cuts), np.split(self.data, cuts), strict=True)))

    def _room(self) -> NDArray[np.uint8]:
        if not len(self.copy):
            self.copy = np.ones_like(self.data)
        return self.copy

    @staticmethod
    def _copied(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> float:
        dist.barrier()
        began = time.perf_counter()
        for into, tensor in pairs:
            np.copyto(into, tensor)
        return time.perf_counter() - began

    def peak_memory(self) -> int:
        """The most bytes since `reset_peak`."""
        return peak_bytes()

    def reset_peak(self) -> int:
        return reset_peak()


def serve(connection: Connection, environment: dict[str, str], *about: Any) -> None:
    """Run one process. A process of the fork server has the server's environment, not that of the process that requests
    it.
    """
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
        context.set_forkserver_preload(["benchmarks.checkpoint_ranks"])  # torch is loaded once
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
            with suppress(BrokenPipeError):  # the process has failed, and has reported why
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
    """A group of so many processes that can communicate with each other."""
    group = Group(url, layers, world)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        group.call("connect", store.port)
        yield group
    finally:
        group.close()


def _fsspec(url: str) -> tuple[str, dict[str, Any]]:
    """(bucket and prefix as fsspec has it, its options)."""
    from urllib.parse import parse_qs, urlsplit

    parts = urlsplit(url)
    options = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return f"s3://{parts.netloc}{parts.path}", {"client_kwargs": {"endpoint_url": options["endpoint_url"]}}
