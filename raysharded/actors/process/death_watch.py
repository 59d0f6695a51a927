"""Causes of the deaths of this machine's processes: status or signal, the memory killer, the last lines of stderr.

Nobody here is the parent of the watched process (Ray's raylet is, and discards the status). Since Linux 6.15 a
descriptor of the process (pidfd) reports its status after its death. Before, there are two signs: the status that
`os._exit` was called with, which the worker's position record keeps, and the report of a fatal signal in its standard
error. A death without either is not explained: SIGKILL leaves no sign.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from raysharded.actors.gpu_health import GpuHealth, GpuReport
from raysharded.actors.process.os_processes import start_ticks
from raysharded.actors.telemetry import position_record
from raysharded.display.quantities import size
from raysharded.protocol.death import Death

_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""ioctl PIDFD_GET_INFO (linux/pidfd.h) with `struct pidfd_info` of 64 bytes."""
_INFO_EXIT = 1 << 3
_INFO_SIZE, _EXIT_CODE_AT = 64, 60
_TAIL_BYTES = 16384
_LINES, _LONGEST = 12, 300
_ENDS_WITHIN_S = 10.0
"""Longest wait for a process whose connections are closed: a large one takes time to free its memory."""
_REAPED_WITHIN_S, _LOOK_S = 0.5, 0.005
_KEPT_S = 60.0
"""Time after a process's end in which its cause may still be requested."""
_REPORTED = re.compile(r"^\*\*\* (SIG[A-Z]+) received at time=|^Fatal Python error: (.+)$", re.MULTILINE)
"""Ray's report of a fatal signal, and Python's."""
_NATIVE = re.compile(r"\s*@\s+0x|PC: @|\[.*logging\.cc:\d+\]|\s+@ ")
_BAR = re.compile(r"(?:[^|\n]*\d%\|[^|\n]*\|[^\[\n]*\[[^\]\n]*\]|[^\[\n]*\d\w* \[\d\d:\d\d, [^\]\n]*\]) *")
"""A bar of tqdm, or its count where the length is unknown, and the spaces with which a shorter one covers the last.

Others write what follows on its line.
"""
_BEFORE_REPORT = 4
_PYTHONS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
_NO_LIMIT = 1 << 60
_V1, _V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


@dataclass(slots=True)
class _Watched:
    """One process that is watched. The descriptors outlive it."""

    process: int
    record: int | None
    stderr: int | None
    stderr_file: str
    stderr_from: int
    """Size of the file of its standard error when the watch began."""
    oom_counter: Path | None
    oom_kills: int
    device: str
    """Its GPU, as its worker names it; empty for none."""
    ended_at: float | None = None
    """Monotonic time at which it was first seen to have ended."""


class DeathWatch:
    """Watches processes of this machine. Any thread; `explain` may wait. Those of no interest are forgotten later."""

    def __init__(self, *, asks_kernel: bool = True, health: GpuHealth | None = None) -> None:
        """`asks_kernel`: False to go by the signs alone, as on a kernel before 6.15. `health`: of this machine's GPUs;
        None: from NVML, once a worker has a GPU."""
        self._asks_kernel = asks_kernel
        self._health = health
        self._watched: dict[int, _Watched] = {}

    def watch(self, pid: int, started: int, device: str = "") -> bool:
        """Watch a process with this start (`os_processes.start_ticks`). False if it has ended, or cannot be watched.

        `device`: its GPU (`WorkerInfo.device`), if it has one.
        """
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return False
        if start_ticks(pid) != started:
            os.close(process)
            return False
        self._forget_old()
        self.forget(pid)
        if device:
            self._health = self._health or GpuHealth()
            self._health.watch(device)
        name, file, begin = _stderr_of(pid)
        counter = _oom_counter_of(pid)
        self._watched[pid] = _Watched(
            process=process,
            record=position_record.open_record(pid),
            stderr=file,
            stderr_file=name,
            stderr_from=begin,
            oom_counter=counter,
            oom_kills=_oom_kills(counter),
            device=device,
        )
        return True

    def explain(self, pid: int) -> Death | None:
        """The cause of a watched process's death; None if it is not watched, or does not end within ten seconds."""
        watched = self._watched.get(pid)
        if watched is None:
            return None
        if not _has_ended(watched.process, _ENDS_WITHIN_S):
            return None
        position = position_record.read_record(watched.record) if watched.record is not None else None
        position = position or position_record.Position()
        tail = _tail(watched)
        status, number = self._ending(watched, position, tail)
        memory = ""
        if number in ("SIGKILL", "") and status is None and _oom_kills(watched.oom_counter) > watched.oom_kills:
            memory = _memory_text(watched.oom_counter)
            for one in list(self._watched.values()):  # this kill is no longer an explanation for others
                if one is not watched and one.oom_counter == watched.oom_counter:
                    one.oom_kills += 1
        self.forget(pid)
        gpu = self._health.report(watched.device) if self._health is not None else GpuReport()
        return Death(
            status=status,
            signal=number,
            out_of_memory=memory,
            generation=position.generation,
            step=position.step,
            phase=position.phase,
            microbatch=position.microbatch,
            samples=position.samples,
            stderr=_last_lines(tail),
            stderr_file=watched.stderr_file,
            gpu=gpu.complaints,
            gpu_is_broken=gpu.is_broken,
        )

    def _ending(self, watched: _Watched, position: position_record.Position, tail: str) -> tuple[int | None, str]:
        code = _exit_code(watched.process) if self._asks_kernel else None
        if code is not None:
            return (None, _name_of(code & 0x7F)) if code & 0x7F else (code >> 8 & 0xFF, "")
        reported = _REPORTED.findall(tail)
        if reported:
            by_ray, by_python = reported[-1]
            number = by_ray or _PYTHONS.get(by_python, "")
            if number:
                return None, number
        return position.status, ""

    def forget(self, pid: int) -> None:
        """End the watch of a process, if there is one."""
        watched = self._watched.pop(pid, None)
        if watched is not None:
            for file in (watched.process, watched.record, watched.stderr):
                if file is not None:
                    os.close(file)

    def _forget_old(self) -> None:
        """Forget processes that have ended a while ago: they were killed on request."""
        now = time.monotonic()
        for pid, watched in list(self._watched.items()):
            if watched.ended_at is None and _has_ended(watched.process, 0.0):
                watched.ended_at = now
            if watched.ended_at is not None and now - watched.ended_at > _KEPT_S:
                self.forget(pid)

    def close(self) -> None:
        """End all watches."""
        for pid in list(self._watched):
            self.forget(pid)


