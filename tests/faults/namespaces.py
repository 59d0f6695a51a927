"""Separate networks for processes, joined by links that can be cut and mended. Linux, and root."""

from __future__ import annotations

import ctypes
import json
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
        _enter(self.name)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A network namespace on a segment that it shares with others and with us."""

    name: str
    address: str
    hardware_address: str

    def enter(self) -> None:
        """As `Network.enter`."""
        _enter(self.name)

    def cut_to(self, other: Host) -> None:
        """From now on packets to the other host vanish; those from it arrive."""
        _ip(f"-n {self.name} neigh replace {other.address} lladdr {_NOBODY} dev {self.name}b nud permanent")

    def limit(self, mbit: float | None) -> None:
        """Limit what the host sends, and what it receives, to so many Mbit/s; None: no limit."""
        for namespace, device in self._ends:
            if mbit is None:
                _run(f"tc {namespace} qdisc del dev {device} root")
            else:
                shape = f"tbf rate {int(mbit * 1e6)}bit burst 20000 limit 400000"
                _run(f"tc {namespace} qdisc replace dev {device} root {shape}")

    def held_back(self) -> int:
        """Times that the present limits made a packet wait."""
        shown = [json.loads(_run(f"tc {namespace} -s -j qdisc show dev {device}")) for namespace, device in self._ends]
        return sum(int(one["overlimits"]) for found in shown for one in found if one["kind"] == "tbf")

    @property
    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(options of `tc` for the namespace, device) of the two ends of its link: the host's, then ours."""
        return (f"-n {self.name}", f"{self.name}b"), ("", f"{self.name}a")

    def mend_to(self, other: Host) -> None:
        """Packets to the other host arrive again."""
        _ip(
            f"-n {self.name} neigh replace {other.address} lladdr {other.hardware_address} dev {self.name}b "
            "nud reachable"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Hosts that reach each other and us."""

    our_address: str
    hosts: tuple[Host, ...]


@contextmanager
def segment(count: int) -> Iterator[Segment]:
    """A new segment, deleted afterwards. Raises CalledProcessError where that is not permitted."""
    name, number = f"rs{secrets.token_hex(3)}", secrets.randbelow(256)
    hosts: list[Host] = []
    _ip(f"link add {name} type bridge")
    try:
        _ip(f"addr add 10.214.{number}.1/24 dev {name}")
        _ip(f"link set {name} up")
        hosts.extend(_add_host(name, number, at) for at in range(count))
        yield Segment(our_address=f"10.214.{number}.1", hosts=tuple(hosts))
    finally:
        for host in hosts:
            _ip(f"netns del {host.name}")
        _ip(f"link del {name}")


def _add_host(bridge: str, number: int, at: int) -> Host:
    name, address, hardware_address = f"{bridge}{at}", f"10.214.{number}.{at + 2}", f"02:00:00:{number:02x}:01:{at:02x}"
    _ip(f"netns add {name}")
    _ip(f"link add {name}a type veth peer name {name}b netns {name}")
    _ip(f"link set {name}a master {bridge}")
    _ip(f"link set {name}a up")
    _ip(f"-n {name} link set {name}b address {hardware_address}")
    _ip(f"-n {name} addr add {address}/24 dev {name}b")
    _ip(f"-n {name} link set {name}b up")
    _ip(f"-n {name} link set lo up")
    return Host(name=name, address=address, hardware_address=hardware_address)


def _enter(name: str) -> None:
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {name}")
    os.close(descriptor)


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20).stdout
