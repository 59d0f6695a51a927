"""Strangers on this machine: processes that connect to every port that some processes listen on.

In the race they are after members' places. In the run they send garbage, while it forms, trains and recovers.

python -m tests.actors.comm.strangers race --generations 200
python -m tests.actors.comm.strangers run --connections 1000

They connect to ports of their victims alone. In the race a victim itself sends each port to the stranger, before any
member knows it, and waits until the stranger has connected: none could be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from raysharded.actors.comm import links
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.errors import CollectiveAborted
from raysharded.layout import Mesh
from raysharded.rendezvous.server import RendezvousStore
from tests.forked import server
from tests.training import harness

_LISTENS = "0A"
_NUM_PLACES = 4
_HELD_S = 0.3
_GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64, b"raysharded store 1\n", b"")


# -- the stranger's side --


def listening_ports(pids: Sequence[int]) -> set[int]:
    """The TCP ports that these processes listen on."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                    if found:
                        inodes.add(found[1])
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS and fields[9] in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def race(over: Connection) -> None:
    """Connect to each port that comes, at once, with the number of each of gloo's first pairs, and hold that.

    Sends the port at which it takes ports (UDP), and at the end the number of connections that were made.
    """
    held: list[tuple[float, socket.socket]] = []
    count = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as informed:
        informed.bind(("127.0.0.1", 0))
        informed.settimeout(0.1)
        over.send(informed.getsockname()[1])
        while not over.poll():
            with contextlib.suppress(TimeoutError):
                data, informant = informed.recvfrom(64)
                for number in range(_NUM_PLACES):
                    sock = socket.socket()
                    sock.settimeout(1.0)
                    with contextlib.suppress(OSError):
                        sock.connect(("127.0.0.1", int(data)))
                        sock.send(struct.pack("=q", number) + draw_of(count))
                        count += 1
                    held.append((time.monotonic() + _HELD_S, sock))
                informed.sendto(b"done", informant)
            while held and held[0][0] < time.monotonic():
                held.pop(0)[1].close()
    over.send(count)


def draw_of(number: int) -> bytes:
    """The bytes that a stranger sends behind the number of the place that it wants: nothing, as a rule."""
    return (b"", b"", b"", b"\xff" * 64)[number % 4] if number >= _NUM_PLACES * 4 else b""


def betray(stranger_port: int) -> None:
    """Make this process send each gloo group's port to the stranger before a member knows it, and wait for it."""
    announce = links._Announcing.set
    informing = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    informing.settimeout(5.0)
    mark = struct.pack("=H", socket.AF_INET)

    def announce_to_all(self: Any, key: str, value: Any) -> None:
        found = re.search(re.escape(mark) + b"(..)" + socket.inet_aton("127.0.0.1"), value, re.DOTALL)
        if self.before is not None:  # the listening socket gets its filter before the port can be known
            self.before(value)
            self.before = None
        if found:
            informing.sendto(str(struct.unpack("!H", found[1])[0]).encode(), ("127.0.0.1", stranger_port))
            informing.recv(64)
        announce(self, key, value)

    setattr(links._Announcing, "set", announce_to_all)  # noqa: B010


def flood(over: Connection, victims: Sequence[int], connections: int) -> None:
    """Keep up to `connections` connections with garbage to the ports of the victims and their children.

    Sends the number of connections, and of ports.
    """
    draw = random.Random(0)
    count, ports_met = 0, set[int]()
    held: list[socket.socket] = []
    over.send("ready")
    while not over.poll():
        ports = sorted(listening_ports([*victims, *children(victims)]))
        ports_met.update(ports)
        for port in ports:
            for _ in range(max(1, connections // (4 * len(ports)))):
                sock = socket.socket()
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError, OSError):
                    sock.connect(("127.0.0.1", port))
                with contextlib.suppress(OSError):
                    sock.send(draw.choice([*_GARBAGE, draw.randbytes(200), struct.pack("=q", draw.randrange(4))]))
                held.append(sock)
                count += 1
        while len(held) > connections:
            held.pop(draw.randrange(len(held))).close()
        over.poll(0.05)
    over.send((count, len(ports_met)))


def children(pids: Sequence[int]) -> list[int]:
    """All processes below these."""
    found: list[int] = []
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(folder.name))
    waiting = list(pids)
    while waiting:
        under = below.get(waiting.pop(), [])
        found += under
        waiting += under
    return found


