"""The Rays that run on this machine, and their users. Does not import Ray.

`ray start` writes the cluster's address to a file in Ray's folder of temporary files. By default, every user of the
machine may write there. The user who runs a cluster can run code in the processes that connect to it. So the file alone
proves nothing, and it stays when the cluster has ended.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
"""State of a socket that accepts connections (TCP_LISTEN of Linux)."""
_PROCESSES = Path("/proc")
_RAYLET = "raylet"
_TOKEN_MODE = b"ray_auth_mode=token"
_MAX_BYTES = 256
_TRY_S = 2.0
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCluster:
    """A cluster that answers at the address in Ray's address file."""

    address: str
    """HOST:PORT."""
    users: frozenset[int]
    """User ids: of the file, and of the processes of this machine that listen at the address."""

    @property
    def is_ours(self) -> bool:
        """True if nobody but this process's user could have started it, or have written the file."""
        return self.users == {os.geteuid()}


def running_cluster(file: Path) -> LocalCluster | None:
    """The cluster that an address file names; None if there is no such file, or nothing answers there.

    A link is not followed: its target may be of another user than its name.
    """
    try:
        written_by, text = _read(file)
        host, _, port = text.strip().rpartition(":")
        number = int(port)
    except (OSError, ValueError):
        return None
    host = host.strip("[]")
    if not listens(host, number):
        return None
    return LocalCluster(address=text.strip(), users=frozenset({written_by}) | users_listening(host, number))


@dataclass(frozen=True, kw_only=True, slots=True)
class Raylet:
    """The process of a Ray that every machine of its cluster has. Its command line names the cluster."""

    user: int
    """User id."""
    address: str
    """HOST:PORT of the cluster."""
    folder: Path
    """Ray's folder of temporary files."""
    process: Path
    """Its folder in /proc."""


def requires_token(address: str) -> bool:
    """Whether a Ray of this user on this machine, at this address, requires a token, as its environment shows."""
    for one in raylets():
        with suppress(OSError):  # it has ended
            if one.address == address and one.user == os.geteuid():
                return _TOKEN_MODE in (one.process / "environ").read_bytes().lower().split(b"\0")
    return False


def raylets() -> list[Raylet]:
    """The raylets of this machine, as far as this process may see them."""
    return [found for process in _PROCESSES.glob("[0-9]*") if (found := _raylet(process)) is not None]


def clusters_elsewhere(file: Path) -> dict[Path, LocalCluster]:
    """This user's clusters of `ray start` with another folder than the address file's: their own file -> the cluster.

    The newest is first. The Ray of a script, of `ray.init()`, writes no file, and is not among them: it ends with the
    script.
    """
    here = [one for one in raylets() if one.user == os.geteuid()]
    files = {folder / file.name for folder in {one.folder for one in here}} - {file}
    found = {other: cluster for other in files if (cluster := running_cluster(other)) is not None and cluster.is_ours}
    there = {one.address for one in here}
    return {
        other: found[other] for other in sorted(found, key=_written_at, reverse=True) if found[other].address in there
    }


def listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=_TRY_S):
            return True
    except OSError:
        return False


def users_listening(host: str, port: int) -> frozenset[int]:
    """User ids of the processes of this machine that listen at HOST:PORT; empty if it is another machine's address."""
    try:
        wanted = {_plain(ipaddress.ip_address(found[4][0])) for found in socket.getaddrinfo(host, port)}
    except (OSError, ValueError):
        return frozenset()
    return frozenset(
        user
        for file in _SOCKETS
        for address, its_port, user in _listening(file)
        if its_port == port and (address.is_unspecified or address in wanted)
    )


def names_of(users: frozenset[int]) -> str:
    """The users' names, in words; the id of a user without a name."""
    return " and ".join(sorted(map(_name_of, users)))


def _read(file: Path) -> tuple[int, str]:
    """The owner of a regular file, and its text. Raises OSError."""
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as opened:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file} is no regular file")
        return found.st_uid, opened.read(_MAX_BYTES).decode()


def _raylet(process: Path) -> Raylet | None:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if Path(words[0]).name != _RAYLET:
            return None
        flags = {
            name.lstrip("-").replace("_", "-"): value for name, _, value in (word.partition("=") for word in words)
        }
        return Raylet(
            user=process.stat().st_uid,
            address=flags.get("gcs-address", ""),
            folder=Path(flags.get("temp-dir", "")),
            process=process,
        )
    except OSError:  # it has ended
        return None


def _written_at(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:
        return 0.0


def _listening(file: Path) -> list[tuple[Address, int, int]]:
    """Every listening socket in a table of the kernel: its address, port, and user id."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [(*_address(row[1]), int(row[7])) for row in rows if row[3] == _LISTENS]


def _address(text: str) -> tuple[Address, int]:
    """Address and port in the kernel's notation: words of 32 bits, each in the machine's own order of bytes."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _plain(address: Address) -> Address:
    """The IPv4 address in an IPv6 one, if that holds one."""
    inside = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if inside is None else inside


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
