"""Runs by their names or URLs, from anywhere on the cluster. Knows Ray."""

from __future__ import annotations

import itertools
import os

from raysharded.display import uncaught_errors
from raysharded.errors import ClusterError, ConfigError, RayshardedError, StorageError
from raysharded.ray_backend import cluster
from raysharded.report.nearby import like, near, near_runs
from raysharded.run.handle import Run
from raysharded.run.hosted import submission
from raysharded.run.hosted.registry import host_name, host_of, hosts, of_another_version
from raysharded.run.hosted.remote import AttachedRun
from raysharded.run.offline import StoredRun

_NAMES = 5


def attach(run: str, address: str | None = None) -> Run:
    """The handle on a run, by its name or by its folder or URL, `<storage_path>/<name>`.

    `address`: the Ray cluster's; None: the one that this process uses, that RAY_ADDRESS names, or that runs on this
    machine. Among finished runs of one name, the one started last is chosen.

    The handle reads storage alone if the run is over, or if `fit()` drives it in another process. It also does so if
    the driver's version of raysharded has another protocol.

    A cluster of another user is used only if `address` or RAY_ADDRESS names it: that user can run code in this process.

    Raises ConfigError for an unknown run, with similar names. Raises ClusterError for a name if no cluster can be
    reached, with the runs near the working directory.
    """
    uncaught_errors.install(RayshardedError)
    url = _url_of(run)
    there_is_one = _find_cluster(run if url is None else None, address)
    if url is not None:
        name = os.path.basename(url.partition("?")[0].rstrip("/"))
        if there_is_one and host_of(host_name(name, url)) is not None:
            return _driven(name, url)
        return _stored(name, url)
    known = submission.known_runs()
    urls = known.get(run, [])
    driven = [one for one in urls if host_of(host_name(run, one)) is not None]
    if len(driven) > 1:
        raise ConfigError(f"there are several runs named {run!r}. Give the URL of one: {', '.join(driven)}.")
    if driven:
        return _driven(run, driven[0])
    if urls:
        return _stored(run, next((one for one in urls if _is_there(one)), urls[0]))
    raise ConfigError(f"no run named {run!r} was started on this cluster{_meant(run, known)}")


def _find_cluster(name: str | None, address: str | None) -> bool:
    """Whether there is a cluster. Raises ClusterError if none answers; without any too, for a run given by its name."""
    try:
        choice = cluster.find_choice(address, log_to_driver=False)
        if choice.address:
            return True
        why = choice.foreign or f"there is no Ray cluster here that could know a run named {name!r} ({choice.why})."
    except ClusterError as error:
        if name is None:
            raise
        why = str(error)
    if name is None:
        return False
    raise ClusterError(
        f"no cluster: {why}{near(name)} Give the run's folder or URL, <storage_path>/{name}, or the address of its "
        "cluster (RAY_ADDRESS, or the address argument, --address)."
    ) from None


def _driven(name: str, url: str) -> Run:
    other = of_another_version(name, url)
    return StoredRun(name, url, why_not_asked=other) if other else AttachedRun(name, url)


def _url_of(run: str) -> str | None:
    """URL of the run's storage, if `run` is a folder or URL; None for a name."""
    from raysharded.checkpoint import open_storage
    from raysharded.checkpoint.removal_mark import is_marked
    from raysharded.report.overview import is_run

    if "/" in run or os.path.isdir(run):
        storage = open_storage(run)
        if "/" in run or is_run(storage) or is_marked(storage):
            return storage.url
    return None


def _stored(name: str, url: str) -> StoredRun:
    from raysharded.report.loader import open_run

    try:
        open_run(url)
    except StorageError as error:
        raise ConfigError(str(error)) from None
    return StoredRun(name, url)


def _meant(run: str, known: dict[str, list[str]]) -> str:
    """The rest of the sentence, with the runs that may be meant: of this cluster, and near the working directory."""
    close = [(name, url) for name in like(run, sorted(known)) for url in known[name] if _is_there(url)]
    here = [path for path in like(run, near_runs()) if os.path.abspath(path) not in {url for _, url in close}]
    if meant := [*dict.fromkeys(repr(name) for name, _ in close), *here][:_NAMES]:
        return f": did you mean {' or '.join(meant)}?"
    there = (name for name in sorted(known) if any(map(_is_there, known[name])))
    names = ", ".join(itertools.islice(there, _NAMES))
    if not names:
        return f": no run was, with ElasticTrainer.start() or as a Ray job.{near(run)} Give the run's folder or URL."
    driven = ", ".join(sorted(set(hosts().values())))
    return f"; known runs: {names}{f' (driven now: {driven})' if driven else ''}.{near(run)}"


def _is_there(url: str) -> bool:
    """False for a run that was removed."""
    from raysharded.checkpoint import open_storage
    from raysharded.report.overview import is_run

    try:
        return is_run(open_storage(url))
    except StorageError:  # it cannot be known
        return True
