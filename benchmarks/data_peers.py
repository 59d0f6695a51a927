"""Reads of an epoch of tokens by raysharded, MosaicML Streaming and litData, in turns, from the same S3 server.

make peers
python -m benchmarks.data_peers [--seq-len 2048] [--rounds 5] [--only NAME ...] [--json PATH]

All read the same tokens as samples of the same length, four processes at once, shuffled, and hand out batches of
int64. A peer has either four processes of its DataLoader, as its documentation recommends, or four ranks that read by
themselves, as raysharded's workers do. Every reader begins with an empty folder for what it keeps on disk.

The processes of all are started first, and read a store once, which is not counted. Then they take turns: one reads a
store of few tokens and a large one, and the others wait. Counted is the difference between the two: what an epoch's
start takes is in both. Processor time is that of the readers and all their children, without the server. Last, each
reads through a proxy that counts requests and bytes, and the sum of all tokens is checked.

Columns of order 2 share the first and last blocks of their windows, of 67 million tokens with `--seq-len 2048`. So
raysharded reads more bytes of a store of few windows than of a large one, for each token used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.epochs import FIGURES, READY, Epoch
from benchmarks.result import ROOT
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from tests.s3.proxy import Exchange, FaultyProxy
from tests.s3.server import running_server

READERS = 4
BATCH = 32
VOCABULARY = 50_257
TOKEN_BYTES = 2
SHARD_TOKENS = 1 << 22
SMALL_TOKENS = 1 << 18
BUCKET = "reads"
OWN = "raysharded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A measured reader."""

    name: str
    program: Sequence[str]
    """Arguments for its Python: a module or a file, and more."""
    store: str
    """Name of the folder of its stores."""
    environment: str = ""
    """Name of its Python environment; empty: this one."""
    ranks: int = READERS
    """Processes that share an epoch."""
    workers: int = 0
    """Processes that each of them starts."""

    def python(self) -> str:
        """The interpreter."""
        return str(ROOT / ".venv-bench" / self.environment / "bin/python") if self.environment else sys.executable


