"""Behaviour of S3 alone: parts, memory, dead writers, neighbours, processes. Other folders test the common promises."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from random import Random

import botocore.auth
import pytest
import torch

from raysharded.checkpoint import api, open_storage
from raysharded.checkpoint.storage.optional_operations import sizes_of
from raysharded.checkpoint.storage.s3 import listing
from raysharded.checkpoint.storage.s3.download import ONE_REQUEST_BYTES, RANGE_BYTES
from raysharded.checkpoint.storage.s3.upload import PART_BYTES, PARTS_IN_FLIGHT
from raysharded.errors import StorageError
from raysharded.locations import join_url
from tests.paths import ROOT
from tests.s3.fixtures import FaultyS3
from tests.s3.proxy import Refuse

pytestmark = pytest.mark.s3

MIB = 1 << 20
DATA = Random(1).randbytes(3 * PART_BYTES + 7)


@pytest.mark.parametrize(
    ("size", "requests"),
    [
        (0, ["PutObject"]),
        (PART_BYTES, ["PutObject"]),
        (PART_BYTES + 1, ["CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload"]),
    ],
)
def test_a_write_is_one_request_as_long_as_it_fits_one_part(
    faulty_s3: FaultyS3, size: int, requests: list[str]
) -> None:
    storage = open_storage(faulty_s3.url)
    storage.write("a", [DATA[:size]])
    assert [request.operation for request in faulty_s3.proxy.requests] == requests
    assert storage.read("a") == DATA[:size]


def test_sizes_of_known_keys_take_a_request_for_each_page_of_them(
    faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(faulty_s3.url)
    known = [f"{name}-{number}.part" for name in ("a b", "a", "é+", "\uff61", "\U0001f600") for number in range(2)]
    others = ["a-0.other", "z", "\U0001f600-1.parted"]
    for key in (*known, *others):
        storage.write(key, [key.encode()])
    sizes = {key: len(key.encode()) for key in known}
    monkeypatch.setattr(listing, "PAGE_KEYS", 3)

    def asked(keys: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
        faulty_s3.proxy.requests.clear()
        found = sizes_of(storage, keys)
        return {key: found[key] for key in known if key in found}, [each.operation for each in faulty_s3.proxy.requests]

    assert asked(known) == (sizes, ["ListObjectsV2"] * 6)  # four, and one more for each other key that stands between
    assert asked([*known, "missing"]) == (sizes, ["ListObjectsV2"] * 6)  # and a listing of all
    refused = faulty_s3.proxy.inject(Refuse(501, "NotImplemented"), on="ListObjectsV2", times=1)
    assert asked(known)[0] == sizes
    assert refused.fired


def test_large_objects_are_read_whole_in_part_and_scattered(s3_url: str) -> None:
    storage = open_storage(s3_url)
    storage.write("a", [memoryview(DATA)[:100], DATA[100:]])
    assert storage.size("a") == len(DATA)
    assert storage.read("a") == DATA
    assert storage.read("a", 3) == DATA[3:]
    assert storage.read("a", 5, 1 << 60) == DATA[5:]
    assert storage.read("a", len(DATA) - 3, 100) == DATA[-3:]
    out = bytearray(len(DATA) + 50)
    outs = [memoryview(out)[:11], memoryview(out)[11 : ONE_REQUEST_BYTES + 1], memoryview(out)[ONE_REQUEST_BYTES + 1 :]]
    assert storage.read_into("a", 2, outs) == len(DATA) - 2
    assert out[: len(DATA) - 2] == DATA[2:]


def test_a_read_of_one_span_is_one_request(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.url)
    storage.write("a", [DATA])
    assert storage.traits.span_bytes == RANGE_BYTES <= ONE_REQUEST_BYTES
    storage.read_into("a", 5, [memoryview(bytearray(RANGE_BYTES // 2)) for _ in range(2)])
    assert faulty_s3.proxy.count("GetObject") == 1
    assert faulty_s3.proxy.count("HeadObject") == 0


def test_connections_are_used_again(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.url)
    storage.write("a", [DATA[:1000]])
    for _ in range(20):
        assert storage.read("a") == DATA[:1000]
        storage.read_into("a", 10, [memoryview(bytearray(500)), memoryview(bytearray(5))])
        storage.size("a")
    assert faulty_s3.proxy.num_connections == 1


def test_a_write_holds_a_few_parts_at_any_size(s3_url: str) -> None:
    """200 MB; and the parts may be one buffer that is filled again and again."""
    storage = open_storage(s3_url)
    storage.write("warm", [DATA])
    buffer = bytearray(MIB)

    def parts() -> Iterator[memoryview]:
        for index in range(200):
            buffer[:] = bytes([index]) * MIB
            yield memoryview(buffer)

    tracemalloc.start()
    try:
        storage.write("a", parts())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= PARTS_IN_FLIGHT * PART_BYTES + 4 * MIB
    for index in (0, 7, 8, 123, 199):
        assert storage.read("a", index * MIB, MIB) == bytes([index]) * MIB
    assert storage.size("a") == 200 * MIB


def test_a_read_of_much_memory_holds_no_more_than_that(s3_url: str) -> None:
    storage = open_storage(s3_url)
    storage.write("a", [DATA])
    out = memoryview(bytearray(len(DATA)))
    storage.read_into("a", 0, [out])
    tracemalloc.start()
    try:
        storage.read_into("a", 0, [out])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out == DATA
    assert peak <= 8 * MIB


_WRITER = """
import sys
from raysharded.checkpoint import open_storage
def parts():
    for _ in range(4):
        yield bytes(8 << 20)
    print("half", flush=True)
    sys.stdin.readline()
