"""Memory that processes of this machine may use: all of it, or as much as a container's limit allows.

The limit is that of the control group (version 1 or 2) of this process, or of one above it, whichever is lowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
"""The folder that has `proc` and `sys`."""
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of the limit and the use, and the name in memory.stat of the file cache, which the kernel frees first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes; None where they are unknown."""

    machine: int | None
    available: int | None
    """Bytes that processes can still allocate."""
    limit: int | None
    """The container's limit, if it is below the machine's memory."""

    @property
    def usable(self) -> int | None:
        """All that processes may have: the limit, or the machine's."""
        return self.machine if self.limit is None else self.limit


def host_memory(root: Path | None = None) -> HostMemory:
    """The memory of this machine. `root`: another folder that has `proc` and `sys`."""
    root = ROOT if root is None else root
    machine, free = _of_machine(root)
    found = (_of_group(folder, names) for folder, names in _groups(root))
    groups = [one for one in found if one is not None and (machine is None or one[0] < machine)]
    limit = min((limit for limit, _ in groups), default=None)
    rooms = [max(0, limit - used) for limit, used in groups] + ([] if free is None else [free])
    return HostMemory(machine=machine, available=min(rooms, default=None), limit=limit)


def _of_machine(root: Path) -> tuple[int | None, int | None]:
    """Bytes of the machine, and those that are available."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    found = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
    return found.get("MemTotal"), found.get("MemAvailable")


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's control group, and of those above it, each with the names of its version.

    A container may see its own group at the top, and in /proc the path that it has outside.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        folder = top / path.strip("/")
        yield from ((one, names) for one in (folder, *folder.parents) if one == top or top in one.parents)


def _of_group(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    """Limit and use of a control group, without the file cache that the kernel frees first; None without a limit."""
    limit_name, used_name, cache_name = names
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
    except (OSError, ValueError):
        return None
    return (int(limit), max(0, used - _cache(folder, cache_name))) if limit.isdigit() else None


def _cache(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