MOSAIC = (str(ROOT / "benchmarks/peers/mosaic_streaming.py"),)
LITDATA = (str(ROOT / "benchmarks/peers/litdata_tokens.py"),)
SUBJECTS = (
    Subject(name=OWN, program=("-m", "benchmarks.own_epochs"), store=OWN),
    Subject(name="raysharded, no disk", program=("-m", "benchmarks.own_epochs", "--no-disk"), store=OWN),
    Subject(
        name="MosaicML Streaming",
        program=MOSAIC,
        store="mosaic",
        environment="mosaicml-streaming",
        ranks=1,
        workers=READERS,
    ),
    Subject(name="MosaicML Streaming, ranks", program=MOSAIC, store="mosaic", environment="mosaicml-streaming"),
    Subject(name="litData", program=LITDATA, store="litdata", environment="litdata", ranks=1, workers=READERS),
    Subject(name="litData, ranks", program=LITDATA, store="litdata", environment="litdata"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A round's figures, for the tokens that the large store has more than the small one."""

    tokens_per_s: float
    cpu_s_per_million: float
    load: float
    """The machine's load before."""
    is_whole: bool = True
    """Whether all tokens of both stores were read; otherwise the round does not count."""


class Counted:
    """Requests and bytes of the answers, of the objects below a folder."""

    def __init__(self, folder: str) -> None:
        self._folder, self.requests, self.bytes = folder, 0, 0

    def __call__(self, exchange: Exchange) -> None:
        reply = exchange.forward()
        if self._folder in exchange.request.target:
            self.requests += 1
            self.bytes += len(reply.body) if exchange.request.method == "GET" else 0
        exchange.send(reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """The stores of all subjects on a server."""

    endpoint_url: str
    seq_len: int
    totals: dict[str, int]
    """Name of a store -> the sum of its tokens."""
    sizes: dict[str, int]
    """Name of a store -> its number of tokens."""

    def url(self, subject: Subject, name: str, endpoint_url: str) -> str:
        """The address for the subject; the peers have the server's from their environment."""
        plain = f"s3://{BUCKET}/{subject.store}/{name}"
        return plain if subject.environment else f"{plain}?endpoint_url={endpoint_url}"


class Readers:
    """The processes of a subject, from entering to leaving the context."""

    def __init__(self, stores: Stores, subject: Subject, *, through: str = "", adds: bool = False) -> None:
        """`through`: another address of the server. `adds`: they add up the tokens."""
        self._stores, self._subject = stores, subject
        self._endpoint_url, self._adds = through or stores.endpoint_url, adds
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        port, subject = _free_port(), self._subject
        for rank in range(subject.ranks):
            words = [*subject.program, f"--seq-len={self._stores.seq_len}", f"--batch={BATCH // subject.ranks}"]
            words += [f"--rank={rank}", f"--world={subject.ranks}", f"--workers={subject.workers}"]
            words += [f"--cache={self._folder}/cache", *(["--adds"] if self._adds else [])]
            environment = _environment(self._endpoint_url) | _rank_environment(rank, subject.ranks, port)
            output = self._stack.enter_context((self._folder / f"output-{rank}").open("w"))
            process = subprocess.Popen(
                [subject.python(), *words],
                cwd=ROOT,
                env=environment | {"TMPDIR": str(self._folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
            self._processes.append(self._stack.enter_context(process))
            self._stack.callback(process.kill)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str) -> Epoch:
        """An epoch of a store. Raises RuntimeError with its words if a process has ended."""
        self._say(self._stores.url(self._subject, name, self._endpoint_url))
        for process in self._processes:
            while self._line(process) != READY:
                pass  # a word of the peer's
        self._say("")
        parts = []
        for process in self._processes:
            while not (line := self._line(process)).startswith(FIGURES):
                pass
            parts.append(Epoch(**json.loads(line)))
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        return Epoch(
            wall_s=max(part.wall_s for part in parts),
            cpu_s=sum(part.cpu_s for part in parts),
            tokens=sum(part.tokens for part in parts),
            total=sum(part.total for part in parts),
        )

    def _say(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if line := process.stdout.readline():
            return line.strip()
        words = "".join(path.read_text() for path in self._folder.glob("output-*"))
        raise RuntimeError(f"{self._subject.name}: a reader ended:\n{words}")


def counted(stores: Stores, subject: Subject) -> dict[str, float]:
    """Requests and bytes of an epoch of the large store. Raises AssertionError if tokens are missing or twice."""
    counted = Counted("/large/")
    with FaultyProxy(stores.endpoint_url) as proxy:
        proxy.inject(counted, times=1 << 30)
        with Readers(stores, subject, through=proxy.endpoint_url, adds=True) as readers:
            epoch = readers.read("large")
    assert epoch.total == stores.totals["large"], (subject.name, epoch, stores.totals)
    return {
        "requests_per_million_tokens": counted.requests / epoch.tokens * 1e6,
        "bytes_fetched_over_used": counted.bytes / (epoch.tokens * TOKEN_BYTES),
    }


def _environment(endpoint_url: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, "AWS_ENDPOINT_URL": endpoint_url, "S3_ENDPOINT_URL": endpoint_url}


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GLOBAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def stores(subjects: Sequence[Subject], seq_len: int, num_tokens: int) -> Iterator[Stores]:
    """Equal tokens in each subject's format, on a new server."""
    import boto3

    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder) / "ceph") as server:
        os.environ.update(
            AWS_ACCESS_KEY_ID=server.access_key,
            AWS_SECRET_ACCESS_KEY=server.secret_key,
            AWS_DEFAULT_REGION="us-east-1",
        )
        boto3.client("s3", endpoint_url=server.endpoint_url).create_bucket(Bucket=BUCKET)
        found = Stores(endpoint_url=server.endpoint_url, seq_len=seq_len, totals={}, sizes={})
        for name, count in (("small", SMALL_TOKENS), ("large", num_tokens)):
            tokens = np.random.default_rng(count).integers(0, VOCABULARY, count, dtype=np.uint16)
            path = Path(folder) / "tokens.npy"
            np.save(path, tokens)
            found.totals[name], found.sizes[name] = int(tokens.sum(dtype=np.int64)), count
            for subject in {subject.store: subject for subject in subjects}.values():
                _write(found, subject, name, path)
        yield found


def _write(found: Stores, subject: Subject, name: str, path: Path) -> None:
    url = found.url(subject, name, found.endpoint_url)
    if subject.environment:
        words = [*subject.program, "write", str(path), url]
        words += [f"--seq-len={found.seq_len}", f"--shard-tokens={SHARD_TOKENS}"]
        subprocess.run([subject.python(), *words], cwd=ROOT, env=_environment(found.endpoint_url), check=True)
        return
    tokens = np.load(path, mmap_mode="r")
    with StoreWriter(url, Kind(tokenizer="random", vocab_size=VOCABULARY), SHARD_TOKENS) as writer:
        for start in range(0, len(tokens), SHARD_TOKENS):
            writer.write(tokens[start : start + SHARD_TOKENS].astype(np.uint32))
        writer.write(np.zeros(1, dtype=np.uint32))  # the last sample's last target


def figures_of(epochs: dict[str, Epoch], sizes: dict[str, int], load: float) -> Figures:
    """The difference between the two epochs. `sizes`: numbers of tokens in the stores."""
    small, large = epochs["small"], epochs["large"]
    millions = (sizes["large"] - sizes["small"]) / 1e6
    return Figures(
        tokens_per_s=millions * 1e6 / (large.wall_s - small.wall_s),
        cpu_s_per_million=(large.cpu_s - small.cpu_s) / millions,
        load=load,
        is_whole={name: epoch.tokens for name, epoch in epochs.items()} == sizes,
    )


def interval(values: Sequence[float], share: float = 0.9) -> tuple[float, float]:
    """The narrowest interval between two of the values that has the median of what they are drawn from with at least
    this probability, by the binomial distribution; the extremes if none has it."""
    ordered, size = sorted(values), len(values)
    outside, cut = 0.0, 0
    while cut < (size - 1) // 2 and 1 - 2 * (outside + math.comb(size, cut) / 2**size) >= share:
        outside += math.comb(size, cut) / 2**size
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[size - 1 - cut]


def summary(rounds: dict[str, list[Figures]]) -> dict[str, Any]:
    """Medians of whole rounds, and ratios to raysharded's of the same round with their intervals."""
    found: dict[str, Any] = {}
    for name, figures in rounds.items():
        pairs = [(one, own) for one, own in zip(figures, rounds[OWN], strict=True) if one.is_whole and own.is_whole]
        of: dict[str, Any] = {"rounds": len(figures), "whole_rounds": len(pairs)}
        if pairs:
            of["tokens_per_s"] = statistics.median(one.tokens_per_s for one, _ in pairs)
            of["cpu_s_per_million_tokens"] = statistics.median(one.cpu_s_per_million for one, _ in pairs)
            of["load"] = [round(one.load, 1) for one, _ in pairs]
        if pairs and name != OWN:
            for what, ratios in (
                ("cpu_over_own", [one.cpu_s_per_million / own.cpu_s_per_million for one, own in pairs]),
                ("own_rate_over_its", [own.tokens_per_s / one.tokens_per_s for one, own in pairs]),
            ):
                of[what] = {"median": statistics.median(ratios), "interval_90": interval(ratios)}
        found[name] = of
    return found


def measure(found: Stores, subjects: Sequence[Subject], num_rounds: int) -> dict[str, list[Figures]]:
    """All in turns, there and back."""
    rounds: dict[str, list[Figures]] = {subject.name: [] for subject in subjects}
    with contextlib.ExitStack() as stack:
        readers = {one.name: stack.enter_context(Readers(found, one)) for one in subjects}
        for one in readers.values():
            one.read("small")
        for number in range(num_rounds):
            for name in list(readers)[:: -1 if number % 2 else 1]:
                load = os.getloadavg()[0]
                epochs = {store: readers[name].read(store) for store in ("small", "large")}
                figures = figures_of(epochs, found.sizes, load)
                rounds[name].append(figures)
                print(f"{time.strftime('%H:%M:%S')} round {number + 1}, {name}: {figures}", flush=True)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 27, help="that the large store has; whole shards")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="names of peers")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    subjects = [one for one in SUBJECTS if not args.only or one.name in (OWN, *args.only)]
    with stores(subjects, args.seq_len, args.tokens) as found:
        rounds = measure(found, subjects, args.rounds)
        for name, of in summary(rounds).items():
            print(name, json.dumps(of), flush=True)
        counts = {subject.name: counted(found, subject) for subject in subjects}
    result = {name: of | counts[name] for name, of in summary(rounds).items()}
    for name, of in result.items():
        print(name, json.dumps(of), flush=True)
    if args.json:
        values = {name: [asdict(one) for one in figures] for name, figures in rounds.items()}
        Path(args.json).write_text(json.dumps({"summary": result, "rounds": values}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
