"""A real S3 server for tests: Ceph's radosgw on loopback, with one monitor and one object store below it.

The programs are Debian's. They are downloaded once and unpacked into a cache folder, so that nothing is installed on
the machine. A server has a separate folder and separate ports, until its context ends. Its processes end with the
thread that started them, also when that is killed.

By hand: `python -m tests.s3.server` prints the endpoint and serves until it is interrupted.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.unpacked import NotUnpacked, Unpacked

_CEPH = Unpacked(
    name="ceph",
    packages=("ceph-mon", "ceph-osd", "radosgw", "ceph-common"),
    programs=("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool"),
    libraries=("ceph",),
)
START_TIMEOUT_S = 120.0  # about 20 s on two idle cores
STOP_TIMEOUT_S = 5.0


class ServerFailed(Exception):
    """The server is not available; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """Address and credentials of a server."""

    endpoint_url: str
    access_key: str = "test"
    secret_key: str = "testsecret"
    pids: tuple[int, ...] = ()


@contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """A server whose files are in the (new) folder, which is removed at the end. Raises ServerFailed."""
    root = programs()
    for part in ("mon", "osd", "rgw"):
        (folder / part).mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield _Start(root=root, folder=folder, stack=stack).run()


def programs() -> Path:
    """The folder with Ceph's programs, which are downloaded if they are not there. Raises ServerFailed."""
    try:
        return _CEPH.root()
    except NotUnpacked as error:
        raise ServerFailed(str(error)) from error


def _environment(root: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in _CEPH.environment(root).items() if not name.startswith("CEPH")},
        "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(kw_only=True, slots=True)
class _Start:
    """The steps to a running server; the stack ends the started processes."""

    root: Path
    folder: Path
    stack: ExitStack

    def run(self) -> S3Server:
        cluster, monitor, gateway = str(uuid.uuid4()), _free_port(), _free_port()
        (self.folder / "ceph.conf").write_text(self._configuration(cluster, monitor, gateway))
        self._make_keys()
        mon = self._start_monitor(cluster, monitor)
        osd = self._start_store()
        rgw = self._spawn("radosgw", "--name", "client.rgw")
        self._until("radosgw answers", lambda: _listens(gateway), rgw)
        server = S3Server(endpoint_url=f"http://127.0.0.1:{gateway}", pids=(mon.pid, osd.pid, rgw.pid))
        keys = [
            f"--access-key={server.access_key}",
            f"--secret-key={server.secret_key}",
            "--caps=users=*",
        ]
        self._do(
            "radosgw-admin", "--name", "client.rgw", "user", "create", "--uid=tests", "--display-name=tests", *keys
        )
        return server

    def _make_keys(self) -> None:
        ring, everything = str(self.folder / "keyring"), ("mon", "allow *", "osd", "allow *")
        for first, name, allowed in (
            (True, "mon.", ("mon", "allow *")),
            (False, "client.admin", (*everything, "mgr", "allow *")),
            (False, "client.rgw", everything),
            (False, "osd.0", ("mon", "allow profile osd", "osd", "allow *")),
        ):
            pairs = zip(allowed[::2], allowed[1::2], strict=True)
            caps = [word for who, what in pairs for word in ("--cap", who, what)]
            create = ["--create-keyring"] if first else []
            self._do("ceph-authtool", *create, ring, "--gen-key", "--name", name, *caps, configured=False)

    def _start_monitor(self, cluster: str, port: int) -> subprocess.Popen[bytes]:
        plan = str(self.folder / "monmap")
        address = f"[v2:127.0.0.1:{port}]"
        self._do("monmaptool", "--create", "--addv", "a", address, "--fsid", cluster, plan, configured=False)
        keyring = str(self.folder / "keyring")
        self._do("ceph-mon", "--id", "a", "--mkfs", "--monmap", plan, "--keyring", keyring)
        process = self._spawn("ceph-mon", "--id", "a")
        self._until("the monitor answers", lambda: _listens(port), process)
        return process

    def _start_store(self) -> subprocess.Popen[bytes]:
        store = str(uuid.uuid4())
        self._ceph("osd", "create", store)
        self._do("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", store)
        process = self._spawn("ceph-osd", "--id", "0")
        self._until("the object store is up", lambda: " 1 up" in self._ceph("osd", "stat"), process)
        return process

    def _ceph(self, *words: str) -> str:
        """Send a command to the monitor. `ceph` is a script for Debian's own Python."""
        unpacked = self.root / "usr/bin/python3"
        python = str(unpacked if unpacked.exists() else "/usr/bin/python3")
        return self._do(python, str(self.root / "usr/bin/ceph"), *words)

    def _do(self, program: str, *words: str, configured: bool = True) -> str:
        config = ["-c", str(self.folder / "ceph.conf")] if configured else []
        script = [words[0]] if program.endswith("python3") else []
        command = [program, *script, *config, *words[len(script) :]]
        done = subprocess.run(
            command, capture_output=True, text=True, env=_environment(self.root), timeout=START_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise ServerFailed(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def _spawn(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a process that stays, and gets SIGKILL when the thread that starts it ends."""
        output = self.stack.enter_context((self.folder / f"{program}.out").open("wb"))
        command = ["setpriv", "--pdeathsig", "KILL", program, "-c", str(self.folder / "ceph.conf"), "-f", *words]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_environment(self.root), start_new_session=True
        )
        self.stack.callback(_end, process)
        return process

    def _until(self, what: str, true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not true():
            if process.poll() is not None or time.monotonic() > deadline:
                state = "still runs" if process.returncode is None else f"ended with {process.returncode}"
                outputs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.out"))
                raise ServerFailed(f"waited in vain until {what}; the process {state}:\n{outputs}")
            time.sleep(0.05)  # waits for another process, which sends no notice

    def _configuration(self, cluster: str, monitor: int, gateway: int) -> str:
        folder, libraries = self.folder, self.root / f"usr/lib/{os.uname().machine}-linux-gnu"
        return f"""
[global]
fsid = {cluster}
mon host = [v2:127.0.0.1:{monitor}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
plugin dir = {libraries}/ceph
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
compressor dir = {libraries}/ceph/compressor

# one copy of everything, in one place
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true

[mon.a]
mon data = {folder}/mon
mon data avail warn = 2
mon data avail crit = 1
mon cluster log file = {folder}/cluster.log

[osd.0]
osd data = {folder}/osd
osd objectstore = bluestore
osd memory target = 1073741824
bluestore block create = true
bluestore block size = 17179869184

[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw thread pool size = 64
rgw gc obj min wait = 5
rgw gc processor period = 10
"""


def _listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process whose data is not needed again: it gets a moment to end by itself."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="raysharded-s3-") as folder,
        running_server(Path(folder) / "ceph") as server,
    ):
        print(server, flush=True)  # noqa: T201  # a script prints
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pause()


if __name__ == "__main__":
    main()
