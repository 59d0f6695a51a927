"""Keys are exchanged while they are used: a refused key is looked up again, and requests continue with the new one."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from raysharded.checkpoint import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage.s3 import connection
from raysharded.checkpoint.storage.s3.bucket import open_bucket
from raysharded.checkpoint.storage.s3.credentials import Found, Session, look_up
from raysharded.checkpoint.storage.s3.upload import PART_BYTES
from raysharded.clock import SystemClock
from raysharded.errors import StorageError
from raysharded.journal import writer as journal_writer
from raysharded.journal.log import Journal, read
from raysharded.journal.writer import Recorder
from tests.paths import ROOT
from tests.s3.fixtures import FaultyS3
from tests.s3.keys import Key, new_key, remove_key
from tests.s3.proxy import Refuse, Request
from tests.s3.server import S3Server

pytestmark = pytest.mark.s3

UNKNOWN = Key(access="KEYOFNOBODY", secret="nothing")
LARGE = Random(2).randbytes(3 * PART_BYTES + 7)


@dataclass(kw_only=True)
class Keyring:
    """The credentials file of this process, and the key in it."""

    server: S3Server
    path: Path
    key: Key
    put: Callable[[Key, Path], None] = field(default=Key.write)

    def exchange(self) -> None:
        """Put a new key into the file, then have the server refuse the old one."""
        old, self.key = self.key, new_key(self.server)
        self.put(self.key, self.path)
        remove_key(self.server, old)


@pytest.fixture
def keyring(s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyring]:
    """A file with a separate key, which this process and its children use from now on."""
    ring = Keyring(server=s3_server, path=tmp_path / "credentials", key=new_key(s3_server))
    ring.key.write(ring.path)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(ring.path))
        patch.setattr(connection, "LOOK_UP_EVERY_S", 0.0)
        yield ring
    remove_key(s3_server, ring.key)


@pytest.fixture
def storage(keyring: Keyring, s3_url: str) -> Storage:
    """A storage with a separate connection, which has used the file's key."""
    opened = open_storage(_apart(s3_url))
    opened.write("old", [b"old"])
    assert opened.read("old", 0, 2) == b"ol"
    return opened


def _apart(url: str) -> str:
    return f"{url}&timeout_s=100.{secrets.randbelow(10**9)}"


def _client_of(storage: Storage) -> object:
    return open_bucket(storage.url).connection.client


def _rewrite(key: Key, path: Path) -> None:
    key.write(path)


