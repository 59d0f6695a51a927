"""A run on a Ray that it starts, from a process without standard streams: `python -m tests.ray.own_ray FOLDER`.

A worker is stopped. Then all processes get SIGHUP, as at the end of a terminal.
FOLDER/found has what was seen, FOLDER/failed a traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import ray

import raysharded as rs
from raysharded.actors.process.os_processes import start_ticks
from raysharded.errors import CheckpointError
from raysharded.testing.ray_nodes import descendants
from tests.ray.leftovers import wait_until
from tests.ray.test_main_job import trainer

STEPS = 1_000_000
FIND = "from raysharded.ray_backend.cluster import find_cluster; print(find_cluster())"

Found = dict[str, Any]


@ray.remote(num_cpus=0)
def environment_of_a_worker() -> dict[str, str]:
    return dict(os.environ)


def refused(folder: Path) -> str:
    """The refusal of a detached run, whose driver would not have the key of this process."""
    try:
        trainer(folder, 1).start()
    except CheckpointError as error:
        return str(error)
    return ""


def see(entries: list[tuple[str, dict[str, Any]]]) -> Found:
    """Findings on a run with two workers, one of which is stopped."""
    wait_until(lambda: sum(kind == "step" for kind, _ in entries) >= 3, "step 3")
    wait_until(lambda: sum(kind == "worker_ready" for kind, _ in entries) == 2, "two workers")
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    found: Found = {"gcs": address["RAY_ADDRESS"]}
    with subprocess.Popen(
        [sys.executable, "-c", FIND],
        env={**os.environ, **address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as other:
        found["addresses"] = listening_addresses()
        found["environments"] = {}
        for pid in set(descendants(os.getpid())) - {other.pid}:
            with contextlib.suppress(OSError):  # it has ended since
                name, environment = Path(f"/proc/{pid}/comm").read_text(), Path(f"/proc/{pid}/environ").read_bytes()
                found["environments"][name.strip()] = environment.decode()
        found["worker"], found["mine"] = ray.get(environment_of_a_worker.remote()), dict(os.environ)
        found["other"] = other.communicate(timeout=120)[0]
    victim = [fields["pid"] for kind, fields in entries if kind == "worker_ready"][-1]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: start_ticks(victim) is None, "the end of the stopped worker")
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    found["titles"] = [line.split(b"\0")[0].decode() for line in lines]
    return found


def listening_addresses() -> list[str]:
    """Those of this process and its children."""
    ours = {f"pid={pid}," for pid in descendants(os.getpid())}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if any(pid in line for pid in ours)]


def main(folder: Path) -> None:
    entries: list[tuple[str, dict[str, Any]]] = []
    found: Found = {"refused": refused(folder), "started": ray.is_initialized()}

    def act() -> None:
        try:
            found.update(see(entries))
        except BaseException:  # noqa: BLE001 - a test reports it
            (folder / "failed").write_text(traceback.format_exc())
        for _ in range(2):  # the kernel's, and the shell's
            os.killpg(0, signal.SIGHUP)

    job = trainer(folder, (1, 2), steps=STEPS, failure=rs.FailureConfig(hang_timeout_s=3.0))
    threading.Thread(target=act).start()
    try:
        job.fit(lambda kind, fields: entries.append((kind, fields)), progress=True)
    except rs.RunStopped as error:
        found["stopped"] = str(error)
    found["kinds"] = sorted({kind for kind, _ in entries})
    (folder / "found").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        with Path(sys.argv[1], "failed").open("a") as file:
            traceback.print_exc(file=file)
        raise
