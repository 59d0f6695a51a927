"""A server that lets its answer drip holds nobody up, although no single wait for it is long."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.storage import Unfinished, retry
from raysharded.checkpoint.storage.s3 import bucket
from raysharded.checkpoint.storage.s3.upload import PART_BYTES
from raysharded.errors import StorageError

pytestmark = pytest.mark.alone

TIMEOUT_S = 0.3
PAUSE_S = 0.02  # between two drops; far less than the timeout of one wait
PATIENCE_S = 30.0
LARGE = bytes(PART_BYTES + 1)

Answer = Callable[["_Handler"], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.closing = threading.Event()
        self.dripped: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def drip(self, drop: bytes, seconds: float = PATIENCE_S * 2) -> None:
        self.server.dripped.append(f"{self.command} {self.path}")
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and not self.server.closing.wait(PAUSE_S):
            self.wfile.write(drop)

    def send(self, body: bytes, *head: str) -> None:
        lines = ["HTTP/1.1 200 OK", *head, f"Content-Length: {len(body)}", "", ""]
        self.wfile.write("\r\n".join(lines).encode() + body)

    def handle(self) -> None:
        with suppress(OSError):  # the client has had enough
            super().handle()

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.answer(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  # http.server's names

    def log_message(self, *_: object) -> None:
        pass


def _body(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    handler.drip(b" ")


def _body_without_end(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    handler.drip(b" ")


def _body_of_an_error(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 1000000\r\n\r\n")
    handler.drip(b" ")


def _header(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
    handler.drip(b"x")


@contextmanager
def _served(answer: Answer) -> Iterator[tuple[_Server, str]]:
    with _Server(answer) as server:
        running = threading.Thread(target=server.serve_forever, args=(0.01,))
        running.start()
        try:
            yield server, f"s3://b/p?endpoint_url=http://127.0.0.1:{server.server_port}&timeout_s={TIMEOUT_S}"
        finally:
            server.closing.set()
            server.shutdown()
            running.join()


@pytest.fixture(autouse=True)
def credentials_and_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "list": lambda storage: storage.list("x"),
    "put_if_absent": lambda storage: storage.put_if_absent("k", b"x"),
    "write": lambda storage: storage.write("k", [b"x"]),
    "write much": lambda storage: storage.write("k", [LARGE]),
    "read": lambda storage: storage.read("k"),
    "read a range": lambda storage: storage.read("k", 5, 10),
    "read a long range": lambda storage: storage.read_into("k", 0, [memoryview(bytearray(5 * PART_BYTES))]),
    "size": lambda storage: storage.size("k"),
    "delete": lambda storage: storage.delete(["k"]),
    "delete some": lambda storage: storage.delete(["k", "l"]),
    "unfinished": lambda storage: storage.unfinished(),
    "discard": lambda storage: storage.discard([Unfinished(key="k", token="t")]),
}


def _endings(operations: dict[str, Callable[[Storage], object]], storage: Storage) -> dict[str, str]:
    """The result of each operation; all run at the same time, and one that does not end in time is missing."""
    endings: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            endings[name] = repr(operations[name](storage))
        except StorageError as error:
            endings[name] = f"StorageError: {error}"

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in operations]
    ends_at = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    return endings


@pytest.mark.parametrize("answer", [_body, _body_without_end, _body_of_an_error, _header])
def test_an_answer_that_drips_is_a_timeout_of_every_operation(answer: Answer) -> None:
    bodiless = () if answer is _header else ("size",)  # to HEAD the answer is whole then
    operations = {name: do for name, do in OPERATIONS.items() if name not in bodiless}
    with _served(answer) as (server, url):
        endings = _endings(operations, open_storage(url))
    assert {request.partition(" ")[0] for request in server.dripped} >= {"GET", "PUT", "POST", "DELETE"}
    assert set(endings) == set(operations)
    for name, ending in endings.items():
        assert ending.startswith("StorageError"), (name, ending)
    assert "not complete after 0.6 s. The server answers too slowly" in endings["list"]


def test_an_answer_without_its_length_is_an_error_that_may_pass() -> None:
    def lengthless(handler: _Handler) -> None:
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\nETag: "1"\r\n\r\nabc')
        handler.close_connection = True

    with _served(lengthless) as (_, url):
        for operation in ("read", "read a range", "size"):
            with pytest.raises(StorageError, match="does not state the object"):
                OPERATIONS[operation](open_storage(url))


def test_a_small_object_that_drips_is_a_timeout() -> None:
    with _served(_body) as (_, url), pytest.raises(TimeoutError, match="not complete after"):
        bucket.open_bucket(url).fetch("k")


def test_the_next_request_after_one_that_dripped_is_answered() -> None:
    listing = b"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
    with _served(_body) as (server, url):
        storage = open_storage(url)
        with pytest.raises(StorageError, match="not complete after"):
            storage.list()
        server.answer = lambda handler: handler.send(listing)
        assert storage.list() == []


@pytest.mark.alone  # only a process without other threads is forked safely
def test_a_forked_process_watches_over_its_own_requests() -> None:
    def listing_ends() -> None:
        with pytest.raises(StorageError, match="not complete after"):
            open_storage(url).list()

    with _served(_body) as (_, url):
        listing_ends()
        child = multiprocessing.get_context("fork").Process(target=listing_ends, daemon=True)
        child.start()
        child.join(PATIENCE_S)
        child.kill()
        assert child.exitcode == 0


def _completes(seconds: float, requests: list[str]) -> Answer:
    """Multipart uploads, whose completion drips for a while, as S3's does by design."""

    def answer(handler: _Handler) -> None:
        requests.append(handler.command)
        if handler.command == "PUT":
            handler.send(b"", 'ETag: "x"')
        elif "uploadId" not in handler.path:
            handler.send(b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        elif handler.command == "DELETE":
            handler.send(b"")
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            handler.drip(b" ", seconds)
            handler.wfile.write(b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
            handler.close_connection = True

    return answer


def test_an_upload_whose_completion_takes_long_succeeds() -> None:
    requests: list[str] = []
    with _served(_completes(4 * TIMEOUT_S, requests)) as (_, url):
        open_storage(url).write("k", [LARGE])
    assert requests[-1] == "POST"


def test_an_upload_whose_completion_never_ends_is_a_timeout_and_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "COMPLETION_S", 2 * TIMEOUT_S)
    requests: list[str] = []
    with _served(_completes(PATIENCE_S, requests)) as (_, url), pytest.raises(StorageError, match="not complete after"):
        open_storage(url).write("k", [LARGE])
    assert requests[-1] == "DELETE"


def test_a_larger_body_has_more_time() -> None:
    limit_s = bucket.open_bucket("s3://b/p?timeout_s=60&region=x")._limit_s
    assert limit_s("list_objects_v2", 0) == 120
    assert limit_s("upload_part", 8 << 20) == 180
    assert limit_s("upload_part", 80 << 20) == 720
    assert limit_s("complete_multipart_upload", 0) == 600
