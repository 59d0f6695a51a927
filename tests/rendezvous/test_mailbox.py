"""Mailboxes: workers that reach each other without the cluster, if they have the same driver's secret."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from raysharded.ids import WorkerId
from raysharded.orphans.mailbox import Mailbox, MailboxPeers

SECRET = b"s" * 32
WITHIN_S = 10.0


class Worker:
    """A worker with methods for others, and one that is not."""

    def __init__(self, number: int) -> None:
        self._number = number

    def last_words(self, epoch: int, after_step: int) -> tuple[int, int, int, bytes]:
        return self._number, epoch, after_step, bytes(4 << 20)  # more than a request may have

    def write_part(self, epoch: int, part: str) -> str:
        return f"{part} for {epoch} by {self._number}"

    def is_orphan(self) -> bool:
        if self._number == 1:
            raise ValueError("it has a driver")
        return True

    def call(self) -> str:
        return "for drivers"


class Run:
    """Some workers with mailboxes on this machine."""

    def __init__(self, count: int) -> None:
        self.secret = SECRET
        self.boxes = [Mailbox("127.0.0.1", lambda: self.secret, Worker(number)) for number in range(count)]
        self.addresses = {WorkerId(number): box.address for number, box in enumerate(self.boxes)}

    def peers(self, secret: bytes = SECRET) -> MailboxPeers:
        peers = MailboxPeers(lambda: secret)
        peers.meet(self.addresses)
        return peers


def test_all_are_asked_and_those_that_refuse_are_left_out() -> None:
    run = Run(3)
    peers = run.peers()
    words = peers.ask(None, "last_words", 7, 3, timeout_s=WITHIN_S)
    assert {worker: answer[:3] for worker, answer in words.items()} == {0: (0, 7, 3), 1: (1, 7, 3), 2: (2, 7, 3)}
    calls: dict[WorkerId, tuple[Any, ...]] = {WorkerId(0): ("a",), WorkerId(2): ("b",)}
    assert peers.ask(calls, "write_part", 7, timeout_s=WITHIN_S) == {0: "a for 7 by 0", 2: "b for 7 by 2"}
    assert peers.ask(None, "is_orphan", timeout_s=WITHIN_S) == {0: True, 2: True}
    assert peers.before(WorkerId(2)) == [0, 1]


def test_only_the_newest_drivers_secret_is_admitted_and_only_the_named_methods() -> None:
    run = Run(1)
    assert run.peers(b"other").ask(None, "last_words", 1, 1, timeout_s=WITHIN_S) == {}
    assert run.peers().ask(None, "call", timeout_s=WITHIN_S) == {}
    run.secret = b"n" * 32  # another driver has taken the worker over
    assert run.peers().ask(None, "is_orphan", timeout_s=WITHIN_S) == {}
    assert run.peers(run.secret).ask(None, "is_orphan", timeout_s=WITHIN_S) == {0: True}


def test_one_that_does_not_answer_holds_up_nobody() -> None:
    run = Run(1)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
        closed.close()
        peers = MailboxPeers(lambda: SECRET)
        others = {WorkerId(1): f"127.0.0.1:{silent.getsockname()[1]}", WorkerId(2): f"127.0.0.1:{gone}"}
        peers.meet({**run.addresses, **others})
        began = time.monotonic()
        assert peers.ask(None, "is_orphan", timeout_s=0.5) == {0: True}
        assert time.monotonic() - began < WITHIN_S


def test_a_mailbox_costs_one_thread_until_it_is_called() -> None:
    before = threading.active_count()
    run = Run(1)
    assert threading.active_count() == before + 1
    assert run.peers().ask(None, "is_orphan", timeout_s=WITHIN_S) == {0: True}
