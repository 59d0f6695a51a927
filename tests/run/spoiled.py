"""Run folders with something changed, as their author, or damage, may have changed them: every command ends in time,
with an answer or one of our errors, and opens no connection.

`python -m tests.run.spoiled COUNT [SEED]` tries so many folders and writes the results as JSON. The commands run in one
process. It exits with 1, and states the seeds of the cases, if any of them failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer
from click.testing import CliRunner

import raysharded as rs
from raysharded.checkpoint import Keep, fork, open_storage, pin, prune
from raysharded.cli import app
from raysharded.errors import RayshardedError
from raysharded.ownership.lease import Holder, Process, encode, lease_key
from raysharded.protocol.session import DriverSession, FoundWorkers
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.run.local import LocalRun
from tests.canary import connections
from tests.checkpoint.retention.runs import Run, ref_of
from tests.checkpoint.samples import seal
from tests.checkpoint.spoiled import places
from tests.paths import ROOT

JOURNALS = ROOT / "tests" / "report" / "journals"
NAME = "run"
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**400, 0.5, -1.5, 1e308, float("nan"), float("inf")),
    *("", "w", "..", "../..", "/", "a/b", "\ud800", "\x1b]0;x\x07", "1e400", "nan", "x" * 100_000, [], {}, [[]]),
    *("http://127.0.0.1:9/run", "s3://b/r?endpoint_url=http://127.0.0.1:9", "simplecache::http://127.0.0.1:9/r"),
    *("sftp://127.0.0.1:9/run", "checkpoints/pins", "fork-run-00000000"),
]
LONGEST_S = 20.0
"""Longest processor time of one command."""
MOST_GROWN_MIB = 1024
"""Largest growth of the process's peak memory in one case."""


# -- a run and its neighbours --


def make_runs(above: Path, chance: random.Random) -> Path:
    """A run, made by the real writers, with a fork and a neighbour; returns the folder of the run, or of the fork."""
    run, child = open_storage(str(above / NAME)), open_storage(str(above / "child"))
    write_journal(above / NAME, chance.choice(sorted(JOURNALS.glob("*.jsonl"))))
    driver = Run(run)
    saves = [driver.save(step, metrics={"loss": float(step)}) for step in (1, 2, 3)]
    driver.unfinished(4)
    pin(run, "kept", ref_of(run, saves[1]))
    prune(run, Keep(last=1))  # retires the first one
    holder = Holder(driver="driver", host="elsewhere", process=Process(), since=1.0, lease_s=1.0, ended=True)
    run.write(lease_key("driver"), [encode(holder)])
    fork(run, ref_of(run, saves[2]), child)
    write_journal(above / "healthy", JOURNALS / "losses.jsonl")
    Run(open_storage(str(above / "healthy"))).save(10)
    write_journal(above / "child", JOURNALS / "losses.jsonl", most=3)
    return above / chance.choice([NAME, NAME, NAME, "child"])


def write_journal(run: Path, source: Path, most: int = 1000) -> None:
    """The recorded journal in segments of a few entries."""
    (run / "journal").mkdir(parents=True)
    lines = source.read_text().splitlines()[:most]
    for number, first in enumerate(range(0, len(lines), 8), 1):
        head = json.dumps({"kind": "segment", "writer": "driver"})
        (run / "journal" / f"{number:08d}.jsonl").write_text("\n".join([head, *lines[first : first + 8], ""]))


# -- changes --


def spoil(run: Path, chance: random.Random) -> list[str]:
    """Change one to three files of the run; returns what was done."""
    done = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        if not files:  # an earlier change has taken them
            break
        path = chance.choice(files)
        kinds = [inside, inside, inside, inside, raw, raw, replaced, replaced, renamed, folder_replaced]
        kind = chance.choice(kinds)
        kind(path, chance)
        done.append(f"{kind.__name__} {path.relative_to(run)}")
    return done


def inside(path: Path, chance: random.Random) -> None:
    """Change values of the JSON in a file, and seal it as its writer would."""
    if path.stat().st_size > 1 << 30:
        return
    data = path.read_bytes()
    try:
        if path.suffix == ".jsonl":
            path.write_bytes(_other_journal(data, chance))
        else:
            body = json.loads(data)
            change(body, chance)
            path.write_bytes(seal(body))
    except (ValueError, RecursionError):  # it holds no JSON, or none that can be written
        raw(path, chance)


def _other_journal(data: bytes, chance: random.Random) -> bytes:
    lines = data.decode().split("\n")
    at = chance.randrange(len(lines) - 1)
    if chance.random() < 0.1:
        lines[at] = chance.choice(['{"kind":"step"}', "[]", "7", "null", "[" * 5000, '{"a":' * 900 + "1" + "}" * 900])
    else:
        entry = json.loads(lines[at])
        if isinstance(entry, dict | list):  # the file may have been spoiled before
            change(entry, chance)
        lines[at] = json.dumps(entry)
    return "\n".join(lines).encode()


