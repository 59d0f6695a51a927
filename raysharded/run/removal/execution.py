"""Removal of a run from its storage, by the process that owns it meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysharded.errors import ConfigError, RayshardedError
from raysharded.run.removal.plan import ForkTreatment, RemovalPlan, plan_removal

if TYPE_CHECKING:
    from raysharded.checkpoint import Claims, Storage
    from raysharded.checkpoint.retention.forks.fork_search import Fork
    from raysharded.ownership.leadership import RunLeadership

_LET_GO_S = 10.0
_LEASE_S = 15.0
"""Time without a sign of life after which another process may continue the removal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """A run that was removed."""

    url: str
    num_files: int
    forks: tuple[str, ...] = ()
    """URLs of the forks that were removed with it."""
    copied: tuple[str, ...] = ()
    """URLs of the forks that got their own copy of a checkpoint."""
    links: tuple[str, ...] = ()
    """Links to folders that were removed; what they lead to is still there."""
    left: tuple[str, ...] = ()
    """Files in its folder `checkpoints` that raysharded did not write, and that stay."""


def remove_run(
    run: str,
    *,
    with_forks: bool = False,
    copy_into_forks: bool = False,
    address: str | None = None,
) -> Removed:
    """Remove a run from its storage, by its folder or URL, `<storage_path>/<name>`, or by its name on a cluster.

    Files in the run's folder that raysharded did not write stay. Nothing behind a link is removed. A call that is
    interrupted leaves a run that nothing uses any more; the same call finishes the removal.

    A fork refers to the checkpoint that it began with until it has its own. `with_forks`: remove such forks too;
    `copy_into_forks`: first copy that checkpoint into them. `address`: the Ray cluster's, as in `attach`.

    Raises ConfigError, with everything that keeps the run: forks, pins, a driver or workers that are still there.
    Raises RunOwnedElsewhere if another process holds it, StorageError if there is no run or storage fails, and
    CheckpointError if what a fork needs cannot be read.
    """
    plan = planned(run, with_forks=with_forks, copy_into_forks=copy_into_forks, address=address)
    return carry_out(plan)


def planned(run: str, *, with_forks: bool, copy_into_forks: bool, address: str | None = None) -> RemovalPlan:
    """The plan of a removal that nothing hinders. Raises as `remove_run` does; changes nothing."""
    from raysharded.checkpoint import open_storage

    if with_forks and copy_into_forks:
        raise ConfigError("remove_run: with_forks removes the forks, and copy_into_forks keeps them: give one of them.")
    storage = open_storage(run if "/" in run or os.path.isdir(run) else _url_of(run, address))
    plan = plan_removal(storage, ForkTreatment(remove=with_forks, copy=copy_into_forks), address)
    plan.refuse_obstacles()
    return plan


def _url_of(name: str, address: str | None) -> str:
    from raysharded.run.attach import attach

    return attach(name, address).url


def carry_out(plan: RemovalPlan, say: Callable[[str], None] = lambda _: None) -> Removed:
    """Remove the run as planned. `say` receives a sentence if another process may hold it, which takes a while."""
    from raysharded.checkpoint import signing_key_from_environment
    from raysharded.checkpoint.retention.run_removal import RunRemoval
    from raysharded.journal import log
    from raysharded.ownership import lease
    from raysharded.protocol.job import COMPILED_FOLDER

    storage = plan.storage
    with _owned(storage, plan.name, say) as (claims, leadership, _):
        forks = [carry_out(fork, say) for fork in plan.remove]
        for fork in plan.copy:
            _copy_into(fork, say)
        folders = [COMPILED_FOLDER, log.FOLDER, lease.FOLDER]
        removal = RunRemoval(storage, folders, key=signing_key_from_environment())
        removal.begin(lambda: claims.find_rival() is not None)
        deleted = removal.delete(lambda: leadership.end(_LET_GO_S))
    return Removed(
        url=storage.url,
        num_files=deleted.num_files,
        forks=tuple(url for fork in forks for url in (*fork.forks, fork.url)),
        copied=tuple(fork.url for fork in plan.copy),
        links=deleted.links,
        left=deleted.left,
    )


def _copy_into(fork: Fork, say: Callable[[str], None]) -> None:
    """Give the fork its own copy of the checkpoint that it refers to, so that it needs its parent no more."""
    from raysharded.checkpoint import open_storage, signing_key_from_environment
    from raysharded.checkpoint.retention.forks.fork_copy import copy_parent
    from raysharded.checkpoint.retention.forks.fork_search import references_of
    from raysharded.journal.log import newest_generation, read

    run = open_storage(fork.url)
    with _owned(run, os.path.basename(fork.url.partition("?")[0]), say) as (claims, _, first):
        generation = max(first, newest_generation(read(run)) + 1)
        for ref in references_of(run):
            copy_parent(run, ref, claims, generation, key=signing_key_from_environment())


@contextmanager
def _owned(storage: Storage, name: str, say: Callable[[str], None]) -> Iterator[tuple[Claims, RunLeadership, int]]:
    """Own the run within this context: no driver can lead it. Yields the first generation too."""
    from raysharded.checkpoint import Claims, signing_key_from_environment
    from raysharded.checkpoint.storage.optional_operations import remove_folders
    from raysharded.checkpoint.stored_claims import find_newest
    from raysharded.clock import SystemClock
    from raysharded.ownership.leadership import REMOVER, LeaseTerms, RunLeadership
    from raysharded.ownership.lease import lease_key

    def waits(about: Mapping[str, Any]) -> None:
        say(f"waiting up to {about['lease_s']:g} s: {about['owner']} may still hold {storage.url}")

    clock, driver = SystemClock(), f"{REMOVER}{secrets.token_hex(4)}"
    key = signing_key_from_environment()
    claims = Claims(storage, driver, wall=clock.wall, key=key)
    leadership = RunLeadership(
        name,
        storage,
        claims,
        clock,
        LeaseTerms(lease_s=_LEASE_S, removing=True),
        lambda _: None,  # `RunRemoval` checks
        waits,
        where=("", ""),
        has_ended=lambda _cluster, _job: False,
        key=key,
    )
    acquired = leadership.acquire()
    try:
        yield claims, leadership, int(acquired.first)
    finally:
        leadership.end(_LET_GO_S)
        with suppress(RayshardedError):
            owner = find_newest(storage, key=key)[1]
            if owner is None or owner.writer != driver:  # another removal, which has listed the leases before
                storage.delete([lease_key(driver)])
                remove_folders(storage, "")
