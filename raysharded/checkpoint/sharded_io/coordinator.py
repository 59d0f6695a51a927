"""Agreement of the ranks of one save or load, without collectives: messages through their process group's store.

Every rank has a queue of messages in the store, and waits for its next one with a deadline. Rank 0 gathers the reports
of all ranks and sends each its answer. A rank that fails notifies every other rank, so that all of them fail at once
with its reason. A dead rank is noticed when its message does not arrive in time. No wait is endless, and a failure
leaves the process group as it was.

    coordinator = Coordinator.of(process_group, timeout_s=600)
    with coordinator.guarded():                  # an error in here is sent to the others
        parts = coordinator.gather(mine)         # on rank 0 every rank's value; elsewhere None
        answer = coordinator.scatter(answers)    # rank 0's value for this rank
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Real
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from raysharded import errors
from raysharded.checkpoint.state_dict.rank_merge import listed
from raysharded.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NoCheckpoint,
    RayshardedError,
    RefusedCheckpoint,
    StorageError,
)

TIMEOUT_S = 1800.0
"""Default time that one rank waits for another before it considers it dead."""

_MOST_TIMEOUT_S = 1e9  # 30 years: stores and clocks overflow somewhere beyond

Json = Any
_PART_BYTES = 4 << 20  # TCPStore takes values of up to 8 MiB (MAX_PAYLOAD_LEN of its libuv backend)
_RANK0_SHARE = 0.9
"""Share of the timeout after which rank 0 times out, before the others: it knows which rank's message is missing."""

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def require_timeout(timeout_s: object) -> None:
    """Raise ConfigError for an invalid timeout. Without a limit a rank would wait for a dead one forever."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not 0 < float(timeout_s) <= _MOST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s={timeout_s!r}: give the seconds for which one rank waits for another, more than 0. "
            f"The default is {TIMEOUT_S:g}."
        )


class PeerFailed(CheckpointError):
    """Another rank failed and sent its error; the message is that error's."""

    def __init__(self, message: str, phase: str = "") -> None:
        super().__init__(message, phase)
        self.phase = phase
        """Phase of the other rank when it failed."""

    def __str__(self) -> str:
        return str(self.args[0])


class PeerFoundIncomplete(PeerFailed, IncompleteCheckpoint):
    """Another rank raised IncompleteCheckpoint, so every rank can catch it as that."""


class PeerFoundNone(PeerFoundIncomplete, NoCheckpoint):
    """Another rank raised NoCheckpoint."""


class PeerFoundCorrupt(PeerFailed, CorruptCheckpoint):
    """Another rank raised CorruptCheckpoint."""


class PeerFoundRefused(PeerFoundCorrupt, RefusedCheckpoint):
    """Another rank raised RefusedCheckpoint."""


class PeerStorageFailed(PeerFailed, StorageError):
    """Another rank raised StorageError."""


_KINDS: dict[type[RayshardedError], type[PeerFailed]] = {
    IncompleteCheckpoint: PeerFoundIncomplete,
    NoCheckpoint: PeerFoundNone,
    CorruptCheckpoint: PeerFoundCorrupt,
    RefusedCheckpoint: PeerFoundRefused,
    StorageError: PeerStorageFailed,
}


