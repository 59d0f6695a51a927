"""The Ray that a run uses, and the reason. Connects to none, and starts none.

The order is Ray's own (`ray._private.services.get_ray_address_from_environment`). RAY_ADDRESS is first, if it is not
empty. Next is the address file in Ray's folder of temporary files, which RAY_TMPDIR or TMPDIR set. Then, unless
RAY_TMPDIR names the folder, comes a cluster of `ray start` with another such folder, which Ray finds with "auto" alone.

A cluster that nobody named must be this user's own, and run: an address file stays when its cluster has ended, and
another program may have its port by now.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ray._common.utils import get_ray_address_file

from raysharded.errors import ClusterError
from raysharded.ray_backend.local_cluster import LocalCluster, clusters_elsewhere, names_of, raylets, running_cluster

LOCAL = "local"
"""Ray's keyword in place of an address: start a cluster on this machine."""
NEWEST = "auto"
"""Ray's keyword in place of an address: the cluster last started on this machine."""
_VARIABLE = "RAY_ADDRESS"
_FOLDER = "RAY_TMPDIR"
_NAME_ONE = "RAY_ADDRESS=HOST:PORT names one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The Ray that is used, in words with `str()`."""

    address: str = ""
    """HOST:PORT, or a URL; empty for a separate Ray, which the run starts and ends."""
    why: str
    named_by: str = ""
    """Source of the address, in words; empty if it was found."""
    foreign: str = ""
    """A sentence about another user's Ray on this machine, which is not used; empty if there is none."""

    def __str__(self) -> str:
        return (
            f"the Ray at {self.address}, {self.why}" if self.address else f"a separate Ray on this machine ({self.why})"
        )


def choose(address: str | None = None) -> Choice:
    """The choice of a process that is not connected to a cluster.

    `address`: the caller's. It precedes RAY_ADDRESS, unless it is "auto". Raises ClusterError if "auto" finds no
    cluster, or only another user's.
    """
    variable = os.environ.get(_VARIABLE, "")
    by_caller = address not in (None, "", NEWEST) or not variable
    given = (address or "") if by_caller else variable
    if given == LOCAL:
        return Choice(why=f"as {'the given address' if by_caller else f'{_VARIABLE}={LOCAL}'} says")
    if given not in ("", NEWEST):
        named_by = "the given address" if by_caller else _VARIABLE
        return Choice(address=given, why=f"as {named_by} says", named_by=named_by)
    file = Path(get_ray_address_file(None))
    found = running_cluster(file)
    if found is not None and found.is_ours and found.address in {one.address for one in raylets()}:
        return Choice(address=found.address, why=_runs_here(file))
    others = clusters_elsewhere(file) if given or not os.environ.get(_FOLDER) else {}
    for other, cluster in others.items():
        many = f", the newest of {len(others)} that do: {_NAME_ONE}" if len(others) > 1 else ""
        return Choice(address=cluster.address, why=_runs_here(other) + many)
    foreign = "" if found is None or found.is_ours else _not_used(found)
    if given:
        raise ClusterError(
            foreign or f'"auto" names no Ray cluster: {_none(file, found)}. Start one: `ray start --head`.'
        )
    return Choice(why=f"{_none(file, found)}; {_NAME_ONE}", foreign=foreign)


def _runs_here(file: Path) -> str:
    return f"which runs on this machine ({file.parent})"


def _none(file: Path, found: LocalCluster | None) -> str:
    """The reason for a separate Ray."""
    if found is None:
        where = f" in {_FOLDER}={file.parent.parent}" if os.environ.get(_FOLDER) else ""
        return f"no cluster of yours was found{where}"
    if found.is_ours:  # a port is taken anew: 6379, Ray's, is also that of Redis
        return f"what answers at {found.address}, which {file} names, is no Ray of this machine"
    return f"the one at {found.address} belongs to {names_of(found.users)}"


def _not_used(found: LocalCluster) -> str:
    return (
        f"the Ray at {found.address} on this machine belongs to {names_of(found.users)}, and is not used: its owner "
        f"could run code in this process. To use it all the same, name it: RAY_ADDRESS={found.address}."
    )
