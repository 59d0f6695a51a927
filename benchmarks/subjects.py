"""The measured programs: each runs in separate processes that are started, followed by the lines they write, and
ended."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.incidents import StepDone, steps_done
from benchmarks.lines import Event, Follower
from benchmarks.result import ROOT
from benchmarks.workload import write_order
from raysharded.testing.ray_nodes import descendants

WORKERS = 4
CHECKPOINT_EVERY = 8
"""Steps between the checkpoints of all subjects."""
_SETTLE_S = 240.0
_ORDER_STEPS = 20_000
_PR_SET_CHILD_SUBREAPER = 36


class NotSeen(Exception):
    """An awaited event did not happen in time."""


@dataclass(slots=True)
class Session:
    """A run of one subject. A context manager: at its end all of its processes are killed, and its files deleted."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="bm", dir="/tmp")))  # short: sockets
    events: list[Event] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    halted: set[int] = field(default_factory=set)
    """Its processes that are stopped for a while, see `benchmarks.turns`."""
    _done: list[StepDone] = field(default_factory=list)
    _follower: Follower = field(init=False)
    _others: frozenset[int] = field(init=False)
    _of_nodes: list[int] = field(default_factory=list)
    """Processes that stand for nodes, oldest first; else the raylets of `node` lines."""

    def __post_init__(self) -> None:
        self._follower = Follower(self.lines)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become ours: they can be found and ended
        self._others = frozenset(descendants(os.getpid()))
        write_order(self.order, _ORDER_STEPS)

    @property
    def lines(self) -> Path:
        return self.folder / "lines"

    @property
    def order(self) -> Path:
        return self.folder / "order.npy"

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    def spawn(self, command: Sequence[str | Path], *, stands_for_node: bool = False, **environment: str) -> None:
        """Start a program that knows the repository's modules, with one thread for torch."""
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(self.folder), "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"output-{len(self.processes)}").open("wb") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env={**os.environ, **own, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        if stands_for_node:
            self._of_nodes.append(process.pid)

    def pause_until(self, at: float) -> None:
        """Wait until so many seconds since 1970."""
        time.sleep(max(0.0, at - time.time()))

    def tell(self, line: str) -> None:
        """Write a line to the first program's standard input."""
        standard_input = self.processes[0].stdin
        assert standard_input is not None
        standard_input.write(line.encode() + b"\n")
        standard_input.flush()

    def read(self) -> list[Event]:
        """All events so far."""
        if new := list(self._follower.read()):
            self.events += new
            self._done = steps_done(self.events)
        return self.events

    def done(self) -> list[StepDone]:
        """The steps so far, in the order in which they were done."""
        self.read()
        return self._done

    def wait(self, happened: Callable[[], bool], within_s: float, what: str) -> None:
        """Return when it has happened; raises NotSeen if it does not within so many seconds, or all programs end."""
        until = time.monotonic() + within_s
        while not happened():
            if time.monotonic() > until or all(process.poll() is not None for process in self.processes):
                raise NotSeen(f"{what}: not within {within_s:.0f} s\n{self.output()}")
            time.sleep(0.02)

    def output(self) -> str:
        """The last output of each program."""
        ends = [path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("output-*"))]
        return "\n--\n".join(ends)

    def pids(self) -> dict[int, int]:
        """Rank -> process id, by the newest step with a line."""
        steps = [event for event in self.read() if event.event == "step"]
        if not steps:
            return {}
        newest = steps[-1]
        if newest.pids:
            return dict(enumerate(newest.pids))
        return {event.rank: event.pid for event in steps if event.step == newest.step and event.world == newest.world}

    def node(self) -> list[int]:
        """All processes of the newest node."""
        raylets = [event.pids[0] for event in self.read() if event.event == "node"]
        top = (raylets or self._of_nodes)[-1]
        return [top, *descendants(top)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while left := [pid for pid in descendants(os.getpid()) if pid not in self._others]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        for process in self.processes:
            process.wait()
            if process.stdin:
                with suppress(OSError):
                    process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A planned change of the number of workers."""

    what: str
    workers: int
    """Number of workers after the change."""
    begin: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A program that is measured."""

    name: str
    start: Callable[[Session], object]
    """Start it on one node with four workers."""
    start_nodes: Callable[[Session], None] | None = None
    """Start it on two nodes with two workers each; None: not here."""
    start_planned: Callable[[Session], list[Change]] | None = None
    """Start it so that its number of workers can be changed, by these changes in order; None: it has none."""
    environment: str = ""
    """The folder of its environment under `.venv-bench`; empty: this one."""

    @property
    def is_installed(self) -> bool:
        return not self.environment or _bin(self.environment, "python").exists()


def _bin(environment: str, program: str) -> Path:
    return ROOT / ".venv-bench" / environment / "bin" / program


def spawn_ours(session: Session, *more: str, every: int = CHECKPOINT_EVERY) -> None:
    """raysharded, with more arguments of `benchmarks.ours`, and a checkpoint every so many steps."""
    files = ("--out", session.lines, "--folder", session.storage, "--every", str(every))
    session.spawn([sys.executable, "-m", "benchmarks.ours", *files, "--workers", str(WORKERS), *more])


def _files(session: Session, every: int = CHECKPOINT_EVERY) -> list[str | Path]:
    where: list[str | Path] = ["--out", session.lines, "--order", session.order, "--folder", session.storage]
    return [*where, "--every", str(every)]


def _torchrun(session: Session, *how: str, stands_for_node: bool = False) -> None:
    program: list[str | Path] = [
        _bin("torchrun", "torchrun"),
        *how,
        "--max-restarts",
        "1000",
        "-m",
        "benchmarks.peers.torchrun_dcp",
    ]
    # By default torchrun 2.13 gives a restarted group the store of the last one, with its addresses, and gloo's ranks
    # try to reach processes that have exited (see pytorch#167288): with this switch every restart has a new store.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    session.spawn([*program, *_files(session)], stands_for_node=stands_for_node, **fresh)


def torchrun_agents(session: Session, agents: int, per_agent: int, least: int = 1) -> Callable[[], None]:
    """Start agents that meet each other, as one per node; returns a function that starts one more of them."""
    endpoint = f"127.0.0.1:{_free_port()}"
    how = ["--nnodes", f"{least}:{agents}", "--nproc-per-node", str(per_agent)]
    how += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "benchmark"]

    def add() -> None:
        _torchrun(session, *how, stands_for_node=True)

    for number in range(agents):
        add()
        if number == 0:
            session.wait(lambda: _listens(endpoint), 120, "torchrun's first agent listens")
    return add


