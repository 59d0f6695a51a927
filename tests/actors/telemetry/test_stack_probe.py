"""Stacks of a thread that runs meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from raysharded.actors.telemetry.stack_probe import is_waiting, look_at, parsed
from raysharded.data import TokenDataset
from raysharded.data.store.layout import Kind
from raysharded.data.store.shard_reader import oldest_read
from raysharded.data.store.store_source import StoreSource
from raysharded.data.store.writer import StoreWriter


def outer(ready: threading.Event, go: threading.Event) -> None:
    inner(ready, go)


def inner(ready: threading.Event, go: threading.Event) -> None:
    ready.set()
    go.wait()


def test_a_stack_has_the_innermost_call_last_and_the_line_of_the_users_code() -> None:
    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=outer, args=(ready, go))
    thread.start()
    assert ready.wait(60)
    try:
        found = look_at(thread.ident)
    finally:
        go.set()
        thread.join()
    assert not found.waits
    assert found.where.startswith(f"{Path(__file__).name}:")
    assert found.where.endswith(" in inner")
    assert found.stack.index("in outer\n    inner(ready, go)") < found.stack.index("in inner\n")
    assert not is_waiting(thread.ident), "it has ended"


def test_a_read_of_a_token_store_that_hangs_is_named_with_its_shard_and_place(tmp_path: Path) -> None:
    with StoreWriter(str(tmp_path), Kind(tokenizer="bytes", vocab_size=257), 1 << 20) as writer:
        writer.write(np.zeros(200_000, dtype=np.uint32))
    dataset, gate, begun = TokenDataset(tmp_path, seq_len=16), threading.Event(), threading.Event()
    assert len(dataset[0]) == 17
    assert isinstance(dataset._reader, StoreSource)
    (reader,) = dataset._reader.readers
    storage = reader._storage
    code = "lambda *given: [begun.set(), gate.wait(), storage.read_into(*given)][-1]"
    blocked = eval(code, {"begun": begun, "gate": gate, "storage": storage})  # noqa: S307 - lines of no file
    reader._storage = SimpleNamespace(url=storage.url, read_into=blocked)
    thread = threading.Thread(target=dataset.__getitem__, args=(len(dataset) - 1,))
    thread.start()
    try:
        assert begun.wait(60)
        found = look_at(thread.ident)
    finally:
        gate.set()
        thread.join()
        dataset.close()
    assert not found.waits
    assert re.fullmatch(rf"the read of {tmp_path}/shard-0\S+\.tokens, \d+ bytes from byte [1-9]\d+ on", found.where)
    assert oldest_read() == ""


def test_names_that_are_not_ascii_are_those_of_the_files() -> None:
    [(thread, calls)] = parsed(
        "Thread 0x00007f0000000010 [name] (most recent call first):\n"
        '  File "/home/j\\xfcrgen/\\u8a13\\u7df4/train.py", line 7 in l\\xe4uft\n'
        '  File "/x.py", line 1 in <module>\n'
    ).items()
    assert thread == 0x7F0000000010
    assert [(call.filename, call.lineno, call.name) for call in calls] == [
        ("/x.py", 1, "<module>"),
        ("/home/jürgen/訓練/train.py", 7, "läuft"),
    ]


def test_a_thread_whose_calls_come_and_go_is_looked_at_again_and_again() -> None:
    ended = threading.Event()

    @contextmanager
    def entered(depth: int) -> Iterator[None]:
        if depth:
            with entered(depth - 1):
                yield
        else:
            yield

    def run() -> None:
        while not ended.is_set():
            with entered(12):
                sum(number for number in range(9))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert not is_waiting(thread.ident)
            assert not look_at(thread.ident).waits
    finally:
        ended.set()
        thread.join()
