"""The Ray cluster of this process: found, or started here; and checks that it still answers. Knows Ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

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

_PACKAGES = {"site-packages", "dist-packages"}
"""Names of the folders that packages are installed in."""
_STANDARD_LIBRARY = {os.path.realpath(sysconfig.get_path(which)) for which in ("stdlib", "platstdlib")}
_MADE_IN = {
    "task": "build_model",
    "train_fn": "the function",
    "data": "the dataset's __getitem__",
    "evaluation.data": "the dataset's __getitem__",
}
"""Object of the user -> the place at which it can make what cannot be sent."""

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
    """Send the modules that define these objects along with the job, unless they are installed.

    Those of an object's class, of a function or a method, and of the function and the arguments in a `partial`.
    """
    for name in {name for one in objects for name in _defined_in(one)}:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and name != "__main__" and not _is_installed(name, file):
            ray.cloudpickle.register_pickle_by_value(module)


def _defined_in(thing: object) -> Iterator[str]:
    """The names of the modules that define an object."""
    if isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _defined_in(part)
    elif isinstance(thing, MethodType):
        yield from _defined_in(thing.__func__)
        yield from _defined_in(thing.__self__)
    else:
        yield (thing if isinstance(thing, FunctionType | type) else type(thing)).__module__


def _is_installed(name: str, file: str) -> bool:
    """Whether a module is the standard library's, raysharded's, or in a folder of packages."""
    path = Path(os.path.realpath(file))
    return (
        name.startswith("raysharded.")
        or bool(_PACKAGES & {*path.parts, *Path(file).parts})
        or any(path.is_relative_to(folder) for folder in _STANDARD_LIBRARY)
    )


def refuse_unsendable(values: Mapping[str, object], at_most: float = math.inf) -> None:
    """Raise ConfigError if a value cannot be pickled, with its innermost attribute that cannot.

    `values`: the user's objects under the names by which a user knows them. Of each, no more than about `at_most`
    bytes are pickled. Needs no cluster.
    """
    for name, value in values.items():
        if (found := _unpicklable(name, value, at_most)) is not None:
            where, what, why = found
            kind = f"{type(what).__module__}.{type(what).__qualname__}"
            place = _MADE_IN.get(name)
            raise ConfigError(
                f"{where} ({kind}) cannot be sent to other processes: {why}. "
                f"Make it where it is used{f', in {place}' if place else ''}, or leave it out in __getstate__."
            )


class _Enough(Exception):
    """`_Counted` has its number of bytes."""


class _Counted:
    """A file that drops what is written, and raises `_Enough` after a number of bytes."""

    def __init__(self, at_most: float) -> None:
        self._left = at_most

    def write(self, data: bytes | memoryview) -> int:
        written = memoryview(data).nbytes
        self._left -= written
        if self._left < 0:
            raise _Enough
        return written


def _pickle_into_nothing(value: object, at_most: float) -> None:
    pickler: Any = ray.cloudpickle.CloudPickler  # its stub wants a file
    with contextlib.suppress(_Enough):
        pickler(_Counted(at_most), protocol=5, buffer_callback=lambda _: None).dump(value)


def _unpicklable(name: str, value: object, at_most: float, levels: int = 4) -> tuple[str, object, str] | None:
    """The innermost part of a value that cannot be pickled, with its name and the error; None if all of it can."""
    try:
        _pickle_into_nothing(value, at_most)
    except Exception as error:  # noqa: BLE001 - any error of the user's objects
        if levels:
            for inner, part in _parts(name, value):
                if found := _unpicklable(inner, part, at_most, levels - 1):
                    return found
        return name, value, f"{type(error).__name__}: {brief(text_of(error), 200).rstrip('.')}"
    return None


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield f"{name}.func", value.func
        yield from _parts(f"{name}.args", value.args)
        yield from _parts(f"{name}.keywords", value.keywords)
    elif isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is not set yet
                yield f"{variable} in {name}", cell.cell_contents
        used = _names_in(value.__code__) & value.__globals__.keys()
        yield from ((f"{variable} in {name}", value.__globals__[variable]) for variable in sorted(used))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{name}.{attribute}", part) for attribute, part in vars(value).items())


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