class Coordinator:
    """Coordination of one save or load on one rank.

    One thread at a time may use it. Every rank makes its coordinators in the same order.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int, timeout_s: float) -> None:
        """`store`: a store with a prefix for this save or load alone; None if there is one rank."""
        self.rank = rank
        self.world_size = world_size
        self.phase = ""
        """Phase of this rank, sent along with its error."""
        self._store: Any = store  # Store, and its clone(), which the stubs lack
        self._connected = False
        self._timeout_s = timeout_s
        self._received = 0
        self._round = 0
        self._early: defaultdict[int, dict[int, Json]] = defaultdict(dict)
        """On rank 0: round -> rank -> its value, for rounds that are being gathered or will be."""

    @staticmethod
    def of(process_group: dist.ProcessGroup | None, timeout_s: float) -> Coordinator:
        """A coordinator for the ranks of a process group. None is the default group, or this process if there is none.

        All ranks of the group must call it in the same order among their calls for that group. Raises as
        `require_timeout`.
        """
        require_timeout(timeout_s)
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return Coordinator(None, 0, 1, timeout_s)
        group: Any = dist.group.WORLD if process_group is None else process_group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise CheckpointError(
                "this process is not in the process group given. Call it on the ranks of the group alone."
            )
        if world_size == 1:
            return Coordinator(None, 0, 1, timeout_s)
        number = _counts[group] = _counts.get(group, 0) + 1
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        return Coordinator(PrefixStore(f"raysharded/{number}", store), rank, world_size, timeout_s)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Send an error inside to all other ranks, and raise it. An error received from another rank is only raised.

        The whole save or load runs inside one such block. Nothing more may be called afterwards.
        """
        try:
            yield
        except PeerFailed:
            raise
        except BaseException as error:
            self._tell_all(error)
            raise
        finally:
            self._clean()

    def gather(self, value: Json) -> list[Json] | None:
        """The values of all ranks, by rank, on rank 0; None on the others, which do not wait.

        Raises PeerFailed if a rank failed, CheckpointError with the ranks that sent no message in time.
        """
        number, self._round = self._round, self._round + 1
        if self.rank != 0:
            self._send(0, ["value", self.rank, number, value])
            return None
        got = self._early[number]
        got[0] = value
        deadline = monotonic() + self._timeout_s * _RANK0_SHARE
        while len(got) < self.world_size:
            message = self._receive(deadline - monotonic())
            if message is None:
                missing = [rank for rank in range(self.world_size) if rank not in got]
                raise CheckpointError(
                    f"{len(missing)} of {self.world_size} ranks sent no message within {self._timeout_s:g} s: "
                    f"{listed(missing)}. Check their logs; if they were only slow, give a larger timeout_s."
                )
            _, rank, at, given = message
            self._early[at][rank] = given
        del self._early[number]
        return [got[rank] for rank in range(self.world_size)]

    def scatter(self, values: Sequence[Json] | None) -> Json:
        """Rank 0's value for this rank. `values` has one for each rank on rank 0, and is ignored elsewhere.

        Raises PeerFailed if a rank failed, CheckpointError if rank 0 sent no message in time.
        """
        if self.rank == 0:
            assert values is not None
            for rank in range(1, self.world_size):
                self._send(rank, ["value", 0, 0, values[rank]])
            return values[0]
        message = self._receive(self._timeout_s)
        if message is None:
            raise CheckpointError(
                f"rank {self.rank}: rank 0 sent no message within {self._timeout_s:g} s. Check its log; if it "
                "was only slow, give a larger timeout_s."
            )
        return message[3]

    def _clean(self) -> None:
        """Remove this rank's remaining keys from the store."""
        if self._store is not None:
            with suppress(RuntimeError, CheckpointError):
                self._open_store().delete_key(f"{self.rank}/count")

    def _tell_all(self, error: BaseException) -> None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message = ["error", self.rank, kinds, str(error), self.phase]
        for rank in range(self.world_size):
            if rank != self.rank:
                with suppress(RuntimeError, CheckpointError):  # the store has failed: they will notice by themselves
                    self._send(rank, message)

    def _send(self, rank: int, message: list[Json]) -> None:
        store = self._open_store()
        data = zlib.compress(json.dumps(message, separators=(",", ":")).encode(), 1)
        parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
        with _explained(self.rank):
            number = store.add(f"{rank}/count", 1)
            for at, part in enumerate(parts[1:], start=1):
                store.set(f"{rank}/{number}/{at}", part)  # type: ignore[arg-type] # bytes are accepted, and intended
            store.set(f"{rank}/{number}", len(parts).to_bytes(4, "little") + parts[0])  # type: ignore[arg-type]

    def _receive(self, timeout_s: float) -> list[Json] | None:
        """The next message for this rank; None if none arrived in time. Raises PeerFailed for an error message."""
        store, key = self._open_store(), f"{self.rank}/{self._received + 1}"
        with _explained(self.rank):
            if not _came(store, key, timeout_s):
                return None
            self._received += 1
            head = store.get(key)
            keys = [f"{key}/{at}" for at in range(1, int.from_bytes(head[:4], "little"))]
            data = head[4:] + b"".join(store.get(key) for key in keys)
            for used in (key, *keys):
                store.delete_key(used)
        message: list[Json] = json.loads(zlib.decompress(data))
        if message[0] == "error":
            raise _as_error(*message[1:])
        return message

    def _open_store(self) -> Store:
        """The store, over a separate connection.

        A wait would block others who use the group's connection, for example to make a new group.
        """
        assert self._store is not None, "there is one rank, which has no store"
        if not self._connected:
            with _explained(self.rank):
                self._store, self._connected = self._store.clone(), True
        store: Store = self._store
        return store


def _came(store: Store, key: str, timeout_s: float) -> bool:
    """Whether the key is set within the time."""
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
    except RuntimeError as error:  # each kind of store raises its own type
        if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
            raise
        return False
    return True


@contextmanager
def _explained(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise CheckpointError(
            f"rank {rank}: the store of the process group failed: {said}. The process that serves it, usually rank "
            "0's or its launcher, has ended; see its log."
        ) from error


def _as_error(rank: int, kinds: Sequence[str], text: str, phase: str) -> PeerFailed:
    """The error of another rank. `kinds`: names of its class and of that one's bases, the nearest first; the class
    alone, as text, from a rank of an earlier version."""
    if isinstance(kinds, str):
        kinds = [kinds, RayshardedError.__name__] if hasattr(errors, kinds) else [kinds]
    if RayshardedError.__name__ not in kinds:
        return PeerFailed(f"rank {rank} failed: {kinds[0]}: {text}", phase)
    ours = {known.__name__: kind for known, kind in _KINDS.items()}
    return next((ours[kind] for kind in kinds if kind in ours), PeerFailed)(f"rank {rank} failed: {text}", phase)
