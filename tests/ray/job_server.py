"""A separate Ray cluster with a job server, as `ray start --head` makes it; on loopback and free ports."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ray.job_submission import JobStatus, JobSubmissionClient

from tests.paths import ROOT
from tests.ray.leftovers import wait_until

_START_S = 180.0
_END_S = 30.0


class JobServer:
    """Ends with its block, with all processes that were started on it."""

    def __init__(self, num_cpus: int) -> None:
        self._marker = f"RAYSHARDED_TEST={uuid.uuid4().hex}"
        name, _, value = self._marker.partition("=")
        self._folder = tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True)
        gcs, dashboard, agent, metrics, client = _free_ports(5)
        self.address, self.url = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        token = secrets.token_hex(32)  # for this cluster alone: it runs every command that it receives
        self._headers = {"Authorization": f"Bearer {token}"}
        environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment.pop("RAY_ADDRESS", None)
        options = {
            "port": gcs,
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "metrics-export-port": metrics,
            "ray-client-server-port": client,
            "dashboard-host": "127.0.0.1",
            "node-ip-address": "127.0.0.1",
            "include-dashboard": "true",
            "num-cpus": num_cpus,
            "temp-dir": self._folder.name,
        }
        self._process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--head",
                "--block",
                "--disable-usage-stats",
                *(f"--{option}={given}" for option, given in options.items()),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self)
            wait_until(self._answers, "the job server", _START_S)
            stack.pop_all()
        self.client = JobSubmissionClient(self.url, headers=self._headers)
        return self

    def _answers(self) -> bool:
        assert self._process.poll() is None, "ray start --head ended"
        with suppress(Exception):
            JobSubmissionClient(self.url, headers=self._headers).list_jobs()
            return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._pids(), "the cluster's end", _END_S)
        self._process.wait(_END_S)
        self._folder.cleanup()

    def _pids(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and self._marker.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return [pid for pid in found if pid != os.getpid()]

    def submit(self, folder: Path, *command: object) -> str:
        """Submit a command with a working directory, once the cluster's agent takes jobs; returns the job's id."""
        submitted: list[str] = []

        def takes_it() -> bool:
            entrypoint, environment = " ".join(map(str, command)), {"working_dir": str(folder)}
            try:
                submitted.append(self.client.submit_job(entrypoint=entrypoint, runtime_env=environment))
            except RuntimeError as error:
                if "No available agent" not in str(error):
                    raise
                return False
            return True

        wait_until(takes_it, "an agent that takes jobs", _START_S)
        return submitted[0]

    def wait(self, job: str, timeout_s: float = 180.0) -> tuple[JobStatus, str]:
        """The job's final status, and its output."""

        def told() -> str:
            return f"job {job} {self.client.get_job_status(job)}:\n{self.client.get_job_logs(job)}"

        wait_until(lambda: self.client.get_job_status(job).is_terminal(), told, timeout_s)
        return self.client.get_job_status(job), self.client.get_job_logs(job)

    def pid(self, word: str) -> int:
        """Process id of the one Python process of this cluster whose command line has this word."""
        (found,) = [pid for pid in self._pids() if word in _command(pid) and _command(pid)[0].endswith("python")]
        return found


def _command(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return [""]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets: list[Any] = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
