"""A host's order, kept in the cluster's own memory (GCS) until the run is over. Knows Ray.

A host that Ray restarts finds it there, even if all other processes have ended. The module also stores the names of
runs that the cluster has seen.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.experimental import internal_kv

from raysharded.errors import ConfigError, RunFailed
from raysharded.locations import scheme_of
from raysharded.protocol.version import greeting, other_version
from raysharded.ray_backend.peers import NAMESPACE
from raysharded.run.spec import RunSpec

_SPACE = NAMESPACE.encode()
_MAX_BYTES = 64 << 20
_KEYS = ("RAYSHARDED_CHECKPOINT_KEY", "RAYSHARDED_CHECKPOINT_KEY_FILE", "RAYSHARDED_ALLOWED_PLACES")
"""Environment variables that the driver needs; workers and other processes do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSubmission:
    """A run to drive."""

    name: str
    url: str
    max_steps: int
    spec: bytes
    """A pickled `RunSpec`, with the user's own modules."""
    identity: str
    """Identity of its job: equal for specifications that compute the same."""
    folder: str
    """Working directory of the process that started it, for relative paths."""
    environment: Mapping[str, str]
    take_over: bool
    since: float
    """Start time: seconds since 1970."""


def make_order(spec: RunSpec, *, take_over: bool) -> RunSubmission:
    """An order for a specification whose paths are absolute. Raises ConfigError if it cannot be sent."""
    from raysharded.checkpoint import open_storage
    from raysharded.protocol.session import job_identity
    from raysharded.ray_backend.cluster import carry_user_code
    from raysharded.run.translation import job_of

    carry_user_code(*spec.user_objects())
    try:
        data = ray.cloudpickle.dumps(spec)
    except Exception as error:  # any error of the user's objects
        raise ConfigError(
            f"the trainer of run {spec.run.name!r} cannot be sent to a driver actor "
            f"({type(error).__name__}: {error}). Give it objects that can be pickled, or use fit()."
        ) from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the trainer of run {spec.run.name!r} is {len(data) >> 20} MiB when it is pickled, more than "
            f"{_MAX_BYTES >> 20} MiB: read its data from files (e.g. raysharded.TokenDataset), or use fit()."
        )
    environment = {name: os.environ[name] for name in _KEYS if os.environ.get(name)}
    if _KEYS[1] in environment:
        environment[_KEYS[1]] = os.path.abspath(environment[_KEYS[1]])
    return RunSubmission(
        name=spec.run.name,
        url=open_storage(spec.url).url,
        max_steps=spec.run.max_steps,
        spec=data,
        identity=job_identity(job_of(spec)),
        folder=os.getcwd(),
        environment=environment,
        take_over=take_over,
        since=time.time(),
    )


def spec_of(order: RunSubmission) -> RunSpec:
    """The specification of an order."""
    found: RunSpec = ray.cloudpickle.loads(order.spec)
    return found


def absolute(spec: RunSpec) -> RunSpec:
    """The specification with paths that mean the same in any process."""
    from raysharded.checkpoint import open_storage

    run = spec.run
    key = run.checkpoint.signing_key_file
    checkpoint = run.checkpoint if key is None else replace(run.checkpoint, signing_key_file=os.path.abspath(key))
    start = run.start_from
    start = start if start is None or scheme_of(str(start)) else os.path.abspath(start)
    run = replace(run, start_from=start)
    return replace(spec, run=replace(run, storage_path=open_storage(str(run.storage_path)).url, checkpoint=checkpoint))


def put_order(digest: str, order: RunSubmission) -> str:
    """Store an order; returns its key. `digest`: the run's."""
    key = f"host/{digest}/{secrets.token_hex(8)}"
    header = json.dumps(greeting()).encode()
    _put_bytes(key, header + b"\n" + ray.cloudpickle.dumps(order))
    _put(f"run/{order.name}/{digest}", (order.since, order.url))
    return key


def read_order(key: str) -> RunSubmission | None:
    """The order of this key; None: its run is over.

    Raises RunFailed for an order of another protocol: it is not unpickled.
    """
    data = internal_kv._internal_kv_get(key.encode(), namespace=_SPACE)
    if data is None:
        return None
    header, _, pickled = data.partition(b"\n")
    other = other_version(json.loads(header) if header.startswith(b"{") else None)
    if other is not None:
        raise RunFailed(
            f"the run was started with {other}, whose settings this version cannot read. Start it again: it "
            "resumes from the checkpoint that its workers write, or from its newest one."
        )
    order: RunSubmission = ray.cloudpickle.loads(pickled)
    return order


def put_greeting(actor_id: str) -> None:
    """Store the protocol of a host, by its id, in the cluster's memory.

    A process with another version may not know the methods of the host's class.
    """
    _put_bytes(f"hello/{actor_id}", json.dumps(greeting()).encode())


def read_greeting(actor_id: str) -> dict[str, Any] | None:
    """The greeting of a host; None if it stored none, as hosts of raysharded 0.1."""
    data = internal_kv._internal_kv_get(f"hello/{actor_id}".encode(), namespace=_SPACE)
    return None if data is None else dict(json.loads(data))


def forget_greeting(actor_id: str) -> None:
    internal_kv._internal_kv_del(f"hello/{actor_id}".encode(), namespace=_SPACE)


def put_stop(key: str, arguments: Mapping[str, Any]) -> None:
    """Store a stop request with its arguments, for a host that follows."""
    _put(f"{key}/stop", dict(arguments))


def read_stop(key: str) -> dict[str, Any] | None:
    """Arguments of the stop request; None without one."""
    found: dict[str, Any] | None = _get(f"{key}/stop")
    return found


def forget(key: str) -> None:
    """Delete an order that is carried out."""
    for one in (key, f"{key}/stop"):
        internal_kv._internal_kv_del(one.encode(), namespace=_SPACE)


def known_runs() -> dict[str, list[str]]:
    """The runs that were started on this cluster: name -> URLs, the newest first."""
    found: dict[str, list[tuple[float, str]]] = {}
    for key in internal_kv._internal_kv_list(b"run/", namespace=_SPACE) or []:
        name = key.decode().split("/")[1]
        found.setdefault(name, []).append(_get(key.decode()))
    return {name: [url for _, url in sorted(started, reverse=True)] for name, started in found.items()}


def _put(key: str, value: object) -> None:
    _put_bytes(key, ray.cloudpickle.dumps(value))


def _put_bytes(key: str, data: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), data, overwrite=True, namespace=_SPACE)


def _get(key: str) -> Any:
    data = internal_kv._internal_kv_get(key.encode(), namespace=_SPACE)
    load: Callable[[bytes], Any] = ray.cloudpickle.loads
    return None if data is None else load(data)
