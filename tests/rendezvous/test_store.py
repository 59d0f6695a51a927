"""The rendezvous store admits only clients with a generation's secret, and strangers cannot make it grow or end it."""

from __future__ import annotations

import datetime
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from raysharded.actors.comm.store_client import StoreClient, introduced, read_exactly
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromStart, GenerationSpec
from raysharded.rendezvous import wire
from raysharded.rendezvous.server import RendezvousStore
from raysharded.rendezvous.values import Limits

_LIMITS = Limits(value_bytes=1000, keys=8, generation_bytes=4000, strangers=16, proof_s=0.2)
_LONG = datetime.timedelta(seconds=30)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    store = RendezvousStore("127.0.0.1", _LIMITS)
    yield store
    store.close()


def member(store: RendezvousStore, prefix: str = "run/g1", secret: bytes | None = None) -> StoreClient:
    return StoreClient("127.0.0.1", store.port, prefix, secret or store.secret(prefix), _LONG)


def until(condition: object, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_listens_on_its_address_alone(store: RendezvousStore) -> None:
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in listening.splitlines() if f":{store.port} " in line]
    assert f"127.0.0.1:{store.port}" in line


def test_it_listens_on_all_where_no_interface_has_the_address(caplog: pytest.LogCaptureFixture) -> None:
    store = RendezvousStore("192.0.2.1")  # an address for documentation
    assert "192.0.2.1" in caplog.text
    member(store).close()
    store.close()


def test_members_see_what_their_generation_left_and_nothing_else(store: RendezvousStore) -> None:
    first, second, later = member(store), member(store), member(store, "run/g2")
    first.set("key", b"\0\xff")
    assert second.get("key") == b"\0\xff"
    assert first.add("count", 2) == 2
    assert second.add("count", -1) == 1
    assert not later.check(["key"])
    assert second.check(["key", "count"])
    assert second.deleteKey("key")
    assert not first.check(["key"])


def test_a_member_waits_until_another_sets_the_key(store: RendezvousStore) -> None:
    first, second = member(store), member(store)
    threading.Timer(0.05, lambda: second.set("late", b"1")).start()
    assert first.get("late") == b"1"


def test_members_exchange_their_values_in_one_request_each(store: RendezvousStore) -> None:
    keys = ["from/0", "from/1", "from/2"]
    clients = [member(store) for _ in keys]
    with ThreadPoolExecutor(len(keys)) as pool:
        found = list(pool.map(lambda at: clients[at].exchange(keys[at], f"value {at}", keys), range(len(keys))))
    assert found == [[b"value 0", b"value 1", b"value 2"]] * len(keys)


def test_a_member_gets_what_gloo_announces_for_each_of_a_thousand() -> None:
    """A gloo announcement has 154 bytes, and 8 for each member. Of 503 members all of them are longer than a request
    may be."""
    store, size = RendezvousStore("127.0.0.1"), 1000
    keys, values = [f"0/{rank}" for rank in range(size)], [rank.to_bytes(154 + 8 * size) for rank in range(size)]
    client = member(store)
    for key, value in zip(keys[1:], values[1:], strict=True):
        client.set(key, value)
    assert client.exchange(keys[0], values[0], keys) == values
    assert sum(map(len, values)) > 3 * wire.MAX_MESSAGE_BYTES
    store.close()


def test_members_that_read_slowly_share_the_memory_of_one_reply() -> None:
    """The reply to each of 1,000 members has 8 MB, and one machine sends them all."""
    limits = Limits(value_bytes=2_000_000, generation_bytes=64 << 20)
    store, keys = RendezvousStore("127.0.0.1", limits), [str(rank) for rank in range(8)]
    values = [rank.to_bytes(1) * 1_500_000 for rank in range(8)]
    names = [key.encode() for key in keys]
    tracemalloc.start()
    try:
        clients = [introduced("127.0.0.1", store.port, "run/g1", store.secret("run/g1"), 30.0) for _ in keys]
        for client, name, value in zip(clients, names, values, strict=True):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.sendall(wire.pack([b"exchange", b"30000", name, value, *names]))
        for client in clients:  # the store has begun to answer each
            assert client.recv(1, socket.MSG_PEEK)
        assert tracemalloc.get_traced_memory()[0] < 4 * sum(map(len, values))
    finally:
        tracemalloc.stop()
    for client in clients:
        size = wire.length_of(read_exactly(client, wire.LENGTH.size), wire.MAX_REPLY_BYTES)
        assert wire.unpack(read_exactly(client, size)) == [wire.DONE, *values]
        client.close()
    store.close()


def test_a_value_given_in_an_exchange_is_there_although_others_never_come(store: RendezvousStore) -> None:
    one, other = member(store), member(store)
    one.set_timeout(datetime.timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match=r"not in the rendezvous store within 0\.05 s: from/1$"):
        one.exchange("from/0", "there", ["from/0", "from/1"])
    assert other.get("from/0") == b"there"


def test_a_member_that_waits_in_vain_learns_for_what(store: RendezvousStore) -> None:
    client = member(store)
    client.set("there", b"")
    with pytest.raises(dist.DistStoreError, match=r"within 0.05 s: one, two$"):
        client.wait(["one", "there", "two"], datetime.timedelta(seconds=0.05))
    assert client.check(["there"])  # it can still be used


def test_closing_releases_a_thread_that_waits(store: RendezvousStore) -> None:
    client = member(store)
    threading.Timer(0.05, client.close).start()
    with pytest.raises(dist.DistStoreError):
        client.get("never")


