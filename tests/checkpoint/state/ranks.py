"""Ranks as real processes: a function runs on each of them, in a gloo group over a store that outlives them all."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.forked import PRELOADED

GROUP_TIMEOUT_S = 60.0


class Killed(Exception):
    """The rank's process ended without a result."""


def run_ranks(world_size: int, act: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """What `act(rank, *args)` returned on each rank. Raises the first rank's error; `outcomes` gives all of them."""
    found = outcomes(world_size, act, *args, timeout_s=timeout_s)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


def outcomes(world_size: int, act: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """For each rank what it returned, the error it raised, or Killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, store.port, theirs, act, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return [_outcome(pipe, timeout_s) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcome(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a rank gave no result within {timeout_s} s")
    try:
        return pipe.recv()
    except EOFError:
        return Killed()


def _serve(
    rank: int, world_size: int, port: int, pipe: Connection, act: Callable[..., Any], args: Sequence[Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=PrefixStore("test", store), rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = act(rank, *args)
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        error.add_note(f"on rank {rank}")
        pipe.send(error)
    else:
        pipe.send(result)
    pipe.close()
    signal.pause()  # until it is killed: a rank that ends early would disturb the others
