"""A host's order, kept in the cluster's own memory (GCS) until the run is over. Knows Ray.

A host that Ray restarts finds it there, even if all other processes have ended. The module also stores the names of
runs that the cluster has seen. Everything but the trainer itself is JSON, and only a host unpickles a trainer: a
process that looks for a run unpickles nothing.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.experimental import internal_kv

from raysharded.errors import ConfigError, RunFailed
from raysharded.locations import scheme_of, with_home
from raysharded.protocol.version import greeting, other_version
from raysharded.ray_backend.peers import NAMESPACE
from raysharded.run.hosted.driver_key import way_to_the_key
from raysharded.run.spec import RunSpec

_log = logging.getLogger("raysharded.host")
_SPACE = NAMESPACE.encode()
_RUNS = "runs/"
"""Beginning of the keys of known runs."""
_RUNS_OF_THE_FIRST = "run/"
"""Beginning of those of raysharded 0.1, which pickled a time and a URL."""
_MOST_BYTES_OF_THE_FIRST = 1 << 16
_MAX_BYTES = 64 << 20
_ALLOWED_PLACES = "RAYSHARDED_ALLOWED_PLACES"
"""An environment variable that the driver needs, beside those of the signing key."""


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
    """Variables that the driver needs. Never a secret: the order lies in the cluster's memory."""
    key_id: str
    """Identity of the signing key that the driver must have in its own environment; empty: no such condition."""
    take_over: bool
    since: float
    """Start time: seconds since 1970."""


def make_order(spec: RunSpec, *, take_over: bool) -> RunSubmission:
    """An order for a specification whose paths are absolute. Raises ConfigError if it cannot be sent."""
    from raysharded.checkpoint import open_storage
    from raysharded.protocol.session import job_identity
    from raysharded.ray_backend.cluster import carry_user_code, refuse_unsendable
    from raysharded.run.translation import job_of

    carry_user_code(*spec.user_objects())
    try:
        data = ray.cloudpickle.dumps(spec)
    except Exception as error:  # any error of the user's objects
        refuse_unsendable(spec.named_objects())
        raise ConfigError(
            f"the trainer of run {spec.run.name!r} cannot be sent to a driver actor "
            f"({type(error).__name__}: {error}). Give it objects that can be pickled, or use fit()."
        ) from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the trainer of run {spec.run.name!r} is {len(data) >> 20} MiB when it is pickled, more than "
            f"{_MAX_BYTES >> 20} MiB: read its data from files (e.g. raysharded.TokenDataset), or use fit()."
        )
    environment, key_id = way_to_the_key(spec.run.checkpoint)
    if places := os.environ.get(_ALLOWED_PLACES):
        environment[_ALLOWED_PLACES] = places
    return RunSubmission(
        name=spec.run.name,
        url=open_storage(spec.url).url,
        max_steps=spec.run.max_steps,
        spec=data,
        identity=job_identity(job_of(spec)),
        folder=_working_folder(),
        environment=environment,
        key_id=key_id,
        take_over=take_over,
        since=time.time(),
    )


def _working_folder() -> str:
    """The working directory; the root if it was removed, as Ray does with a job's folder that another node unpacks."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        _log.warning("the working directory was removed: relative paths of the task will not be found")
        return os.sep


def spec_of(order: RunSubmission) -> RunSpec:
    """The specification of an order."""
    found: RunSpec = ray.cloudpickle.loads(order.spec)
    return found


def absolute(spec: RunSpec) -> RunSpec:
    """The specification with paths that mean the same in any process."""
    from raysharded.checkpoint import open_storage

    run = spec.run
    key = run.checkpoint.signing_key_file
    checkpoint = (
        run.checkpoint if key is None else replace(run.checkpoint, signing_key_file=os.path.abspath(with_home(key)))
    )
    start = run.start_from
    start = start if start is None or scheme_of(str(start)) else os.path.abspath(with_home(str(start)))
    run = replace(run, start_from=start)
    return replace(spec, run=replace(run, storage_path=open_storage(str(run.storage_path)).url, checkpoint=checkpoint))


def put_order(digest: str, order: RunSubmission) -> str:
    """Store an order; returns its key. `digest`: the run's."""
    key = f"host/{digest}/{secrets.token_hex(8)}"
    plain = {name: value for name, value in asdict(order).items() if name != "spec"}
    _put_bytes(key, _json({**greeting(), "order": plain}) + b"\n" + order.spec)
    _put_bytes(f"{_RUNS}{order.name}/{digest}", _json({"since": order.since, "url": order.url}))
    return key


