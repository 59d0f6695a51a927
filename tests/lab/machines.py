"""Machines in namespaces of this one, joined by links that can be cut, slowed down and made to lose packets.

Linux, and root. Each machine has its own network, processes, mounts, host name and shared memory. Files are this
machine's. All of it is in namespaces below one process, which ends with the thread that made it, also if that is
killed; and with it everything that runs on the machines. Nothing of this machine's network changes.

Packets take an ordinary bridge. Those of a link that is slow or loses packets take a program, `lab.c`, in their
direction alone: at low rates, since it needs one of this machine's cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

_NOBODY = "02:00:00:00:00:01"
"""A hardware address that nobody has: packets to it vanish, and no error comes back."""
_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv", "mount", "cc")
_MTU = 9000
_WITHIN_S = 20.0
_BURST_S = 0.05
"""Burst of a rate limit, in seconds of its rate; packets that would wait longer than ten of these are lost."""
_NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")


@cache
def why_not() -> str:
    """The reason that there can be no machines here, in one line; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    try:
        with Machines(2) as machines:
            machines.cut(0, 1)
            machines.limit(1, out_mbit=1)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"no namespaces: {said.splitlines()[-1] if said else type(error).__name__}"
    return ""


class Machine:
    """One machine. Made by `Machines`."""

    def __init__(self, number: int, folder: Path, on: _Space) -> None:
        """`folder`: a short path; files that the machine has there for itself stay when it is off."""
        self.number, self.address = number, f"10.77.0.{number + 1}"
        self.name = f"lab-{number}"
        self._folder, self._on = folder, on
        self._space: _Space | None = None
        self._home = folder / f"machine{number}"
        self._home.mkdir()

    @property
    def pid(self) -> int:
        """Process id, on this machine, of its first process. Raises RuntimeError while it is off."""
        if self._space is None:
            raise RuntimeError(f"{self.name} is off")
        return self._space.pid

    @property
    def own(self) -> Path:
        """A folder that each machine has for itself, under the same path."""
        return self._folder / "own"

    def popen(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on this machine, in the current directory; `options` are those of `subprocess.Popen`."""
        return self._running.popen(["env", "-C", os.getcwd(), *command], env=dict(environment or os.environ), **options)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Output of a command on this machine. Raises CalledProcessError, TimeoutExpired."""
        process = self.popen(
            command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), out, err)
        return str(out)

    def processes(self) -> dict[int, str]:
        """The command lines of all of its processes, by process id on this machine."""
        mine, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == mine:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def freeze(self) -> None:
        """Stop all of its processes at once: its connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)
        self._running.settle()

    def thaw(self) -> None:
        """Continue its processes."""
        self._signal(signal.SIGCONT)
        self._running.wake()

    def _signal(self, number: int) -> None:
        for pid in self.processes().keys() - {self.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def _running(self) -> _Space:
        if self._space is None:
            raise RuntimeError(f"{self.name} is off")
        return self._space

    # -- for `Machines` --

    def begin(self) -> None:
        """Start it, without a link."""
        own = self.own
        own.mkdir(exist_ok=True)
        made = (
            f"hostname {self.name}; mount --bind {self._home} {own}; mount -t tmpfs tmpfs /dev/shm; "
            "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done; ip link set lo up"
        )
        self._space = _Space(made, inside=self._on)

    def end(self) -> None:
        """End all of its processes at once."""
        self._running.end()
        self._space = None

    def ip(self, *lines: str) -> None:
        """Change its network. Raises CalledProcessError."""
        _ip(self.pid, lines)


class Machines:
    """Some machines, numbered from 0, each reaching each other at `Machine.address`. A context manager."""

    def __init__(self, count: int) -> None:
        """`count`: at most 32. Raises OSError and SubprocessError where that is not possible: see `why_not`."""
        self.folder = Path(tempfile.mkdtemp(prefix="lab", dir="/tmp"))  # short: sockets need that
        self._cut: set[tuple[int, int]] = set()
        self._slow: set[tuple[int, int]] = set()
        self._switch: subprocess.Popen[str] | None = None
        self._devices: set[int] = set()
        self._exits = contextlib.ExitStack()
        self._exits.callback(shutil.rmtree, self.folder, ignore_errors=True)
        with contextlib.ExitStack() as undone:
            undone.push(self._exits.pop_all())
            self.all: tuple[Machine, ...] = ()
            self._space = _Space("ip link set lo up")
            undone.callback(self._end)
            _ip(self._space.pid, ("link add lab type bridge", f"link set lab mtu {_MTU} up"))
            self.all = tuple(Machine(number, self.folder, self._space) for number in range(count))
            for number in range(count):
                self.power_on(number)
            self._exits = undone.pop_all()

    def __getitem__(self, number: int) -> Machine:
        return self.all[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exits.close()

    # -- links: from one machine to another, in that direction alone --

    def cut(self, source: int, target: int) -> None:
        """From now on packets of `source` to `target` vanish: no reset, no error. Both ends must be on."""
        self._cut.add((source, target))
        self._apply(source, target)

    def mend(self, source: int, target: int) -> None:
        """Undo `cut` and `slow_down`."""
        self._cut.discard((source, target))
        self._slow.discard((source, target))
        self._apply(source, target)

    def slow_down(
        self, source: int, target: int, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss_percent: float = 0.0
    ) -> None:
        """Delay each packet of `source` to `target` by `delay_ms` and up to `jitter_ms` more, and lose some of them."""
        for number in (source, target):
            self._ensure_device(number)
        self._tell(f"link {source} {target} {delay_ms} {jitter_ms} {loss_percent}")
        self._slow.add((source, target))
        self._apply(source, target)

    def limit(self, number: int, *, out_mbit: float | None = None, in_mbit: float | None = None) -> None:
        """Limit what a machine sends, and what it receives, in Mbit/s; None: no limit."""
        self._limit(self.all[number].pid, "eth0", out_mbit)
        self._limit(self._space.pid, f"to{number}", in_mbit)

    def crossed(self, source: int, target: int) -> tuple[int, int]:
        """(packets that `source` has sent over slow links, packets that `target` has received over such)."""
        sent, received = (_counted(self.all[number].pid, f"lab{number}") for number in (source, target))
        return int(sent["tx"]["packets"]), int(received["rx"]["packets"])

    def held_back(self, number: int) -> tuple[int, int]:
        """Times that the present limits made packets wait: those that a machine sends, and those that it receives."""
        return _waits(self.all[number].pid, "eth0"), _waits(self._space.pid, f"to{number}")

    def isolate(self, number: int) -> None:
        """Cut all links of a machine in both directions."""
        for other in range(len(self.all)):
            if other != number:
                self.cut(number, other)
                self.cut(other, number)

    def rejoin(self, number: int) -> None:
        """Mend all links of a machine."""
        for other in range(len(self.all)):
            if other != number:
                self.mend(number, other)
                self.mend(other, number)

    # -- power --

    def power_off(self, number: int) -> None:
        """End a machine as if its power failed: the others receive nothing of it any more, no reset either."""
        self.isolate(number)
        self._devices.discard(number)
        self.all[number].end()

    def power_on(self, number: int) -> None:
        """Start a machine that is off, with its address and files, and without processes; all of its links are well."""
        machine = self.all[number]
        machine.begin()
        with contextlib.suppress(subprocess.CalledProcessError):  # of the same machine before
            _ip(self._space.pid, (f"link del to{number}",))
        _ip(
            self._space.pid,
            (
                f"link add to{number} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {machine.pid}",
                f"link set to{number} master lab up",
            ),
        )
        machine.ip(f"addr add {machine.address}/24 dev eth0", "link set eth0 up")
        if self._cut or self._slow:
            self.rejoin(number)

    # -- below --

    def _end(self) -> None:
        """End all of it at once."""
        self._space.end(*(machine._space for machine in self.all if machine._space is not None))

    def _apply(self, source: int, target: int) -> None:
        machine, address = self.all[source], self.all[target].address
        if machine._space is None:
            return  # its links are well when it is on again
        lines = []
        if (source, target) in self._cut:
            lines.append(f"neigh replace {address} lladdr {_NOBODY} dev eth0 nud permanent")
        elif _has_neighbour(machine, address):
            lines.append(f"neigh del {address} dev eth0")
        if (source, target) in self._slow - self._cut:
            lines.append(f"route replace {address}/32 dev lab{source} src {machine.address}")
        elif _has_route(machine, address):
            lines.append(f"route del {address}/32")
        machine.ip(*lines)

    def _ensure_device(self, number: int) -> None:
        if number in self._devices:
            return
        if self._switch is None:
            self._switch = self._space.popen(
                [str(_program()), "switch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self._tell(f"device {number}")
        machine = self.all[number]
        _ip(self._space.pid, (f"link set lab{number} mtu {_MTU}", f"link set lab{number} netns {machine.pid}"))
        machine.ip(f"link set lab{number} up")
        machine.run(["sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/lab{number}/rp_filter"])
        self._devices.add(number)

    def _tell(self, line: str) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()
        _expect(self._switch.stdout, "done")

    def _limit(self, pid: int, device: str, mbit: float | None) -> None:
        if mbit is None:
            rule = ["tc", "qdisc", "del", "dev", device, "root"]
            subprocess.run(["nsenter", "-t", str(pid), "-n", *rule], check=False, capture_output=True)
            return
        burst = max(2 * _MTU, int(mbit * 1e6 / 8 * _BURST_S))
        shape = f"tbf rate {int(mbit * 1e6)}bit burst {burst} limit {10 * burst}"
        command = ["tc", "qdisc", "replace", "dev", device, "root", *shape.split()]
        subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True, text=True)


class _Space:
    """A set of new namespaces, with a first process that reaps. It ends with the thread that made it."""

    def __init__(self, prepare: str, inside: _Space | None = None) -> None:
        """`prepare`: shell commands that run in it first; `inside`: the space whose first process it ends with."""
        command = [
            *("unshare", *_NAMESPACES, "--fork", "--kill-child=KILL", "--propagation=private", "--mount-proc"),
            *("sh", "-e", "-c", f"{prepare}; exec {_program()} init"),
        ]
        if inside is not None:
            command = inside.entered(command)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            said = self._process.stderr.read()
            self._process.wait(_WITHIN_S)
            raise subprocess.CalledProcessError(self._process.returncode, command, stderr=said)
        self.pid = _last_child(self._process.pid)
        self._entered: list[subprocess.Popen[Any]] = []

    def entered(self, command: Sequence[str]) -> list[str]:
        """The command that runs another in this space."""
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process in this space."""
        process = subprocess.Popen(self.entered(command), **options)
        self._entered.append(process)
        return process

    def settle(self) -> None:
        """Return when the processes outside have stopped with those that they wait for."""
        deadline = time.monotonic() + _WITHIN_S
        while any(process.poll() is None and _state(process.pid) not in "TZ" for process in self._entered):
            if time.monotonic() > deadline:
                raise TimeoutError("a program that was stopped does not look so from outside")
            time.sleep(0.01)

    def wake(self) -> None:
        """Continue the processes outside that wait for one inside: `nsenter` stops when that is stopped."""
        self._entered = [process for process in self._entered if process.poll() is None]
        for process in self._entered:
            process.send_signal(signal.SIGCONT)

    def end(self, *inside: _Space) -> None:
        """End all of its processes, and those of the spaces inside, and wait for their end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _WITHIN_S
        while self._process.poll() is None:  # it ends when all are reaped; one that waits may stop only now
            for space in (self, *inside):
                space.wake()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the namespaces of process {self.pid} do not end")
            time.sleep(0.02)
        self._process.communicate()


@cache
def _program() -> Path:
    """`lab.c`, compiled."""
    source = Path(__file__).with_name("lab.c")
    made = Path(tempfile.gettempdir()) / f"raysharded-lab-{os.getuid()}"
    made.mkdir(mode=0o700, exist_ok=True)
    program = made / f"lab-{int(source.stat().st_mtime)}"
    if not program.exists():
        fresh = made / f"lab-{os.getpid()}"
        subprocess.run(["cc", "-O2", "-o", fresh, source], check=True, capture_output=True, text=True)
        fresh.replace(program)
    return program


def _last_child(pid: int) -> int:
    """The innermost of the processes that each started the next."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _ip(pid: int, lines: Sequence[str]) -> None:
    if lines:
        command = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
        text = "".join(f"{line}\n" for line in lines)
        subprocess.run(command, input=text, check=True, capture_output=True, text=True, timeout=_WITHIN_S)


