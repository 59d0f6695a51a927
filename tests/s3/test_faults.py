"""Faults of networks and servers at requests are retried or reported: never a torn object, never a hang.

Through a proxy in front of a real server; a storage's timeout is 2 s there. Every fault is proven to have fired.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from raysharded.checkpoint import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage import retry
from raysharded.checkpoint.storage.s3.upload import PART_BYTES
from raysharded.errors import StorageError
from tests.s3.fixtures import FaultyS3
from tests.s3.proxy import (
    Change,
    CutBody,
    Exchange,
    Fault,
    FlipByte,
    FlipUploadedByte,
    LoseReply,
    Refuse,
    Reply,
    Request,
    Reset,
    Stall,
    Trickle,
    WrongLength,
)

pytestmark = pytest.mark.s3

SMALL = b"0123456789" * 10
LARGE = random.Random(0).randbytes(2 * PART_BYTES + 4321)

PASSING: list[Fault] = [
    Refuse(503, "SlowDown"),
    Refuse(500, "InternalError"),
    Refuse(429, "TooManyRequests"),
    Refuse(503, "SomethingNew"),
    Reset(),
    Stall(),
]
LOST: list[Fault] = [LoseReply(), LoseReply(instead=(500, "InternalError"))]
BROKEN_BODIES: list[Fault] = [
    CutBody(),
    CutBody(then="reset"),
    CutBody(then="stall"),
    WrongLength(by=10),
    WrongLength(by=-10),
    Trickle(pause_s=0.1),
]
UPLOAD = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between attempts, which are tested elsewhere."""
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.01)


@pytest.fixture
def storage(faulty_s3: FaultyS3) -> Iterator[Storage]:
    opened = open_storage(faulty_s3.url)
    yield opened
    assert not open_storage(faulty_s3.direct_url).unfinished()


def _named(fault: Fault) -> str:
    return repr(fault)


def _often(fault: Fault) -> int:
    """Number of times in a row: two; one where each time costs a time-out."""
    return 1 if isinstance(fault, Stall) or fault == CutBody(then="stall") else 2


@pytest.mark.parametrize("fault", PASSING + LOST, ids=_named)
def test_a_small_write_outlasts_what_passes(storage: Storage, faulty_s3: FaultyS3, fault: Fault) -> None:
    injected = faulty_s3.proxy.inject(fault, on="PutObject", times=_often(fault))
    storage.write("a", [SMALL])
    assert injected.fired == storage.retries == _often(fault)
    assert open_storage(faulty_s3.direct_url).read("a") == SMALL


@pytest.mark.parametrize("operation", UPLOAD)
@pytest.mark.parametrize("fault", PASSING, ids=_named)
def test_a_large_write_outlasts_what_passes(
    storage: Storage, faulty_s3: FaultyS3, operation: str, fault: Fault
) -> None:
    injected = faulty_s3.proxy.inject(fault, on=operation, times=_often(fault))
    storage.write("a", [LARGE])
    assert injected.fired == storage.retries == _often(fault)
    assert open_storage(faulty_s3.direct_url).read("a") == LARGE


@pytest.mark.parametrize("fault", LOST, ids=_named)
@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_a_large_write_whose_reply_is_lost_knows_its_own(
    storage: Storage, faulty_s3: FaultyS3, operation: str, fault: Fault
) -> None:
    storage.write("a", [SMALL])  # an older object is not mistaken for it
    injected = faulty_s3.proxy.inject(fault, on=operation)
    storage.write("a", [LARGE])
    assert injected.fired == storage.retries == 1
    assert open_storage(faulty_s3.direct_url).read("a") == LARGE


def test_a_half_answer_to_a_completed_upload_is_no_failure(storage: Storage, faulty_s3: FaultyS3) -> None:
    injected = faulty_s3.proxy.inject(CutBody(), on="CompleteMultipartUpload")
    storage.write("a", [LARGE])
    assert injected.fired == storage.retries == 1
    assert open_storage(faulty_s3.direct_url).read("a") == LARGE


