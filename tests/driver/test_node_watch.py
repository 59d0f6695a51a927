"""A node's end is noticed by the end of its raylet's process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from raysharded.ids import WorkerId
from raysharded.protocol.worker_launcher import NodeBack, NodeLost
from raysharded.ray_backend.drain_watch import DrainWatch
from raysharded.ray_backend.node_watch import NodeInfo, NodeWatch

LISTENER = """
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    peer.send(b"settings")  # as a gRPC server greets
    print("met", flush=True)
    if sys.argv[1] == "hang up":
        peer.close()
        sys.argv[1] = "stay"
    else:
        threading.Thread(target=peer.recv, args=(1,), daemon=True).start()
"""


@contextmanager
def raylet(manner: str = "stay") -> Iterator[tuple[subprocess.Popen[str], NodeInfo]]:
    """A process that listens as a raylet does."""
    process = subprocess.Popen([sys.executable, "-c", LISTENER, manner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, NodeInfo(host="127.0.0.1", port=int(process.stdout.readline()), alive=True)
    finally:
        process.kill()
        process.wait(10)


def until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        time.sleep(0.001)
    return time.monotonic() - began


def met(process: subprocess.Popen[str]) -> None:
    """Return when the raylet has been connected to."""
    assert process.stdout is not None
    assert process.stdout.readline() == "met\n"


def test_a_killed_raylet_is_noticed_at_once_and_the_other_node_is_not_touched() -> None:
    with raylet() as (first, a), raylet() as (second, b):
        watch = NodeWatch(lambda: {"a": a, "b": b})
        watch.watch("a")
        watch.watch("b")
        met(first)
        met(second)
        first.kill()
        assert until(lambda: "a" in watch.dead()) < 1.0
        assert watch.dead() == {"a": f"its raylet at 127.0.0.1:{a.port} is gone"}
        watch.close()


def test_a_raylet_that_ends_a_connection_or_is_stopped_for_a_while_is_not_dead() -> None:
    with raylet("hang up") as (process, info):
        watch = NodeWatch(lambda: {"a": info})
        watch.watch("a")
        met(process)
        met(process)  # it was connected to again
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)
        assert watch.dead() == {}
        process.kill()
        until(lambda: "a" in watch.dead())
        watch.close()


def test_a_node_that_the_cluster_has_lost_is_dead_and_one_that_was_never_reached_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    asked = threading.Event()
    nodes = {"lost": NodeInfo(host="127.0.0.1", port=port, alive=False)}
    nodes["behind a firewall"] = NodeInfo(host="127.0.0.1", port=port, alive=True)

    def table() -> dict[str, NodeInfo]:
        asked.set()
        return nodes

    watch = NodeWatch(table)
    watch.watch("lost")
    watch.watch("behind a firewall")
    assert asked.wait(10)
    until(lambda: "lost" in watch.dead())
    assert set(watch.dead()) == {"lost"}
    watch.close()


def test_a_cluster_that_cannot_be_queried_is_queried_again() -> None:
    with raylet() as (process, info):
        answers: list[dict[str, NodeInfo]] = [{"a": info}]

        def table() -> dict[str, NodeInfo]:
            if answers:
                return answers[0]
            raise ConnectionError("no cluster")

        watch = NodeWatch(table)
        watch.watch("a")
        met(process)
        answers.clear()
        watch.watch("b")
        process.kill()
        until(lambda: "a" in watch.dead())
        watch.close()


def test_a_check_queries_the_cluster_at_once() -> None:
    with raylet() as (process, info):
        nodes = {"a": info}
        watch = NodeWatch(lambda: nodes)
        watch.watch("a")
        met(process)
        nodes["a"] = replace(info, alive=False)
        watch.check()
        assert until(lambda: "a" in watch.dead()) < 4.0  # by itself it would query every 5 s
        watch.close()


def test_a_node_that_answers_again_is_back_and_is_watched_as_before() -> None:
    with raylet() as (first, info):
        nodes = {"a": info}
        watch = NodeWatch(lambda: nodes)
        watch.watch("a", "host a")
        met(first)
        first.kill()
        until(lambda: "a" in watch.dead())
        assert [type(one) for one in watch.fetch()] == [NodeLost]
        with raylet() as (second, again):  # as if the cut was mended: the cluster has listed the node all the time
            nodes["a"] = again
            watch.check()
            met(second)
            until(lambda: watch.dead() == {})
            assert watch.fetch() == [NodeBack(node_id="a", host="host a")]
            second.kill()
            until(lambda: "a" in watch.dead())
            (lost,) = watch.fetch()
            assert isinstance(lost, NodeLost)
            assert watch.descriptions() == [f"host a (a): {lost.reason}"]
        nodes["a"] = replace(again, alive=False)
        watch.check()
        until(lambda: watch.descriptions() == [])  # the cluster has lost it: it is not retried
        watch.close()


def test_a_process_that_answers_from_a_dead_node_shows_that_it_lives() -> None:
    with raylet() as (process, info):
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        gone = NodeInfo(host="127.0.0.1", port=silent.getsockname()[1], alive=True)
        nodes = {"a": info}
        watch = NodeWatch(lambda: nodes)
        watch.watch("a", "host a")
        met(process)
        nodes["a"] = gone
        process.kill()
        until(lambda: "a" in watch.dead())
        watch.fetch()
        watch.watch("a", "host a")
        assert watch.fetch()[0] == NodeBack(node_id="a", host="host a")
        until(lambda: "a" in watch.dead())  # but if its raylet does not answer then, it was the last word of a dead one
        watch.close()
        silent.close()


def test_a_node_that_resets_each_connection_at_once_is_not_dead_and_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that was reset has no peer: `getpeername` raises."""
    connect, connected, resets = socket.create_connection, threading.Semaphore(0), threading.Event()

    def slowly(*given: Any, **more: Any) -> socket.socket:
        connection = connect(*given, **more)
        connected.release()
        poll = select.poll()
        poll.register(connection, 0)  # errors alone: it has been reset by then
        assert poll.poll(10_000)
        resets.set()
        return connection

    def reset_all(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = server.accept()
                connected.acquire()  # a reset before that is an error of `connect`
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()

    monkeypatch.setattr(socket, "create_connection", slowly)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=reset_all, args=(server,), daemon=True).start()
        nodes = {"a": NodeInfo(host="127.0.0.1", port=server.getsockname()[1], alive=True)}
        nodes["b"] = replace(nodes["a"], alive=False)
        watch = NodeWatch(lambda: nodes)
        watch.watch("a")
        assert resets.wait(10)
        watch.watch("b")
        until(lambda: "b" in watch.dead())
        assert set(watch.dead()) == {"b"}, "something listens on the other"
        watch.close()
        server.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_gets_another_node_before_it_starts_is_told_of_that_ones_drain() -> None:
    worker, nodes = WorkerId(1), {1: "a"}
    watch = DrainWatch(dict, lambda one: nodes[one], lambda: [worker])
    watch._look({"c": 0.0})
    nodes[1] = "b"
    watch._look({"a": 0.0})
    assert watch.fetch() == []
    for _ in range(2):  # one notice of each drain
        watch._look({"a": 0.0, "b": 0.0})
    (notice,) = watch.fetch()
    assert (notice.workers, notice.reason) == ((worker,), "node b is being drained")
    watch.close()
