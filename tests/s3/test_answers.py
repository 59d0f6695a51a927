"""Pages of consoles, load balancers, proxies and portals are not taken for answers of S3.

A page is shown by a real HTTP server on loopback, in front of a real S3 server, or as the proxy that HTTP_PROXY names.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest

from raysharded.checkpoint import NoSuchKey, Storage, check_writable, open_storage
from raysharded.checkpoint.storage import retry
from raysharded.checkpoint.storage.s3.upload import PART_BYTES
from raysharded.clock import SystemClock
from raysharded.errors import StorageError
from raysharded.journal import writer as journal_writer
from raysharded.journal.log import Journal, read
from raysharded.journal.writer import Recorder
from tests.s3.fixtures import FaultyS3
from tests.s3.proxy import FaultyProxy, Head, Page, Request

pytestmark = pytest.mark.s3

LARGE = Random(3).randbytes(2 * PART_BYTES + 77)
HTML: Head = [("Content-Type", "text/html; charset=utf-8")]
TEXT: Head = [("Content-Type", "text/plain")]
FILE: Head = [*HTML, ("ETag", '"5f3e"'), ("Last-Modified", "Fri, 27 Nov 2026 02:48:38 GMT"), ("Accept-Ranges", "bytes")]
"""As web servers send a file."""

CONSOLES = {
    "Apache": (Page(), r"\(text/html: 'It works!'\)"),
    "a file": (Page(head=FILE), r"\(text/html: 'It works!'\)"),
    "broken HTML": (Page(body=b"<!doctype html><html><title>MinIO Console</title><br><p>x"), "'MinIO Console'"),
    "text": (Page(body=b"ok", head=TEXT), r"\(text/plain: 'ok'\)"),
    "nothing": (Page(body=b"", head=[]), "no content type"),
    "another XML": (Page(body=b"<?xml version='1.0'?><status>up</status>", head=[("Content-Type", "text/xml")]), "up"),
    "not found": (Page(status=404, body=b"404 page not found\n", head=TEXT), "404, text/plain: '404 page not found'"),
    "forbidden": (Page(status=403, body=b"<title>403 Forbidden</title>"), "403, text/html: '403 Forbidden'"),
    "not allowed": (Page(status=405, body=b"<title>405 Not Allowed</title>"), "405, text/html: '405 Not Allowed'"),
}
OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "write": lambda storage: storage.write("a", [b"x" * 10]),
    "large write": lambda storage: storage.write("a", [LARGE]),
    "read": lambda storage: storage.read("a"),
    "read a part": lambda storage: storage.read("a", 3, 4),
    "read_into": lambda storage: storage.read_into("a", 0, [memoryview(bytearray(44))]),
    "put_if_absent": lambda storage: storage.put_if_absent("a", b"x"),
    "size": lambda storage: storage.size("a"),
    "list": lambda storage: storage.list(),
    "delete one": lambda storage: storage.delete(["a"]),
    "delete two": lambda storage: storage.delete(["a", "b"]),
    "unfinished": lambda storage: storage.unfinished(),
}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between attempts, which are tested elsewhere."""
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.01)


