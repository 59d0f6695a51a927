"""Workers test the links between them: real connections, through a real rendezvous store."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysharded.actors.comm import link_check
from raysharded.actors.comm.link_check import check_links
from raysharded.actors.comm.store_client import StoreClient
from raysharded.driver.state.broken_links import all_pairs
from raysharded.ids import WorkerId
from raysharded.protocol.link_messages import LinkCheck
from raysharded.rendezvous import wire
from raysharded.rendezvous.server import RendezvousStore

HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    made = RendezvousStore(HOST)
    yield made
    made.close()


def check_of(store: RendezvousStore, count: int, number: int = 7) -> LinkCheck:
    prefix = f"run/links{number}"
    pairs = tuple(sorted(all_pairs(map(WorkerId, range(count)))))
    return LinkCheck(number=number, pairs=pairs, host=HOST, port=store.port, prefix=prefix, secret=store.secret(prefix))


def found(spec: LinkCheck, *workers: int) -> dict[int, tuple[int, ...]]:
    """Worker -> those that it does not reach."""
    with ThreadPoolExecutor(len(workers)) as threads:
        reports = list(threads.map(lambda worker: check_links(spec, WorkerId(worker)), workers))
    assert {report.number for report in reports} == {spec.number}
    return {worker: report.failed for worker, report in zip(workers, reports, strict=True)}


def test_workers_that_reach_each_other_find_that_in_no_time(store: RendezvousStore) -> None:
    before, began = threading.active_count(), time.monotonic()
    assert found(check_of(store, 6), *range(6)) == dict.fromkeys(range(6), ())
    assert time.monotonic() - began < link_check.MEET_S
    assert threading.active_count() <= before + 1


def announce(spec: LinkCheck, worker: int, port: int) -> StoreClient:
    """As a worker that is at this port, until the client is closed."""
    client = StoreClient(HOST, spec.port, spec.prefix, spec.secret, datetime.timedelta(seconds=5))
    client.set(f"at/{worker}", f"{HOST} {port}")
    return client


def test_a_worker_whose_packets_go_nowhere_is_named_by_the_others_and_one_that_never_comes_is_not(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_check, "CONNECT_S", 0.3)
    monkeypatch.setattr(link_check, "PROVE_S", 0.3)
    monkeypatch.setattr(link_check, "MEET_S", 0.5)
    spec = check_of(store, 4)
    silent = socket.create_server((HOST, 0))  # it accepts, and no proof comes back; worker 3 never comes
    client = announce(spec, 2, silent.getsockname()[1])
    assert found(spec, 0, 1) == {0: (2,), 1: (2,)}
    silent.close()
    client.close()


def test_connections_of_strangers_and_of_a_worker_that_comes_late_do_not_count_as_those_that_are_awaited(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 2 is announced and connects last; two strangers and worker 3, which comes late, connect before."""
    monkeypatch.setattr(link_check, "MEET_S", 0.5)
    spec = check_of(store, 4)
    theirs = socket.create_server((HOST, 0))
    clients = [announce(spec, worker, theirs.getsockname()[1]) for worker in (1, 2)]
    with ThreadPoolExecutor(1) as threads:
        report = threads.submit(check_links, spec, WorkerId(0))
        address, port = clients[0].get("at/0").decode().rsplit(" ", 1)
        for asked in (b"x" * 100, called_by(spec, 3), called_by(spec, 1), called_by(spec, 1)):
            with socket.create_connection((address, int(port)), 5) as peer:
                peer.sendall(asked)
                assert len(peer.recv(wire.PROOF_BYTES, socket.MSG_WAITALL)) == wire.PROOF_BYTES
        with pytest.raises(TimeoutError):
            report.result(2 * link_check.MEET_S)
        with socket.create_connection((address, int(port)), 5) as peer:  # it still listens
            peer.sendall(called_by(spec, 2))
            assert len(peer.recv(wire.PROOF_BYTES, socket.MSG_WAITALL)) == wire.PROOF_BYTES
        theirs.close()
        assert report.result(5).number == spec.number
    for client in clients:
        client.close()


def called_by(spec: LinkCheck, worker: int) -> bytes:
    """The bytes that a worker sends to another one."""
    nonce = b"n" * wire.NONCE_BYTES
    return nonce + worker.to_bytes(8, "big") + wire.proof(spec.secret, f"link from {worker}".encode(), nonce)


def test_a_worker_that_comes_when_the_others_have_left_does_not_say_that_they_are_out_of_reach(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_check, "MEET_S", 0.5)
    spec = check_of(store, 3)
    assert found(spec, 0, 1) == {0: (), 1: ()}
    assert found(spec, 2) == {2: ()}


def test_another_process_in_a_workers_place_is_no_worker(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_check, "CONNECT_S", 1.0)
    monkeypatch.setattr(link_check, "PROVE_S", 1.0)
    spec, stranger = check_of(store, 2), socket.create_server((HOST, 0))
    client = announce(spec, 1, stranger.getsockname()[1])

    def answer() -> None:
        peer, _ = stranger.accept()
        peer.recv(1024)
        peer.sendall(b"x" * 32)
        peer.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert found(spec, 0) == {0: (1,)}
    thread.join()
    stranger.close()
    client.close()


def test_without_a_store_no_link_counts_as_broken(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "MEET_S", 0.1)
    spec = check_of(store, 2)
    store.close()
    assert found(spec, 0) == {0: ()}
