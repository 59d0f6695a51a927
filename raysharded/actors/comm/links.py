"""One attempt of a generation's members to connect their gloo groups, so that only members are in them.

Members find each other through the rendezvous store, which admits nobody else. But gloo itself takes any connection. So
every group is closed to further connections once it is connected, and its members are proven. At the end of an attempt
each member writes into the store how it went. If a stranger was in a member's place, all make another attempt, with new
listening sockets. In every second one, and in all of the next minutes that have one member that saw a stranger, no
stranger gets in: members write into the store which ports they connect from, and only those are let in.
That takes a fifth of a second for each group, TCP's shortest time until it repeats a packet.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raysharded.actors.comm import listeners, sockets
from raysharded.actors.comm.abortable_wait import has_ended, keep_until_ended
from raysharded.actors.comm.membership_proof import MembershipProof
from raysharded.actors.comm.socket_admission import Admission
from raysharded.actors.comm.store_client import StoreClient
from raysharded.actors.comm.torch_groups import connect_gloo
from raysharded.actors.device.device_waits import waits_for_peers

_log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 6.0
"""Time limit for the members to connect a group, once all of them have arrived."""
_SETTLE_TIMEOUT_S = 6 * CONNECT_TIMEOUT_S
"""Time limit for the outcome of an attempt: gloo waits for a connection five times as long as it is given."""
_PATIENCE_S = 1.0
"""Time after which a proof is abandoned if more connections exist than members have."""
_WARY_S = 600.0
_wary_until = 0.0


def is_wary() -> bool:
    """True if this process has seen a stranger in the last minutes."""
    return time.monotonic() < _wary_until


class Intruded(RuntimeError):
    """A stranger was in a member's place. No group of the attempt has been used."""


