"""A driver in a separate process, to be killed, stopped and woken up: `python -m tests.ray.driving FOLDER ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import raysharded as rs
from raysharded.errors import RayshardedError
from tests.training.harness import GptTask, Outcome, Tokens, train

STEPS = 12
MICROBATCHES = 4
LEASE_S = 2.0


class PacedTokens(Tokens):
    """Slow until `hurry` reports that the awaited event of a test has happened: so the run is not over before.

    A process that has read some steps becomes slower: on a busy machine the event comes late.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._hurry, self._read = folder / "hurry", 0

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        until = time.monotonic() + (0.15 if self._read <= 10 * MICROBATCHES else 1.5)
        while not self._hurry.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return super().__getitem__(index)


def hurry(folder: Path) -> None:
    """Let the runs in the folder continue as fast as they can."""
    (folder / "hurry").touch()


class HoldsALock:
    """A writer of metrics that cannot be pickled once the run has begun, as one with an open file."""

    def begin(self, _: Any) -> None:
        self.lock = threading.Lock()

    def step(self, _: Any) -> None:
        pass

    def event(self, _: Any) -> None:
        pass

    def close(self) -> None:
        pass


@cache
def undisturbed() -> Outcome:
    """The run on one plain process."""
    return train(1, steps=STEPS, microbatches=MICROBATCHES)


def trainer(
    folder: Path,
    workers: int | tuple[int, int],
    *,
    name: str = "driven",
    orphan_wait_s: float = 60.0,
    lease_s: float = LEASE_S,
    max_steps: int = STEPS,
) -> rs.ElasticTrainer:
    """The one run that all tests of this folder have in common, in every process that drives it."""
    return rs.ElasticTrainer(
        task=GptTask(),
        data=PacedTokens(folder),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=rs.RunConfig(
            name=name,
            storage_path=str(folder),
            max_steps=max_steps,
            lease_s=lease_s,
            record_events=True,
            metrics=[HoldsALock()],
            failure=rs.FailureConfig(orphan_wait_s=orphan_wait_s),
        ),
        engine=rs.EngineConfig(prefetch=False),
    )


class DriverProcess:
    """A process that drives the run on a cluster (None: on a separate Ray), and its messages so far."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        address: str | None,
        *,
        orphan_wait_s: float = 60.0,
        marker: str = "",
        program: str = "driving",
    ) -> None:
        environment = {**os.environ, "RAYSHARDED_TEST": marker}
        environment["RAY_ADDRESS"] = "local" if address is None else address
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.ray.{program}", str(folder), str(workers), str(orphan_wait_s)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self.entries: list[tuple[str, dict[str, Any]]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                entry = json.loads(line)
                with self._changed:
                    self.entries.append((entry.pop("kind"), entry))
                    self._changed.notify_all()

    def wait_for(self, what: Callable[[str, dict[str, Any]], bool], timeout_s: float = 300.0) -> dict[str, Any]:
        """The first entry for which `what` holds."""

        def found() -> list[dict[str, Any]]:
            return [fields for kind, fields in self.entries if what(kind, fields)]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), timeout_s), self.entries
            return found()[0]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda kind, fields: kind == "step" and fields["step"] >= step)

    @property
    def pids(self) -> list[int]:
        """Process ids of its workers."""
        return [fields["pid"] for kind, fields in self.entries if kind == "worker_ready"]


def tell(kind: str, fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, workers, orphan_wait_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        result = trainer(folder, workers, orphan_wait_s=orphan_wait_s).fit(tell)
    except RayshardedError as error:
        tell("raised", {"error": type(error).__name__, "text": str(error)})
        sys.exit(1)
    tell("result", {"fingerprint": result.fingerprint})


if __name__ == "__main__":
    from tests.ray.driving import main as imported_main  # so that the classes have one name wherever they are driven

    imported_main()
