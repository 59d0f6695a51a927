"""The demo: packs the standard library's sources, trains on them while workers are killed, trains undisturbed,
compares."""

from __future__ import annotations

import json
import os
import signal
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from raysharded.clock import SystemClock
from raysharded.config import BatchConfig, FailureConfig, RunConfig, ScalingConfig
from raysharded.demo.outcome import Outcome, Training, show
from raysharded.errors import ConfigError, RayshardedError, StorageError
from raysharded.locations import local_path
from raysharded.report.live.progress import LiveView
from raysharded.run import Run
from raysharded.testing.chaos import Chaos
from raysharded.testing.hazards import ORDERED, SIGNALLED, Hazard, parse_hazards

STEPS = 32
WORKERS = 4
SEQ_LEN = 128
_FIRST_KILL_STEP = 4
_PROGRESS_TIMEOUT_S = 30.0
"""Many of its steps: a stopped worker is detected by then."""
_MID_STEP = 0.5
"""Fraction of a step's usual time after which a kill occurs."""


def run_demo(
    *,
    json_path: str | None,
    steps: int | None,
    workers: int | None,
    storage: str | None,
    chaos: str | None = None,
    seed: int = 0,
) -> int:
    """Run the demo; returns the exit code: 0 if all checks pass.

    `chaos`: faults instead of the demo's kills, in the format of `raysharded.testing.Chaos`, with its seed. `storage`:
    a folder for its runs and data, without an existing demo; default: a temporary folder.
    """
    console = Console()
    steps, workers = steps or STEPS, workers or WORKERS
    if workers < WORKERS:
        raise ConfigError(f"--workers {workers}: the demo kills two workers at once; give {WORKERS} or more.")
    if storage is not None:
        _local(storage)
    hazards = parse_hazards(chaos) if chaos is not None else ()
    if inside := [hazard.kind for hazard in hazards if hazard.kind in ORDERED]:
        raise ConfigError(f"--chaos: {inside[0]} is not for the demo; give {', '.join(SIGNALLED)}.")
    with _folder(storage) as folder:
        data = _pack_standard_library(folder, console)
        with _ray(workers):

            def harm(training: Training, run: Run) -> None:
                if hazards:
                    _chaos(training, run, hazards, seed)
                else:
                    _Killer(training, run.status, console.print, workers).watch(run.wait)

            disturbed = _train("with losses", folder, data, steps, (2, workers), console, harm)
            console.print("Now the same on 2 workers, undisturbed:")
            undisturbed = _train("undisturbed", folder, data, steps, (2, 2), console, None)
        outcome = Outcome.of(disturbed, undisturbed, steps=steps, chaos=bool(hazards))
    show(outcome, console)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(outcome.as_dict(), indent=2) + "\n")
    return 0 if outcome.held else 1


def _local(storage: str) -> str:
    """The path of a folder. Raises ConfigError for storage elsewhere."""
    path = local_path(storage)
    if path is None:
        raise ConfigError(f"--storage {storage}: the demo keeps its runs on this machine; give a folder.")
    return path


@contextmanager
def _folder(storage: str | None) -> Iterator[Path]:
    if storage is not None:
        path = Path(_local(storage))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"--storage {storage}: the folder cannot be made: {error.strerror}.") from error
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="raysharded-demo-") as name:
        yield Path(name)


@contextmanager
def _ray(workers: int) -> Iterator[None]:
    """A small private Ray: two cores are enough for all workers, each computes with one thread."""
    import ray

    from raysharded.display.raylet_output import quiet_raylet
    from raysharded.ray_backend.cluster import start_local

    with quiet_raylet():
        start_local(num_cpus=workers)
        try:
            yield
        finally:
            ray.shutdown()


