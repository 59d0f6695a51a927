"""The Ray cluster of this process: found, or started here; and checks that it still answers. Knows Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, TextIO, cast

import ray
from ray._private import ray_constants

from raysharded.errors import ClusterError
from raysharded.quantities import count

_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")
_HERE = "local"
"""Ray's keyword in place of an address: start a cluster on this machine."""
_ANSWER_S = 10.0
"""Time in which a cluster at a given address must begin to listen there."""
_GONE_S = 20.0
"""Longest absence of a cluster's head, for example during a restart.

Ray itself ends the processes of a cluster whose head is away for a minute.
"""
_TRY_S = 2.0
_PAUSE_S = 0.2
_RAYLET_PREFIX = "(raylet)"
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_OWN_RAY = {
    # Workers have their parent's priority. With Ray's default, 15, everything else on the machine precedes training.
    "RAY_worker_niceness": "0",
    # Ray's log monitor looks for new files twice a second, not ten times: a task's prints may come that late.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    # Ray uses the loopback address, as on macOS and Windows: no other machine is to reach its ports.
    _CLUSTERS: "0",
}
"""Ray's settings where it is started only for runs of this process, unless the environment sets others."""


def connect() -> bool:
    """Use the cluster that this process is connected to, is pointed to, or finds running; else start one here.

    Returns whether one was started, which then ends with this process.
    """
    if find_cluster():
        return False
    start_local()
    return True


def find_cluster(address: str | None = None, *, log_to_driver: bool = True) -> bool:
    """Use the cluster at `address`, or the one that this process is connected to, is pointed to, or finds running.

    Returns whether there is one; there is none if the address, or RAY_ADDRESS, is "local". Raises ClusterError if no
    cluster answers at the address, or if this process is connected to another cluster. `log_to_driver`: whether this
    process prints its actors' output, if it connects now.
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise ClusterError(
                f"this process is connected to the cluster at {here}, not to {address}: a process can use one "
                "cluster. Call ray.shutdown() first, or use another process."
            )
        return True
    given = address or os.environ.get("RAY_ADDRESS", "")
    if given == _HERE or (not given and not _running_here()):
        return False
    named = f"the address {address!r}" if address else f"RAY_ADDRESS={given!r}"
    remedy = f"Check {named} and that the cluster runs (`ray status`), or leave it out to use a Ray on this machine."
    if not _answers(given, _ANSWER_S):
        raise ClusterError(f"there is no Ray cluster at {given}: nothing answered within {_ANSWER_S:g} s. {remedy}")
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise ClusterError(f"{type(error).__name__}: {text}. {remedy}") from None
    return True


def describe_size() -> str:
    """The nodes, CPUs and GPUs of the cluster that this process is connected to, as text."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    total, free = ray.cluster_resources(), ray.available_resources()
    slots = (f"{total.get(name, 0):g} {name}s ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
    return ", ".join([count(len(alive), "node"), *slots])


def refuse_a_lost_cluster(what: str) -> None:
    """Raise ClusterError if the head of the connected cluster is lost, and stays so for a while.

    `what` begins the message: the operation that is then impossible.
    """
    address = ray.get_runtime_context().gcs_address
    if not _answers(address, _GONE_S):
        raise ClusterError(
            f"{what}: the Ray cluster at {address} is lost; nothing has answered there for {_GONE_S:g} s. Start "
            "the run again on another cluster: it resumes from its newest checkpoint on storage."
        )


def _answers(address: str, within_s: float) -> bool:
    """Whether HOST:PORT accepts connections, now or within `within_s`; True for keywords like `auto`."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return True
    deadline = time.monotonic() + within_s
    while not _listens(host.strip("[]"), int(port)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_TRY_S):
            return True
    except OSError:
        return False


def start_local(num_cpus: int | None = None) -> None:
    """Start a Ray on this machine that ends with this process; `num_cpus` counts slots, not cores.

    All of its ports are on the loopback interface, unless the environment has RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1.
    """
    ours = {name: value for name, value in _OWN_RAY.items() if name not in os.environ}
    os.environ.update(ours)  # its processes inherit them
    clusters = ray_constants.ENABLE_RAY_CLUSTER  # this process has read the variable when it imported Ray
    try:
        ray_constants.ENABLE_RAY_CLUSTER = os.environ[_CLUSTERS].lower() in ("1", "true")
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name in ours:
            del os.environ[name]


def carry_user_code(*objects: object) -> None:
    """Send the modules that define these objects' classes along with the job, unless they are installed."""
    for cls in (thing if isinstance(thing, FunctionType) else type(thing) for thing in objects):
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or cls.__module__ == "__main__" or cls.__module__.startswith("raysharded."):
            continue
        if "site-packages" not in Path(file).parts:
            ray.cloudpickle.register_pickle_by_value(module)


@contextlib.contextmanager
def quiet_raylet() -> Iterator[None]:
    """Suppress Ray's own paragraphs about dead workers: raysharded reports a lost worker itself.

    Ray prints them from a thread of the driver, to `sys.stdout`, regardless of its logging settings.
    """
    outside = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRaylet(outside))
    try:
        yield
    finally:
        sys.stdout = outside


class _WithoutRaylet:
    """A text stream that drops Ray's output under the name of its raylet."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropping = False

    def write(self, text: str) -> int:
        if _RAYLET_PREFIX in text[:40]:
            self._dropping = not text.endswith("\n")
            return len(text)
        if self._dropping:
            self._dropping = "\n" not in text
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _running_here() -> bool:
    """Whether the cluster last started on this machine still answers: Ray would wait long for one that does not."""
    try:
        host, _, port = _ADDRESS_FILE.read_text().strip().rpartition(":")
        return _listens(host, int(port))
    except (OSError, ValueError):
        return False