@pytest.mark.parametrize("fault", PASSING + BROKEN_BODIES, ids=_named)
@pytest.mark.parametrize("size", [len(SMALL), len(LARGE)], ids=["small", "large"])
def test_reads_outlast_what_passes(faulty_s3: FaultyS3, storage: Storage, fault: Fault, size: int) -> None:
    data = LARGE[:size]
    open_storage(faulty_s3.direct_url).write("a", [data])
    injected = faulty_s3.proxy.inject(fault, on="GetObject", times=_often(fault))
    out = bytearray(size)
    assert storage.read_into("a", 0, [memoryview(out)]) == size
    assert out == data
    assert storage.read("a") == data
    assert storage.read("a", 5, size - 10) == data[5:-5]
    assert injected.fired == storage.retries == _often(fault)


@pytest.mark.parametrize("fault", [*PASSING, CutBody(), CutBody(then="reset"), CutBody(then="stall")], ids=_named)
def test_listings_are_whole(storage: Storage, faulty_s3: FaultyS3, fault: Fault) -> None:
    open_storage(faulty_s3.direct_url).write("a/b", [SMALL])
    injected = faulty_s3.proxy.inject(fault, on="ListObjectsV2", times=_often(fault))
    assert storage.list() == ["a/b"]
    assert injected.fired == storage.retries == _often(fault)


def test_an_empty_body_is_not_taken_for_an_empty_listing(storage: Storage, faulty_s3: FaultyS3) -> None:
    open_storage(faulty_s3.direct_url).write("a/b", [SMALL])

    injected = faulty_s3.proxy.inject(CutBody(kept=0.0), on="ListObjectsV2")
    assert storage.list() == ["a/b"]
    assert injected.fired == storage.retries == 1


@pytest.mark.parametrize("fault", PASSING + LOST, ids=_named)
def test_sizes_deletions_and_clean_ups_outlast_what_passes(storage: Storage, faulty_s3: FaultyS3, fault: Fault) -> None:
    open_storage(faulty_s3.direct_url).write("a", [SMALL])
    open_storage(faulty_s3.direct_url).write("b", [SMALL])
    for operation in ("HeadObject", "DeleteObjects", "DeleteObject", "ListMultipartUploads"):
        faulty_s3.proxy.inject(fault, on=operation)
    assert storage.size("a") == len(SMALL)
    storage.delete(["a", "b"])
    storage.delete(["a"])
    assert storage.unfinished() == []
    assert storage.retries == 4
    assert storage.list() == []


@pytest.mark.parametrize("fault", [*PASSING, *LOST, Refuse(409, "ConditionalRequestConflict")], ids=_named)
def test_a_claim_is_won_once_with_any_fate_of_its_reply(storage: Storage, faulty_s3: FaultyS3, fault: Fault) -> None:
    storage.put_if_absent("claims/0", b"")  # the server is probed
    injected = faulty_s3.proxy.inject(fault, on="PutObject")
    assert storage.put_if_absent("claims/1", b"mine") is True
    assert injected.fired == storage.retries == 1
    assert storage.put_if_absent("claims/1", b"yours") is False
    assert storage.read("claims/1") == b"mine"


def test_a_lost_reply_does_not_make_anothers_claim_ones_own(storage: Storage, faulty_s3: FaultyS3) -> None:
    direct = open_storage(faulty_s3.direct_url)
    storage.put_if_absent("claims/0", b"")

    def another_is_first(request: Request) -> bool:
        return direct.put_if_absent("claims/1", b"theirs")

    injected = faulty_s3.proxy.inject(Reset(), on="PutObject", when=another_is_first)
    assert storage.put_if_absent("claims/1", b"mine") is False
    assert injected.fired == storage.retries == 1
    assert direct.read("claims/1") == b"theirs"


@dataclass(frozen=True)
class IgnoresCondition:
    direct: Storage

    def __call__(self, exchange: Exchange) -> None:
        key = exchange.request.target.split("/run/", 1)[1]
        self.direct.write(key, [exchange.request.body])
        exchange.send(Reply(status=200, head=[("Content-Length", "0"), ("ETag", '"x"')], body=b""))