def _has_ended(process: int, within_s: float) -> bool:
    """Whether the process of a pidfd has ended, or does so within this time."""
    found = select.poll()
    found.register(process, select.POLLIN)
    return bool(found.poll(within_s * 1000))


def _exit_code(process: int) -> int | None:
    """The wait status of a process that has ended, from its pidfd; None if this kernel does not report it.

    The kernel has it once the parent has reaped the process, which may be a moment after its end.
    """
    deadline = time.monotonic() + _REAPED_WITHIN_S
    while True:
        found = bytearray(_INFO_SIZE)
        struct.pack_into("<Q", found, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(process, _GET_INFO, found)
        except OSError:
            return None
        (mask,) = struct.unpack_from("<Q", found)
        (code,) = struct.unpack_from("<i", found, _EXIT_CODE_AT)
        if mask & _INFO_EXIT:
            return int(code)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_S)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _stderr_of(pid: int) -> tuple[str, int | None, int]:
    """(path, descriptor, size) of the regular file that is a process's standard error; ("", None, 0) if it is none.

    Neither if this process writes into the same file: then the last lines may be anybody's.
    """
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/{pid}/fd/2")
        if Path(path).is_file() and not _is_own_stderr(path):
            file = os.open(path, os.O_RDONLY)
            return path, file, os.fstat(file).st_size
    return "", None, 0


def _is_own_stderr(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(2))
    except OSError:  # it is closed
        return False


def _tail(watched: _Watched) -> str:
    """The end of what the process wrote to its standard error since the watch began."""
    if watched.stderr is None:
        return ""
    with contextlib.suppress(OSError):
        end = os.fstat(watched.stderr).st_size
        start = max(watched.stderr_from, end - _TAIL_BYTES)
        return os.pread(watched.stderr, max(0, end - start), start).decode(errors="replace")
    return ""


def _last_lines(tail: str) -> tuple[str, ...]:
    """The last lines; of the report of a fatal signal the beginning, with the lines before it.

    Without native stacks, progress bars, and what a carriage return has overwritten.
    """
    written = (line for line in tail.splitlines(keepends=True) if not line.endswith("\r"))
    said = (line[bar.end() :] if (bar := _BAR.match(line)) else line for line in written)
    lines = [line.rstrip()[:_LONGEST] for line in said if line.strip() and not _NATIVE.match(line)]
    reports = [number for number, line in enumerate(lines) if _REPORTED.match(line)]
    if not reports:
        return tuple(lines[-_LINES:])
    start = max(0, reports[0] - _BEFORE_REPORT)
    return tuple(lines[start : start + _LINES])


def _oom_counter_of(pid: int) -> Path | None:
    """The file in which the memory cgroup of a process counts kills; None if there is none that can be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if "memory" in controllers.split(","):
                found = [Path(_V1, inside, "memory.oom_control"), Path(_V1, "memory.oom_control")]
            elif not controllers:
                found = [Path(_V2, inside, "memory.events"), Path(_V2, "memory.events")]
            else:
                continue
            for one in found:  # in a container the group's own path may not be visible: it is the root there
                if one.is_file():
                    return one
    return None


def _oom_kills(counter: Path | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        if counter is not None:
            for line in counter.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def _memory_text(counter: Path | None) -> str:
    limit: int | None = None
    if counter is not None:
        name = "memory.limit_in_bytes" if counter.name == "memory.oom_control" else "memory.max"
        with contextlib.suppress(OSError, ValueError):
            limit = int((counter.parent / name).read_text())
    if limit is None or limit >= _NO_LIMIT:
        return "the kernel's memory killer ended it, as its machine had no memory left"
    return f"the kernel's memory killer ended it at the limit of its cgroup, {size(limit)}"
