"""The lease of a run on its storage: its holder, and whether another driver may follow. Pure, except for `read_lease`.

The claims (`checkpoint/claims.py`) determine who leads a run; the lease shows whether that driver is alive:

    lease/5e21c0f4.json    driver 5e21c0f4, of process 4711 on host a, since ..., beat 17

The driver rewrites it every third of the lease's time. A driver that wants to follow watches it. If the bytes change,
the holder is alive; if they do not change for the lease's time, by the watcher's own clock, it is not. Clocks of two
machines are never compared. Evidence that the holder's process has exited makes the wait unnecessary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.storage import Storage
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.config import MAX_LEASE_S
from raysharded.errors import CorruptCheckpoint
from raysharded.locations import join_url

FOLDER = "lease"
BEATS_PER_LEASE = 3
"""Number of times that the holder rewrites the lease within the lease's time."""
FORMAT = "raysharded-lease"
ACTOR = "actor"
"""First word of `Holder.job` for a driver in a Ray actor."""
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Identity of a process on one machine, by which another process there can check whether it lives."""

    machine: str = ""
    """Boot of the machine and its process id namespace; empty: unknown."""
    pid: int = 0
    started: int = 0
    """Ticks from the machine's boot until the process began: distinguishes it from a later one with its id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A driver that holds the lease of a run."""

    driver: str
    host: str
    process: Process
    since: float
    """Seconds since the Unix epoch, for people; nothing depends on it."""
    lease_s: float
    cluster: str = ""
    """Ray cluster of the driver, and its job there; empty: none."""
    job: str = ""
    beat: int = 0
    """Counter that grows whenever the holder rewrites the lease."""
    ended: bool = False
    """Whether it released the run."""
    ending: bool = False
    """Whether it only writes an orphan checkpoint and then releases the run: others wait for it."""

    @property
    def is_actor(self) -> bool:
        """Whether the driver is in a Ray actor, which Ray may restart."""
        return self.job.partition(" ")[0] == ACTOR

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"driver {self.driver} (process {self.process.pid} on {self.host}) since {since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The lease as it was read; None if there is none. `holder` is None too if it cannot be decoded."""

    data: bytes
    holder: Holder | None


class LeaseVerdict(Enum):
    """Whether another driver may follow the one that owns the run."""

    FREE = "it ended, or never held a lease"
    DEAD = "its process is gone"
    EXPIRED = "it gave no sign of life"
    UNKNOWN = "it may be there"
    HELD = "it is there"


def judge(first: Seen | None, now: Seen | None, watched_s: float, *, dead: bool, own_lease_s: float) -> LeaseVerdict:
    """Verdict on a lease that was first seen `watched_s` ago; `dead`: its process is known to have exited.

    A lease that cannot be decoded is judged by whether it changes, against the watcher's own lease time. A holder that
    is ending is waited for, whether or not its lease changes.
    """
    if now is None or (now.holder is not None and now.holder.ended):
        return LeaseVerdict.FREE
    if dead:
        return LeaseVerdict.DEAD
    if has_changed(first, now):
        return LeaseVerdict.UNKNOWN if now.holder is not None and now.holder.ending else LeaseVerdict.HELD
    lease_s = max(own_lease_s, now.holder.lease_s) if now.holder else own_lease_s
    return LeaseVerdict.EXPIRED if watched_s > lease_s else LeaseVerdict.UNKNOWN


def has_changed(first: Seen | None, now: Seen | None) -> bool:
    """Whether the holder has rewritten the lease between the two."""
    return first is not None and now is not None and first.data != now.data


def lease_key(driver: str) -> str:
    """Storage key of a driver's lease, below the run's folder."""
    return f"{FOLDER}/{driver}.json"


def encode(holder: Holder, *, key: SigningKey | None = None, place: str = "") -> bytes:
    """The lease as it is stored, signed if a key is given. `place`: as in `signed_json`."""
    return signed_json.seal(asdict(holder), FORMAT, key=key, place=place)


def read_lease(storage: Storage, driver: str, *, key: SigningKey | None = None) -> Seen:
    """The lease of a driver. Raises NoSuchKey, StorageError.

    One that is no file, is too long, or was not signed with the key has no holder.
    """
    at = lease_key(driver)
    try:
        data = read_small(storage, at, _MAX_BYTES)
    except CorruptCheckpoint:
        return Seen(data=b"", holder=None)
    return decode(data, join_url(storage.url, at), key=key, place=place_of(storage.url, at))


def decode(data: bytes, where: str, *, key: SigningKey | None = None, place: str = "") -> Seen:
    """The stored lease; a torn or damaged one, and one that the key did not sign for this place, has no holder."""
    try:
        return Seen(data=data, holder=holder_of(signed_json.unseal(data, FORMAT, where, key=key, place=place), where))
    except CorruptCheckpoint:
        return Seen(data=data, holder=None)


def holder_of(body: Mapping[str, Any], where: str) -> Holder:
    """The holder in an unsealed lease, or in a mark of a start. Raises CorruptCheckpoint."""
    process = body.get("process")
    if not isinstance(process, dict):
        raise CorruptCheckpoint(f"{where}: process={process!r}. What wrote it does not follow the format.")
    return Holder(
        driver=signed_json.text(body, "driver", where),
        host=signed_json.text(body, "host", where),
        process=Process(
            machine=signed_json.text(process, "machine", where),
            pid=signed_json.whole(process, "pid", where),
            started=signed_json.whole(process, "started", where),
        ),
        since=signed_json.seconds(body, "since", where),
        lease_s=_lease_s(body, where),
        cluster=signed_json.text(body, "cluster", where),
        job=signed_json.text(body, "job", where),
        beat=signed_json.whole(body, "beat", where),
        ended=body.get("ended") is True,
        ending=body.get("ending") is True,
    )


def _lease_s(body: Mapping[str, Any], where: str) -> float:
    found = signed_json.seconds(body, "lease_s", where)
    if found > MAX_LEASE_S:  # others would wait for that long
        raise CorruptCheckpoint(f"{where}: lease_s={found:g} is more than {MAX_LEASE_S:g}. No driver writes that.")
    return found
