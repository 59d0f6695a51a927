"""A Ray cluster on the machines of the laboratory, whose head node can lose its GCS and get it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.lab.machines import Machine, Machines
from tests.ray.leftovers import wait_until
from tests.unpacked import Unpacked

HEAD = 0
"""The machine with Ray's head node."""
_PORT, _REDIS_PORT = 6379, 6380
_START_S = 120.0
_REDIS = Unpacked(
    name="redis", packages=("redis-server", "redis-tools"), programs=("redis-server", "redis-check-rdb", "redis-cli")
)


class RayMachines:
    """Machines with a Ray node each. A context manager.

    The first is the head node. Programs of a test run on the machines: this process is on none of them.
    """

    def __init__(self, slots: Sequence[int], *, redis: bool = False, settings: Mapping[str, str] | None = None) -> None:
        """`slots`: CPUs of each node; `redis`: keep the GCS's tables in a Redis, so that it can be started again.

        `settings`: environment variables of all that runs on the machines, Ray's own too.
        """
        self._slots = tuple(slots)
        self._gcs: tuple[list[str], dict[str, str]] = ([], {})
        with ExitStack() as exits:
            self.machines = exits.enter_context(Machines(len(slots)))
            self._environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))),
                "RAY_AUTH_MODE": "disabled",
                "RAY_COLOR_PREFIX": "0",
                "RAY_DEDUP_LOGS": "0",
                "RAY_worker_niceness": "0",  # Ray's own 15 gives all other programs on the machine priority
                "RAY_TMPDIR": str(self.machines[HEAD].own),
                **(settings or {}),
            }
            if redis:
                self._start_redis()
            for number in range(len(slots)):
                self.start(number)
            self._exits = exits.pop_all()

    @property
    def address(self) -> str:
        """The cluster's address on each of the machines."""
        return f"{self.machines[HEAD].address}:{_PORT}"

    def environment(self, number: int) -> dict[str, str]:
        """The environment of programs on this machine that use its Ray."""
        return {**self._environment, "RAY_ADDRESS": self.address}

    def popen(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A program on a machine that uses its Ray."""
        return self.machines[number].popen(command, self.environment(number), **options)

    def start(self, number: int) -> None:
        """Start a Ray node on a machine that is on, and return when it is one of the cluster's."""
        machine = self.machines[number]
        here = ["--head", f"--port={_PORT}"] if number == HEAD else [f"--address={self.address}"]
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", *here, f"--node-ip-address={machine.address}"),
            *(f"--num-cpus={self._slots[number]}", "--object-store-memory=100000000", "--disable-usage-stats"),
            *(("--include-dashboard=false", f"--temp-dir={machine.own}") if number == HEAD else ()),
        ]
        machine.run(command, self._environment, _START_S)

    def processes(self, number: int, name: str) -> list[int]:
        """Ids, on this machine, of a machine's processes whose command line contains `name`."""
        return [pid for pid, command in self.machines[number].processes().items() if name in command]

    # -- the head node --

    def kill_gcs(self) -> None:
        """End the GCS with SIGKILL; the rest of the head node continues."""
        (pid,) = self._gcs_pids()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")[:-1]
        self._gcs = (command, dict(one.split("=", 1) for one in environment))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._gcs_pids(), "the end of the GCS")

    def restart_gcs(self) -> None:
        """Start the GCS that was killed again, as it was started."""
        command, environment = self._gcs
        self.machines[HEAD].popen(
            command, environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop_gcs(self) -> None:
        """Stop the GCS: its connections stay open, and nothing answers."""
        (pid,) = self._gcs_pids()
        os.kill(pid, signal.SIGSTOP)

    def continue_gcs(self) -> None:
        """Continue the GCS that was stopped."""
        (pid,) = self._gcs_pids()
        os.kill(pid, signal.SIGCONT)

    def _gcs_pids(self) -> list[int]:
        found = self.machines[HEAD].processes()
        return [pid for pid, command in found.items() if command.split(" ")[0].endswith("/gcs_server")]

    def _start_redis(self) -> None:
        root, machine = _REDIS.root(), self.machines[HEAD]
        command = [str(root / "usr/bin/redis-server"), "--port", str(_REDIS_PORT), "--save", "", "--appendonly", "no"]
        machine.popen(
            [*command, "--dir", str(machine.own)],
            _REDIS.environment(root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{_REDIS_PORT}"
        ask = [str(root / "usr/bin/redis-cli"), "-p", str(_REDIS_PORT), "ping"]
        wait_until(lambda: _says(machine, ask, _REDIS.environment(root)) == "PONG", "Redis", _START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exits.close()


def _says(machine: Machine, command: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        return machine.run(command, environment).strip()
    except subprocess.CalledProcessError:
        return ""
