"""Only members are in a generation's groups, also while strangers connect to their ports."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raysharded.actors.comm import links, listeners, sockets
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.comm.membership_proof import MembershipProof, digest
from raysharded.actors.comm.torch_groups import connect_gloo
from raysharded.errors import CollectiveAborted
from raysharded.layout import Mesh
from raysharded.rendezvous.server import RendezvousStore
from tests import patches
from tests.actors.comm.strangers import flooded, raced
from tests.forked import in_a_fork
from tests.training.harness import SmallTask, train

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only: needs /proc")
_TIMEOUT = datetime.timedelta(seconds=10)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    store = RendezvousStore("127.0.0.1")
    yield store
    store.close()


def alone(store: RendezvousStore, prefix: str = "g1") -> Rendezvous:
    return Rendezvous(
        host="127.0.0.1",
        port=store.port,
        prefix=prefix,
        secret=store.secret(prefix),
        rank=0,
        mesh=Mesh(shards=1),
        arrival_timeout_s=10.0,
        collective_timeout_s=10.0,
    )


@pytest.mark.procs
def test_a_stranger_that_is_first_at_every_place_gets_in_nowhere() -> None:
    outcomes, connections = raced(3)
    for outcome in outcomes:
        assert outcome.failed == []
        assert (outcome.right, outcome.wrong) == (3, 0)
        assert outcome.intruded >= 3  # it was in a member's place, each time
        assert outcome.closed >= 3
    assert connections >= 24  # the last of them send more than a number


@pytest.mark.procs
def test_a_run_trains_and_recovers_while_strangers_flood_all_of_its_ports() -> None:
    outcome, (connections, ports) = flooded(300, steps=3)
    assert outcome.bits == train(1, task=SmallTask(), steps=3).bits
    assert len(outcome.of("generation")) == 2
    assert connections > 300
    assert ports > 1


def test_members_without_the_secret_form_no_group(store: RendezvousStore) -> None:
    groups = Groups(use_gpu=False)
    with pytest.raises(CollectiveAborted, match="not the rendezvous store of this generation"):
        groups.form(replace(alone(store), secret=store.secret("another")))
    groups.close()


def test_a_stranger_that_does_all_that_a_member_does_but_the_proof_is_found_before_a_sum_is_used(
    store: RendezvousStore,
) -> None:
    places = [replace(alone(store), rank=rank, mesh=Mesh(shards=2)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        of_member, _ = pool.map(lambda place: in_a_fork(_sum, place, place.rank == 1), places)
    assert "at the place of rank 1 is a stranger" in of_member


def _sum(place: Rendezvous, is_stranger: bool) -> str:
    """The sum of the members' numbers, or the error. A stranger does not know the secret of the proofs."""
    if is_stranger:
        patches.replace(links, "MembershipProof", _WrongProof)
    groups = Groups(use_gpu=False)
    try:
        groups.form(place)
        return str(groups.state.sum_int64(torch.tensor([7000 + place.rank])))
    except CollectiveAborted as error:
        return str(error)
    finally:
        groups.abort()
        groups.close()


class _WrongProof(MembershipProof):
    """The proof of who has another secret, and checks none of the others'."""

    def __init__(self, group: Any, secret: bytes, *others: Any) -> None:
        super().__init__(group, secret[::-1], *others)

    def strangers(self) -> list[int]:
        return []


def test_no_connection_reaches_the_groups_once_they_are_formed(store: RendezvousStore) -> None:
    ports = in_a_fork(_ports_that_answer, store.port, store.secret("g1"))
    assert ports[0]  # there are some
    assert ports[1] == []


def _ports_that_answer(port: int, secret: bytes) -> tuple[list[int], list[int]]:
    """The listening ports of formed groups, and those that establish a connection."""
    before = sockets.open_sockets()
    groups = Groups(use_gpu=False)
    where = Rendezvous(
        host="127.0.0.1",
        port=port,
        prefix="g1",
        secret=secret,
        rank=0,
        mesh=Mesh(shards=1),
        arrival_timeout_s=10.0,
        collective_timeout_s=10.0,
    )
    groups.form(where)
    groups.axes().alone()
    listening = sorted(set(sockets.listening_ports(sockets.open_sockets() - before)))
    answering = []
    for one in listening:
        try:
            socket.create_connection(("127.0.0.1", one), timeout=0.2).close()
            answering.append(one)
        except OSError:
            pass
    groups.close()
    return listening, answering


