"""Several Ray nodes on one machine, each with a separate raylet, that can be killed as if their machine was lost."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.cluster_utils import Cluster


class RayNodes:
    """A cluster in a separate folder: a head without slots, to which this process is connected, and further nodes.

    A context manager, once per process; no Ray may have run in the process before. Other clusters of this machine are
    not affected, and do not find this one.
    """

    def __init__(self, folder: str | None = None) -> None:
        """`folder`: for Ray's files, with a short path, as sockets need it; None: in `/tmp`."""
        self._folder = tempfile.mkdtemp(prefix="rn", dir=folder or "/tmp")
        os.environ["RAY_TMPDIR"] = self._folder
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 prefers all other processes
        self._cluster = Cluster(head_node_args={"num_cpus": 0, "include_dashboard": False}, initialize_head=True)
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def add(self, num_cpus: int) -> str:
        """Start one more node; returns its id."""
        node = self._cluster.add_node(num_cpus=num_cpus, include_dashboard=False)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def processes(self, node_id: str) -> list[int]:
        """A node's raylet and all processes that it started."""
        raylet = int(self._nodes[node_id].all_processes["raylet"][0].process.pid)
        return [raylet, *descendants(raylet)]

    def kill(self, node_id: str, processes: list[int] | None = None) -> None:
        """Send SIGKILL to a node's `processes` at once; finding them first takes a while."""
        for pid in processes or self.processes(node_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node = self._nodes.pop(node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """The descendants of a process: its children, their children, ..."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        children = parents.get(ahead.pop(), [])
        found += children
        ahead += children
    return found
