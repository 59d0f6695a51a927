"""Another user's Ray on this machine is not used, unless it is named; and what it stores is not unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.experimental import internal_kv

from raysharded.cli import machine
from raysharded.errors import ClusterError, ConfigError, RunFailed
from raysharded.protocol.version import greeting
from raysharded.ray_backend import cluster
from raysharded.ray_backend.local_cluster import running_cluster, users_listening
from raysharded.run.attach import attach
from raysharded.run.hosted import submission

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


LISTENS = """
import os, signal, socket, sys

user, host = int(sys.argv[1]), sys.argv[2]
if user != os.geteuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:  # it belongs to the user who makes it
    server.bind((host, 0))
    server.listen()
    print(server.getsockname()[1], flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def listener(host: str = "127.0.0.1", *, user: int | None = None) -> Iterator[tuple[int, str]]:
    """A process, of another user if one is given, that accepts connections: its user id and its HOST:PORT."""
    user = os.geteuid() if user is None else user
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENS, str(user), host], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield user, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        process.kill()


def note(folder: Path, address: str, *, user: int | None = None) -> Path:
    """Ray's address file in its folder of temporary files, of another user if one is given."""
    folder.mkdir(exist_ok=True)
    file = folder / "ray_current_cluster"
    file.write_text(address)
    if user is not None:
        os.chown(file, user, user)
    return file


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_cluster_of_this_user_is_found(host: str, tmp_path: Path) -> None:
    with listener(host) as (user, address):
        found = running_cluster(note(tmp_path, address))
    assert found is not None
    assert (found.address, found.users, found.is_ours) == (address, frozenset({user}), True)
    assert running_cluster(tmp_path / "ray_current_cluster") is None, "nobody listens there any more"


@as_root
def test_the_address_file_of_another_user_is_not_believed(tmp_path: Path) -> None:
    with listener() as (_, address):
        found = running_cluster(note(tmp_path, address, user=NOBODY))
    assert found is not None
    assert not found.is_ours


@as_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_another_user_who_took_the_port_of_an_old_file_is_not_believed(host: str, tmp_path: Path) -> None:
    with listener(host, user=NOBODY) as (_, address):
        file = note(tmp_path, address.replace("0.0.0.0", "127.0.0.1"))
        found = running_cluster(file)
        assert users_listening("127.0.0.2", 1) == frozenset()
    assert found is not None
    assert (found.users, found.is_ours) == (frozenset({0, NOBODY}), False)


@pytest.mark.parametrize("kind", ["link", "pipe", "no address", "folder"])
def test_what_is_no_address_file_names_no_cluster(kind: str, tmp_path: Path) -> None:
    with listener() as (_, address):
        real = note(tmp_path, address)
        file = tmp_path / "other"
        if kind == "link":
            file.symlink_to(real)
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.write_bytes(b"\xff\xfe no port\x1b[2J")
        assert running_cluster(file) is None


@pytest.fixture
def of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of what another user has started on this machine, and named in Ray's own place."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with listener(user=NOBODY) as (_, address):
        note(tmp_path / "ray", address, user=NOBODY)
        yield address


@as_root
def test_a_cluster_of_another_user_that_nobody_named_is_not_connected_to_and_is_said(of_another_user: str) -> None:
    assert not cluster.find_cluster()
    name = f"the Ray at {of_another_user} on this machine belongs to nobody, and is not used"
    with pytest.raises(ClusterError, match=name):
        attach("gpt")
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS={of_another_user}"):
        cluster.find_cluster("auto")
    found = machine.which_ray()
    assert (
        f"on this machine (the one at {of_another_user} belongs to nobody; RAY_ADDRESS=HOST:PORT names" in found.found
    )
    assert name in found.advice


class Bomb:
    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._file, "w")


@pytest.mark.ray
def test_what_a_cluster_stores_about_runs_is_not_unpickled(cluster: None, tmp_path: Path) -> None:
    bomb = ray.cloudpickle.dumps(Bomb(str(tmp_path / "went off")))
    old = ray.cloudpickle.dumps((1.5, "/old/url"))
    internal_kv._internal_kv_put(b"run/old/0", old, overwrite=True, namespace=b"raysharded")  # as raysharded 0.1 did
    keys = ["run/evil/0", "runs/evil/0", "hello/abc", "host/0/1/stop", "host/0/1"]
    for key in keys:
        internal_kv._internal_kv_put(key.encode(), bomb, overwrite=True, namespace=b"raysharded")
    try:
        known = submission.known_runs()
        assert ("evil" in known, known["old"]) == (False, ["/old/url"])
        with pytest.raises(ConfigError, match="no run named 'evil' was started on this cluster"):
            attach("evil")
        assert submission.read_greeting("abc") is None
        assert submission.read_stop("host/0/1") is None
        with pytest.raises(RunFailed, match=r"started with raysharded 0\.1"):
            submission.read_order("host/0/1")
        header = json.dumps(greeting()).encode()
        internal_kv._internal_kv_put(b"host/0/1", header + b"\n" + bomb, overwrite=True, namespace=b"raysharded")
        with pytest.raises(RunFailed, match="another form than this version's"):
            submission.read_order("host/0/1")
    finally:
        for key in [*keys, "run/old/0"]:
            internal_kv._internal_kv_del(key.encode(), namespace=b"raysharded")
    assert not (tmp_path / "went off").exists()


FINDS = """
import json
from raysharded.ray_backend import cluster

choice = cluster.find_choice(log_to_driver=False)
said = f"{choice}; {cluster.describe_owner()}" if choice.address else choice.foreign
print(json.dumps([choice.address, said]))
"""


@pytest.mark.ray
@as_root
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_real_ray_is_used_by_who_started_it_and_whose_it_is_is_said(cluster: None, tmp_path: Path, user: int) -> None:
    address = ray.get_runtime_context().gcs_address
    note(tmp_path / "ray", address, user=user)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)
    told = subprocess.run([sys.executable, "-c", FINDS], capture_output=True, text=True, check=False, env=environment)
    assert told.returncode == 0, told.stderr
    found, said = json.loads(told.stdout.splitlines()[-1])
    if user:
        assert not found
        assert said.startswith(f"the Ray at {address} on this machine belongs to nobody and root, and is not used")
    else:
        assert (found, said) == (address, f"the Ray at {address}, which runs on this machine ({tmp_path}/ray); yours")
