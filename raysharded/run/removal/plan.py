"""The plan of a run's removal: its forks, and everything that keeps it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from raysharded.errors import CheckpointError, ConfigError, StorageError
from raysharded.run.live_processes import local_workers, on_cluster

if TYPE_CHECKING:
    from raysharded.checkpoint import Pin, Storage
    from raysharded.checkpoint.retention.forks.fork_search import Fork
    from raysharded.report.overview import RunOverview

_AT_WORK = ("new", "running", "paused")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkTreatment:
    """The treatment of forks that need a checkpoint of the run: by default they keep the run."""

    remove: bool = False
    copy: bool = False
    """Whether each gets its own copy of that checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalPlan:
    """A run to remove, and its forks."""

    storage: Storage
    name: str
    glance: RunOverview | None
    """The run now; None if its removal was interrupted."""
    remove: tuple[RemovalPlan, ...] = ()
    """Forks that are removed first."""
    copy: tuple[Fork, ...] = ()
    """Forks that get their own copy first."""
    obstacles: tuple[str, ...] = ()
    """Everything that keeps the run, in words."""
    remedies: tuple[str, ...] = ()
    """Sentences about the next step."""

    def refuse_obstacles(self) -> None:
        """Raise ConfigError, with everything that keeps the run, if anything does."""
        if self.obstacles:
            remedies = "".join(f" {remedy}" for remedy in dict.fromkeys(self.remedies))
            raise ConfigError(f"the run at {self.storage.url} stays: {'; '.join(self.obstacles)}.{remedies}")

    def urls(self) -> list[str]:
        """URLs of the runs that are removed, in that order."""
        return [*(url for fork in self.remove for url in fork.urls()), self.storage.url]


