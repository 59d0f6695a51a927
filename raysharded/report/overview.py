"""An overview of runs: their progress and their drivers, from a few small files of each.

Clocks of two machines are never compared to decide whether a driver is alive. It is alive if its lease changes between
two polls, if its process runs on this machine, or if it has just written an entry. Its process may be known to have
exited. All other cases are `silent`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from raysharded.checkpoint import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME, parse_save_folder
from raysharded.checkpoint.removal_mark import is_marked, refuse_removed
from raysharded.checkpoint.retention.fork_reference import REFERENCE_NAME
from raysharded.checkpoint.storage import NotAFile
from raysharded.checkpoint.storage.optional_operations import last_part, list_folders, list_times
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER, Claim, list_numbers, read_claim
from raysharded.display.quantities import duration
from raysharded.errors import CorruptCheckpoint, StorageError
from raysharded.journal import log
from raysharded.locations import join_url
from raysharded.ownership.lease import (
    BEATS_PER_LEASE,
    FOLDER as LEASE_FOLDER,
    Holder,
    Seen,
    has_changed,
    lease_key,
    read_lease,
)
from raysharded.ownership.process_identity import is_gone, this_process
from raysharded.ownership.start_mark import is_starting, read_start
from raysharded.report.newest_step import Tail, read_tail

State = Literal["new", "running", "paused", "silent", "restarting", "ended", "finished", "stopped", "failed", "damaged"]
_OVER = ("ended", "finished", "stopped", "failed")
JUST_NOW_S = 20.0
"""A driver counts as at work for this long after its newest entry, by this machine's clock."""
_AT_ONCE = 16
_LONGEST_WAIT_S = 30.0
"""Longest wait for drivers that seem silent, regardless of their leases."""
_OVERDUE = 4
"""A lease that was not renewed for so many times its duration shows that its driver cannot write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOverview:
    """A run at the time of the poll. None: unknown, or there is none."""

    url: str
    name: str
    state: State
    driver: str
    """The holder of the run's lease, in words; empty if there is none."""
    error: str
    step: int | None
    max_steps: int | None
    loss: float | None
    workers: int | None
    checkpoint_step: int | None
    """Step of the newest committed checkpoint."""
    checkpoint_at: float | None
    """Time of that checkpoint's commit: seconds since 1970."""
    newest_entry_at: float | None
    """Time of the newest entry: seconds since 1970, by the driver's clock."""
    num_segments: int
    driver_pid: int | None = None
    """Process id of that driver, on its node."""
    driver_node: str = ""
    """Host name of that driver's node; empty if there is none."""
    driver_since: float | None = None
    """Time since which that driver has held the run: seconds since 1970."""
    fork_step: int | None = None
    """For a run that is over without its own checkpoint: step of the parent's checkpoint that it begins with."""
    interrupted: bool = False
    """Whether Ctrl-C stopped it."""
    before_start: State | None = None
    """Its state apart from its newest start, which failed before a driver led the run; None: there was no such start.

    `error` is then that start's, and `state` is `failed`, unless the run is finished.
    """
    keeps_best: bool = False
    """Whether its newest driver began with `CheckpointConfig.keep_best`."""
    driver_is_actor: bool = False
    """Whether its newest driver, which has not released the run, is an actor on a Ray cluster."""
    cluster: str = ""
    """That driver's Ray cluster, on which workers can outlive it; empty: unknown, or none."""
    waiting: tuple[int, float] | None = None
    """Number of workers that wait there for another driver, and for how many seconds; None: unknown, or none."""
    lost_actor: bool = False
    """Whether it ended because its driver actor's process has exited: Ray may restart the actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A run, and its owner's lease as it was first read."""

    storage: Storage
    glance: RunOverview
    owner: Claim | None
    lease: Seen | None
    paused: bool


def is_run(storage: Storage) -> bool:
    """True if the storage is the folder of one run, which may be starting, and the run is not being removed."""
    return _is_of_run(storage, list_folders(storage)) and not is_marked(storage)


def _is_of_run(storage: Storage, folders: Sequence[str]) -> bool:
    """True for numbered claims, or segments, or a start: a source tree may have folders of these names, too."""
    if CLAIMS_FOLDER in folders and list_numbers(storage):
        return True
    if log.FOLDER in folders and log.segment_numbers(storage):
        return True
    return LEASE_FOLDER in folders and is_starting(storage)


