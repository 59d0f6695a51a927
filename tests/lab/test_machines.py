"""The laboratory itself: each fault is one, in its direction alone, and nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machines import Machines, why_not
from tests.ray.leftovers import processes_marked, wait_until

pytestmark = [pytest.mark.procs, pytest.mark.skipif(bool(why_not()), reason=f"no laboratory: {why_not()}")]

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 7))
print("ready", flush=True)
while True:
    data, client = server.recvfrom(9000)
    server.sendto(data, client)
"""
ASK = """
import json, socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[3]))
seconds = []
for number in range(int(sys.argv[2])):
    began = time.monotonic()
    client.sendto(str(number).encode().ljust(1000), (sys.argv[1], 7))
    try:
        while int(client.recvfrom(9000)[0]) != number:
            pass
        seconds.append(time.monotonic() - began)
    except TimeoutError:
        pass
print(json.dumps(seconds))
"""
STORE = """
import sys, time
from raysharded.rendezvous.server import RendezvousStore
from raysharded.rendezvous.values import Limits
store = RendezvousStore(sys.argv[1], Limits(vanished_s=2.0))
print(store.port, store.secret("run/g1").hex(), store.secret("run/g2").hex(), flush=True)
held = 0
while True:
    if store.generations != held:
        held = store.generations
        print(held, flush=True)
    time.sleep(0.02)
"""
MEMBER = """
import datetime, sys
from raysharded.actors.comm.store_client import StoreClient
host, port, prefix, secret = sys.argv[1:]
client = StoreClient(host, int(port), prefix, bytes.fromhex(secret), datetime.timedelta(seconds=60))
client.set("key", b"value")
print("a member", flush=True)
sys.stdin.readline()
print(client.get("key").decode(), flush=True)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines(3) as made:
        for machine in made.all:
            echo(made, machine.number)
        yield made


def echo(machines: Machines, number: int) -> None:
    """Have a machine answer."""
    process = machines[number].popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def answers(machines: Machines, source: int, target: int, count: int = 3, wait_s: float = 0.3) -> list[float]:
    """Seconds until each answer that came."""
    command = [sys.executable, "-c", ASK, machines[target].address, str(count), str(wait_s)]
    found: list[float] = json.loads(machines[source].run(command))
    return found


@pytest.mark.long
def test_a_link_is_cut_in_one_direction_and_mended(machines: Machines) -> None:
    machines.cut(0, 1)
    assert answers(machines, 0, 1) == []
    assert answers(machines, 1, 0) == []  # its packets arrive, and the replies do not
    assert len(answers(machines, 0, 2)) == len(answers(machines, 2, 1)) == 3
    machines.mend(0, 1)
    assert len(answers(machines, 0, 1)) == 3


@pytest.mark.long
def test_a_link_delays_and_loses_packets_in_one_direction(machines: Machines) -> None:
    machines.slow_down(0, 1, delay_ms=80)
    assert min(answers(machines, 0, 1)) >= 0.08
    machines.slow_down(1, 0, delay_ms=40)  # both ways
    assert min(answers(machines, 0, 1)) >= 0.12
    machines.mend(1, 0)
    machines.slow_down(0, 1, loss_percent=50)
    assert 5 < len(answers(machines, 0, 1, 40, 0.05)) < 35
    machines.cut(0, 1)
    assert answers(machines, 0, 1) == []
    machines.mend(0, 1)
    assert len(answers(machines, 0, 1)) == 3
    assert min(answers(machines, 0, 1)) < 0.08


@pytest.mark.long
def test_what_a_machine_sends_and_receives_is_limited(machines: Machines) -> None:
    for limit in ({"out_mbit": 0.1}, {"in_mbit": 0.1}):
        machines.limit(2, **limit)
        assert max(answers(machines, 0, 2, 22, 5.0)) >= 0.05  # packets of 8 kbit, after a burst of 18
        machines.limit(2)
        assert len(answers(machines, 0, 2)) == 3


@pytest.mark.long
def test_a_frozen_machine_answers_nothing_until_it_thaws(machines: Machines) -> None:
    machines[2].freeze()
    assert answers(machines, 0, 2) == []
    machines[2].thaw()
    assert len(answers(machines, 0, 2)) == 3


@pytest.mark.long
def test_a_machine_without_power_vanishes_without_a_word_and_comes_back_empty(machines: Machines) -> None:
    client = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 9))
print("connected", flush=True)
client.settimeout(1.5)
try:
    print("closed" if client.recv(1) == b"" else "data")
except TimeoutError:
    print("silent")
except OSError as error:
    print(type(error).__name__)
"""
    listening = (
        "import socket; s = socket.create_server(('', 9)); print('ready', flush=True); c = s.accept(); s.accept()"
    )
    server = machines[1].popen([sys.executable, "-c", listening], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    other = machines[0].popen([sys.executable, "-c", client, machines[1].address], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "connected\n"
    (machines[1].own / "kept").touch()  # on this machine: none of the machines has it
    machines[1].run(["touch", str(machines[1].own / "kept by it")])
    machines.power_off(1)
    assert other.stdout.readline() == "silent\n"
    with pytest.raises(RuntimeError, match="is off"):
        machines[1].run(["true"])
    machines.power_on(1)
    assert list(machines[1].processes()) == [machines[1].pid]
    assert machines[1].run(["ls", str(machines[1].own)]) == "kept by it\n"
    echo(machines, 1)
    assert len(answers(machines, 0, 1)) == len(answers(machines, 1, 0)) == 3


def test_a_member_whose_machine_vanished_leaves_the_rendezvous_store_and_one_that_is_idle_stays(
    machines: Machines,
) -> None:
    store = machines[0].popen([sys.executable, "-c", STORE, machines[0].address], stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    port, *secrets = store.stdout.readline().split()
    members = []
    for number, secret in zip((1, 2), secrets, strict=True):
        command = [sys.executable, "-c", MEMBER, machines[0].address, port, f"run/g{number}", secret]
        member = machines[number].popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert member.stdout is not None
        assert member.stdout.readline() == "a member\n"
        assert store.stdout.readline() == f"{number}\n"
        members.append(member)
    machines.power_off(1)
    assert store.stdout.readline() == "1\n", "the generation of the lost machine is forgotten"
    assert members[1].communicate("\n", timeout=30.0)[0] == "value\n", "it was idle for as long"
    store.kill()
    machines.power_on(1)
    echo(machines, 1)


def test_machines_see_neither_each_others_processes_nor_this_machines_network(machines: Machines) -> None:
    assert "eth0" in machines[0].run(["ip", "-o", "addr"])
    assert machines[0].run(["hostname"]) == "lab-0\n"
    processes = machines[0].run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
    assert int(processes) < 10
    assert "10.77.0." not in subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout


def test_everything_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path: Path) -> None:
    marker = f"RAYSHARDED_TEST={tmp_path}"
    program = (
        "import time; from tests.lab.machines import Machines\n"
        "machines = Machines(2); machines.slow_down(0, 1, delay_ms=1)\n"
        "sleeping = machines[1].popen(['setsid', 'sleep', '1000'])\n"
        "time.sleep(0.3); print('ready', flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "RAYSHARDED_TEST": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    assert any("sleep 1000" in one for one in processes_marked(marker))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not processes_marked(marker), lambda: f"the end of {processes_marked(marker)}", 20.0)


def test_the_end_takes_all_with_it(tmp_path: Path) -> None:
    marker = f"RAYSHARDED_TEST={tmp_path}"
    with Machines(2) as made:
        environment = {**os.environ, "RAYSHARDED_TEST": str(tmp_path)}
        made[0].popen(["sleep", "1000"], environment)
        wait_until(lambda: bool(processes_marked(marker)), "a process", 20.0)
        made[0].freeze()
        folder, began = made.folder, time.monotonic()
    assert time.monotonic() - began < 10
    wait_until(lambda: not processes_marked(marker), "its end", 20.0)
    assert not folder.exists()