def test_a_generation_whose_members_have_left_is_forgotten(store: RendezvousStore) -> None:
    clients = [member(store), member(store)]
    clients[0].set("key", b"value")
    for client in clients:
        client.close()
    until(lambda: store.generations == 0)


@pytest.mark.parametrize("secret", [b"", b"guess", bytes(32)])
def test_a_client_without_the_secret_is_refused(store: RendezvousStore, secret: bytes) -> None:
    with pytest.raises(dist.DistStoreError, match="not the rendezvous store of this generation"):
        StoreClient("127.0.0.1", store.port, "run/g1", secret, _LONG)
    until(lambda: store.refused == 1)


def test_the_secret_of_one_generation_opens_no_other(store: RendezvousStore) -> None:
    with pytest.raises(dist.DistStoreError):
        member(store, "run/g2", store.secret("run/g1"))


def test_a_client_that_does_not_check_the_store_gets_no_further(store: RendezvousStore) -> None:
    with socket.create_connection(("127.0.0.1", store.port)) as sock:
        sock.sendall(wire.hello("run/g1", bytes(wire.NONCE_BYTES)))
        first = sock.recv(1000)
        sock.sendall(first[wire.NONCE_BYTES :])  # the store's own proof, sent back
        assert sock.recv(1000) == b""
    assert store.generations == 0


def test_a_worker_does_not_take_another_process_for_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        threading.Thread(target=lambda: squatter.accept()[0].sendall(bytes(100)), daemon=True).start()
        with pytest.raises(dist.DistStoreError, match="not the rendezvous store"):
            StoreClient("127.0.0.1", squatter.getsockname()[1], "run/g1", b"secret", _LONG)


def test_torchs_own_client_cannot_list_keys_nor_poison_them(store: RendezvousStore) -> None:
    client = member(store)
    client.set("arrived/0", b"")
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", store.port, is_master=False, timeout=datetime.timedelta(seconds=1)).list_keys()
    assert client.get("arrived/0") == b""
    assert store.refused > 0


def test_strangers_in_numbers_are_closed_and_named_in_few_lines(
    store: RendezvousStore, caplog: pytest.LogCaptureFixture
) -> None:
    client, draw = member(store), random.Random(0)
    strangers = []
    for number in range(1000):
        sock = socket.create_connection(("127.0.0.1", store.port))
        strangers.append(sock)
        if number % 2:
            sock.send(draw.randbytes(200) if number % 4 == 1 else b"GET / HTTP/1.1\r\n\r\n")
    until(lambda: store.refused == 1000)  # those that send nothing have little time, and the oldest go first
    client.set("key", b"value")
    assert member(store).get("key") == b"value"
    store.close()
    lines = [record.getMessage() for record in caplog.records if "does not admit" in record.getMessage()]
    assert 1 <= len(lines) <= 3
    assert sum(int(line.split("closed ")[1].split()[0]) for line in lines) == 1000
    for sock in strangers:
        sock.close()


def test_a_member_gets_in_while_strangers_hold_all_places() -> None:
    """Their time is longer than a member waits: the oldest connection makes way."""
    store = RendezvousStore("127.0.0.1", replace(_LIMITS, proof_s=600.0))
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(3 * _LIMITS.strangers)]
    assert member(store).add("count", 1) == 1
    for sock in strangers:
        sock.close()
    store.close()


@pytest.mark.parametrize(
    "request_",
    [
        [b"set", b"key", bytes(_LIMITS.value_bytes + 1)],
        [b"set", bytes(2000), b""],
        [b"set", b"key"],
        [b"add", b"arrived", b"text"],
        [b"get", b"soon", b"key"],
        [b"list"],
        [b"set", *([b"%d" % number for number in range(2 * _LIMITS.keys + 2)])],
    ],
)
def test_a_request_that_makes_no_sense_is_dropped_with_its_sender(
    store: RendezvousStore, caplog: pytest.LogCaptureFixture, request_: list[bytes]
) -> None:
    client, other = member(store), member(store)
    with pytest.raises(dist.DistStoreError):
        client._ask(request_)
    assert not other.check(["others"])
    assert "a member of run/g1" in caplog.text
    assert store.refused == 1


@pytest.mark.parametrize("data", [b"\0\0\0\x05\0\0\0\x09x", b"\0\0\0\0", b"\xff\xff\xff\xff", bytes(3)])
def test_a_message_that_is_none_is_dropped_with_its_sender(store: RendezvousStore, data: bytes) -> None:
    client = member(store)
    client._socket.sendall(data)
    client._socket.shutdown(socket.SHUT_WR)
    assert client._socket.recv(100) == b""
    assert member(store).add("others", 1) == 1


def test_a_member_cannot_make_the_store_grow_without_end(store: RendezvousStore) -> None:
    client = member(store)
    for number in range(4):
        client.set(f"{number}", bytes(900))
    with pytest.raises(dist.DistStoreError):
        client.set("one more", bytes(900))
    again = member(store)
    for _ in range(100):
        again.set("0", bytes(900))  # in the place of the value before


def test_nobody_prints_the_secret(store: RendezvousStore) -> None:
    secret = store.secret("run/g1")
    spec = GenerationSpec(
        generation=GenerationId(1),
        members=(WorkerId(0),),
        source=FromStart(),
        host="127.0.0.1",
        port=store.port,
        prefix="run/g1",
        secret=secret,
    )
    client = member(store)
    for thing in (spec, store, client, vars(store), store._server, vars(client)):
        text = repr(thing)
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text
    assert pickle.loads(pickle.dumps(spec)).secret == secret


def test_the_store_needs_no_torch() -> None:
    code = "import sys, raysharded.rendezvous.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
