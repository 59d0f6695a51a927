"""Epochs of tokens that a process reads, timed on request; for raysharded and the peers alike.

A reader is a program that reads lines. The first names a store: the reader opens it, and prints a line when it is
ready. At the second it reads an epoch, and prints its figures as JSON. So on, until its standard input ends. Standard
library only: the peers use it too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from multiprocessing import active_children
from typing import Any

READY = "ready"
FIGURES = '{"wall_s"'
"""Begins the line with an epoch's figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Time and tokens of an epoch."""

    wall_s: float
    cpu_s: float
    """User and system time of the process and of those that it started, which have ended."""
    tokens: int
    total: int = 0
    """Sum of all tokens; 0 if the reader does not add them up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A reader's arguments."""

    seq_len: int
    """Tokens per sample."""
    batch: int
    """Samples per batch of this process."""
    workers: int
    """Processes that read for this one; 0: it reads by itself."""
    rank: int
    world: int
    """Number of processes that share an epoch, and this one's number."""
    cache: str
    """A folder for what is kept on disk; one for all processes."""
    adds: bool
    """Whether the tokens are added up."""


def arguments() -> argparse.ArgumentParser:
    """The arguments that all readers have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--adds", action="store_true")
    return parser


def order_of(options: argparse.Namespace) -> Order:
    """The arguments as a value."""
    return Order(**{name: getattr(options, name) for name in Order.__slots__})


def serve(order: Order, open_epoch: Callable[[Order, str], AbstractContextManager[Iterable[Any]]]) -> None:
    """Read epochs. `open_epoch`: the batches of one, tensors of int64 [batch, at least seq_len]; its order has an empty
    folder for what is kept on disk."""
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        with open_epoch(replace(order, cache=os.path.join(order.cache, str(number))), line.strip()) as batches:
            print(READY, flush=True)
            sys.stdin.readline()
            began, cpu = time.monotonic(), _cpu_s()
            samples = total = 0
            for batch in batches:
                samples += len(batch)
                if order.adds:
                    total += int(batch[:, : order.seq_len].sum())
            wall_s = time.monotonic() - began
            if left := active_children():
                raise RuntimeError(f"{left} still run: their time is not known.")
            epoch = Epoch(wall_s=wall_s, cpu_s=_cpu_s() - cpu, tokens=samples * order.seq_len, total=total)
        print(json.dumps(asdict(epoch)), flush=True)


def run(
    write: Callable[[argparse.Namespace], None],
    open_epoch: Callable[[Order, str], AbstractContextManager[Iterable[Any]]],
) -> None:
    """A peer's program: `write TOKENS.npy URL --seq-len ... --shard-tokens ...` makes a store, other arguments read."""
    if sys.argv[1:2] != ["write"]:
        serve(order_of(arguments().parse_args()), open_epoch)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("write")
    parser.add_argument("tokens")
    parser.add_argument("url")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--shard-tokens", type=int, required=True)
    write(parser.parse_args())


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
