"""A run on the laboratory's machines: `python -m tests.lab.training fit|start FOLDER WORKERS [SETTING=VALUE ...]`.

The program is on one of the machines, and prints each entry of the run's journal as a line of JSON, and its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import raysharded as rs
from raysharded.testing import processes
from tests.lab.ray_machines import RayMachines
from tests.ray.leftovers import wait_until
from tests.training.harness import GptTask, Tokens

STEPS = 2000
"""Far more than all stories need: a run ends with its machines."""
MICROBATCHES = 4
WITHIN_S = 300.0


class Slow(Tokens):
    """Two workers need half a second for a step, so that few steps fall into a story."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.1)
        return super().__getitem__(index)


def trainer(folder: Path, workers: tuple[int, int], data: Tokens | None = None, **settings: float) -> rs.ElasticTrainer:
    """The run of all stories. `data`: other data with the same samples.

    `settings`: `max_steps`, `lease_s`, `every_steps`, and fields of `FailureConfig`. No node is avoided:
    stories strike the same one again and again.
    """
    max_steps, lease_s = int(settings.pop("max_steps", STEPS)), settings.pop("lease_s", 15.0)
    every = int(settings.pop("every_steps", 10_000))
    return rs.ElasticTrainer(
        task=GptTask(),
        data=data or Slow(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers, cpus_per_worker=1),
        run=rs.RunConfig(
            name="lab",
            storage_path=str(folder),
            max_steps=max_steps,
            lease_s=lease_s,
            checkpoint=rs.CheckpointConfig(every_steps=every, keep_last=100),
            failure=rs.FailureConfig(max_node_failures=None, **settings),  # type: ignore[arg-type]  # numbers
        ),
        engine=rs.EngineConfig(prefetch=False),
    )


@cache
def _continued(name: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of an undisturbed run that is continued: of states, or of numbers, at later and later steps."""
    return tempfile.TemporaryDirectory(prefix=f"lab-undisturbed-{name}")


_fingerprints: dict[int, str] = {}


def undisturbed(steps: int) -> str:
    """The fingerprint of the state after so many steps."""
    if steps in _fingerprints:
        return _fingerprints[steps]
    if steps > max(_fingerprints, default=0):
        found = processes.fit(trainer(Path(_continued("states").name), (1, 1), Tokens(), max_steps=steps))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = processes.fit(trainer(Path(folder), (1, 1), Tokens(), max_steps=steps))
    return _fingerprints.setdefault(steps, str(found.fingerprint))


_AT_ONCE = 100
"""Steps that an undisturbed run does at least when its numbers are wanted."""
_IN_ANY_RUN = frozenset({"generation", "workers", "seconds", "remarks"})
"""Fields of a step's entry that depend on the run, and not on what was computed."""
_known: list[dict[str, Any]] = []


def undisturbed_steps(count: int) -> Sequence[dict[str, Any]]:
    """The numbers of at least so many steps from the first one: as in their entries, read from JSON."""
    if count > len(_known):

        def listen(kind: str, fields: dict[str, Any]) -> None:
            if kind == "step":
                numbers = {name: value for name, value in fields.items() if name not in _IN_ANY_RUN}
                _known.append(json.loads(json.dumps(numbers, default=str)))

        folder = Path(_continued("numbers").name)
        processes.fit(trainer(folder, (1, 1), Tokens(), max_steps=count + _AT_ONCE), listen=listen)
        assert [numbers["step"] for numbers in _known] == list(range(1, count + _AT_ONCE + 1))
    return _known


_MANY = frozenset({"step", "recording", "event"})
"""Kinds of entries that come with every step."""


class LabRun:
    """The program, on one of the machines, and what it has printed so far."""

    def __init__(
        self,
        cluster: RayMachines,
        number: int,
        folder: Path,
        *,
        how: str = "fit",
        workers: tuple[int, int],
        **settings: float,
    ) -> None:
        """Start it on machine `number`."""
        self.folder, self.entries = folder, list[tuple[float, str, dict[str, Any]]]()
        self.ended: str | None = None
        given = [f"{name}={value}" for name, value in settings.items()]
        least, most = workers
        command = [sys.executable, "-m", "tests.lab.training", how, str(folder), str(least), str(most), *given]
        self.errors = folder / "stderr"
        folder.mkdir(exist_ok=True)
        with self.errors.open("w") as errors:
            self.process = cluster.popen(
                number, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                entry = json.loads(line)
                if "ended" in entry:
                    self.ended = entry["ended"]
                else:
                    self.entries.append((time.monotonic(), entry.pop("kind"), entry))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The entries of this kind so far."""
        return [fields for _, found, fields in list(self.entries) if found == kind]

    def first(self, kind: str, after: float = 0.0) -> float:
        """When the first entry of this kind after that moment came (monotonic seconds)."""
        return next(at for at, found, _ in list(self.entries) if found == kind and at > after)

    def wait_for(self, kind: str, count: int = 1, within_s: float = WITHIN_S) -> None:
        """Return when so many entries of this kind have come."""
        wait_until(lambda: len(self.of(kind)) >= count or self.process.poll() is not None, self._shown(kind), within_s)
        assert len(self.of(kind)) >= count, self._shown(kind)()

    def step(self) -> int:
        """The newest step."""
        steps = self.of("step")
        return int(steps[-1]["step"]) if steps else 0

    def wait_until_trained(self, workers: int, steps: int = 6) -> None:
        """Return when so many workers have done so many steps: the usual time of a step is known then."""

        def count() -> int:
            return sum(fields["workers"] == workers for fields in self.of("step"))

        what = self._shown(f"{steps} steps of {workers} workers")
        wait_until(lambda: count() >= steps or self.process.poll() is not None, what, WITHIN_S)
        assert count() >= steps, what()

    def wait(self, within_s: float = WITHIN_S) -> str:
        """The end of the run in words, when the program has ended."""
        self.process.wait(within_s)
        wait_until(lambda: self.ended is not None or self.process.returncode != 0, "its end", 5.0)
        return self.ended or ""

    def said(self) -> str:
        """Its log for a person."""
        return self.errors.read_text(errors="replace")

    def _shown(self, what: str) -> Callable[[], str]:
        return lambda: f"{what}; {self.shown()}"

    def shown(self) -> str:
        """Its newest entries but steps, its end, and its log, for a test that failed."""
        entries = [(round(at, 1), kind, fields) for at, kind, fields in list(self.entries) if kind not in _MANY]
        newest = "\n".join(str(entry)[:300] for entry in entries[-20:])
        end = f"it ended with {self.process.poll()}, {self.ended}; now it is {time.monotonic():.1f}"
        return f"{end}\n{newest}\n{self.said()[-3000:]}"


def main() -> None:
    """Run it, and print its entries."""
    how, folder, least, most, *given = sys.argv[1:]
    settings = {name: float(value) for name, _, value in (one.partition("=") for one in given)}
    made = trainer(Path(folder), (int(least), int(most)), None, **settings)

    def say(kind: str, fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}, default=str), flush=True)  # noqa: T201  # a script prints

    try:
        if how == "fit":
            result = made.fit(say)
        else:
            run = made.start()
            for _, kind, fields in (entry for entries in run.follow() for entry in entries):
                say(kind, fields)
            result = run.wait()
        ended = f"finished {result.fingerprint}"
    except Exception as error:  # noqa: BLE001 - the boundary: the story gets it
        ended = f"{type(error).__name__}: {error}"
    print(json.dumps({"ended": ended}), flush=True)  # noqa: T201
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL) if how == "start" else os._exit(0)


if __name__ == "__main__":
    main()