@contextlib.contextmanager
def stranger(act: Any, *args: Any) -> Iterator[list[Any]]:
    """A process that does this meanwhile; the list has what it sends first, and its count at the end."""
    context, counts = server(), list[Any]()
    ours, theirs = context.Pipe()
    process = context.Process(target=act, args=(theirs, *args), daemon=True)
    process.start()
    counts.append(ours.recv())
    try:
        yield counts
    finally:
        ours.send("over")
        if ours.poll(30.0):
            counts.append(ours.recv())
        process.kill()
        process.join()


# -- the members' side --


@dataclass
class Outcome:
    """The generations of one member."""

    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    intruded: int = 0
    """Attempts in which a stranger was in a member's place."""
    closed: int = 0
    """Lines about strangers' connections that were closed."""


class _Counting(logging.Handler):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.outcome.intruded += "in a member's place" in text
        self.outcome.closed += "of strangers to gloo" in text


def member(places: Sequence[Rendezvous], pipe: Connection) -> None:
    """Form each generation, add the ranks' numbers in each of its groups, and leave it."""
    torch.set_num_threads(1)
    outcome = Outcome()
    logging.getLogger("raysharded").addHandler(_Counting(outcome))
    pipe.send("ready")
    betray(pipe.recv())
    for place in places:
        links.be_wary(0.0)  # every generation is as open to strangers as the first
        groups = Groups(use_gpu=False)
        try:
            groups.form(place)
            total = int(groups.state.sum_int64(torch.tensor([7000 + place.rank]))[0])
            own = torch.tensor([float(place.rank)])
            torch.distributed.all_reduce(own)
            expected = sum(range(place.world_size))
            if total == 7000 * place.world_size + expected and int(own[0]) == expected:
                outcome.right += 1
            else:
                outcome.wrong += 1
        except CollectiveAborted as error:
            outcome.failed.append(str(error))
        finally:
            groups.abort()
            groups.close()
    pipe.send(outcome)


def raced(generations: int, world_size: int = 2) -> tuple[list[Outcome], int]:
    """The outcome of each member of these generations, and the connections that the stranger made."""
    store, context = RendezvousStore("127.0.0.1"), server()
    pipes, processes = [], []
    for rank in range(world_size):
        places = [
            Rendezvous(
                host="127.0.0.1",
                port=store.port,
                prefix=f"g{generation}",
                secret=store.secret(f"g{generation}"),
                rank=rank,
                mesh=Mesh(shards=world_size),
                arrival_timeout_s=60.0,
                collective_timeout_s=60.0,
            )
            for generation in range(generations)
        ]
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(places, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    with stranger(race) as counts:
        for pipe in pipes:
            pipe.send(counts[0])
        outcomes = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    store.close()
    return outcomes, counts[-1]


def flooded(connections: int, steps: int) -> tuple[harness.Outcome, tuple[int, int]]:
    """The outcome of a run of two workers, one killed in every second step, and the connections and ports met."""
    kills = [(number, 2 * number + 1, "backward") for number in range(steps // 2)]
    with stranger(flood, [os.getpid()], connections) as counts:
        outcome = harness.train(2, task=harness.SmallTask(), steps=steps, kills=kills)
    return outcome, counts[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("race", "run"))
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.what == "race":
        outcomes, connections = raced(options.generations)
        for rank, one in enumerate(outcomes):
            print(
                f"rank {rank}: {one.right} generations right, {one.wrong} wrong, {len(one.failed)} not formed, "
                f"{one.intruded} attempts with a stranger in a member's place, {one.closed} lines about others"
            )
            print("\n".join(one.failed[:5]))
        print(f"{connections} connections of the stranger")
        return
    outcome, (made, ports) = flooded(options.connections, options.steps)
    calm = harness.train(2, task=harness.SmallTask(), steps=options.steps)
    print(
        f"{made} connections to {ports} ports; {len(outcome.of('generation'))} generations; "
        f"{'the same bits as' if outcome.bits == calm.bits else 'OTHER BITS THAN'} without strangers"
    )


if __name__ == "__main__":
    main()
