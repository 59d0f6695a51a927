"""A quarter of an hour of chaos: workers meet faults of every kind, and at the end nothing has changed.

python -m benchmarks.soak [--minutes 15] [--workers 5] [--every 20] [--seed 0] [--json PATH]

A small GPT trains on Ray. At random times, about `--every` seconds apart, a worker meets a fault. It is killed,
stopped, requested to leave, slowed down, cut off from the network, wedged or stuck, or it raises, or computes a wrong
bit. Every step is audited. Then the run is stopped with a checkpoint and resumed for a few steps more.

Exits with 1 unless all of this holds. The final state is, bit for bit, that of as many undisturbed steps. Every sample
was read once. No process, port, temporary file or unfinished checkpoint is left. Driver and workers need no more memory
and files than before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

import raysharded as rs
from benchmarks.memory import Sampler, slope
from benchmarks.workload import BATCH, RandomBytes
from raysharded.actors.comm.sockets import listening_ports, open_sockets
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.demo.model import ByteGPT
from raysharded.display.raylet_output import quiet_raylet
from raysharded.errors import RunFailed
from raysharded.ray_backend.cluster import start_local
from raysharded.run import Result
from raysharded.testing import Chaos, FaultPlan
from raysharded.testing.faults import Kind
from raysharded.testing.hazards import ORDERED, SIGNALLED, Hazard
from raysharded.testing.processes import fit

DURATIONS: dict[Kind, float | None] = {
    "kill": None, "stop": None, "term": None, "slow": 2.0, "wedge": 60.0, "stuck": None, "raise": None, "drop": None,
    "corrupt": None,
}  # fmt: skip
STEPS_AFTER_RESUME = 10
NEVER = 1_000_000
MOST_MB_PER_MINUTE = 1.0
MEMORY_AFTER_S = 300.0
"""Growth is judged in soaks of at least this length: before, caches fill."""
MARK = "RAYSHARDED_SOAK"


def trainer(name: str, folder: str, workers: int | tuple[int, int], steps: int) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=ByteGPT(layers=2, width=64, heads=4, seq_len=128, dropout=0.1, warmup_steps=10, total_steps=10_000),
        data=RandomBytes(),
        batch=BATCH,
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(
            name=name,
            storage_path=folder,
            max_steps=steps,
            checkpoint=rs.CheckpointConfig(every_steps=20),
            failure=rs.FailureConfig(task_error_retries=10, progress_timeout_s=60.0),
        ),
        engine=rs.EngineConfig(audit_every_steps=1),  # a flipped bit would stay otherwise
    )


def disturbed(folder: str, workers: int, minutes: float, every_s: float, seed: int) -> tuple[Chaos, Sampler]:
    """The run that meets all faults, for so long, and then stops with a checkpoint."""
    plan = FaultPlan(faults=(), folder=folder, listens=True)
    job = trainer("soak", folder, (2, workers), NEVER)
    job.faults = plan
    hazards = [
        Hazard(kind=kind, every_s=every_s * len(DURATIONS), seconds=seconds) for kind, seconds in DURATIONS.items()
    ]
    run = job.start_local(say)
    try:
        wait_for_first_step(run)
        with Sampler(run.status) as sampler, Chaos(run, hazards, seed=seed, plan=plan) as chaos:
            time_is_over(run, minutes * 60)
        run.stop(checkpoint=True, within_s=120)
        run.wait(300)
    except RunFailed as error:
        if not str(error).startswith("Stopped."):
            raise
    finally:
        run.stop()
    return chaos, sampler


def wait_for_first_step(run: rs.Run) -> None:
    """Return when the first step is done; raises the run's failure if it fails before."""
    while run.status().step == 0:
        time_is_over(run, 0.2)


def time_is_over(run: rs.Run, seconds: float) -> None:
    """Return after so long; raises the run's failure if it fails before."""
    try:
        run.wait(seconds)
    except TimeoutError:
        return
    raise RunFailed("the run ended before the soak did")


def say(kind: str, fields: dict[str, Any]) -> None:
    if kind in ("chaos", "worker_lost", "recovery", "checkpoint_failed", "failed"):
        from raysharded.journal.entry_text import incident_text

        print(f"{time.strftime('%H:%M:%S')} {incident_text(kind, fields)}", flush=True)


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[Path]:
    """Make this process and those that it starts create their temporary files there, within the block."""
    before = os.environ.get("TMPDIR")
    folder.mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None  # None: read TMPDIR again
    try:
        yield folder
    finally:
        del os.environ["TMPDIR"]
        os.environ.update({"TMPDIR": before} if before is not None else {})
        tempfile.tempdir = None


