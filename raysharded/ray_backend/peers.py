"""The actors of a run on a Ray cluster, found by their names: its workers, and its driver. Knows Ray."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.session import DriverSession, run_digest
from raysharded.protocol.version import ASK
from raysharded.protocol.worker_launcher import GCS_LIMIT_SETTING

NAMESPACE = "raysharded"
_NAME = re.compile(r"([0-9a-f]+)-e([0-9]+)-w([0-9]+)(?:-p[0-9]+)?")
GROUP = "lease"
"""Concurrency group of calls that a worker must always be able to answer."""
GROUP_SIZE = 4
_GREETING_S = 5.0
_RENEWALS = 5
"""Renewals within a lease's time."""
_GCS_LIMIT_S = 60.0
"""Ray's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A worker that is registered with the cluster; it may not have started yet, or may be ending."""

    name: str
    epoch: int
    """Epoch of the driver that started it."""
    worker: WorkerId


def name_of(run: str, epoch: int, worker: WorkerId, place: int = 0) -> str:
    """Unique name of a worker, never used again; `run` is the run's digest.

    `place`: number of earlier requests for a place that were withdrawn before the worker had one.
    """
    return f"{run}-e{epoch}-w{worker}{f'-p{place}' if place else ''}"


def find(run: str) -> list[Named]:
    """The run's workers. Raises RayError if the cluster does not answer."""
    found: list[Named] = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        match = _NAME.fullmatch(actor["name"])
        if actor["namespace"] == NAMESPACE and match is not None and match[1] == run:
            found.append(Named(name=match[0], epoch=int(match[2]), worker=WorkerId(int(match[3]))))
    return sorted(found, key=lambda named: (named.worker, named.epoch))


def handle(named: Named) -> Any:
    """The worker's actor; None if it has exited."""
    try:
        return ray.get_actor(named.name, namespace=NAMESPACE)
    except (ValueError, RayError):
        return None


def gcs() -> Any:
    """Ray's client of the cluster's GCS in this process, whose calls take a timeout; Ray's other calls wait for it."""
    worker: Any = ray._private.worker.global_worker  # the stubs do not have its client
    return worker.gcs_client


def gcs_answers(within_s: float) -> bool:
    """Whether the GCS answers a query in this time."""
    try:
        gcs().internal_kv_exists(b"raysharded", None, timeout=within_s)
    except Exception:  # noqa: BLE001 - any error of Ray's client
        return False
    return True


def gcs_limit_s() -> float:
    """Seconds without a GCS after which Ray ends the processes of the connected cluster. Queries the GCS.

    The cluster's system config (`ray start --system-config`) holds for all processes. Without this setting there, the
    environment of each process holds; all are assumed to have this process's.
    """
    try:
        whole = ray._private.state.state.get_system_config()
        return float(whole.get(GCS_LIMIT_SETTING.removeprefix("RAY_"), os.environ.get(GCS_LIMIT_SETTING, _GCS_LIMIT_S)))
    except ValueError:
        return _GCS_LIMIT_S


class RayPeers:
    """Implements `raysharded.orphans.leased_worker.ClusterPeers`, for one worker."""

    def __init__(self, run: str, own_name: str) -> None:
        self._run, self._own_name = run, own_name

    def own_host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def cluster_answers(self, within_s: float) -> bool:
        return gcs_answers(within_s)

    def before(self, worker: WorkerId) -> list[WorkerId]:
        return [other for other in self._newest() if other < worker]

    def _newest(self) -> dict[WorkerId, Named]:
        """The newest worker of each number: a driver that did not know of its successor may have started another."""
        return {named.worker: named for named in find(self._run)}  # sorted by epoch

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        refs: dict[Any, WorkerId] = {}
        for named in self._newest().values():
            if calls is None or named.worker in calls:
                actor = handle(named)
                if actor is not None:
                    more = calls[named.worker] if calls is not None else ()
                    bound = getattr(actor, method).options(concurrency_group=GROUP)
                    refs[bound.remote(*args, *more)] = named.worker
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        answers: dict[WorkerId, Any] = {}
        for ref in done:
            with contextlib.suppress(Exception):  # it refused, or is lost: it does not take part
                answers[refs[ref]] = ray.get(ref, timeout=timeout_s)
        return answers

    def end_all(self) -> None:
        for named in find(self._run):
            actor = handle(named) if named.name != self._own_name else None
            if actor is not None:
                with contextlib.suppress(RayError):
                    ray.kill(actor, no_restart=True)


class Leases:
    """Renews the leases of a driver's workers, and sends them each other's mailboxes. Used by one thread."""

    def __init__(self) -> None:
        self._renewed_at = time.monotonic()
        self._newest = 0
        """Number of the newest change of the workers that are ready."""
        self._met: dict[WorkerId, int] = {}
        """Worker -> number of the change up to which it has the others' addresses."""

    def change(self) -> None:
        """Note that a worker is ready."""
        self._newest += 1

    def forget(self, worker: WorkerId) -> None:
        """Note that a worker is lost."""
        self._met.pop(worker, None)
        self._newest += 1

    def introduce(
        self, terms: DriverSession, worker: WorkerId, actor: Any, facts: Mapping[WorkerId, WorkerInfo]
    ) -> dict[Any, tuple[WorkerId, str]]:
        """The call that sends a worker the others' addresses, which renews its lease too; empty if it has them."""
        if worker not in facts or self._met.get(worker) == self._newest:
            return {}
        self._met[worker] = self._newest
        addresses = {one: known.mailbox for one, known in facts.items() if known.mailbox}
        return {actor.meet.options(concurrency_group=GROUP).remote(terms.epoch, addresses): (worker, "renew")}

    def renew(
        self,
        terms: DriverSession,
        actors: Mapping[WorkerId, Any],
        facts: Mapping[WorkerId, WorkerInfo],
        calls: Iterable[tuple[WorkerId, str]],
    ) -> dict[Any, tuple[WorkerId, str]]:
        """The calls that renew leases, if it is time; not of workers with such a call among the unanswered `calls`."""
        if time.monotonic() - self._renewed_at < terms.lease_s / _RENEWALS:
            return {}
        self._renewed_at = time.monotonic()
        waiting = {worker for worker, method in calls if method == "renew"}
        made: dict[Any, tuple[WorkerId, str]] = {}
        for worker, actor in actors.items():
            if worker not in waiting:
                introduced = self.introduce(terms, worker, actor, facts)
                renewed = actor.renew.options(concurrency_group=GROUP)
                made |= introduced or {renewed.remote(terms.epoch): (worker, "renew")}
        return made


def waiting_workers(url: str) -> tuple[int, float] | None:
    """The number of the run's workers without a driver, and the seconds that they wait; None if there are none."""
    try:
        greetings = RayPeers(run_digest(url), "").ask(None, ASK, timeout_s=_GREETING_S).values()
    except (RayError, AttributeError):  # workers of raysharded 0.1 have no such method
        return None
    waits = [float(greeting["wait_s"]) for greeting in greetings if greeting.get("orphan")]
    return (len(waits), max(waits)) if waits else None


def host_name(name: str, url: str) -> str:
    """Name of a run's host among the cluster's actors."""
    return f"driver-{run_digest(url)}-{name}"


def host_of(actor_name: str) -> Any:
    """The host's actor, also while Ray restarts it; None if there is none."""
    try:
        return ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:
        return None