def read_order(key: str) -> RunSubmission | None:
    """The order of this key; None: its run is over.

    Raises RunFailed for an order of another protocol, or of another form. Nothing is unpickled.
    """
    data = _get(key)
    if data is None:
        return None
    header, _, spec = data.partition(b"\n")
    found = _object(header)
    other = other_version(found)
    if other is not None:
        raise RunFailed(
            f"the run was started with {other}, whose settings this version cannot read. Start it again: it "
            "resumes from the checkpoint that its workers write, or from its newest one."
        )
    try:
        return RunSubmission(**(found or {})["order"], spec=spec)
    except (KeyError, TypeError) as error:
        raise RunFailed(
            f"the order of this run has another form than this version's ({type(error).__name__}: {error}). Start the "
            "run again: it resumes from the checkpoint that its workers write, or from its newest one."
        ) from None


def put_greeting(actor_id: str) -> None:
    """Store the protocol of a host, by its id, in the cluster's memory.

    A process with another version may not know the methods of the host's class.
    """
    _put_bytes(f"hello/{actor_id}", _json(greeting()))


def read_greeting(actor_id: str) -> dict[str, Any] | None:
    """The greeting of a host; None if it stored none, as hosts of raysharded 0.1."""
    return _object(_get(f"hello/{actor_id}"))


def forget_greeting(actor_id: str) -> None:
    internal_kv._internal_kv_del(f"hello/{actor_id}".encode(), namespace=_SPACE)


def put_stop(key: str, arguments: Mapping[str, Any]) -> None:
    """Store a stop request with its arguments, for a host that follows."""
    _put_bytes(f"{key}/stop", _json(dict(arguments)))


def read_stop(key: str) -> dict[str, Any] | None:
    """Arguments of the stop request; None without one."""
    return _object(_get(f"{key}/stop"))


def forget(key: str) -> None:
    """Delete an order that is carried out."""
    for one in (key, f"{key}/stop"):
        internal_kv._internal_kv_del(one.encode(), namespace=_SPACE)


def known_runs() -> dict[str, list[str]]:
    """The runs that were started on this cluster: name -> URLs, the newest first.

    Entries of another form are ignored.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for beginning, load in ((_RUNS, _started), (_RUNS_OF_THE_FIRST, _started_by_the_first)):
        for key in internal_kv._internal_kv_list(beginning.encode(), namespace=_SPACE) or []:
            match load(_get(key.decode())):
                case (int() | float() as since, str() as url):
                    found.setdefault(key.decode().split("/")[1], []).append((since, url))
    return {name: [url for _, url in sorted(started, reverse=True)] for name, started in found.items()}


class _NoClasses(pickle.Unpickler):
    """Reads numbers, texts and tuples of them: without classes and functions a pickle runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def _started(data: bytes | None) -> object:
    """Time and URL in the entry about a run."""
    found = _object(data) or {}
    return found.get("since"), found.get("url")


def _started_by_the_first(data: bytes | None) -> object:
    """Time and URL in the entry of raysharded 0.1 about a run; None if it is none."""
    try:
        return _NoClasses(io.BytesIO(data)).load() if data and len(data) <= _MOST_BYTES_OF_THE_FIRST else None
    except Exception:  # noqa: BLE001 - bytes of others: the unpickler raises any error
        return None


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _object(data: bytes | None) -> dict[str, Any] | None:
    """The JSON object in stored bytes; None if there is none."""
    try:
        found = None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _put_bytes(key: str, data: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), data, overwrite=True, namespace=_SPACE)


def _get(key: str) -> bytes | None:
    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_SPACE)
    return found