def find_runs(
    url: str, *, now: Callable[[], float] = time.time, pause: Callable[[float], None] = time.sleep
) -> list[RunOverview]:
    """The runs directly below a folder or URL, by name; for a run itself, that run. Raises StorageError.

    Omits runs that are being removed. Reads a few small files of each, several runs at once. If some
    seem silent, it waits once for all of them, and polls again. The wait is as long as their drivers take to show
    activity (5 s by default).
    """
    above = open_storage(url)
    names = list_folders(above)
    if _is_of_run(above, names):
        return look([above], now=now, pause=pause)
    below = [open_storage(join_url(above.url, name)) for name in names]
    with ThreadPoolExecutor(_AT_ONCE, "raysharded-runs") as pool:
        runs = [
            storage
            for storage, found in zip(
                below, pool.map(lambda one: _is_of_run(one, list_folders(one)), below), strict=True
            )
            if found
        ]
    return _glances(runs, _look_unless_removed, now, pause)


def look(
    runs: Sequence[Storage], *, now: Callable[[], float] = time.time, pause: Callable[[float], None] = time.sleep
) -> list[RunOverview]:
    """An overview of each run, in order; as `find_runs`. Raises StorageError for a run that is being removed."""
    return _glances(runs, _look, now, pause)


def _glances(
    runs: Sequence[Storage],
    look_at: Callable[[Storage, float], _Found | None],
    now: Callable[[], float],
    pause: Callable[[float], None],
) -> list[RunOverview]:
    with ThreadPoolExecutor(_AT_ONCE, "raysharded-runs") as pool:
        looked = pool.map(lambda storage: look_at(storage, now()), runs)
        found = [run for run in looked if run is not None]
        silent = [run for run in found if run.glance.state == "silent"]
        if silent:
            leases_s = [run.lease.holder.lease_s for run in silent if run.lease and run.lease.holder]
            pause(min(max(leases_s, default=0.0) / BEATS_PER_LEASE, _LONGEST_WAIT_S) + 1.0)
            alive = dict(zip((run.glance.url for run in silent), pool.map(_shows_itself, silent), strict=True))
            found = [_running(run) if alive.get(run.glance.url) else run for run in found]
    return [_paused(run) if run.paused and run.glance.state == "running" else run.glance for run in found]


def _look_unless_removed(storage: Storage, now: float) -> _Found | None:
    """The run; as damaged if its files cannot be read. None for a run that is being removed."""
    try:
        return _look(storage, now)
    except StorageError as error:
        with suppress(StorageError):
            if not is_run(storage):
                return None
        glance = RunOverview(
            url=storage.url,
            name=_folder(storage),
            state="damaged",
            driver="",
            error=str(error),
            step=None,
            max_steps=None,
            loss=None,
            workers=None,
            checkpoint_step=None,
            checkpoint_at=None,
            newest_entry_at=None,
            num_segments=0,
        )
        return _Found(storage=storage, glance=glance, owner=None, lease=None, paused=False)


def _folder(storage: Storage) -> str:
    return storage.url.partition("?")[0].rstrip("/").rpartition("/")[2]


def _look(storage: Storage, now: float) -> _Found:
    refuse_removed(storage, StorageError)
    owner, commit = _claims(storage)
    lease = _lease(storage, owner)
    try:
        tail, damage = read_tail(storage), ""
    except (*log.DAMAGE, log.DamagedJournal) as error:
        tail, damage = Tail(num_segments=0), f"its journal cannot be read ({type(error).__name__}: {error})"
    found: State = "damaged" if damage else _state(tail, owner, lease, now)
    start = read_start(storage) if found in _OVER else None
    refusal = start.error if start is not None and tail.num_segments <= start.num_segments else ""
    state = found
    if found != "finished" and start is not None and start.under_way:
        state = "new"
    elif found != "finished" and refusal:
        state = "failed"
    holder = lease.holder if lease and state in ("new", "running", "silent") else None
    newest = _unreleased(lease)
    glance = RunOverview(
        url=storage.url,
        name=tail.name or _folder(storage),
        state=state,
        driver=str(holder) if holder else "",
        error=damage
        or refusal
        or (tail.error if state == "failed" else _why_unwritten(storage, state, tail, lease, now)),
        step=tail.step,
        max_steps=tail.max_steps,
        loss=tail.loss,
        workers=None if state == "new" else tail.workers,
        checkpoint_step=commit.step if commit else None,
        checkpoint_at=commit.created_at if commit else None,
        newest_entry_at=tail.at,
        num_segments=tail.num_segments,
        driver_pid=(holder.process.pid or None) if holder else None,
        driver_node=holder.host if holder else "",
        driver_since=holder.since if holder else None,
        fork_step=_fork_step(storage) if state in _OVER and commit is None else None,
        interrupted=tail.interrupted,
        before_start=found if refusal else None,
        keeps_best=tail.keeps_best,
        driver_is_actor=newest is not None and newest.is_actor,
        cluster=newest.cluster if newest else "",
        lost_actor=state == "ended" and newest is not None and newest.is_actor,
    )
    return _Found(storage=storage, glance=glance, owner=owner, lease=lease, paused=tail.paused)