def leftovers(ports_before: set[int], temporary: Path, url: str) -> list[str]:
    """Things that the soak left behind, though Ray is shut down."""
    found = [f"a process: {line}" for line in living_processes(20.0)]
    found += [f"port {port}" for port in set(listening_ports(open_sockets())) - ports_before]
    found += [f"a temporary file: {path}" for path in temporary.rglob("*") if not path.is_dir()]
    refs = list_checkpoints(open_storage(url))  # the data of retired checkpoints is deleted with the next commit
    found += [
        f"a save that is {ref.state}: {ref.reason}" for ref in refs if not ref.complete and ref.state != "retired"
    ]
    return found


def living_processes(within_s: float) -> list[str]:
    """Command lines of our descendants that are still alive after so long."""
    deadline = time.monotonic() + within_s
    while (alive := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def marked_processes() -> list[str]:
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not ended and mark in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120].strip())
            except OSError:
                continue
    return found


def on_ray(folder: str, workers: int, minutes: float, every_s: float, seed: int) -> tuple[Chaos, Sampler, Result]:
    """The disturbed run, and the same resumed at another size until a few steps later."""
    with quiet_raylet():
        start_local(num_cpus=workers + 2)
        try:
            chaos, sampler = disturbed(folder, workers, minutes, every_s, seed)
            refs = list_checkpoints(open_storage(f"{folder}/soak"))
            newest = max((ref.step for ref in refs if ref.complete), default=0)  # none if all were down when it stopped
            resumed = trainer("soak", folder, 2, newest + STEPS_AFTER_RESUME).fit(say)
        finally:
            ray.shutdown()
    return chaos, sampler, resumed


def soak(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """All findings; `problems` is empty if every promise held."""
    ports = set(listening_ports(open_sockets()))
    with temporary_files_in(Path(folder, "tmp")) as temporary:
        chaos, sampler, resumed = on_ray(folder, options.workers, options.minutes, options.every, options.seed)
    problems = [f"left behind: {what}" for what in leftovers(ports, temporary, resumed.url)]
    undisturbed = fit(trainer("undisturbed", folder, 1, resumed.steps))
    report = resumed.report()
    if resumed.fingerprint != undisturbed.fingerprint:
        problems.append(f"the state differs: {resumed.fingerprint} and {undisturbed.fingerprint}")
    if not report.ok or report.ledger is None or report.ledger.steps_checked != resumed.steps:
        problems.append(f"samples or steps: {report.ledger}, {report.summary.differences}")
    growth = {"driver": slope(sampler.driver), "worker": sampler.worker_growth()}
    if options.minutes * 60 >= MEMORY_AFTER_S:
        problems += [f"a {who} grows by {mb:.2f} MB a minute" for who, mb in growth.items() if mb > MOST_MB_PER_MINUTE]
        problems += (
            [f"the driver opens {sampler.file_growth():.1f} files a minute"] if sampler.file_growth() > 1 else []
        )
    recoveries = report.summary.recoveries
    return {
        "minutes": options.minutes,
        "steps": resumed.steps,
        "faults": struck(chaos, folder),
        "workers_lost": sum(event.what == "lost" for event in report.summary.worker_events),
        "recoveries": len(recoveries),
        "recovery_s_median": statistics.median([r.total_s for r in recoveries]) if recoveries else None,
        "recoveries_from": dict(Counter(recovery.source for recovery in recoveries)),
        "corruptions": len(report.summary.corruptions),
        "steps_redone": sum(recovery.steps_redone for recovery in recoveries),
        "goodput": report.summary.goodput,
        "growth_mb_per_minute": growth,
        "driver_mb": sampler.driver[-1][1] if sampler.driver else None,
        "driver_files_per_minute": sampler.file_growth(),
        "fingerprint": resumed.fingerprint,
        "problems": problems,
    }


def struck(chaos: Chaos, folder: str) -> dict[Kind, int]:
    """Kind -> how many faults really happened; a fault that a worker inflicts on itself has left a marker."""
    outside = {kind: sum(fault.kind == kind for fault in chaos.struck) for kind in SIGNALLED}
    return outside | {kind: len(list(Path(folder).glob(f"{kind}-worker*"))) for kind in ORDERED if kind in DURATIONS}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=15.0)
    arguments.add_argument("--workers", type=int, default=5, help="the most; the run continues with 2")
    arguments.add_argument("--every", type=float, default=20.0, help="seconds between two faults, on average")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    os.environ[MARK] = uuid.uuid4().hex
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # its logs may stay, and its sockets need short paths
    with tempfile.TemporaryDirectory(prefix="raysharded-soak-") as folder:
        found = soak(folder, options)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
