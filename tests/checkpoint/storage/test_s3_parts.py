"""S3 without a server: how bytes are cut into parts and ranges, and which failures may pass."""

from __future__ import annotations

import multiprocessing
import threading
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

import botocore.utils
import pytest
import urllib3.exceptions
from botocore import exceptions as boto
from botocore.exceptions import ClientError
from hypothesis import given, strategies as st

from raysharded.checkpoint.storage.s3 import conditional, download, upload
from raysharded.checkpoint.storage.s3.bucket import open_bucket
from raysharded.checkpoint.storage.s3.connection import connect
from raysharded.checkpoint.storage.s3.credentials import instant, new_session
from raysharded.checkpoint.storage.s3.errors import is_refusal, may_pass, remedy_for
from raysharded.checkpoint.storage.s3.location import Endpoint

PART = 10


def _free(count: int = upload.PARTS_IN_FLIGHT) -> SimpleQueue[bytearray]:
    free: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(count):
        free.put(bytearray())
    return free


@given(sizes=st.lists(st.integers(0, 35), max_size=8))
def test_pieces_are_the_parts_in_full_pieces_and_a_rest(sizes: list[int]) -> None:
    data = [bytes([index]) * size for index, size in enumerate(sizes)]
    free = _free()
    pieces = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "PART_BYTES", PART)
        for piece in upload.cut(data, free):
            pieces.append(bytes(piece))
            free.put(piece)
    assert b"".join(pieces) == b"".join(data)
    assert all(len(piece) == PART for piece in pieces[:-1])
    assert 0 <= len(pieces[-1]) <= PART
    assert len(pieces[-1]) > 0 or len(pieces) == 1


def test_ten_thousand_parts_hold_the_largest_object_and_few_bytes_are_in_flight() -> None:
    sizes = [upload.part_bytes(index) for index in range(10_000)]
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    written = 0
    for size in sizes:
        assert upload.PARTS_IN_FLIGHT * size <= max(32 << 20, 0.0081 * written)
        written += size


def test_a_buffer_is_taken_again_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", PART)
    free = _free(1)
    seen = set()
    for piece in upload.cut([b"x" * 5 * PART], free):
        seen.add(id(piece))
        free.put(piece)
    assert len(seen) == 1


@given(sizes=st.lists(st.integers(0, 35), max_size=8))
def test_ranges_cover_the_memory_to_read_into_in_order(sizes: list[int]) -> None:
    memory = bytearray(sum(sizes))
    outs, at = [], 0
    for size in sizes:
        outs.append(memoryview(memory)[at : at + size])
        at += size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "RANGE_BYTES", PART)
        ranges = list(download.in_ranges(outs))
    assert [sum(len(view) for view in some) for some in ranges[:-1]] == [PART] * (len(ranges) - 1)
    value = 0
    for view in (view for some in ranges for view in some):
        view[:] = bytes((value + i) % 256 for i in range(len(view)))
        value += len(view)
    assert memory == bytes(i % 256 for i in range(len(memory)))


def _said(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(
    "error",
    [
        _said(503, "SlowDown"),
        _said(400, "RequestTimeout"),
        _said(400, "IncompleteBody"),
        _said(400, "XAmzContentSHA256Mismatch"),
        _said(409, "OperationAborted"),
        _said(429, "x"),
        _said(502, "502"),
        _said(0, "InternalError"),
        boto.EndpointConnectionError(endpoint_url="x"),
        boto.ConnectTimeoutError(endpoint_url="x"),
        boto.ReadTimeoutError(endpoint_url="x"),
        boto.ConnectionClosedError(endpoint_url="x"),
        boto.IncompleteReadError(actual_bytes=1, expected_bytes=2),
        boto.HTTPClientError(error=TimeoutError("timed out")),
        boto.SSLError(endpoint_url="x", error="EOF occurred in violation of protocol"),
        urllib3.exceptions.ProtocolError("x"),
        ConnectionResetError(),
    ],
    ids=repr,
)
def test_what_may_pass_by_itself_is_retried(error: Exception) -> None:
    assert may_pass(error)
    assert not is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        _said(403, "AccessDenied"),
        _said(404, "NoSuchBucket"),
        _said(400, "ExpiredToken"),
        _said(412, "PreconditionFailed"),
        _said(501, "NotImplemented"),
        _said(507, "XMinioStorageFull"),
        boto.NoCredentialsError(),
        boto.ParamValidationError(report="x"),
        boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"),
        boto.HTTPClientError(error=MemoryError()),
        FileNotFoundError(),
    ],
    ids=repr,
)
def test_what_cannot_pass_is_not_retried(error: Exception) -> None:
    assert not may_pass(error)