@pytest.fixture
def no_proxy(s3_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a proxy in the environment."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def console(no_proxy: None) -> Iterator[FaultyProxy]:
    """An HTTP server with nothing behind it."""
    with FaultyProxy("http://127.0.0.1:1") as server:
        yield server


@pytest.mark.parametrize("kind", CONSOLES)
def test_no_operation_believes_a_console(console: FaultyProxy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 2)
    page, shown = CONSOLES[kind]
    console.inject(page, times=10**6)
    storage = open_storage(f"s3://bucket/run?endpoint_url={console.endpoint_url}&timeout_s=5")
    for name, operation in OPERATIONS.items():
        if name == "read" and kind == "nothing":
            continue
        with pytest.raises(StorageError) as caught:
            operation(storage)
        said = str(caught.value)
        assert f"what answers at {console.endpoint_url} is no S3 server" in said, (name, said)
        assert "the port of its console, or a proxy?" in said
        assert name == "size" or re.search(shown, said), (name, said)  # the answer to a HEAD has no text
        assert not isinstance(caught.value, NoSuchKey)
    with pytest.raises(StorageError, match=r"cannot be written to: .* is no S3 server"):
        check_writable(storage)


def test_a_page_in_the_middle_is_outlasted_by_every_operation(faulty_s3: FaultyS3) -> None:
    storage, direct = open_storage(faulty_s3.url), open_storage(faulty_s3.direct_url)
    storage.put_if_absent("claims/0", b"")  # the server is probed
    for name, operation in OPERATIONS.items():
        direct.write("a", [b"y" * 100])
        if name == "put_if_absent":
            direct.delete(["a"])
        retries = storage.retries
        shown = faulty_s3.proxy.inject(Page(), times=3)
        operation(storage)
        assert shown.fired == 3, name
        assert storage.retries >= retries + 1, name
    assert direct.list() == ["a", "claims/0"]
    assert direct.read("a") == b"y" * 100
    assert direct.unfinished() == []


def test_an_upload_during_which_a_page_is_shown_is_whole(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.url)
    shown = [
        faulty_s3.proxy.inject(Page(), on=operation, times=2)
        for operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
    ]
    storage.write("a", [LARGE])
    assert [page.fired for page in shown] == [2, 2, 2]
    assert storage.read("a") == LARGE
    assert open_storage(faulty_s3.direct_url).unfinished() == []


def test_a_journal_loses_nothing_while_a_page_is_shown(faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page outlasts the retries of several writes."""
    monkeypatch.setattr(journal_writer, "BACK_OFF_S", 0.0)
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 2)
    recorder = Recorder(Journal(open_storage(faulty_s3.url), SystemClock(), "driver"), SystemClock())
    recorder.record("started", {}, durable=True)
    recorder.flush()
    assert recorder.failure is None
    shown = faulty_s3.proxy.inject(Page(), times=6)
    for step in range(8):
        recorder.record("step", {"step": step}, durable=True)
        recorder.flush()
        if shown.fired < 6:
            assert recorder.failure is not None
            assert "is no S3 server" in str(recorder.failure.error)
    recorder.close(60.0)
    assert shown.fired == 6
    steps = [entry["step"] for entry in read(open_storage(faulty_s3.direct_url)) if entry["kind"] == "step"]
    assert steps == list(range(8))


PROXYS_OWN = [
    Page(status=403, body=b"<html><title>Blocked by policy</title></html>"),
    Page(status=407, body=b"<html><title>Log in first</title></html>"),
    Page(status=302, body=b"", head=[("Location", "http://user:secret@portal.example/login")]),
    Page(status=301, body=b"<html>moved</html>", head=[*HTML, ("Location", "http://portal.example/")]),
    Page(status=307, body=b"", head=[("Location", "http://portal.example/")]),
    Page(status=511, body=b"<html>network authentication</html>"),
]


@pytest.mark.parametrize("page", PROXYS_OWN, ids=lambda page: str(page.status))
def test_what_a_proxy_answers_is_said_in_its_name(
    no_proxy: None, s3_url: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 2)
    host = "127.0.0.1"
    with FaultyProxy("http://127.0.0.1:1") as proxy:
        proxy.inject(page, times=10**6)
        address = proxy.endpoint_url.replace("http://", "http://me:secret@")
        shown = proxy.endpoint_url.replace("http://", "http://me:***@")
        monkeypatch.setenv("HTTP_PROXY", address)
        storage = open_storage(f"{s3_url}&timeout_s=5.{page.status}")
        for name, operation in OPERATIONS.items():
            with pytest.raises(StorageError) as caught:
                operation(storage)
            said = str(caught.value)
            assert f"the proxy HTTP_PROXY={shown} answered, not S3 ({page.status}" in said, (name, said)
            assert f"Add {host} to NO_PROXY" in said
            assert "secret" not in said
        monkeypatch.setenv("NO_PROXY", host)
        allowed = open_storage(f"{s3_url}&timeout_s=6.{page.status}")
        allowed.write("a", [b"1"])
        assert allowed.read("a") == b"1"


@pytest.mark.parametrize("begin", ["", "//", "http://"])
def test_a_proxy_s_password_is_hidden_however_its_address_begins(
    no_proxy: None, s3_url: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
    with FaultyProxy("http://127.0.0.1:1") as proxy:
        proxy.inject(PROXYS_OWN[0], times=10**6)
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url.replace("http://", f"{begin}me:secret@"))
        shown = proxy.endpoint_url.replace("http://", "http://me:***@")
        with pytest.raises(StorageError) as caught:
            open_storage(f"{s3_url}&timeout_s=5.{len(begin)}").read("a")
    assert f"the proxy HTTP_PROXY={shown} answered" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_proxy_that_refuses_a_tunnel_is_named(no_proxy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
    with _server(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n") as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        storage = open_storage("s3://bucket/run?endpoint_url=https://s3.example&timeout_s=5")
        with pytest.raises(StorageError, match=f"{port}.*407 Proxy Authentication.*NO_PROXY"):
            storage.list()


def test_https_to_a_port_that_speaks_http_is_said(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
    with pytest.raises(StorageError, match="does not speak https: write http://"):
        open_storage(s3_url.replace("http:", "https:")).list()


@pytest.mark.parametrize(
    "body",
    [
        b"Client sent an HTTP request to an HTTPS server.\n",
        b"<html><title>400 The plain HTTP request was sent to HTTPS port</title></html>",
    ],
)
def test_http_to_a_port_that_speaks_https_is_said(
    console: FaultyProxy, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of Go's servers and of nginx."""
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
    console.inject(Page(status=400, body=body, head=TEXT), times=10)
    with pytest.raises(StorageError, match=r"speaks https.*Write https://"):
        open_storage(f"s3://bucket/run?endpoint_url={console.endpoint_url}&timeout_s=5").list()


def test_a_refusal_without_a_document_is_still_a_refusal(faulty_s3: FaultyS3) -> None:
    """Small servers answer so to what they do not implement."""
    storage = open_storage(faulty_s3.url)
    refused = faulty_s3.proxy.inject(Page(status=501, body=b"not implemented", head=TEXT), on="DeleteObjects", times=10)
    storage.write("a", [b"1"])
    storage.write("b", [b"1"])
    storage.delete(["a", "b"])
    assert storage.list() == []
    assert refused.fired == 1


def test_a_listing_that_does_not_tell_how_it_goes_on_is_an_error(console: FaultyProxy) -> None:
    body = b"<ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated></ListBucketResult>"
    console.inject(Page(body=body, head=[("Content-Type", "application/xml")]))
    storage = open_storage(f"s3://bucket/run?endpoint_url={console.endpoint_url}&timeout_s=5")
    with pytest.raises(StorageError, match="not whole, and has no NextContinuationToken"):
        storage.list()


def test_a_redirect_of_s3_without_a_region_is_no_endless_search(console: FaultyProxy) -> None:
    body = b"<?xml version='1.0'?><Error><Code>TemporaryRedirect</Code><Message>there</Message></Error>"

    def asks_for_region(request: Request) -> bool:
        return request.method == "HEAD"

    head = console.inject(Page(status=307, body=b"", head=[("x-amz-request-id", "1")]), when=asks_for_region, times=99)
    console.inject(Page(status=307, body=body, head=[("Content-Type", "application/xml")]), times=99)
    storage = open_storage(f"s3://bucket/run?endpoint_url={console.endpoint_url}&timeout_s=5")
    with pytest.raises(StorageError, match="307 TemporaryRedirect"):
        storage.list()
    assert head.fired == 1


def test_a_path_in_the_servers_address_is_suspected(faulty_s3: FaultyS3) -> None:
    url = faulty_s3.direct_url
    for path in ("/s3", "/bucket"):
        with pytest.raises(StorageError, match=f"{path} has a path, which most servers do not"):
            open_storage(f"{url}{path}").list()
    assert open_storage(f"{url}/").list() == open_storage(f"{url}//").list() == []


def test_the_scheme_of_an_address_may_be_in_capitals(s3_url: str) -> None:
    open_storage(s3_url.replace("http://", "HTTP://")).write("a", [b"1"])
    assert open_storage(s3_url).read("a") == b"1"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_address_without_a_scheme_is_named_with_its_variable(
    s3_credentials: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "minio.example:9000")
    storage = open_storage(f"s3://bucket/{name}")
    with pytest.raises(StorageError, match=f"{name}=minio.example:9000 is not an address.*Correct it"):
        storage.list()


def test_names_that_no_key_may_have_are_refused(s3_url: str) -> None:
    path, _, options = s3_url.partition("?")
    for wrong in ("a/../b", "./a", ".."):
        with pytest.raises(StorageError, match=r"'\.' and '\.\.' are not resolved"):
            open_storage(f"{path}/{wrong}?{options}")
    with pytest.raises(StorageError, match=r"UTF-8 cannot encode") as caught:
        open_storage(f"{path}/name\udce9?{options}")
    str(caught.value).encode()
    storage = open_storage(s3_url)
    operations: list[Callable[[], object]] = [
        lambda: storage.write("name\udce9", [b""]),
        lambda: storage.read("name\udce9"),
        lambda: storage.list("name\udce9"),
        lambda: storage.delete(["name\udce9", "b"]),
    ]
    for operation in operations:
        with pytest.raises(StorageError, match=r"name\\udce9.*UTF-8 cannot encode") as caught:
            operation()
        str(caught.value).encode()


@contextlib.contextmanager
def _server(answer: bytes) -> Iterator[int]:
    """A server that gives this answer to everybody; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(65536)
                        client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