open_storage(sys.argv[1]).write("a/dead", parts())
"""


def test_a_killed_writer_leaves_nothing_under_the_key_and_an_upload_that_is_found(s3_url: str) -> None:
    storage = open_storage(s3_url)
    writer = _python(_WRITER, s3_url)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    writer.kill()
    writer.communicate()
    assert storage.list() == []
    (left,) = storage.unfinished("a")
    assert left.key == "a/dead"
    assert storage.unfinished() == [left]
    assert storage.unfinished("b") == []
    storage.discard([left, left])
    assert storage.unfinished() == []


def test_a_writer_whose_upload_is_discarded_fails_with_the_reason(s3_url: str) -> None:
    storage = open_storage(s3_url)

    def parts() -> Iterator[bytes]:
        yield DATA
        storage.discard(storage.unfinished())
        yield DATA

    with pytest.raises(StorageError, match="let no clean-up run"):
        storage.write("a", parts())
    assert storage.list() == []


def test_storages_with_similar_prefixes_do_not_disturb_each_other(s3_url: str) -> None:
    names = ["run", "run2", "ru", "run/run"]
    storages = {name: open_storage(join_url(s3_url, name)) for name in names[:3]}
    for name, storage in storages.items():
        storage.write("a/x", [name.encode()])
        assert storage.put_if_absent("claims/1", name.encode())
    storages["run"].delete(["a/x"])
    assert storages["run"].list() == ["claims/1"]
    for name in ("run2", "ru"):
        assert storages[name].list() == ["a/x", "claims/1"]
        assert storages[name].read("a/x") == storages[name].read("claims/1") == name.encode()
    assert len(open_storage(s3_url).list()) == 5


def test_more_keys_than_one_request_takes_are_listed_and_deleted(s3_url: str) -> None:
    storage = open_storage(s3_url)
    subprocess.run([sys.executable, "-c", _MANY, s3_url], check=True, cwd=ROOT, timeout=120)
    keys = storage.list("many")
    assert keys == [f"many/{index:04d}" for index in range(1001)]
    storage.delete(keys)
    assert storage.list() == []


_MANY = """
import sys
from concurrent.futures import ThreadPoolExecutor
from raysharded.checkpoint import open_storage
storage = open_storage(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    list(pool.map(lambda index: storage.write(f"many/{index:04d}", [b"x"]), range(1001)))
"""

_FORKS = """
import os, sys
from raysharded.checkpoint import open_storage
storage = open_storage(sys.argv[1])
data = bytes(range(256)) * (1 << 17)
storage.write("parent", [data])
child = os.fork()
if not child:
    storage.write("child", [data])
    os._exit(0 if storage.read("parent") == storage.read("child") == data else 1)
storage.write("after", [data])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert storage.read("child") == storage.read("after") == data
"""


def test_a_forked_process_has_separate_connections(s3_url: str) -> None:
    subprocess.run([sys.executable, "-c", _FORKS, s3_url], check=True, cwd=ROOT, timeout=60)


def test_the_server_may_be_named_by_boto3s_own_variables(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, endpoint = s3_url.partition("?endpoint_url=")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    program = "import sys; from raysharded.checkpoint import open_storage; open_storage(sys.argv[1]).write('a', [b'1'])"
    subprocess.run([sys.executable, "-c", program, path], check=True, cwd=ROOT, timeout=60)
    assert open_storage(s3_url).read("a") == b"1"


@pytest.mark.parametrize(
    ("credentials", "remedy"),
    [
        ({"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "wrong"}, "does not accept these credentials"),
        ({"AWS_ACCESS_KEY_ID": "wrong", "AWS_SECRET_ACCESS_KEY": "wrong"}, "does not accept these credentials"),
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "Give boto3 credentials"),
    ],
)
def test_credentials_that_are_missing_or_wrong_are_reported_with_what_to_do(
    s3_url: str, credentials: dict[str, str], remedy: str
) -> None:
    program = (
        "import sys; from raysharded.checkpoint import open_storage, check_writable\n"
        "try:\n    check_writable(open_storage(sys.argv[1]))\nexcept Exception as error:\n    print(error)"
    )
    hidden = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | credentials
    done = subprocess.run(
        [sys.executable, "-c", program, s3_url],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert remedy in done.stdout


def _python(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


def _wrong_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_SECRET_ACCESS_KEY", "another")


def _unknown_key(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", "nobody")


def _slow_clock(patch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime
    patch.setattr(botocore.auth, "get_current_datetime", lambda *args, **kw: now(*args, **kw) - timedelta(hours=2))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_wrong_secret, "SignatureDoesNotMatch.*does not accept these credentials"),
        (_unknown_key, "InvalidAccessKeyId.*does not accept these credentials"),
        (_slow_clock, "RequestTimeTooSkewed.*clock differs"),
    ],
)
def test_what_is_wrong_with_the_credentials_or_the_clock_is_reported_though_the_first_request_is_a_head(
    s3_url: str, break_it: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    open_storage(s3_url).write("c/manifest.json", [b"{}"])
    url = f"{s3_url}&timeout_s=100.{secrets.randbelow(10**9)}"  # a separate connection
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        storage = open_storage(url)
        with pytest.raises(StorageError, match=said):
            storage.size("c/manifest.json")
        with pytest.raises(StorageError, match=said):
            api.open(join_url(url, "c"))
        with pytest.raises(StorageError, match=said):
            api.save(join_url(url, "d"), {"w": torch.zeros(1)})


def test_a_head_that_is_refused_by_a_policy_alone_stays_what_it_is(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.url)
    storage.write("a", [b"1"])
    said = r"HeadObject with 403.*Allow these credentials s3:GetObject there: the access key that ends in test, from"
    faulty_s3.proxy.inject(Refuse(403, "AccessDenied"), on="HeadObject", times=2)
    with pytest.raises(StorageError, match=said):
        storage.size("a")
    faulty_s3.proxy.inject(Refuse(403, "AccessDenied"), on="ListObjectsV2", times=2)
    with pytest.raises(StorageError, match=said):
        storage.size("a")
