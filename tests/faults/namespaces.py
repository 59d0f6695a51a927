"""A separate network for a process, joined to ours by a link that can be cut and mended. Linux, and root."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:01"
"""A hardware address that nobody has: messages to it vanish, and no error comes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network namespace, and the two ends of the link to it."""

    name: str
    number: int

    @property
    def our_address(self) -> str:
        return f"10.213.{self.number}.1"

    @property
    def its_address(self) -> str:
        return f"10.213.{self.number}.2"

    def enter(self) -> None:
        """Have the calling thread, and the threads that it starts, live in this network from now on."""
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {self.name}")
        os.close(descriptor)

    def cut(self) -> None:
        """From now on packets vanish, both ways: no reset, no error, and the link looks well to both ends."""
        _ip(f"neigh replace {self.its_address} lladdr {_NOBODY} dev {self.name}a nud permanent")
        _ip(f"-n {self.name} neigh replace {self.our_address} lladdr {_NOBODY} dev {self.name}b nud permanent")

    def mend(self) -> None:
        """Packets arrive again."""
        _ip(f"neigh del {self.its_address} dev {self.name}a")
        _ip(f"-n {self.name} neigh del {self.our_address} dev {self.name}b")


def why_not() -> str:
    """The reason that such a network is impossible here; empty if it is possible."""
    try:
        with network():
            return ""
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def network() -> Iterator[Network]:
    """A new network, deleted afterwards. Raises CalledProcessError where that is not permitted."""
    name, number = f"rs{secrets.token_hex(3)}", secrets.randbelow(256)
    made = Network(name=name, number=number)
    _ip(f"netns add {name}")
    try:
        _ip(f"link add {name}a type veth peer name {name}b netns {name}")
        _ip(f"addr add {made.our_address}/24 dev {name}a")
        _ip(f"link set {name}a up")
        _ip(f"-n {name} addr add {made.its_address}/24 dev {name}b")
        _ip(f"-n {name} link set {name}b up")
        _ip(f"-n {name} link set lo up")
        yield made
    finally:
        _ip(f"netns del {name}")  # both ends of the link are deleted with it


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True, timeout=20)
