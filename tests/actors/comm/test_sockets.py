"""Freeing a blocked group: its sockets and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from raysharded.actors.comm import sockets

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only: needs /proc")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def connect(stack: ExitStack, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = stack.enter_context(socket.create_connection(server.getsockname()))
    accepted = stack.enter_context(server.accept()[0])
    for end in (client, accepted):
        end.settimeout(5.0)
    return client, accepted


def test_only_connections_of_the_groups_ports_are_shut_down(stack: ExitStack) -> None:
    before = sockets.open_sockets()
    of_group, of_others = listener(stack), listener(stack)
    ours, theirs = connect(stack, of_group)
    client, server = connect(stack, of_others)  # opened meanwhile: by Ray, by storage, by the user
    left, right = socket.socketpair()
    stack.enter_context(left), stack.enter_context(right)
    appeared = sockets.open_sockets() - before

    ports = frozenset({of_group.getsockname()[1]})
    assert set(sockets.listening_ports(appeared)) == {of_group.getsockname()[1], of_others.getsockname()[1]}
    found = sockets.connected_to(appeared, ports)
    assert len(found) == 2  # both ends are in this process
    sockets.shut_down(found)
    sockets.close_all(found)

    assert ours.recv(1) == theirs.recv(1) == b""
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    left.sendall(b"y")
    assert right.recv(1) == b"y"


def test_a_listening_socket_is_never_taken(stack: ExitStack) -> None:
    before = sockets.open_sockets()
    server = listener(stack)
    appeared = sockets.open_sockets() - before
    assert sockets.connected_to(appeared, frozenset({server.getsockname()[1]})) == []
    connect(stack, server)  # it still accepts


def test_a_descriptor_that_was_closed_meanwhile_is_left_out(stack: ExitStack) -> None:
    server = listener(stack)
    port = server.getsockname()[1]
    before = sockets.open_sockets()
    client, accepted = connect(stack, server)
    appeared = sockets.open_sockets() - before
    client.close()
    found = sockets.connected_to(appeared, frozenset({port}))
    assert [sock.getpeername() for sock in found] == [accepted.getpeername()]
    sockets.close_all(found)


def test_shutting_down_twice_or_after_the_peer_is_harmless(stack: ExitStack) -> None:
    before = sockets.open_sockets()
    server = listener(stack)
    _, accepted = connect(stack, server)
    found = sockets.connected_to(sockets.open_sockets() - before, frozenset({server.getsockname()[1]}))
    accepted.close()
    sockets.shut_down(found)
    sockets.shut_down(found)
    sockets.close_all(found)
    sockets.shut_down(found)