def plan_removal(storage: Storage, forks: ForkTreatment, address: str | None = None) -> RemovalPlan:
    """The plan of a run's removal, as everything is now; changes nothing.

    `address`: the Ray cluster's, as in `attach`. Raises StorageError if there is no run, ConfigError if its folder or a
    folder in it is a link, and CorruptCheckpoint if a pin is damaged.
    """
    from raysharded.checkpoint import list_pins, signing_key_from_environment
    from raysharded.checkpoint.removal_mark import read_mark
    from raysharded.ownership.start_mark import is_starting
    from raysharded.report.overview import look
    from raysharded.report.recent import read_recent

    _require_run(storage)
    folder = storage.url.partition("?")[0].rstrip("/").rpartition("/")[2]
    key = signing_key_from_environment()
    mark = read_mark(storage, key=key)
    if mark is not None and mark.begun:
        return RemovalPlan(storage=storage, name=folder, glance=None)
    (glance,) = look([storage]) if mark is None else (None,)
    name = glance.name if glance else folder
    alive = [f"it is {glance.state}, held by {glance.driver}"] if glance and _is_at_work(glance) else []
    alive += ["it is starting"] if mark is None and not alive and is_starting(storage) else []
    workers = local_workers(read_recent(storage)) if mark is None else []
    if workers:
        alive.append(f"its worker processes are still there: {', '.join(map(str, workers))} on this machine")
    alive += on_cluster(name, storage.url, address)
    ended = (
        [f"End it first: by Ctrl-C where `fit()` runs, otherwise by `raysharded stop {storage.url}`."] if alive else []
    )
    found = _with_forks(storage, list_pins(storage, key=key), forks, address)
    return RemovalPlan(
        storage=storage,
        name=name,
        glance=glance,
        remove=found.remove,
        copy=found.copy,
        obstacles=(*alive, *found.obstacles),
        remedies=(*ended, *found.remedies),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The consequences of a run's pins."""

    remove: tuple[RemovalPlan, ...]
    copy: tuple[Fork, ...]
    obstacles: tuple[str, ...]
    remedies: tuple[str, ...]


def _with_forks(storage: Storage, pins: Sequence[Pin], treatment: ForkTreatment, address: str | None) -> _Found:
    from raysharded.checkpoint import open_storage
    from raysharded.checkpoint.retention.forks.fork_search import find_forks

    forks = find_forks(storage, pins)
    of_forks = {fork.pin.tag for fork in forks}
    others = [pin for pin in pins if pin.tag not in of_forks]
    remove = [
        plan_removal(open_storage(fork.url), treatment, address)
        for fork in forks
        if treatment.remove and not fork.problem
    ]
    obstacles = [f"its fork {plan.storage.url}: {why}" for plan in remove for why in plan.obstacles]
    remedies = [remedy for plan in remove for remedy in plan.remedies]
    for fork in [] if treatment.remove else forks:
        obstacle = _keeps(fork, treatment)
        obstacles += [obstacle] if obstacle else []
    obstacles += [f"its fork {fork.url} cannot be read: {fork.problem}" for fork in forks if fork.problem]
    if forks and not treatment.remove and not treatment.copy:
        remedies.append(
            "Remove its forks too with --with-forks (with_forks=True), or first copy what they need into them with "
            "--copy-into-forks (copy_into_forks=True)."
        )
    obstacles += map(_pinned, others)
    if others:
        remedies.append(f"Unpin it: `raysharded checkpoint unpin {storage.url} {others[0].tag}`.")
    copy = tuple(fork for fork in forks if treatment.copy and not treatment.remove)
    return _Found(remove=tuple(remove), copy=copy, obstacles=tuple(obstacles), remedies=tuple(remedies))


def _keeps(fork: Fork, treatment: ForkTreatment) -> str:
    """The way in which a fork keeps its parent; empty if it does not, or is reported elsewhere."""
    from raysharded.checkpoint import open_storage
    from raysharded.report.overview import look

    if fork.problem:
        return ""
    if fork.reference is None:
        return f"its fork {fork.url} is being removed, or that was interrupted: `raysharded rm {fork.url}` finishes it"
    if not treatment.copy:
        return f"its fork {fork.url} needs its checkpoint of step {fork.pin.step}{_since(fork.pin)}"
    (glance,) = look([open_storage(fork.url)])
    if not _is_at_work(glance):
        return ""
    return (
        f"its fork {fork.url} is {glance.state}, held by {glance.driver}, and may be reading the checkpoint of step "
        f"{fork.pin.step}: end it, or wait for its first own checkpoint"
    )


def _is_at_work(glance: RunOverview) -> bool:
    """Whether a driver certainly is at work. A removal that was interrupted, or a torn lease, is waited for later."""
    from raysharded.ownership.leadership import REMOVER

    return glance.state in _AT_WORK and bool(glance.driver) and not glance.driver.startswith(f"driver {REMOVER}")


def _pinned(pin: Pin) -> str:
    of = ""
    if pin.fork:
        of = f", for a fork at {pin.fork} that does not refer to it (any more, or not yet)"
    return f"step {pin.step} is pinned as {pin.tag!r}{_since(pin)}{of}"


def _since(pin: Pin) -> str:
    return f", since {datetime.fromtimestamp(pin.created_at, UTC).strftime('%Y-%m-%d %H:%M:%S UTC')}"


def _require_run(storage: Storage) -> None:
    """Raise an error unless a run, or what is left of one, is directly at this place."""
    from raysharded.checkpoint import list_checkpoints
    from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER
    from raysharded.checkpoint.removal_mark import is_marked
    from raysharded.checkpoint.retention.run_removal import refuse_linked
    from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER
    from raysharded.journal import log
    from raysharded.ownership import lease
    from raysharded.protocol.job import COMPILED_FOLDER
    from raysharded.report.nearby import advice
    from raysharded.report.overview import is_run

    if os.path.islink(storage.url):
        raise ConfigError(
            f"{storage.url} is a link to {os.path.realpath(storage.url)}: nothing behind a link is removed. Give that "
            "folder, or delete the link."
        )
    refuse_linked(storage, [CHECKPOINTS_FOLDER, CLAIMS_FOLDER, COMPILED_FOLDER, log.FOLDER, lease.FOLDER])
    if is_marked(storage) or is_run(storage):
        return
    try:
        if list_checkpoints(storage):
            return
    except CheckpointError as error:
        raise StorageError(str(error)) from error
    raise StorageError(f"there is no run at {storage.url}.{advice(storage)}")
