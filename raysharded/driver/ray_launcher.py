"""Workers as Ray actors. Together with `trainer`, the only code of the driver's side that knows Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raysharded.config import ScalingConfig
from raysharded.driver.launching import Gone, Reply
from raysharded.driver.messages import Job
from raysharded.errors import ClusterError
from raysharded.ids import WorkerId

_CONCURRENT_CALLS = 8
_RAYLET_PREFIX = "(raylet)"
_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


def connect() -> bool:
    """Use the cluster that this process is connected to, is pointed to, or finds running; else start one here.

    Returns whether one was started, and thus ends with this process.
    """
    if ray.is_initialized():
        return False
    if "RAY_ADDRESS" in os.environ or _running_here():
        try:
            ray.init(logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ClusterError(
                f"{error}. Check RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r} and that the cluster runs (`ray "
                "status`), or unset it to start a Ray on this machine."
            ) from None
        return False
    start_local()
    return True


def start_local(num_cpus: int | None = None) -> None:
    """A Ray on this machine that ends with this process; `num_cpus` counts slots, not cores."""
    ray.init(
        address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )


def carry_user_code(*objects: object) -> None:
    """Send the modules that define these objects' classes along with the job, unless they are installed."""
    for cls in map(type, objects):
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or cls.__module__ == "__main__" or cls.__module__.startswith("raysharded."):
            continue
        if "site-packages" not in Path(file).parts:
            ray.cloudpickle.register_pickle_by_value(module)


@contextlib.contextmanager
def quiet_raylet() -> Iterator[None]:
    """Within it, Ray's own paragraphs about dead workers are not printed: a lost worker is news we tell ourselves.

    Ray prints them from a thread of the driver, to `sys.stdout`, whatever its logging is set to.
    """
    outside = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRaylet(outside))
    try:
        yield
    finally:
        sys.stdout = outside


class _WithoutRaylet:
    """A text stream that drops what Ray prints under the name of its raylet."""

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
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


class RayLauncher:
    """Implements `raysharded.driver.launching.Launcher` with one Ray actor per worker."""

    def __init__(self, job: Job, scaling: ScalingConfig, *, owns_cluster: bool) -> None:
        from raysharded.actors.worker import Worker

        self._scaling = scaling
        self._owns_cluster = owns_cluster
        self._actor_class = ray.remote(Worker).options(
            num_cpus=scaling.cpus_per_worker,
            num_gpus=1 if scaling.use_gpu else 0,
            resources=scaling.resources_per_worker or None,
            max_concurrency=_CONCURRENT_CALLS,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        self._job = ray.put(job)
        self._actors: dict[WorkerId, ActorHandle[Any]] = {}
        self._calls: dict[ray.ObjectRef[Any], tuple[WorkerId, str]] = {}
        self._store: Any = None
        self._refuse_the_impossible()

    def _needs(self) -> dict[str, float]:
        needs = {"CPU": self._scaling.cpus_per_worker, "GPU": 1.0 if self._scaling.use_gpu else 0.0}
        return {name: amount for name, amount in (needs | self._scaling.resources_per_worker).items() if amount}

    def _refuse_the_impossible(self) -> None:
        """A cluster that was started here does not grow: say at once that it is too small."""
        if not self._owns_cluster:
            return
        have = ray.cluster_resources()
        for name, amount in self._needs().items():
            fits = int(have.get(name, 0) / amount + 1e-9)
            if fits < self._scaling.min_workers:
                less = " (cpus_per_worker=0.5, say)" if name == "CPU" else ""
                raise ClusterError(
                    f"at least {self._scaling.min_workers} workers with {amount:g} {name} each are asked for, and this "
                    f"machine has {have.get(name, 0):g} {name}: room for {fits}. Lower the minimum in "
                    f"ScalingConfig.num_workers, ask for less per worker{less}, or connect to a larger cluster with "
                    "ray.init(address=...)."
                )

    def rendezvous(self) -> tuple[str, int]:
        from raysharded.actors.process_group import start_store

        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = start_store(host)
        return host, self._store.port

    def start(self, worker: WorkerId) -> None:
        self._actors[worker] = cast("ActorHandle[Any]", self._actor_class.remote(worker, self._job))
        self.call(worker, "ready")

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            self._calls[getattr(actor, method).remote(*args)] = (worker, method)

    def kill(self, worker: WorkerId) -> None:
        actor = self._actors.pop(worker, None)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != worker}
        if actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)

    def wait(self, timeout_s: float) -> list[Reply | Gone]:
        refs = list(self._calls)
        if not refs:
            time.sleep(min(timeout_s, 0.05))
            return []
        done, rest = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
            done += more
        happened: list[Reply | Gone] = []
        for ref in done:
            if ref in self._calls:
                worker, method = self._calls.pop(ref)
                happened.append(self._outcome(worker, method, ref))
        return happened

    def _outcome(self, worker: WorkerId, method: str, ref: ray.ObjectRef[Any]) -> Reply | Gone:
        try:
            return Reply(worker=worker, method=method, value=ray.get(ref, timeout=60))
        except (RayActorError, GetTimeoutError) as error:
            self.kill(worker)
            return Gone(worker=worker, reason=_one_line(error), error=_cause(error))
        except RayTaskError as error:
            return Reply(worker=worker, method=method, error=_cause(error) or error)
        except RayError as error:  # an object lost with its node
            self.kill(worker)
            return Gone(worker=worker, reason=_one_line(error))

    def describe_shortage(self) -> str:
        have, free = ray.cluster_resources(), ray.available_resources()
        parts = [
            f"{amount:g} {name} (the cluster has {have.get(name, 0):g}, {free.get(name, 0):g} free)"
            for name, amount in self._needs().items()
        ]
        return f"Each worker needs {' and '.join(parts)}."

    def close(self) -> None:
        for worker in list(self._actors):
            self.kill(worker)
        self._store = None


def _cause(error: BaseException) -> BaseException | None:
    """What the worker itself raised, if that is why."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else None


def _one_line(error: BaseException) -> str:
    """What happened to a worker, in one line; Ray's own text is a paragraph of possibilities."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)
    if isinstance(error, ActorDiedError) and detail:
        return f"its process died: {detail[1][:200]}"
    return f"{type(error).__name__}: {text[:300]}"
