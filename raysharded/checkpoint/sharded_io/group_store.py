"""The store of a process group: waits with a deadline, and a name for the group's messages.

A group that is destroyed and made again over the same store gets the same prefix from torch. The store still holds the
messages that a failed save of the earlier group left. So the ranks of a group agree on a random name before their first
message:

1. Rank 0 draws a name and publishes it as `session`.
2. Every other rank draws a token, reads `session`, and sets `{name}/here/{rank}` to the token.
3. Rank 0 waits for the tokens under its own name. No earlier group can have set them. It confirms each by
   `{name}/go/{token}`.
4. A rank accepts a name when its own token is confirmed. The name of an earlier group never confirms it: the rank reads
   `session` again until rank 0 has replaced it.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from raysharded.checkpoint.state_dict.rank_merge import listed
from raysharded.errors import CheckpointError

RANK0_SHARE = 0.9
"""Share of the timeout after which rank 0 times out, before the others: it knows which rank's message is missing."""

_FIRST_WAIT_S, _MOST_WAIT_S = 0.05, 1.0
"""Time until a rank reads `session` again, doubled each time."""


class GroupSession:
    """The agreed name of one process group, on one rank. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._token = secrets.token_hex(8)
        """The name on rank 0. It stays for later attempts: a confirmation that came too late counts then."""
        self._name = ""
        self._uses = 0

    def next_prefix(self, store: Store, rank: int, world_size: int, timeout_s: float) -> str:
        """A prefix for the messages of one more save or load, the same on all ranks.

        The first call waits for all ranks. Every rank makes the same number of calls, failed ones included. Raises
        CheckpointError.
        """
        with self._lock:
            self._uses += 1
            if not self._name:
                with explained(rank):
                    own: Any = store  # its clone() is missing in the stubs
                    self._name = self._agree(own.clone(), rank, world_size, timeout_s)
            return f"{self._name}/{self._uses}"

    def _agree(self, store: Store, rank: int, world_size: int, timeout_s: float) -> str:
        if rank:
            return self._join(store, rank, timeout_s)
        name = self._token
        store.set("session", name)
        here = {other: f"{name}/here/{other}" for other in range(1, world_size)}
        in_time = came(store, list(here.values()), timeout_s * RANK0_SHARE)
        present = {other: key for other, key in here.items() if in_time or store.check([key])}
        refusal = "" if in_time else late(sorted(here.keys() - present.keys()), world_size, timeout_s)
        for key in present.values():
            token = store.get(key).decode()
            store.set(f"{name}/late/{token}/{self._uses}" if refusal else f"{name}/go/{token}", refusal)
            if not refusal:
                store.delete_key(key)
        if refusal:
            raise CheckpointError(refusal)
        return name

    def _join(self, store: Store, rank: int, timeout_s: float) -> str:
        deadline, wait_s, name = monotonic() + timeout_s, _FIRST_WAIT_S, ""
        while came(store, ["session"], deadline - monotonic()):
            if (published := store.get("session").decode()) != name:
                name = published
                store.set(f"{name}/here/{rank}", self._token)
            if came(store, [confirmed := f"{name}/go/{self._token}"], min(wait_s, deadline - monotonic())):
                store.delete_key(confirmed)
                return name
            if store.check([refused := f"{name}/late/{self._token}/{self._uses}"]):
                raise CheckpointError(f"rank 0 failed: {store.get(refused).decode()}")
            if monotonic() >= deadline:
                break
            wait_s = min(2 * wait_s, _MOST_WAIT_S)
        raise CheckpointError(no_rank0(rank, timeout_s))


_sessions: weakref.WeakKeyDictionary[Any, GroupSession] = weakref.WeakKeyDictionary()
_sessions_lock = Lock()


def next_store(group: Any, rank: int, world_size: int, timeout_s: float) -> Store:
    """A store for one more save or load of this process group. Raises as `GroupSession.next_prefix`."""
    with _sessions_lock:
        session = _sessions.setdefault(group, GroupSession())
    store = PrefixStore("raysharded", dist.distributed_c10d._get_process_group_store(group))
    return PrefixStore(session.next_prefix(store, rank, world_size, timeout_s), store)


def came(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Whether all keys are set within the time."""
    try:
        store.wait(keys, timedelta(seconds=max(timeout_s, 0.001)))
    except RuntimeError as error:  # each kind of store raises its own type
        if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
            raise
        return False
    return True


@contextmanager
def explained(rank: int) -> Iterator[None]:
    """Raise a failure of the store as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise CheckpointError(
            f"rank {rank}: the store of the process group failed: {said}. The process that serves it, usually rank "
            "0's or its launcher, has ended; see its log."
        ) from error


def late(missing: list[int], world_size: int, timeout_s: float) -> str:
    """Text of the error on rank 0 when ranks sent nothing in time."""
    return (
        f"{len(missing)} of {world_size} ranks sent no message within {timeout_s:g} s: {listed(missing)}. Check their "
        "logs; if they were only slow, give a larger timeout_s."
    )


def no_rank0(rank: int, timeout_s: float) -> str:
    """Text of the error on another rank when rank 0 sent nothing in time."""
    return (
        f"rank {rank}: rank 0 sent no message within {timeout_s:g} s. Check its log; if it was only slow, give a "
        "larger timeout_s."
    )