def change(body: Any, chance: random.Random) -> None:
    """Set, drop, double or exchange a few values."""
    for _ in range(chance.choice([1, 1, 2, 4])):
        found = places(body, [])
        if not found:
            return
        where, key = chance.choice(found)
        match chance.choice(["set", "set", "set", "drop", "deep", "swap"]):
            case "set":
                where[key] = chance.choice(VALUES)
            case "drop":
                del where[key]
            case "deep":
                for _ in range(chance.choice([3, 150, 950])):
                    where[key] = [where[key]]
            case _:
                other, at = chance.choice(found)
                where[key] = json.loads(json.dumps(other[at]))


def raw(path: Path, chance: random.Random) -> None:
    """Change bytes, cut the file off, or make it very long."""
    if path.stat().st_size > 1 << 30:
        return
    data = bytearray(path.read_bytes())
    match chance.choice(["flip", "flip", "cut", "empty", "zeros", "huge", "text"]):
        case "flip" if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "cut" if data:
            del data[chance.randrange(len(data)) :]
        case "empty":
            data = bytearray()
        case "zeros":
            data = bytearray(4096)
        case "huge":
            with path.open("r+b") as file:
                file.truncate(1 << 40)
            return
        case _:
            data = bytearray(b"\xff\xfe not JSON\n")
    path.write_bytes(data)


def replaced(path: Path, chance: random.Random) -> None:
    """Put a pipe, a device, a folder or a link in place of a file."""
    path.unlink()
    match chance.choice(["fifo", "zero", "folder", "dangling", "loop", "elsewhere"]):
        case "fifo":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "dangling":
            path.symlink_to("not there")
        case "loop":
            path.symlink_to(path.name)
        case _:
            path.symlink_to("/etc/passwd")


def renamed(path: Path, chance: random.Random) -> None:
    """Give a file another name of its kind, or a nearly right one."""
    names = [
        "00000000.jsonl",
        "99999999999999999999.jsonl",
        "x.jsonl",
        "0000000000.json",
        "9" * 30 + ".json",
        "a b.json",
    ]
    names += ["removal.json", "deleting.json", "reference.json", "\x1b[2J.json", "manifest.json", ".json", "x.json"]
    new = path.with_name(chance.choice(names))
    if not new.exists():
        path.rename(new)


def folder_replaced(path: Path, chance: random.Random) -> None:
    """Put a file, a pipe or a link in place of a file's folder."""
    folder = path.parent
    shutil.rmtree(folder)
    match chance.choice(["file", "fifo", "dangling", "up"]):
        case "file":
            folder.write_text("in the way")
        case "fifo":
            os.mkfifo(folder)
        case "dangling":
            folder.symlink_to("not there")
        case _:
            folder.symlink_to("..")


# -- commands --


class Told(RayshardedError):
    """A command has printed one of our errors."""


class NoWorkers(RayshardedError):
    """The driver has resumed, and wants workers."""


class NoLauncher:
    """The launcher of a run that ends before it has any worker."""

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def where(self) -> tuple[str, str]:
        return "", ""

    def has_ended(self, cluster: str, job: str) -> bool:
        return False

    def of_another_version(self) -> None:
        return None

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        raise NoWorkers

    def gcs_health(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def resume(run: Path) -> None:
    """Resume the run, as `fit()` does, until it needs workers."""
    trainer = rs.ElasticTrainer(
        task=_Task(),
        data=list(range(301)),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=(1, 2)),
        run=rs.RunConfig(name=run.name, storage_path=str(run.parent), max_steps=100),
    )
    with suppress(NoWorkers):
        LocalRun(trainer.spec(), take_over=True, launch=lambda _: NoLauncher()).drive()  # type: ignore[arg-type, return-value]


class _Task(rs.Task):
    def build_model(self) -> Any: ...

    def build_optimizer(self, model: Any) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


