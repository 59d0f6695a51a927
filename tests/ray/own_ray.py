"""A run on a Ray that it starts, from a process without standard streams: `python -m tests.ray.own_ray FOLDER`.

A worker is stopped. Then this process gets SIGTERM, and all processes get SIGHUP, as at the end of a terminal.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray

import raysharded as rs
from raysharded.actors.process.os_processes import start_ticks
from raysharded.checkpoint.format.signing import ENVIRONMENT_KEY
from raysharded.errors import CheckpointError
from raysharded.testing.ray_nodes import descendants
from tests.ray.leftovers import wait_until
from tests.ray.test_main_job import trainer

STEPS = 1_000_000
FIND = "from raysharded.ray_backend.cluster import find_cluster; print(find_cluster())"

Found = dict[str, Any]
Entries = list[tuple[str, dict[str, Any]]]


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


def members(entries: Entries) -> Sequence[int]:
    """The workers of the newest generation; none before it has trained a step."""
    newest = max((at for at, (kind, _) in enumerate(entries) if kind == "generation"), default=len(entries))
    trains = any(kind == "step" for kind, _ in entries[newest:])
    return entries[newest][1]["members"] if trains else ()


def see(entries: Entries) -> Found:
    """Findings on a run with two workers, one of which is stopped."""
    wait_until(lambda: len(members(list(entries))) == 2, "two workers that train")
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    found: Found = {"gcs": address["RAY_ADDRESS"]}
    with subprocess.Popen(
        [sys.executable, "-c", FIND],
        env={name: value for name, value in {**os.environ, **address}.items() if name != ENVIRONMENT_KEY},
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
    pids = {fields["worker"]: fields["pid"] for kind, fields in list(entries) if kind == "worker_ready"}
    victim = pids[members(list(entries))[-1]]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: start_ticks(victim) is None, "the end of the stopped worker")
    found["titles"] = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended since
            found["titles"].append(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode())
    return found


def listening_addresses() -> list[str]:
    """Those of this process and its children."""
    ours = {f"pid={pid}," for pid in descendants(os.getpid())}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if any(pid in line for pid in ours)]


def main(folder: Path) -> None:
    entries: Entries = []
    found: Found = {"refused": refused(folder), "started": ray.is_initialized(), "stops": []}
    is_stopping = threading.Event()

    def act() -> None:
        try:
            found.update(see(entries))
        except BaseException:  # noqa: BLE001 - a test reports it
            (folder / "failed").write_text(traceback.format_exc())
        os.kill(os.getpid(), signal.SIGTERM)
        found["sigterm_stops"] = is_stopping.wait(30)
        for _ in range(2):  # the kernel's, and the shell's
            os.killpg(0, signal.SIGHUP)

    def noting_stops(run: rs.Run) -> AbstractContextManager[Callable[..., None]]:
        stop = run.stop

        def note_and_stop(**arguments: Any) -> None:
            found["stops"].append(arguments)
            is_stopping.set()
            stop(**arguments)

        return patch.object(run, "stop", note_and_stop)

    job = trainer(folder, (1, 2), steps=STEPS, failure=rs.FailureConfig(hang_timeout_s=3.0))
    acting = threading.Thread(target=act, daemon=True)  # an error of `fit` ends this process at once
    acting.start()
    try:
        job.fit(lambda kind, fields: entries.append((kind, fields)), progress=True, context=noting_stops)
    except rs.RunStopped as error:
        found["stopped"] = str(error)
    acting.join(60)
    found["kinds"] = sorted({kind for kind, _ in entries})
    (folder / "found").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        with Path(sys.argv[1], "failed").open("a") as file:
            traceback.print_exc(file=file)
        raise