@pytest.mark.parametrize("how", ["ignores", "refuses"])
def test_a_server_without_conditional_puts_is_found_by_trying(
    storage: Storage, faulty_s3: FaultyS3, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Refuse(501, "NotImplemented") if how == "refuses" else IgnoresCondition(open_storage(faulty_s3.direct_url))
    injected = faulty_s3.proxy.inject(fault, when=lambda r: r.header("If-None-Match") is not None, times=10**6)
    assert storage.put_if_absent("claims/1", b"mine") is True
    assert storage.put_if_absent("claims/1", b"yours") is False
    assert storage.read("claims/1") == b"mine"
    assert "does not put conditionally" in caplog.text
    assert storage.list() == ["claims/1"]
    assert injected.fired == 2  # the probe: put twice, or once with and once without a checksum
    assert storage.retries == 0


def test_a_server_that_refuses_checksums_gets_none(storage: Storage, faulty_s3: FaultyS3) -> None:
    def checksummed(request: Request) -> bool:
        names = {name.lower() for name, _ in request.head}
        return bool(names & {"x-amz-checksum-crc32", "x-amz-checksum-algorithm", "x-amz-checksum-mode"})

    refused = faulty_s3.proxy.inject(Refuse(400, "InvalidArgument"), when=checksummed, times=10**6)
    storage.write("a", [LARGE])
    storage.write("b", [SMALL])
    assert storage.read("a") == LARGE
    assert storage.read("b") == SMALL
    assert refused.fired == 1
    assert storage.retries == 0


def test_a_server_confirms_the_bytes_it_received(storage: Storage, faulty_s3: FaultyS3) -> None:
    def received_others(request: Request, reply: Reply) -> Reply:
        return Reply(status=reply.status, head=[*reply.head, ("x-amz-checksum-crc32", "AAAAAA==")], body=reply.body)

    injected = faulty_s3.proxy.inject(Change(received_others), on="PutObject")
    storage.write("a", [SMALL])
    assert injected.fired == storage.retries == 1


def test_a_checksum_that_a_server_gives_is_checked(storage: Storage, faulty_s3: FaultyS3) -> None:
    storage.write("a", [SMALL])

    def of_other_bytes(request: Request, reply: Reply) -> Reply:
        return Reply(status=reply.status, head=[*reply.head, ("x-amz-checksum-crc32", "AAAAAA==")], body=reply.body)

    injected = faulty_s3.proxy.inject(Change(of_other_bytes), on="GetObject")
    assert storage.read("a") == SMALL
    assert injected.fired == storage.retries == 1


def test_bytes_that_change_on_the_way_up_are_refused_and_sent_again(storage: Storage, faulty_s3: FaultyS3) -> None:
    changed = faulty_s3.proxy.inject(FlipUploadedByte(at=9), on="UploadPart")
    storage.write("a", [LARGE])
    assert changed.fired == storage.retries == 1
    assert open_storage(faulty_s3.direct_url).read("a") == LARGE


PERMANENT = [
    (403, "AccessDenied", "Allow these credentials"),
    (403, "ExpiredToken", "credentials have expired"),
    (400, "ExpiredToken", "credentials have expired"),
    (403, "InvalidAccessKeyId", "does not accept these credentials"),
    (403, "SignatureDoesNotMatch", "does not accept these credentials"),
    (403, "RequestTimeTooSkewed", "clock"),
    (404, "NoSuchBucket", "Create the bucket"),
    (403, "QuotaExceeded", "Free some space"),
    (507, "InsufficientStorage", "Free some space"),
]


@pytest.mark.parametrize(("status", "code", "remedy"), PERMANENT)
def test_what_cannot_pass_is_reported_at_once_with_what_to_do(
    storage: Storage, faulty_s3: FaultyS3, status: int, code: str, remedy: str
) -> None:
    open_storage(faulty_s3.direct_url).write("a", [SMALL])
    refused = faulty_s3.proxy.inject(
        Refuse(status, code), when=lambda r: r.method != "DELETE" and r.operation != "HeadObject", times=10**6
    )
    begun = time.monotonic()
    operations: list[Callable[[], object]] = [
        lambda: storage.write("b", [SMALL]),
        lambda: storage.write("b", [LARGE]),
        lambda: storage.put_if_absent("b", SMALL),
        lambda: storage.read("a"),
        lambda: storage.read_into("a", 0, [memoryview(bytearray(4))]),
        storage.list,
        lambda: storage.delete(["a", "b"]),
        *([] if code == "AccessDenied" else [storage.unfinished]),  # only tidying: tested with the rights
    ]
    for operation in operations:
        fired = refused.fired
        with pytest.raises(StorageError, match=f"{code}.*{remedy}") as caught:
            operation()
        assert not isinstance(caught.value, NoSuchKey)
        assert refused.fired == fired + 1
    assert time.monotonic() - begun < 30
    assert storage.retries == 0


def test_credentials_that_expire_in_the_middle_of_a_write_leave_nothing(storage: Storage, faulty_s3: FaultyS3) -> None:
    refused = faulty_s3.proxy.inject(Refuse(403, "ExpiredToken"), on="UploadPart", times=10)
    with pytest.raises(StorageError, match="credentials have expired"):
        storage.write("a", [LARGE])
    assert refused.fired >= 1
    assert storage.list() == []


def test_a_writer_that_fails_leaves_neither_an_object_nor_an_upload(storage: Storage, faulty_s3: FaultyS3) -> None:
    def dies() -> Iterator[bytes]:
        yield LARGE
        raise RuntimeError("the writer dies")

    with pytest.raises(RuntimeError, match="the writer dies"):
        storage.write("a", dies())
    assert faulty_s3.proxy.count("AbortMultipartUpload") == 1
    assert storage.list() == []


@pytest.mark.parametrize("operation", ["PutObject", *UPLOAD])
def test_a_server_that_stays_broken_is_an_error_and_tears_nothing(
    storage: Storage, faulty_s3: FaultyS3, operation: str
) -> None:
    open_storage(faulty_s3.direct_url).write("a", [b"old"])
    refused = faulty_s3.proxy.inject(Refuse(503, "SlowDown"), on=operation, times=10**6)
    with pytest.raises(StorageError, match="503 SlowDown"):
        storage.write("a", [SMALL if operation == "PutObject" else LARGE])
    assert retry.MAX_ATTEMPTS <= refused.fired <= 3 * retry.MAX_ATTEMPTS
    assert storage.retries >= retry.MAX_ATTEMPTS - 1
    assert open_storage(faulty_s3.direct_url).read("a") == b"old"


def test_a_server_that_does_not_answer_is_an_error_within_a_bounded_time(
    storage: Storage, faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "GIVE_UP_AFTER_S", 3.0)
    stalled = faulty_s3.proxy.inject(Stall(), times=10**6)
    with pytest.raises(StorageError, match="Check that the server runs"):
        storage.read("a")
    assert stalled.fired == 2, "each has its timeout"


def test_a_lost_server_is_an_error_that_names_it(s3_credentials: None) -> None:
    storage = open_storage("s3://bucket/run?endpoint_url=http://127.0.0.1:1&timeout_s=2")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1.*Check that the server runs"):
        storage.read("a")
    assert storage.retries == retry.MAX_ATTEMPTS - 1


@dataclass(frozen=True)
class ReplaceAfterTheFirst:
    """The first range is of the old object, all others of the new one."""

    replace: Callable[[], None]
    first: threading.Lock = field(default_factory=threading.Lock)
    replaced: threading.Event = field(default_factory=threading.Event)

    def __call__(self, exchange: Exchange) -> None:
        if self.first.acquire(blocking=False):
            reply = exchange.forward()
            self.replace()
            self.replaced.set()
            exchange.send(reply)
        elif self.replaced.wait(60):
            exchange.send(exchange.forward())


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.url.replace("timeout_s=2", "timeout_s=60"))
    direct = open_storage(faulty_s3.direct_url)
    direct.write("a", [LARGE])
    fault = ReplaceAfterTheFirst(lambda: direct.write("a", [LARGE[::-1]]))
    injected = faulty_s3.proxy.inject(fault, on="GetObject", times=3)
    with pytest.raises(StorageError, match="replaced while it was read"):
        storage.read_into("a", 0, [memoryview(bytearray(len(LARGE)))])
    assert injected.fired == 3
    assert storage.retries == 0


@pytest.mark.parametrize("size", [len(SMALL), len(LARGE)], ids=["small", "large"])
def test_a_flipped_byte_that_no_one_noticed_is_the_digests_business(
    storage: Storage, faulty_s3: FaultyS3, size: int
) -> None:
    """This server gives no checksums back: the checkpoint's own digests find changes on the way down."""
    open_storage(faulty_s3.direct_url).write("a", [LARGE[:size]])
    injected = faulty_s3.proxy.inject(FlipByte(at=7), on="GetObject")
    out = bytearray(size)
    storage.read_into("a", 0, [memoryview(out)])
    assert injected.fired == 1
    assert out != LARGE[:size]
    at = next(at for at in range(size) if out[at] != LARGE[at])
    assert bytes(out[:at] + out[at + 1 :]) == LARGE[:at] + LARGE[at + 1 : size]