def test_a_listener_admits_the_ends_that_it_is_given_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as member, socket.socket() as stranger:
        listeners.admit(listening, [])
        for one in (stranger, member):
            one.connect(listening.getsockname())
            one.send(b"hello")
        listening.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listening.accept()
        listeners.admit(listening, [member.getsockname()])
        listening.settimeout(10.0)
        accepted, peer = listening.accept()
        assert peer == member.getsockname()
        assert accepted.recv(5) == b"hello"
        listening.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listening.accept()
        listeners.free_of_filter([accepted])
        accepted.close()


def test_a_listener_that_drops_all_keeps_its_connections() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as before,
        listening.accept()[0] as accepted,
    ):
        listeners.drop_all(listening)
        before.send(b"still")
        assert accepted.recv(5) == b"still"
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname(), timeout=0.2)


def test_only_the_socket_that_gloo_announces_is_taken_for_its_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        announced: list[bytes] = []
        store = links._Announcing(None, "", 1)
        store.before = announced.append
        before = sockets.open_sockets()
        group = connect_gloo(store, 0, 1, "127.0.0.1", 5.0, _TIMEOUT)
        found = sockets.listening(sockets.open_sockets() - before)
        assert announced == [store.announced]
        listening = listeners.with_port_in([one, *found, other], store.announced)
        assert listening is found[0]
        assert listeners.with_port_in([one, other], store.announced) is None
        sockets.close_all(found)
        assert group.size() == 1


@pytest.mark.parametrize(("secrets", "strangers"), [((b"a", b"a"), ([], [])), ((b"a", b"b"), ([1], [0]))])
def test_the_proof_shows_who_lacks_the_secret(
    secrets: tuple[bytes, bytes], strangers: tuple[list[int], list[int]]
) -> None:
    store = HashStore()

    def prove(rank: int) -> list[int]:
        group = connect_gloo(store, rank, 2, "127.0.0.1", 5.0, _TIMEOUT)
        proof = MembershipProof(group, secrets[rank], "g1/state", _TIMEOUT)
        proof.work.wait()
        return proof.strangers()

    with ThreadPoolExecutor(2) as pool:
        assert tuple(pool.map(prove, range(2))) == strangers


def test_no_digest_can_be_sent_back_or_again() -> None:
    drawn = {
        digest(secret, name, sender, receiver)
        for secret in (b"a", b"b")
        for name in ("g1/try0/state", "g1/try1/state", "g1/try0/train")
        for sender in range(3)
        for receiver in range(3)
    }
    assert len(drawn) == 2 * 3 * 9


def test_a_verdict_that_makes_no_sense_is_refused() -> None:
    for text in (b"[]", b"7", b"{}", b'{"ports": ["x"], "from": [], "failed": "", "intruded": false}', b"\xff"):
        with pytest.raises(ValueError):
            links._Verdict(text)


def test_an_abort_releases_a_member_that_waits_for_the_others(store: RendezvousStore) -> None:
    groups = Groups(use_gpu=False)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(groups.form, replace(alone(store), mesh=Mesh(shards=2), arrival_timeout_s=60.0))
        while not store.generations:
            time.sleep(0.005)
        groups.abort()
        with pytest.raises(CollectiveAborted):
            forming.result(timeout=10.0)
    groups.close()


def test_a_member_that_does_not_come_is_counted(store: RendezvousStore) -> None:
    groups = Groups(use_gpu=False)
    with pytest.raises(CollectiveAborted, match=r"1 of 2 workers arrived within 0.1 s"):
        groups.form(replace(alone(store), mesh=Mesh(shards=2), arrival_timeout_s=0.1))
    groups.close()
