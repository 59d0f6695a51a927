"""The Ray cluster of this process: found, or started here; and checks that it still answers. Knows Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from raysharded.actors.process.surroundings import no_hangup, why_not_started
from raysharded.checkpoint.format.signing import ENVIRONMENT_KEY
from raysharded.display.plain_text import brief
from raysharded.display.quantities import count
from raysharded.display.raylet_output import open_closed_streams
from raysharded.errors import ClusterError, ConfigError, text_of
from raysharded.ray_backend.bundles import captured
from raysharded.ray_backend.local_cluster import listens, names_of, requires_token, users_listening
from raysharded.ray_backend.which_ray import LOCAL, NEWEST, Choice, choose

_log = logging.getLogger("raysharded.cluster")
_ANSWER_S = 10.0
"""Time in which a cluster at a given address must begin to listen there."""
_TOKEN = (
    "A cluster with token authentication (Ray 2.60 enables it in `ray start`) refuses everyone else: set "
    "RAY_AUTH_MODE=token here, and have the token of ~/.ray/auth_token on the machine that ran `ray start` in the same "
    "file here, or in RAY_AUTH_TOKEN."
)
_GONE_S = 20.0
"""Longest absence of a cluster's head, for example during a restart.

Ray itself ends the processes of a cluster whose head is away for a minute.
"""
_PAUSE_S = 0.2
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


_chosen: tuple[str, Choice] | None = None
"""Address of the cluster to which this module has connected the process, and the choice."""


def connect(tell: Callable[[str], None] = lambda _: None, check: Callable[[], None] = lambda: None) -> bool:
    """Use the cluster that this process is connected to, is pointed to, or finds running; else start one here.

    Returns whether one was started, which then ends with this process. A cluster of another user that nobody named is
    not used; a warning names it. Starting Ray and workers takes 10 s and more: `tell` gets a sentence about which Ray
    is used, why, and what begins now, without its end: the number of workers. `check` is called before one is started,
    and raises if workers of this machine alone could not train.
    """
    choice = find_choice()
    if choice.address:
        group = f", in the placement group of this process ({bundles})" if (bundles := captured({})) else ""
        tell(f"on {choice}{group}: starting")
        return False
    if choice.foreign:
        _log.warning("%s", choice.foreign)
    check()
    tell(f"on {choice}: starting it, then")
    start_local()
    return True


def find_cluster(address: str | None = None, *, log_to_driver: bool = True) -> bool:
    """Whether `find_choice` finds a cluster, to which this process is then connected. Raises as it does."""
    return bool(find_choice(address, log_to_driver=log_to_driver).address)


def find_choice(address: str | None = None, *, log_to_driver: bool = True) -> Choice:
    """Use the cluster at `address`, or the one that this process is connected to, is pointed to, or finds running.

    Returns it with the reason, or a choice without an address if a Ray would have to be started, which this does not:
    none is there, or the address, or RAY_ADDRESS, is "local". A cluster that neither names is used only if it is this
    user's own: who runs a cluster can run code in the processes that connect to it.

    Raises ClusterError if no cluster answers at the address, if this process is connected to another cluster, or if
    "auto" finds another user's. `log_to_driver`: whether this process prints its actors' output, if it connects now.
    """
    global _chosen
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address and address not in (NEWEST, here):
            raise ClusterError(
                f"this process is connected to the cluster at {here}, not to {address}: a process can use one "
                "cluster. Call ray.shutdown() first, or use another process."
            )
        if _chosen is None or _chosen[0] != here:
            return Choice(address=here, why="to which this process is connected")
        return _chosen[1]
    choice = choose(address)
    if not choice.address:
        return choice
    if choice.named_by and (others := _users_at(choice.address) - {os.geteuid()}):
        _log.warning(
            "the Ray at %s is run by another user, %s, who can run code in this process: used because %s names it",
            choice.address,
            names_of(others),
            choice.named_by,
        )
    _connect(choice, log_to_driver=log_to_driver)
    here = ray.get_runtime_context().gcs_address
    _chosen = (here, replace(choice, address=here))
    return _chosen[1]


def _connect(choice: Choice, *, log_to_driver: bool) -> None:
    given = choice.address
    named = f"{choice.named_by}, {given!r}," if choice.named_by else f"the Ray at {given}"
    other = "leave it out to use a Ray on" if choice.named_by else "set RAY_ADDRESS=local to start a Ray on"
    remedy = f"Check {named} and that the cluster runs (`ray status`), or {other} this machine."
    if not _answers(given, _ANSWER_S):
        raise ClusterError(f"there is no Ray cluster at {given}: nothing answered within {_ANSWER_S:g} s. {remedy}")
    open_closed_streams()
    if requires_token(given):
        _use_token()
    try:
        with _node_address(clusters=not _is_on_loopback_alone(given)):
            ray.init(address=given, logging_level=logging.WARNING, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        text = brief(str(error), 300).rstrip(".")
        token = f" {_TOKEN}" if isinstance(error, ConnectionError | RayError) else ""
        raise ClusterError(f"{type(error).__name__}: {text}. {remedy}{token}") from None


def _use_token() -> None:
    """Use the token in the home, if there is one and the environment does not set RAY_AUTH_MODE.

    `ray.init()` does so with a cluster that it finds, and not with an address, which may be a stranger's.
    """
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # an older Ray, in which RAY_AUTH_MODE is the only way
        return
    log = logging.getLogger("ray._private.authentication")
    before = log.level
    log.setLevel(logging.ERROR)  # Ray warns of every cluster with a token
    try:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        log.setLevel(before)


def _is_on_loopback_alone(address: str) -> bool:
    """Whether a Ray listens on the loopback interface and no other, as one of `start_local` does.

    Ray replaces a loopback address by the machine's own, where such a cluster does not listen.
    """
    found = _host_and_port(address)
    if found is None or not found[0].startswith("127."):
        return False
    return not listens(ray.util.get_node_ip_address(), found[1])


@contextlib.contextmanager
def _node_address(*, clusters: bool) -> Iterator[None]:
    """A context in which Ray uses this machine's own address, or with `clusters=False` the loopback one."""
    before = ray_constants.ENABLE_RAY_CLUSTER  # this process has read the variable when it imported Ray
    ray_constants.ENABLE_RAY_CLUSTER = before and clusters
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def describe_owner() -> str:
    """The user who runs the cluster that this process is connected to."""
    users = _users_at(ray.get_runtime_context().gcs_address)
    return "yours" if users == {os.geteuid()} else f"run by {names_of(users)}" if users else "on another machine"