def test_a_bucket_elsewhere_is_reported_with_the_option_that_helps() -> None:
    assert "?region=" in str(remedy_for(_said(301, "PermanentRedirect")))
    assert "AWS_PROFILE" in str(remedy_for(boto.NoCredentialsError()))


@pytest.mark.parametrize(("scheme", "signed"), [("http", None), ("https", False)])
def test_bodies_are_signed_unless_tls_and_a_checksum_protect_them(
    scheme: str, signed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    client: Any = connect(Endpoint(endpoint_url=f"{scheme}://127.0.0.1:1", region="us-east-1")).client
    assert (client.meta.config.s3 or {}).get("payload_signing_enabled") is signed
    assert client.meta.config.retries["total_max_attempts"] == 1


@pytest.mark.alone  # only a process without other threads is forked safely
def test_a_process_forked_during_a_put_can_put_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, may_go_on = threading.Event(), threading.Event()

    def looks_and_puts(_: object, key: str, data: bytes) -> bool:
        under_way.set()
        return key == "b" or may_go_on.wait()

    def puts() -> None:
        assert conditional.put_if_absent(bucket, "b", b"") is True

    monkeypatch.setattr(conditional, "honours_condition", lambda _: False)
    monkeypatch.setattr(conditional, "_look_and_put", looks_and_puts)
    bucket = open_bucket("s3://bucket/run?region=us-east-1")
    putting = threading.Thread(target=conditional.put_if_absent, args=(bucket, "a", b""))
    putting.start()
    assert under_way.wait(30)
    child = multiprocessing.get_context("fork").Process(target=puts, daemon=True)
    child.start()
    child.join(30)
    child.kill()
    may_go_on.set()
    putting.join()
    assert child.exitcode == 0


WRITTEN = [
    "2026-11-29T17:00:01.250Z",
    "2026-11-29T17:00:01Z",
    "Sun, 29 Nov 2026 17:00:01 GMT",
    1764435601,
    "1764435601",
]


@pytest.mark.parametrize("written", [*WRITTEN, "2026-11-29T17:00:01+02:00", "20261129T170001Z", "2026-11-29"])
def test_times_in_answers_are_those_that_botocore_reads(written: Any) -> None:
    found, expected = instant(written), botocore.utils.parse_timestamp(written)
    assert found.timestamp() == expected.timestamp()
    assert found.utcoffset() == expected.utcoffset()


def test_a_listing_is_read_without_the_slow_reader_of_times_and_words_that_are_no_time_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = new_session()
    listing = session.get_service_model("s3").operation_model("ListObjectsV2").output_shape
    parser = session.get_component("response_parser_factory").create_parser("rest-xml")
    key = "<Contents><Key>a</Key><LastModified>2026-11-29T17:00:01.000Z</LastModified><Size>3</Size></Contents>"
    body = f"<ListBucketResult>{key}</ListBucketResult>".encode()
    slow: list[str] = []
    monkeypatch.setattr(botocore.utils, "parse_timestamp", slow.append)
    (found,) = parser.parse({"body": body, "headers": {}, "status_code": 200}, listing)["Contents"]
    assert found == {"Key": "a", "LastModified": datetime(2026, 11, 29, 17, 0, 1, tzinfo=UTC), "Size": 3}
    assert not slow
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nonsense"):
        instant("nonsenseZ")