class Runner(CliRunner):
    """Runs commands with a standard output that takes any text, as that of the shell's command."""

    @contextmanager
    def isolation(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(*arguments, **options) as streams:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it is a TextIOWrapper
            yield streams


_APP: Any = typer.main.get_command(app)  # typer has its own click


def command(*words: str) -> Callable[[Path], None]:
    """A command of the shell. RUN stands for the run's folder, ABOVE for the one above it."""

    def run_it(run: Path) -> None:
        places = {"RUN": str(run), "ABOVE": str(run.parent)}
        result = Runner().invoke(_APP, [places.get(word, word) for word in words], catch_exceptions=False)
        if "Traceback" in result.output or result.exit_code not in (0, 1):
            raise AssertionError(result.output)
        if result.stderr.startswith("error: "):
            raise Told(result.stderr)
        if words[0] == "runs":
            found = {one["url"].rpartition("/")[2]: one["state"] for one in json.loads(result.stdout)}
            if found.get("healthy") != "finished":
                raise AssertionError(result.output)

    return run_it


COMMANDS: dict[str, list[Callable[[Path], None]]] = {
    "status": [command("status", "RUN"), command("status", "RUN", "--json")],
    "runs": [command("runs", "ABOVE", "--json")],
    "report": [command("report", "RUN", *more) for more in ([], ["--json"], ["--html", "-"])],
    "ls": [command("checkpoint", "ls", "RUN"), command("checkpoint", "ls", "RUN", "--json")],
    "show": [command("checkpoint", "show", "RUN"), command("checkpoint", "show", "RUN", "--json")],
    "verify": [command("checkpoint", "verify", "RUN", "--all")],
    "fit": [resume],
    "gc": [command("checkpoint", "gc", "RUN", "--keep-last", "1", *more) for more in ([], ["--now"], ["--dry-run"])],
}
"""Commands in the order in which they run, each with its forms, of which a case takes one."""


# -- cases --


@dataclass(kw_only=True, slots=True)
class Watched:
    """The results of some cases."""

    folders: int = 0
    answered: int = 0
    """Commands that ended without an error."""
    refused: int = 0
    """Commands that ended with one of our errors."""
    slowest_s: float = 0.0
    """Processor time of the slowest command."""
    grown_mib: int = 0
    """Largest growth of the process's peak memory in one case."""
    failures: list[str] = field(default_factory=list)
    """Everything else, with the seed of its case."""


def watch(count: int, seed: int = 0, *, report: Callable[[str], None] = lambda _: None) -> Watched:
    """Spoil `count` folders, and run all commands on each. The case of a seed is the same in every call."""
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="spoiled-") as made, quietly():
        originals = originals_in(Path(made))
        for number in range(seed, seed + count):
            known = len(watched.failures)
            case(number, originals, Path(made) / f"case-{number}", watched)
            for failure in watched.failures[known:]:
                report(failure)
            if watched.folders % 100 == 0:
                report(f"{watched.folders}: {len(watched.failures)} failures, slowest {watched.slowest_s:.1f} s")
    return watched


def originals_in(folder: Path) -> list[Path]:
    """The runs that cases spoil copies of, new in the folder."""
    return [_original(folder / f"original-{number}", random.Random(number)) for number in range(8)]


def _original(above: Path, chance: random.Random) -> Path:
    above.mkdir()
    return make_runs(above, chance)


def case(number: int, originals: list[Path], above: Path, watched: Watched) -> None:
    """Spoil a copy of one of the originals, and run all commands on it."""
    chance = random.Random(number)
    original = chance.choice(originals)
    shutil.copytree(original.parent, above, symlinks=True)
    run = above / original.name
    done = spoil(run, chance)
    neighbour = _digest(above / "healthy")
    before_mib = _peak_mib()
    faulthandler.dump_traceback_later(10 * LONGEST_S, exit=True)
    for name, forms in COMMANDS.items():
        act = chance.choice(forms)
        began = time.process_time()
        with connections() as opened:
            try:
                act(run)
                watched.answered += 1
            except RayshardedError as error:
                str(error)
                watched.refused += 1
            except BaseException as error:  # noqa: BLE001 - each is a failure
                where = traceback.extract_tb(error.__traceback__)
                inner = [frame for frame in where if "/raysharded/" in frame.filename][-1:] or where[-1:]
                at = f"{inner[0].filename.partition('/raysharded/')[2]}:{inner[0].lineno}"
                watched.failures.append(f"{number} {name}: {type(error).__name__}: {error!s:.200} at {at} ({done})")
        took = time.process_time() - began
        watched.slowest_s = max(watched.slowest_s, took)
        if opened:
            watched.failures.append(f"{number} {name}: {opened} ({done})")
        if took > LONGEST_S:
            watched.failures.append(f"{number} {name}: {took:.1f} s ({done})")
    faulthandler.cancel_dump_traceback_later()
    grown = _peak_mib() - before_mib
    watched.grown_mib = max(watched.grown_mib, grown)
    if grown > MOST_GROWN_MIB:
        watched.failures.append(f"{number}: {grown} MiB ({done})")
    if _digest(above / "healthy") != neighbour:
        watched.failures.append(f"{number}: the neighbour was changed ({done})")
    watched.folders += 1
    shutil.rmtree(above, ignore_errors=True)


def _digest(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if stat.S_ISREG(path.stat().st_mode)}


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@contextmanager
def quietly() -> Iterator[None]:
    """A context without log messages."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(count: str, seed: str = "0") -> None:
    """Writes the results to stdout. A case that hangs, or takes the machine's memory, ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    found = watch(int(count), int(seed), report=_tell)
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
    sys.exit(1 if found.failures else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