def _users_at(address: str) -> frozenset[int]:
    """User ids of those who run a cluster; empty if it is not on this machine."""
    found = _host_and_port(address)
    return users_listening(*found) if found else frozenset()


def _host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT or ray://HOST:PORT; None for keywords like `auto`."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


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
    found = _host_and_port(address)
    if found is None:
        return True
    deadline = time.monotonic() + within_s
    while not listens(*found):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def start_local(num_cpus: int | None = None) -> None:
    """Start a Ray on this machine that ends with this process; `num_cpus` counts slots, not cores.

    Its processes inherit the environment, but for the signing key: only the run's driver signs. All of its ports are on
    the loopback interface, unless the environment has RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1. Raises ClusterError with the
    reason, and the way out, if Ray does not start.
    """
    open_closed_streams()
    ours = {name: value for name, value in _OWN_RAY.items() if name not in os.environ}
    key = os.environ.pop(ENVIRONMENT_KEY, None)
    os.environ.update(ours)
    try:
        with _node_address(clusters=os.environ[_CLUSTERS].lower() in ("1", "true")), no_hangup():
            ray.init(
                address=LOCAL,
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        with contextlib.suppress(Exception):  # what has started of it ends with this process anyway
            ray.shutdown()
        raise ClusterError(why_not_started(error)) from error
    finally:
        for name in ours:
            del os.environ[name]
        if key is not None:
            os.environ[ENVIRONMENT_KEY] = key


def carry_user_code(*objects: object) -> None:
    """Send the modules that define these objects' classes along with the job, unless they are installed."""
    for cls in (thing if isinstance(thing, FunctionType) else type(thing) for thing in objects):
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or cls.__module__ == "__main__" or cls.__module__.startswith("raysharded."):
            continue
        if "site-packages" not in Path(file).parts:
            ray.cloudpickle.register_pickle_by_value(module)


def refuse_unsendable(values: Mapping[str, object]) -> None:
    """Raise ConfigError if a value cannot be pickled, with its innermost attribute that cannot.

    `values`: the user's objects under the names by which a user knows them. For after an error: all are pickled.
    """
    for name, value in values.items():
        if (found := _unpicklable(name, value)) is not None:
            where, what, why = found
            kind = f"{type(what).__module__}.{type(what).__qualname__}"
            raise ConfigError(
                f"{where} ({kind}) cannot be sent to other processes: {why}. "
                "Make it where it is used, in build_model or in the dataset's __getitem__, or leave it out in "
                "__getstate__."
            )


def _unpicklable(name: str, value: object, levels: int = 4) -> tuple[str, object, str] | None:
    """The innermost part of a value that cannot be pickled, with its name and the error; None if all of it can."""
    try:
        ray.cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any error of the user's objects
        if levels:
            for inner, part in _parts(name, value):
                if found := _unpicklable(inner, part, levels - 1):
                    return found
        return name, value, f"{type(error).__name__}: {brief(text_of(error), 200).rstrip('.')}"
    return None


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"{variable} in {name}", cell.cell_contents
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{name}.{attribute}", part) for attribute, part in vars(value).items())