def spawn_ray_train(session: Session, *more: str, every: int = CHECKPOINT_EVERY) -> None:
    """Ray Train, with more arguments of its program, and a checkpoint every so many steps."""
    program = [_bin("ray-train", "python"), "-m", "benchmarks.peers.ray_train", *_files(session, every)]
    session.spawn([*program, "--workers", str(WORKERS), *more])


def _torchft_lighthouse(session: Session) -> Callable[[int], list[str | Path]]:
    """Start it; returns the program of each of torchft's groups, which is one worker."""
    port = _free_port()
    how = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    session.spawn([_bin("torchft", "torchft_lighthouse"), *how, "--bind", f"127.0.0.1:{port}"])
    session.wait(lambda: _listens(f"127.0.0.1:{port}"), 60, "torchft's lighthouse listens")
    program: list[str | Path] = ["env", f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:{port}"]
    program += [_bin("torchft", "torchrun"), "--standalone", "--nproc-per-node", "1", "--max-restarts", "1000"]
    program += ["-m", "benchmarks.peers.torchft_replicas", "--out", session.lines, "--order", session.order]
    return lambda group: [*program, "--group", str(group), "--groups", str(WORKERS)]


def _torchft(session: Session) -> Callable[[int], None]:
    """Start it; returns a function that starts one of its groups again."""
    program = _torchft_lighthouse(session)

    def start(group: int) -> None:
        session.spawn(program(group))

    for group in range(WORKERS):
        start(group)
    return start


def _torchft_nodes(session: Session) -> None:
    """A shell stands for each node."""
    program = _torchft_lighthouse(session)
    for first in range(0, WORKERS, 2):
        groups = [shlex.join(map(str, program(group))) for group in (first, first + 1)]
        session.spawn(["sh", "-c", f"{' & '.join(groups)} & wait"], stands_for_node=True)


def wait_until_settled(
    session: Session, name: str, *, workers: int = WORKERS, steps: int = 6, after_checkpoint: int | None = None
) -> None:
    """Wait until so many have done some steps together, of which the newest is `after_checkpoint` steps after one is
    written (None: any)."""

    def settled() -> bool:
        newest = session.done()[-steps:]
        together = len(newest) == steps and all(step.workers == workers for step in newest)
        in_row = together and all(b.step == a.step + 1 for a, b in pairwise(newest))
        return in_row and after_checkpoint in (None, newest[-1].step % CHECKPOINT_EVERY)

    session.wait(settled, _SETTLE_S, f"{name}: {steps} steps of {workers} workers")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _terminate(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    """A function that sends the program SIGTERM."""
    return lambda: process.send_signal(signal.SIGTERM)


def _ours_planned(session: Session) -> list[Change]:
    spawn_ours(session)
    return [
        Change(what="4 to 3 workers", workers=3, begin=lambda: session.tell("resize 3")),
        Change(what="3 to 4 workers", workers=4, begin=lambda: session.tell("resize 4")),
    ]


def _torchrun_nodes(session: Session) -> None:
    torchrun_agents(session, 2, 2)


def _torchrun_planned(session: Session) -> list[Change]:
    """Start an agent per worker: one is requested to leave, one is started."""
    add = torchrun_agents(session, WORKERS, 1)
    return [
        Change(what="4 to 3 workers", workers=3, begin=_terminate(session.processes[-1])),
        Change(what="3 to 4 workers", workers=4, begin=add),
    ]


def _ray_train_planned(session: Session) -> list[Change]:
    """Start it. Ray Train has no call for a change: it grows when it finds a new node."""
    spawn_ray_train(session, "--least", "2", "--nodes", "3")
    return [Change(what="3 to 4 workers", workers=4, begin=lambda: session.tell("add 1"))]


def _torchft_planned(session: Session) -> list[Change]:
    """Start it. A group is requested to leave, and started again."""
    start = _torchft(session)
    return [
        Change(what="4 to 3 workers", workers=3, begin=_terminate(session.processes[-1])),
        Change(what="3 to 4 workers", workers=4, begin=lambda: start(WORKERS - 1)),
    ]


def in_groups(size: int) -> Subject:
    """raysharded, in shard groups of so many workers."""
    return Subject(
        name=f"raysharded, groups of {size}",
        start=lambda session: spawn_ours(session, "--shard-group-size", str(size)),
    )


OURS = Subject(
    name="raysharded",
    start=spawn_ours,
    start_nodes=lambda session: spawn_ours(session, "--nodes", "2,2"),
    start_planned=_ours_planned,
)
TORCHRUN = Subject(
    name="torchrun + DCP",
    start=lambda session: _torchrun(session, "--standalone", "--nproc-per-node", str(WORKERS)),
    start_nodes=_torchrun_nodes,
    start_planned=_torchrun_planned,
    environment="torchrun",
)
RAY_TRAIN = Subject(
    name="Ray Train, fixed",
    start=spawn_ray_train,
    start_nodes=lambda session: spawn_ray_train(session, "--nodes", "2,2"),
    environment="ray-train",
)
RAY_TRAIN_ELASTIC = Subject(
    name="Ray Train, elastic",
    start=lambda session: spawn_ray_train(session, "--least", "2"),
    start_nodes=lambda session: spawn_ray_train(session, "--least", "2", "--nodes", "2,2"),
    start_planned=_ray_train_planned,
    environment="ray-train",
)
TORCHFT = Subject(
    name="torchft",
    start=_torchft,
    start_nodes=_torchft_nodes,
    start_planned=_torchft_planned,
    environment="torchft",
)
SUBJECTS = (OURS, TORCHRUN, RAY_TRAIN, RAY_TRAIN_ELASTIC, TORCHFT)


def versions() -> dict[str, str]:
    """Versions of the packages in the peers' environments."""
    found = {}
    for environment, package in (("torchrun", "torch"), ("ray-train", "ray"), ("torchft", "torchft-nightly")):
        places = (ROOT / ".venv-bench" / environment / "lib").glob("python*/site-packages")
        for one in importlib.metadata.distributions(path=[str(place) for place in places], name=package):
            found[f"{package} of {environment}" if package != environment else package] = one.version
    return found