class Links:
    """The groups of one attempt. `client` may be used by nobody else meanwhile."""

    def __init__(
        self,
        client: StoreClient,
        another_client: Callable[[], StoreClient],
        secret: bytes,
        name: str,
        timeout: datetime.timedelta,
        is_aborted: Callable[[], bool],
        *,
        strictly: bool,
    ) -> None:
        """`name`: fresh for each attempt. `timeout`: of the groups' collectives. `strictly`: let only members in."""
        self._client, self._another_client, self._secret, self._name = client, another_client, secret, name
        self._timeout, self._is_aborted, self._strictly = timeout, is_aborted, strictly
        self._before = self._seen = sockets.open_sockets()
        self._groups: list[Any] = []
        self._proofs: list[tuple[str, MembershipProof]] = []
        self._num_pairs = 0
        self._listening: list[socket.socket] = []
        self._own_listening: list[socket.socket] = []
        """The listening sockets of the groups, among all that appeared."""
        self.sockets: list[socket.socket] = []
        """Duplicates of the groups' connected sockets, once `settle` has returned; the caller closes them."""

    @waits_for_peers
    def connect(self, name: str, rank: int, size: int) -> Any:
        """A gloo group, to be used once `settle` has returned. Raises gloo's RuntimeError."""
        self._num_pairs += size - 1
        announcing = _Announcing(self._client, f"{self._name}/{name}/", size)
        admission = Admission(self._another_client, f"{self._name}/{name}/from", rank, size, self._before)
        if self._strictly:
            announcing.before = lambda announced: self._admit(admission, announced)
        with admission if self._strictly else contextlib.nullcontext():
            group = connect_gloo(announcing, rank, size, self._client.own_address, CONNECT_TIMEOUT_S, self._timeout)
        self._groups.append(group)
        listening = self._listener_of(announcing.announced)
        if listening is not None:
            self._own_listening.append(listening)
        if size > 1:
            full_name, timeout = f"{self._name}/{name}", datetime.timedelta(seconds=CONNECT_TIMEOUT_S)
            self._proofs.append((full_name, MembershipProof(group, self._secret, full_name, timeout)))
        return group

    @waits_for_peers
    def settle(self, rank: int, world_size: int, error: RuntimeError | None) -> None:
        """Prove that members are in the groups, and agree with all on how that went. Call it also after an error of
        `connect`.

        Raises Intruded on all members if one of them met a stranger, so that another attempt makes sense; otherwise
        RuntimeError if one of them failed. The attempt's groups are then gone.
        """
        try:
            self._settle(rank, world_size, error or self._error_of_proofs())
        except BaseException:
            sockets.shut_down(self.sockets)
            sockets.close_all(self.sockets)
            keep_until_ended(self._groups, [proof.work for _, proof in self._proofs])
            raise
        finally:
            sockets.close_all(self._listening)
            self._groups = []

    def _error_of_proofs(self) -> RuntimeError | None:
        try:
            self._finish_proofs()
        except RuntimeError as error:
            return error
        return None

    @waits_for_peers
    def _settle(self, rank: int, world_size: int, error: RuntimeError | None) -> None:
        found = sockets.tcp(sockets.open_sockets() - self._before)
        self._listening += [sock for sock in found if sockets.listens(sock)]
        connected = self.sockets = [sock for sock in found if not sockets.listens(sock)]
        own_ports = {_own_port(sock) for sock in self._listening}
        num_accepted = sum(_own_port(sock) in own_ports for sock in connected)
        verdict = {
            "ports": sorted(own_ports),
            "from": sorted({_own_port(sock) for sock in connected} - own_ports),
            "failed": str(error or ""),
            "intruded": isinstance(error, Intruded) or (error is not None and num_accepted > self._num_pairs),
        }
        self._client.set_timeout(datetime.timedelta(seconds=_SETTLE_TIMEOUT_S))
        if verdict["intruded"]:
            self._client.set(f"{self._name}/intruded", b"")
        settled = [f"{self._name}/settled/{one}" for one in range(world_size)]
        texts = self._client.exchange(settled[rank], json.dumps(verdict), settled)
        for sock in self._own_listening:  # all members have connected; before, it could be a stranger in one's place
            listeners.drop_all(sock)
        verdicts = [_Verdict(text) for text in texts]
        ports = frozenset(port for one in verdicts for port in one.ports)
        self.sockets = [sock for sock in connected if _own_port(sock) in ports or _peer(sock)[1] in ports]
        sockets.close_all(sock for sock in connected if sock not in self.sockets)
        if self._is_aborted():  # then some may belong to groups that are formed in the place of these
            raise RuntimeError("aborted while connecting")
        self._close_strangers(own_ports, {port for one in verdicts for port in one.from_ports})
        listeners.free_of_filter(self.sockets)
        intruded = [f"rank {one}: {each.failed}" for one, each in enumerate(verdicts) if each.intruded]
        failed = [f"rank {one}: {each.failed}" for one, each in enumerate(verdicts) if each.failed]
        if intruded:
            be_wary()
            raise Intruded("; ".join(intruded))
        if failed:
            if self._strictly:  # perhaps something between the members changes addresses or ports
                be_wary(0.0)
            raise error or RuntimeError("; ".join(failed))

    def _close_strangers(self, own_ports: set[int], members: set[int]) -> None:
        """Shut down what was accepted beside the connections from the members' ports."""
        if len(self.sockets) <= self._num_pairs:
            return
        strangers = [s for s in self.sockets if _own_port(s) in own_ports and _peer(s)[1] not in members]
        if strangers:
            (address, port), number = _peer(strangers[-1]), len(strangers)
            word = "connection" if number == 1 else "connections"
            last = f"{address}:{port}" if address else "one that has gone"
            _log.warning("%s: closed %d %s of strangers to gloo, the last from %s", self._name, number, word, last)
        self.sockets = [sock for sock in self.sockets if sock not in strangers]
        sockets.shut_down(strangers)
        sockets.close_all(strangers)

    @waits_for_peers
    def _finish_proofs(self) -> None:
        """Return when every pair of every group is proven. Raises Intruded, or RuntimeError on abort."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for name, proof in self._proofs:
            try:
                while not has_ended(proof.work):
                    if self._is_aborted() or time.monotonic() > deadline:
                        raise RuntimeError("no proof of all members in time")
                    self._look_around(deadline)
            except RuntimeError as error:
                if self._is_aborted():
                    raise
                raise Intruded(f"{name}: {error}") from None
            strangers = proof.strangers()
            if strangers:
                raise Intruded(f"{name}: at the place of rank {', '.join(map(str, strangers))} is a stranger")

    def _look_around(self, deadline: float) -> None:
        """Raise RuntimeError if a slow proof is to be abandoned: another member did so, or strangers are there."""
        if self._client.check([f"{self._name}/intruded"]):
            raise RuntimeError("another member has met a stranger")
        if deadline - time.monotonic() < CONNECT_TIMEOUT_S - _PATIENCE_S:
            found = sockets.tcp(sockets.open_sockets() - self._before)
            own_ports = {_own_port(sock) for sock in self._listening}
            accepted = [sock for sock in found if not sockets.listens(sock) and _own_port(sock) in own_ports]
            sockets.close_all(found)
            if len(accepted) > self._num_pairs:
                raise RuntimeError(f"{len(accepted)} connections where {self._num_pairs} were expected at most")

    def _admit(self, admission: Admission, announced: bytes) -> None:
        listening = self._listener_of(announced)
        if listening is not None:
            admission.begin(listening)

    def _listener_of(self, announcement: bytes) -> socket.socket | None:
        """The listening socket of the group that announced this; the object closes it at the end."""
        now = sockets.open_sockets()
        found = sockets.listening(now - self._seen)
        self._seen |= now
        self._listening += found
        return listeners.with_port_in(self._listening, announcement)


def connect_alone(timeout: datetime.timedelta) -> Any:
    """A gloo group of this worker alone."""
    before, announcing = sockets.open_sockets(), _Announcing(None, "", 1)
    group = connect_gloo(announcing, 0, 1, "127.0.0.1", CONNECT_TIMEOUT_S, timeout)
    found = sockets.listening(sockets.open_sockets() - before)
    listening = listeners.with_port_in(found, announcing.announced)
    if listening is not None:
        listeners.drop_all(listening)
    sockets.close_all(found)
    return group


class _Announcing(Store):
    """The store that gloo uses: it shows what the group announces, and exchanges it for what all members announce.

    gloo's key of a member's announcement ends with its rank. A member sets its own before it gets another's, so that
    both take one request. A group of one member needs no store.
    """

    def __init__(self, store: StoreClient | None, prefix: str, size: int) -> None:
        super().__init__()
        self._store, self._prefix, self._size = store, prefix, size
        self._known: dict[str, bytes] = {}
        self._unsent: list[tuple[str, bytes]] = []
        self.before: Callable[[bytes], None] | None = None
        """Called with what the group announces, before others can know it."""
        self.announced = b""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.announced += data
        if self.before is not None:
            self.before(data)
        self._known[key] = data
        self._unsent.append((self._prefix + key, data))

    @waits_for_peers
    def get(self, key: str) -> bytes:
        if key not in self._known:
            path, _, rank = key.rpartition("/")
            keys = [f"{path}/{one}" for one in range(self._size)] if rank.isdigit() else [key]
            self._known.update(zip(keys, self._exchanged([self._prefix + one for one in keys]), strict=True))
        return self._known[key]

    @waits_for_peers
    def _exchanged(self, keys: list[str]) -> list[bytes]:
        """The values of these keys, once what is not sent yet has been sent."""
        if self._store is None:
            raise dist.DistStoreError(f"a group of one member waits for {', '.join(keys)}")
        if not self._unsent:
            return self._store.multi_get(keys)
        *others, (key, value) = self._unsent
        self._unsent = []
        for one in others:
            self._store.set(*one)
        return self._store.exchange(key, value, keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        return False


class _Verdict:
    """The outcome of an attempt for one member. Raises ValueError if it is no member's text."""

    def __init__(self, text: bytes) -> None:
        try:
            fields = json.loads(text)
            self.ports, self.from_ports = [int(port) for port in fields["ports"]], {int(one) for one in fields["from"]}
            self.failed, self.intruded = str(fields["failed"]), bool(fields["intruded"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"a verdict that makes no sense: {error!r}") from None


@waits_for_peers
def arrive(client: StoreClient, rank: int, world_size: int, timeout_s: float, name: str = "") -> bool:
    """Return once every member has arrived; True, on all of them, if one of them is wary of strangers.

    Connecting to a lost member would take gloo its whole time-out. Raises RuntimeError if one is missing.
    """
    keys = [f"arrived{name}/{one}" for one in range(world_size)]
    client.set_timeout(datetime.timedelta(seconds=timeout_s))
    try:
        return b"wary" in client.exchange(keys[rank], b"wary" if is_wary() else b"", keys)
    except dist.DistStoreError as error:
        count = sum(client.check([key]) for key in keys)
        raise RuntimeError(f"{count} of {world_size} workers arrived within {timeout_s} s: {error}") from None


def be_wary(for_s: float = _WARY_S) -> None:
    """Let only members in for so long."""
    global _wary_until
    _wary_until = time.monotonic() + for_s


def _own_port(sock: socket.socket) -> int:
    try:
        return int(sock.getsockname()[1])
    except OSError:
        return 0


def _peer(sock: socket.socket) -> tuple[str, int]:
    """Address and port of the other end; empty and 0 once that has gone."""
    try:
        address, port = sock.getpeername()[:2]
    except OSError:
        return "", 0
    return str(address), int(port)