def _replace(key: Key, path: Path) -> None:
    key.write(path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def _mount(key: Key, path: Path) -> None:
    """As Kubernetes updates a mounted secret: the file is a link through `..data`, which is replaced."""
    fresh = path.parent / f"..{key.access}"
    fresh.mkdir()
    key.write(fresh / path.name)
    (path.parent / "..data_tmp").symlink_to(fresh.name)
    os.replace(path.parent / "..data_tmp", path.parent / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(f"..data/{path.name}")


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "write": lambda storage: storage.write("new", [b"new"]),
    "large write": lambda storage: storage.write("new", [LARGE]),
    "read": lambda storage: storage.read("old"),
    "read_into": lambda storage: storage.read_into("old", 0, [memoryview(bytearray(3))]),
    "put_if_absent": lambda storage: storage.put_if_absent("old", b"new"),
    "size": lambda storage: storage.size("old"),
    "list": lambda storage: storage.list(),
    "unfinished": lambda storage: storage.unfinished(),
    "delete": lambda storage: storage.delete(["old", "new"]),
    "delete one": lambda storage: storage.delete(["old"]),
}


@pytest.mark.parametrize("put", [_rewrite, _replace, _mount])
def test_a_key_that_is_exchanged_is_found_however_the_file_is_put_there(
    storage: Storage, keyring: Keyring, put: Callable[[Key, Path], None]
) -> None:
    keyring.put = put
    keyring.exchange()
    storage.write("new", [b"new"])
    assert storage.list() == ["new", "old"]
    assert storage.retries == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_goes_on_with_the_key_that_is_in_the_file_by_now(
    storage: Storage, keyring: Keyring, s3_url: str, name: str
) -> None:
    UNKNOWN.write(keyring.path)
    refused = open_storage(_apart(s3_url))
    before = _client_of(refused)
    keyring.key.write(keyring.path)
    OPERATIONS[name](refused)
    assert _client_of(refused) is not before
    assert refused.retries == 0


def test_a_range_of_an_object_that_was_read_with_the_old_key_is_read_with_the_new_one(
    storage: Storage, keyring: Keyring
) -> None:
    keyring.exchange()
    assert storage.read("old", 1, 2) == storage.read("old", 1, 2) == b"ld"
    assert storage.retries == 0


def test_an_upload_that_began_with_the_old_key_ends_with_the_new_one(storage: Storage, keyring: Keyring) -> None:
    before = _client_of(storage)

    def parts() -> Iterator[bytes]:
        yield LARGE[: 2 * PART_BYTES + 1]
        assert storage.unfinished()
        keyring.exchange()
        yield LARGE[2 * PART_BYTES + 1 :]

    storage.write("a", parts())
    assert _client_of(storage) is not before
    assert storage.read("a") == LARGE
    assert storage.unfinished() == []
    assert storage.retries == 0


def test_threads_that_are_refused_together_make_one_new_client(
    storage: Storage, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    keyring.exchange()
    start = threading.Barrier(12)

    def write(index: int) -> None:
        start.wait()
        storage.write(f"many/{index}", [b"x"])

    with caplog.at_level(logging.INFO, "raysharded.checkpoint"), ThreadPoolExecutor(12) as pool:
        list(pool.map(write, range(12)))
    assert len(storage.list("many")) == 12
    used = [record for record in caplog.messages if "the next requests use" in record]
    of = f"the access key that ends in {keyring.key.access[-4:]}, from the file {keyring.path}, profile default"
    assert used == [f"credentials were refused; the next requests use {of}"]


def test_a_session_token_that_expires_is_replaced_by_the_one_in_the_file(faulty_s3: FaultyS3, keyring: Keyring) -> None:
    """The server knows the key and has no tokens; the proxy knows the tokens."""
    first, second = (Key(access=keyring.key.access, secret=keyring.key.secret, token=token) for token in ("1st", "2nd"))
    first.write(keyring.path)
    storage = open_storage(faulty_s3.url)
    storage.write("a", [b"1"])

    def has_first(request: Request) -> bool:
        return request.header("x-amz-security-token") == first.token

    expired = faulty_s3.proxy.inject(Refuse(400, "ExpiredToken"), when=has_first, times=10**6)
    with pytest.raises(StorageError, match=f"credentials have expired.*{first.access[-4:]}.*{keyring.path}"):
        storage.write("b", [b"2"])
    second.write(keyring.path)
    storage.write("b", [b"2"])
    assert storage.size("b") == 1
    assert any(request.header("x-amz-security-token") == second.token for request in faulty_s3.proxy.requests)
    assert expired.fired == 2
    assert storage.retries == 0


def test_a_program_that_gives_keys_is_called_again_for_a_refused_key_and_not_for_a_missing_right(
    faulty_s3: FaultyS3, keyring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys with a time of expiry are renewed by botocore, and those of a role are new at each look-up."""
    given, config = tmp_path / "given.json", tmp_path / "config"

    def give(key: Key) -> None:
        expiry = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
        names = {"AccessKeyId": key.access, "SecretAccessKey": key.secret, "SessionToken": key.token or "1st"}
        given.write_text(json.dumps({"Version": 1, **names, "Expiration": expiry}))

    config.write_text(f"[default]\ncredential_process = cat {given}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    keyring.path.unlink()
    give(keyring.key)
    storage = open_storage(faulty_s3.url)
    storage.write("a", [b"1"])
    before = _client_of(storage)
    keyring.put = lambda key, _: give(key)
    config.write_text("[default]\ncredential_process = /no/such/program\n")
    apart = open_storage(_apart(faulty_s3.direct_url))
    with pytest.raises(StorageError, match=r"credentials could not be looked up.*no/such/program") as caught:
        apart.read("a")
    assert not isinstance(caught.value, NoSuchKey)
    config.write_text(f"[default]\ncredential_process = cat {given}\n")
    faulty_s3.proxy.inject(Refuse(403, "AccessDenied"), on="PutObject")
    give(replace(keyring.key, token="2nd"))
    with pytest.raises(StorageError, match=r"s3:PutObject there: .* from credential_process of profile default"):
        storage.write("a", [b"2"])
    assert _client_of(storage) is before
    keyring.exchange()
    storage.write("a", [b"3"])
    assert _client_of(storage) is not before
    assert storage.read("a") == b"3"


def test_keys_that_are_found_only_later_are_used(
    keyring: Keyring, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    keyring.path.unlink()
    storage = open_storage(_apart(s3_url))
    with pytest.raises(StorageError, match="Give boto3 credentials"):
        storage.write("a", [b"1"])
    keyring.path.write_text(f"[default]\naws_access_key_id = {keyring.key.access}\n")  # half of it
    with pytest.raises(StorageError, match="Give boto3 credentials"):
        storage.write("a", [b"1"])
    keyring.key.write(keyring.path)
    storage.write("a", [b"1"])
    assert storage.read("a") == b"1"


def test_keys_that_stay_the_same_are_looked_up_at_most_every_so_often(
    storage: Storage, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def counted(session: Session) -> Found:
        nonlocal looked
        looked += 1
        return look_up(session)

    monkeypatch.setattr(connection, "look_up", counted)
    monkeypatch.setattr(connection, "LOOK_UP_EVERY_S", 3600.0)
    remove_key(keyring.server, keyring.key)
    for _ in range(5):
        with pytest.raises(StorageError, match="does not accept these credentials"):
            storage.write("a", [b"1"])
    assert looked == 1
    monkeypatch.setattr(connection, "LOOK_UP_EVERY_S", 0.0)
    keyring.key = new_key(keyring.server)
    keyring.key.write(keyring.path)
    storage.write("a", [b"1"])
    assert looked == 2


def test_a_journal_waits_for_keys_and_loses_no_entry(
    storage: Storage, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses the old key long before somebody writes the new one into the file."""
    monkeypatch.setattr(journal_writer, "BACK_OFF_S", 0.0)
    recorder = Recorder(Journal(storage, SystemClock(), "driver"), SystemClock())
    recorder.record("started", {}, durable=True)
    recorder.flush()
    assert recorder.failure is None
    remove_key(keyring.server, keyring.key)
    for step in range(3):
        recorder.record("step", {"step": step}, durable=True)
        recorder.flush()
        assert recorder.failure is not None
        assert "does not accept these credentials" in str(recorder.failure.error)
    keyring.key = new_key(keyring.server)
    keyring.key.write(keyring.path)
    recorder.record("step", {"step": 3}, durable=True)
    recorder.flush()
    assert recorder.failure is None
    recorder.close(60.0)
    assert [entry["step"] for entry in read(storage) if entry["kind"] == "step"] == [0, 1, 2, 3]


def test_a_refusal_says_where_the_key_comes_from_and_its_last_characters(storage: Storage, keyring: Keyring) -> None:
    remove_key(keyring.server, keyring.key)
    with pytest.raises(StorageError) as caught:
        storage.write("a", [b"1"])
    said = str(caught.value)
    assert (
        f"the access key that ends in {keyring.key.access[-4:]}, from the file {keyring.path}, profile default" in said
    )
    assert "looked up again with every later try" in said
    assert keyring.key.access not in said
    assert keyring.key.secret[-4:] not in said
    keyring.key = new_key(keyring.server)


def test_keys_of_the_environment_are_said_to_stay(s3_url: str) -> None:
    program = (
        "import sys; from raysharded.checkpoint import open_storage\n"
        "try:\n    open_storage(sys.argv[1]).write('a', [b''])\nexcept Exception as error:\n    print(error)"
    )
    env = {**os.environ, "AWS_ACCESS_KEY_ID": "AKIANOBODY", "AWS_SECRET_ACCESS_KEY": "xyztOpS"}
    command = [sys.executable, "-c", program, s3_url]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    said = r"does not accept these credentials: the access key that ends in BODY, from the environment.*start it again"
    assert re.search(said, done.stdout), done.stdout
    assert "tOpS" not in done.stdout
