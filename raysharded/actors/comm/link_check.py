"""A worker's test of its links to other workers: it connects to each, and answers each, beside what it computes.

The workers find each other through the rendezvous store, which all of them reach, at the addresses that their
collectives use. Each listens at a free port, where both ends of a connection prove who they are with the secret of the
test. A link counts as broken if no proof comes back in time: a packet is lost on the way there, or on the way back.

A worker that comes late does not hold the others up, and they are not waiting for it: each marks that it has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
import struct

from raysharded.actors.comm.store_client import StoreClient
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.ids import WorkerId
from raysharded.protocol.link_messages import LinkCheck, LinkReport
from raysharded.rendezvous import wire

_log = logging.getLogger(__name__)
MEET_S = 3.0
"""Time limit for the other workers to come to the rendezvous; those that do not come are not tested."""
CONNECT_S = 4.0
"""Time limit for a connection: TCP repeats a lost first packet after one second, and after three."""
PROVE_S = 4.0
"""Further time until the proof: a busy machine answers late."""
_AT_ONCE = 256
_NUMBER = struct.Struct("!Q")


def check_links(spec: LinkCheck, worker: WorkerId) -> LinkReport:
    """Test the links of this worker. Any thread; returns within 14 s. Without the store, no link counts as broken."""
    peers = sorted({one for pair in spec.pairs if worker in pair for one in pair} - {worker})
    within = datetime.timedelta(seconds=MEET_S)
    failed: list[WorkerId] = []
    try:
        client = StoreClient(spec.host, spec.port, spec.prefix, spec.secret, within)
        try:
            failed = asyncio.run(_Test(client, spec.secret, worker, peers).run())
        finally:
            client.close()
    except (RuntimeError, ValueError, OSError) as error:
        _log.warning("worker %s could not test its links: %s", worker, error)
    if failed:
        _log.warning("worker %s does not reach worker %s", worker, ", ".join(map(str, failed)))
    return LinkReport(number=spec.number, failed=tuple(failed))


class _Test:
    """One worker's part in a test."""

    def __init__(self, client: StoreClient, secret: bytes, worker: WorkerId, peers: list[WorkerId]) -> None:
        self._client, self._secret, self._worker, self._peers = client, secret, worker, peers
        self._awaited: set[WorkerId] | None = None
        """Workers that came in time, and have not got their proof here; None as long as they meet."""
        self._answered: set[WorkerId] = set()
        self._all_answered = asyncio.Event()

    async def run(self) -> list[WorkerId]:
        """The workers that could not be reached."""
        own = self._client.own_address
        server = await asyncio.start_server(self._answer, own, 0)
        try:
            port = server.sockets[0].getsockname()[1]
            await asyncio.to_thread(self._client.set, _key(self._worker), f"{own} {port}")
            there = await asyncio.to_thread(self._meet)
            self._awaited = set(there)
            self._look()
            gate = asyncio.Semaphore(_AT_ONCE)
            others = asyncio.ensure_future(self._all_have_come())
            reached = await asyncio.gather(*(self._reaches(peer, *there[peer], gate) for peer in there))
            await others
            failed = [peer for peer, good in zip(there, reached, strict=True) if not good]
            failed = await asyncio.to_thread(lambda: [one for one in failed if not self._client.check([_left(one)])])
            await asyncio.to_thread(self._client.set, _left(self._worker), "")
            return failed
        finally:
            server.close()

    @waits_for_peers
    def _meet(self) -> dict[WorkerId, tuple[str, int]]:
        """Worker -> its address and port, of those that have come in time. Waits for the others."""
        come = self._peers
        try:
            texts = self._client.multi_get([_key(peer) for peer in come])
        except RuntimeError:
            come = [peer for peer in self._peers if self._client.check([_key(peer)])]
            texts = self._client.multi_get([_key(peer) for peer in come]) if come else []
        places = (text.decode().rsplit(" ", 1) for text in texts)
        return {peer: (address, int(port)) for peer, (address, port) in zip(come, places, strict=True)}

    async def _all_have_come(self) -> None:
        """Return when all others have got their proof, or no longer can."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S + PROVE_S):
                await self._all_answered.wait()

    def _look(self) -> None:
        if self._awaited is not None and self._awaited <= self._answered:
            self._all_answered.set()

    async def _reaches(self, peer: WorkerId, address: str, port: int, gate: asyncio.Semaphore) -> bool:
        """Whether the worker at this address answers with its proof."""
        async with gate:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(address, port)
                try:
                    async with asyncio.timeout(PROVE_S):
                        nonce = secrets.token_bytes(wire.NONCE_BYTES)
                        proof = wire.proof(self._secret, _caller(self._worker), nonce)
                        writer.write(nonce + _NUMBER.pack(self._worker) + proof)
                        given = await reader.readexactly(wire.PROOF_BYTES)
                finally:
                    writer.transport.abort()
            except (OSError, EOFError, TimeoutError):
                return False
        return wire.is_proof(given, self._secret, _side(peer), nonce)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Prove to another worker that it has reached this one."""
        try:
            async with asyncio.timeout(PROVE_S):
                nonce = await reader.readexactly(wire.NONCE_BYTES)
                (number,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                shown, peer = await reader.readexactly(wire.PROOF_BYTES), WorkerId(number)
                writer.write(wire.proof(self._secret, _side(self._worker), nonce))
                await writer.drain()
                with contextlib.suppress(ConnectionResetError):
                    await reader.read(1)  # until the other one has it, and closes
                if wire.is_proof(shown, self._secret, _caller(peer), nonce):
                    self._answered.add(peer)
                    self._look()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.transport.abort()


def _key(worker: WorkerId) -> str:
    return f"at/{worker}"


def _left(worker: WorkerId) -> str:
    """Key that is there once the worker listens no more: who does not reach it from then on came too late."""
    return f"left/{worker}"


def _side(worker: WorkerId) -> bytes:
    return f"link of {worker}".encode()


def _caller(worker: WorkerId) -> bytes:
    return f"link from {worker}".encode()