def standard_library_sources() -> list[str]:
    """The Python files of the running interpreter's standard library, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(str(p) for p in root.rglob("*.py") if "site-packages" not in p.parts and "__pycache__" not in p.parts)


def _pack_standard_library(folder: Path, console: Console) -> str:
    from raysharded.data.pack import pack

    started = time.monotonic()
    target = folder / "data"
    report = pack(standard_library_sources(), str(target), input_format="text")
    console.print(
        f"Packed {report.documents:,} source files of the standard library: {report.tokens:,} tokens "
        f"in {time.monotonic() - started:.1f} s."
    )
    return str(target)


def _train(
    name: str, folder: Path, data: str, steps: int, workers: tuple[int, int], console: Console, harm: _Harm | None
) -> Training:
    from raysharded.data import TokenDataset
    from raysharded.demo.model import ByteGPT
    from raysharded.trainer import ElasticTrainer

    batch = BatchConfig(global_batch_size=16, microbatch_size=2, seed=0)
    trainer = ElasticTrainer(
        task=ByteGPT(layers=4, seq_len=SEQ_LEN, warmup_steps=steps // 8 or 1, total_steps=steps),
        data=TokenDataset(data, seq_len=SEQ_LEN),
        batch=batch,
        scaling=ScalingConfig(num_workers=workers),
        run=RunConfig(
            name=name.replace(" ", "-"),
            storage_path=str(folder / "runs"),
            max_steps=steps,
            failure=FailureConfig(progress_timeout_s=_PROGRESS_TIMEOUT_S),
        ),
    )
    training = Training(url=trainer.url)
    tokens_per_step = batch.global_batch_size * SEQ_LEN
    with LiveView(console, steps, SystemClock(), tokens_per_step) as view:

        def listen(kind: str, entry: dict[str, Any]) -> None:
            training.entries.append((kind, entry))
            view.on_entry(kind, entry)

        run = trainer.start_local(listen)
        try:
            if harm is not None:
                harm(training, run)
            training.fingerprint = run.wait().fingerprint
        except KeyboardInterrupt:
            run.stop()
            with suppress(RayshardedError):
                run.wait()
            raise
    return training


_Harm = Callable[[Training, Run], None]
"""Inflicts the faults that a run must survive."""


def _chaos(training: Training, run: Run, hazards: Sequence[Hazard], seed: int) -> None:
    with Chaos(run, hazards, seed=seed) as chaos, suppress(RayshardedError):  # the caller's `wait` raises it
        run.wait()
    training.kills.extend((struck.at, (struck.worker,)) for struck in chaos.struck)


class _Killer:
    """Kills one worker in the middle of a step, and two at once when all `full` workers are back."""

    def __init__(self, training: Training, status: Callable[[], Any], note: Callable[[str], None], full: int) -> None:
        self._training, self._status, self._note = training, status, note
        self._seen_step, self._step_began, self._step_s = -1, 0.0, 0.0
        self._full = full

    def watch(self, wait: Callable[[float], Any]) -> None:
        """Return when both kills are done, or the run is over."""
        while len(self._training.kills) < 2:
            try:
                wait(0.01)
                return
            except TimeoutError:
                self._look()
            except RayshardedError:
                return  # the caller's `wait` raises it

    def _look(self) -> None:
        status, now = self._status(), time.monotonic()
        if status.phase != "training":
            self._seen_step = -1
            return
        if status.step != self._seen_step:
            if self._seen_step >= 0:
                self._step_s = now - self._step_began
            self._seen_step, self._step_began = status.step, now
            return
        in_the_middle = self._step_s > 0 and now - self._step_began >= _MID_STEP * self._step_s
        if not in_the_middle:
            return
        if not self._training.kills and status.step >= _FIRST_KILL_STEP:
            self._kill(status, (status.workers[1],))
        elif self._training.kills and len(status.workers) == self._full:
            self._kill(status, (status.workers[0], status.workers[2]))

    def _kill(self, status: Any, workers: tuple[int, ...]) -> None:
        self._training.kills.append((time.monotonic(), workers))
        for worker in workers:
            os.kill(status.pids[worker], signal.SIGKILL)
        names = " and ".join(map(str, workers))
        self._note(f"SIGKILL to worker {names} in the middle of step {status.step + 1}")
        self._step_s, self._seen_step = 0.0, -1