def _shown(machine: Machine, *what: str) -> str:
    command = ["nsenter", "-t", str(machine.pid), "-n", "ip", *what]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S).stdout


def _counted(pid: int, device: str) -> dict[str, dict[str, int]]:
    """Counters of a device, of both directions."""
    command = ["nsenter", "-t", str(pid), "-n", "ip", "-s", "-j", "link", "show", "dev", device]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S)
    found: dict[str, dict[str, int]] = json.loads(done.stdout)[0]["stats64"]
    return found


def _waits(pid: int, device: str) -> int:
    """Times that a packet had to wait for a device's limit."""
    command = ["nsenter", "-t", str(pid), "-n", "tc", "-s", "-j", "qdisc", "show", "dev", device]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S)
    return sum(int(one["overlimits"]) for one in json.loads(done.stdout) if one["kind"] == "tbf")


def _has_neighbour(machine: Machine, address: str) -> bool:
    return bool(_shown(machine, "neigh", "show", "to", address, "dev", "eth0").strip())


def _has_route(machine: Machine, address: str) -> bool:
    return bool(_shown(machine, "route", "show", "exact", f"{address}/32").strip())


def _expect(stream: IO[str], word: str) -> None:
    said = stream.readline().strip()
    if said != word:
        raise OSError(f"the switch said {said!r}")
