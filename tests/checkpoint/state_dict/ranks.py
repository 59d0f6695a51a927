"""Ranks as real processes: a function runs on each of them, in a gloo group over a store that outlives them all."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.forked import server

GROUP_TIMEOUT_S = 60.0


class Killed(Exception):
    """The rank's process ended without a result."""


def run_ranks(world_size: int, act: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """The results of `act(rank, *args)` by rank. Raises the first rank's error; `outcomes` gives all of them."""
    found = outcomes(world_size, act, *args, timeout_s=timeout_s)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


def outcomes(
    world_size: int,
    act: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    kill: tuple[int, float] | None = None,
) -> list[Any]:
    """For each rank its return value, its error, or Killed. `kill`: a rank, and so many seconds after all processes
    were started. Raises TimeoutError, with the stacks of the hanging rank on its stderr."""
    context = server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, store.port, theirs, act, args, group_timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        if kill is not None:
            time.sleep(kill[1])
            processes[kill[0]].kill()
        return [_outcome(pipe, process, timeout_s) for pipe, process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcome(pipe: Connection, process: Any, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        raise TimeoutError(f"a rank gave no result within {timeout_s} s")
    try:
        return pipe.recv()
    except EOFError:
        return Killed()


def _serve(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    act: Callable[..., Any],
    args: Sequence[Any],
    group_timeout_s: float,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        store = PrefixStore("test", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        timeout = timedelta(seconds=group_timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = act(rank, *args)
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        error.add_note(f"on rank {rank}")
        pipe.send(error)
    else:
        pipe.send(result)
    pipe.close()
    signal.pause()  # until it is killed: a rank that ends early would disturb the others
