"""The proof, through every pair of a gloo group, that a member of the generation is at the other end.

gloo takes the first connection that comes with a pair's number, and anybody can send one. So before a group is used,
each member sends each other one a keyed digest over generation, group, sender and receiver, and checks those that it
receives.
"""

from __future__ import annotations

import datetime
import hmac
from typing import Any

import torch
import torch.distributed as dist

_BYTES = 32


def digest(secret: bytes, group_name: str, sender: int, receiver: int) -> bytes:
    """The digest that the member with rank `sender` in the group sends to `receiver`.

    The group's name is fresh for every attempt.
    """
    return hmac.digest(secret, f"member\0{group_name}\0{sender}\0{receiver}".encode(), "sha256")


class MembershipProof:
    """The exchange of digests in one group of at least two members."""

    def __init__(self, group: Any, secret: bytes, group_name: str, timeout: datetime.timedelta) -> None:
        """Send the digests."""
        self._secret, self._name, self._rank, self._size = secret, group_name, group.rank(), group.size()
        own = b"".join(digest(secret, group_name, self._rank, to) for to in range(self._size))
        self._sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._received = torch.zeros_like(self._sent)
        options = dist.AllToAllOptions()
        options.timeout = timeout
        self.work = group.alltoall_base(self._received, self._sent, [], [], options)
        """gloo's work; `strangers` has a meaning once it has ended without an error."""

    def strangers(self) -> list[int]:
        """Ranks in the group whose digest is wrong: at their places are strangers."""
        received = self._received.numpy().tobytes()
        parts = [received[rank * _BYTES : (rank + 1) * _BYTES] for rank in range(self._size)]
        return [
            sender
            for sender, part in enumerate(parts)
            if not hmac.compare_digest(part, digest(self._secret, self._name, sender, self._rank))
        ]
