"""The second read of an object, which is not made by boto3, gives and raises what the first gives and raises."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from raysharded.checkpoint import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage import retry
from raysharded.checkpoint.storage.s3 import ranged_reads
from raysharded.checkpoint.storage.s3.bucket import open_bucket
from raysharded.errors import StorageError
from tests.s3.fixtures import FaultyS3
from tests.s3.proxy import Change, CutBody, Fault, Page, Refuse, Reply, Request, Reset, Stall, Trickle, WrongLength

pytestmark = pytest.mark.s3

DATA = bytes(range(256)) * 8
FAULTS: list[Fault] = [
    Refuse(503, "SlowDown"),
    Refuse(500, "InternalError"),
    Refuse(429, "TooManyRequests"),
    Page(),
    Page(status=502),
    Reset(),
    Stall(),
    CutBody(),
    CutBody(then="reset"),
    WrongLength(by=10),
    WrongLength(by=-10),
    Trickle(pause_s=0.1),
]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between attempts, which are tested elsewhere."""
    monkeypatch.setattr(retry, "MAX_WAIT_S", 0.01)


@pytest.fixture
def calls(faulty_s3: FaultyS3) -> list[str]:
    """The reads that boto3 makes, whose number is compared with the server's."""
    made: list[str] = []
    events = open_bucket(faulty_s3.url).connection.client.meta.events
    events.register("before-call.s3.GetObject", lambda params, **_: made.append(params["headers"]["Range"]))
    return made


@pytest.fixture
def storage(faulty_s3: FaultyS3) -> Storage:
    """A storage with the object `a`, of which the first bytes have been read."""
    opened = open_storage(faulty_s3.url)
    opened.write("a", [DATA])
    assert opened.read("a", 0, 10) == DATA[:10]
    return opened


def test_later_reads_of_an_object_are_not_made_by_boto3(faulty_s3: FaultyS3, calls: list[str]) -> None:
    storage = open_storage(faulty_s3.url)
    for key in ("a", "parts/a b+c%20/ü~(1)'*"):
        storage.write(key, [DATA])
        for start, end in pairwise(range(0, len(DATA) + 1, 256)):
            assert storage.read(key, start, end - start) == DATA[start:end]
    assert calls == ["bytes=0-255", "bytes=0-255"]
    assert faulty_s3.proxy.count("GetObject") == 16
    assert (storage.retries, faulty_s3.proxy.num_connections) == (0, 1)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_what_passes_is_outlasted(faulty_s3: FaultyS3, storage: Storage, fault: Fault) -> None:
    injected = faulty_s3.proxy.inject(fault, on="GetObject")
    assert storage.read("a", 5, 500) == DATA[5:505]
    assert injected.fired == storage.retries == 1
    assert storage.read("a", 7, 500) == DATA[7:507]


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (400, "InvalidRequest"), (404, "NoSuchBucket"), (507, "Full"), (503, "SlowDown")],
)
def test_what_stays_is_raised_as_at_the_first_read(
    faulty_s3: FaultyS3, storage: Storage, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
    faulty_s3.proxy.inject(Refuse(status, code), on="GetObject", times=100)
    with pytest.raises(StorageError) as first:
        storage.read("b", 5, 500)
    with pytest.raises(StorageError) as later:
        storage.read("a", 5, 500)
    assert str(later.value).replace("/run/a?", "/run/b?") == str(first.value)
    assert code in str(first.value)


def test_a_read_is_answered_by_what_is_there_by_then(storage: Storage) -> None:
    assert storage.read("a", len(DATA) - 5, 500) == DATA[-5:]
    assert storage.read("a", len(DATA) + 5, 500) == b""
    storage.write("a", [DATA[::-1]])
    assert storage.read("a", 5, 500) == DATA[::-1][5:505]
    storage.delete(["a"])
    with pytest.raises(NoSuchKey):
        storage.read("a", 5, 500)
    storage.write("a", [DATA])
    assert storage.read("a", 5, 500) == DATA[5:505]


def test_another_range_than_the_requested_one_is_not_taken(faulty_s3: FaultyS3, storage: Storage) -> None:
    def shifted(request: Request, reply: Reply) -> Reply:
        head = [(name, re.sub("5-504", "6-505", value)) for name, value in reply.head]
        return Reply(status=reply.status, head=head, body=reply.body)

    injected = faulty_s3.proxy.inject(Change(shifted), on="GetObject")
    assert storage.read("a", 5, 500) == DATA[5:505]
    assert injected.fired == storage.retries == 1


def test_an_answer_without_a_length_is_received_by_the_client(faulty_s3: FaultyS3, storage: Storage) -> None:
    def chunked(_: Request, reply: Reply) -> Reply:
        head = [(name, value) for name, value in reply.head if name.lower() != "content-length"]
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(reply.body), reply.body)
        return Reply(status=reply.status, head=[*head, ("Transfer-Encoding", "chunked")], body=body)

    injected = faulty_s3.proxy.inject(Change(chunked), on="GetObject", times=1)
    before = faulty_s3.proxy.count("GetObject")
    assert storage.read("a", 5, 500) == DATA[5:505]
    assert (injected.fired, storage.retries) == (1, 0)
    assert faulty_s3.proxy.count("GetObject") == before + 2


@pytest.mark.parametrize("kept_s", [60.0, 0.0])
def test_a_request_is_signed_once_in_a_minute_for_all_ranges(
    faulty_s3: FaultyS3, storage: Storage, monkeypatch: pytest.MonkeyPatch, kept_s: float
) -> None:
    monkeypatch.setattr(ranged_reads, "_SIGNED_S", kept_s)
    signed: list[object] = []
    events = open_bucket(faulty_s3.url).connection.client.meta.events
    events.register_last("request-created.s3.GetObject", lambda request, **_: signed.append(request.headers["Range"]))
    storage.read("a", 0, 1)  # the client may have signed the object before
    signed.clear()
    for start in range(10, 20):
        assert storage.read("a", start, 3) == DATA[start : start + 3]
    assert signed == ([] if kept_s else [None] * 10)


def test_the_oldest_requests_are_forgotten(
    faulty_s3: FaultyS3, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged_reads, "_MOST_REMEMBERED", 2)
    storage = open_storage(faulty_s3.url)
    for key in "abc":
        storage.write(key, [DATA])
        storage.read(key, 0, 10)
    calls.clear()
    for number, key in enumerate("cba"):
        storage.read(key, number, 10)
    assert calls == ["bytes=2-11"]
