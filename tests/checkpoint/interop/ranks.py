"""Ranks as real processes over gloo, and a small FSDP2 model whose weights are a function of their names."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.forked import server

TIMEOUT_S = 120
dcp: Any = torch.distributed.checkpoint  # its functions are exported from their own modules only, types have it


def run_ranks(folder: Path, num_ranks: int, act: Callable[..., Any], *args: Any) -> list[Any]:
    """act(*args) in `num_ranks` processes of one process group; what they returned, in order.

    Raises AssertionError with the traceback of the first rank that raised.
    """
    context = server()
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, str(store), rank, num_ranks, act, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        replies = [_reply(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for error, _ in replies:
        assert error is None, error
    return [value for _, value in replies]


def _reply(rank: int, pipe: Connection) -> tuple[str | None, Any]:
    if not pipe.poll(TIMEOUT_S):
        return f"rank {rank} did not answer within {TIMEOUT_S} s", None
    try:
        reply: tuple[str | None, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return f"rank {rank} died", None
    return reply


def _serve(pipe: Connection, store: str, rank: int, num_ranks: int, act: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        files = FileStore(store, num_ranks)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        pipe.send_bytes(pickle.dumps((None, act(*args))))  # as bytes: not through memory that ends with the process
    except BaseException:  # noqa: BLE001 - the boundary of the process: the test raises it
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))


def model() -> nn.Module:
    """Sharded over all ranks; dimensions that no number of ranks divides."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(whole[2], mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and AdamW after some steps, the same for every number of ranks."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(4, 7, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def whole(state: Any) -> Any:
    """The state with every DTensor gathered."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value) for value in state)
    return state


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    """Assert that they are equal in structure, types and every bit."""
    assert type(found) is type(expected), f"{at}: {found!r} instead of {expected!r}"
    if isinstance(expected, dict):
        assert list(map(str, sorted(found))) == list(map(str, sorted(expected))), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{at}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, at
        assert found.shape == expected.shape, at
        assert bits(found) == bits(expected), at
    else:
        assert found == expected, at


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in C order."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