def _why_unwritten(storage: Storage, state: State, tail: Tail, lease: Seen | None, now: float) -> str:
    """The text about a driver that is alive here and does not renew its lease; empty for any other."""
    holder = lease.holder if lease is not None and state == "running" else None
    if holder is None or tail.at is None or now - tail.at <= JUST_NOW_S:
        return ""
    key = lease_key(holder.driver)
    with suppress(StorageError):
        written_at = list_times(storage, last_part(key), LEASE_FOLDER).get(key)
        if written_at is not None and now - written_at > _OVERDUE * holder.lease_s:
            return (
                f"its driver's process has not renewed its lease for {duration(now - written_at)}: it cannot write to "
                "the run's storage, or it stands still"
            )
    return ""


def _claims(storage: Storage) -> tuple[Claim | None, Claim | None]:
    """The newest claim, whose writer owns the run, and the newest commit of a checkpoint that still exists."""
    owner: Claim | None = None
    for number in reversed(list_numbers(storage)):
        try:
            claim = read_claim(storage, number)
        except (NoSuchKey, CorruptCheckpoint):
            continue
        owner = owner or claim
        if claim.kind == "commit" and _exists(storage, f"{claim.prefix}/{MANIFEST_NAME}"):
            return owner, claim
    return owner, None


def begins_with(url: str) -> int:
    """The step of the checkpoint that a run begins with, or began with; 0 without one. Raises StorageError."""
    storage = open_storage(url)
    if (step := _fork_step(storage)) is not None:  # the reference goes when the fork has its own checkpoint
        return step
    return next((int(entry["resumed_after_step"]) for entry in log.read(storage) if entry["kind"] == "started"), 0)


def _fork_step(storage: Storage) -> int | None:
    """Step of the parent's checkpoint that a fork without its own begins with."""
    folders = (key.split("/")[-2] for key in storage.list(CHECKPOINTS_FOLDER) if last_part(key) == REFERENCE_NAME)
    steps = [parsed[0] for folder in folders if (parsed := parse_save_folder(folder)) is not None]
    return max(steps, default=None)


def _exists(storage: Storage, key: str) -> bool:
    """False for a checkpoint that a rewind or an audit deleted."""
    try:
        storage.size(key)
    except (NoSuchKey, NotAFile):
        return False
    return True


def _state(tail: Tail, owner: Claim | None, lease: Seen | None, now: float) -> State:
    """The run's state. A driver that claimed the run after the journal's newest entry owns it, regardless of that
    entry."""
    if tail.ending is not None and (owner is None or owner.writer == tail.writer or lease is None):
        return tail.ending
    holder = lease.holder if lease else None
    if lease is None or (holder is not None and (holder.ended or is_gone(holder.process))):
        return tail.ending or "ended"
    if tail.at is None or (owner is not None and owner.writer != tail.writer):
        return "new"
    here = holder is not None and bool(holder.process.machine) and holder.process.machine == this_process().machine
    return "running" if here or abs(now - tail.at) <= JUST_NOW_S else "silent"


def _lease(storage: Storage, owner: Claim | None) -> Seen | None:
    if owner is None:
        return None
    try:
        return read_lease(storage, owner.writer)
    except NoSuchKey:
        return None


def _unreleased(lease: Seen | None) -> Holder | None:
    """The newest driver, unless it has released the run."""
    holder = lease.holder if lease else None
    return holder if holder is not None and not holder.ended else None


def _shows_itself(run: _Found) -> bool:
    return has_changed(run.lease, _lease(run.storage, run.owner))


def _paused(run: _Found) -> RunOverview:
    return replace(run.glance, state="paused")


def _running(run: _Found) -> _Found:
    return replace(run, glance=replace(run.glance, state="running"))
