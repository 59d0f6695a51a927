"""Processes of a run that are still there: on this machine, and on a Ray cluster. Knows Ray."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from raysharded.errors import ClusterError

if TYPE_CHECKING:
    from raysharded.report.recent import Recent

TITLE = "ray::Tenant"
"""Start of every worker's command line, as Ray sets it."""
_STARTED = 19
"""Index into /proc/<pid>/stat after the command's name (proc(5): field 22)."""
_CLOCKS_S = 60.0
"""Longest time by which a driver's clock may be behind this machine's."""


def is_worker(pid: int) -> bool:
    """Whether a process of this machine is a worker of some run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(TITLE.encode())
    except OSError:
        return False


def local_workers(recent: Recent) -> list[int]:
    """Process ids of the run's members on this machine that are still there."""
    here = [member for member, node in recent.nodes.items() if node == platform.node()]
    return [
        recent.pids[member]
        for member in here
        if is_worker(recent.pids[member]) and _started_by(recent.pids[member], recent.ready_at[member])
    ]


def on_cluster(name: str, url: str, address: str | None = None) -> list[str]:
    """The run's processes on the Ray cluster that is found, in words; empty without a cluster.

    Raises ClusterError if no cluster answers at `address`.
    """
    from raysharded.protocol.session import run_digest
    from raysharded.ray_backend import cluster, peers
    from raysharded.run.hosted.registry import about, host_name, host_of

    try:
        if not cluster.find_cluster(address, log_to_driver=False):
            return []
    except ClusterError:
        if address is not None:
            raise
        return []
    host = host_of(host_name(name, url))
    found = about(host) if host is not None else None
    driver = [f"its driver actor is at work ({found})"] if found is not None and not found.is_over else []
    workers = [named.worker for named in peers.find(run_digest(url)) if peers.handle(named) is not None]
    many = ", ".join(map(str, sorted(workers)))
    return [*driver, *([f"its workers on the Ray cluster are still there: {many}"] if workers else [])]


def _started_by(pid: int, at: float) -> bool:
    """Whether a process started before a time: its id was not given to another process since."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
    return started <= at + _CLOCKS_S
