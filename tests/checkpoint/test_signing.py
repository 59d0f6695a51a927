"""With a key, data that its holders did not sign is refused: write access to the storage is not enough."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest
import torch

from raysharded import CheckpointConfig, checkpoint
from raysharded.checkpoint import (
    SigningKey,
    Storage,
    commit,
    open_checkpoint,
    open_storage,
    signing_key_from_environment,
)
from raysharded.checkpoint.format.encoding import decode
from raysharded.errors import CheckpointError, ConfigError, CorruptCheckpoint
from raysharded.run.translation import key_of
from tests.checkpoint.samples import State, bytes_of, flipped, raw, read_all, save, seal, with_index
from tests.cli.test_commands import fail

SECRET = b"0123456789abcdef0123456789abcdef"
KEY = SigningKey(SECRET)
OTHER = SigningKey(SECRET[::-1])
STATE: State = {"w": raw("float32", 6, 4), "b": raw("int64")}


def _saved(key: SigningKey | None = KEY) -> tuple[Storage, str]:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    return storage, save(storage, STATE, key=key)


def test_a_signed_checkpoint_loads_with_its_key_and_without_any() -> None:
    storage, prefix = _saved()
    assert read_all(open_checkpoint(storage, prefix, key=KEY)) == bytes_of(STATE)
    assert read_all(open_checkpoint(storage, prefix)) == bytes_of(STATE)


def test_an_unsigned_checkpoint_is_refused_with_a_key() -> None:
    storage, prefix = _saved(key=None)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is not signed, and a signing key is set"):
        open_checkpoint(storage, prefix, key=KEY)


def test_a_checkpoint_signed_with_another_key_is_refused() -> None:
    storage, prefix = _saved(key=OTHER)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is signed with another key"):
        open_checkpoint(storage, prefix, key=KEY)


def test_what_a_forger_changes_in_a_signed_manifest_is_refused_wherever_it_is() -> None:
    """The forger can make the digest right, and has a signature of another manifest of the same writers."""
    storage, prefix = _saved()
    whole = storage.read(f"{prefix}/manifest.json")
    body = json.loads(whole)
    signature = body["hmac"].encode()
    for field, value in (("run", "other"), ("step", 8), ("created_at", 1.5), ("metadata", {"a": 1}), ("tree", [])):
        forged = seal({**body, field: value}, SECRET)
        mine = forged[:85] + signature + forged[149:]
        with pytest.raises(CorruptCheckpoint, match="signed"):
            decode(_resealed(mine), key=KEY)
    for at in range(85, 149):
        with pytest.raises(CorruptCheckpoint, match="signed"):
            decode(_resealed(flipped(whole, at, 1)), key=KEY)


def _resealed(data: bytes) -> bytes:
    from blake3 import blake3

    return data[:11] + blake3(data[75:]).hexdigest().encode() + data[75:]


@pytest.mark.parametrize(
    "signature",
    [b"", b"0" * 64, b"\xff" * 64, "é".encode() * 32, b'","hmac":"', b"F" * 64],
    ids=["none", "zeros", "bytes", "letters", "quotes", "capitals"],
)
def test_a_signature_of_any_bytes_is_refused(signature: bytes) -> None:
    storage, prefix = _saved()
    whole = storage.read(f"{prefix}/manifest.json")
    with pytest.raises(CorruptCheckpoint):
        decode(_resealed(whole[:85] + signature + whole[149:]), key=KEY)


def test_a_duplicate_signature_is_refused() -> None:
    storage, prefix = _saved()
    body = json.loads(storage.read(f"{prefix}/manifest.json"))
    text = json.dumps({name: value for name, value in body.items() if name not in ("digest", "hmac")})
    with pytest.raises(CorruptCheckpoint, match="two fields"):
        decode(seal(text[:-1] + f', "hmac": "{"0" * 64}"}}', SECRET), key=KEY)


def test_a_signature_reaches_every_file_through_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    with_index(monkeypatch)
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    prefix = save(storage, STATE, key=KEY, chunk=2)
    manifest = json.loads(storage.read(f"{prefix}/manifest.json"))
    assert manifest["index"]["digest"]
    assert {"digest_table", "path"} <= set(manifest["files"][0])
    for key in storage.list(prefix):
        whole = storage.read(key)
        storage.write(key, [flipped(whole, len(whole) // 2, 8)])
        with pytest.raises(CheckpointError, match=key.rpartition("/")[2].replace(".", r"\.")):
            open_checkpoint(storage, prefix, key=KEY).verify()
        storage.write(key, [whole])


def test_a_checkpoint_of_a_digest_is_that_one_or_none() -> None:
    storage, prefix = _saved()
    digest = open_checkpoint(storage, prefix).digest
    assert open_checkpoint(storage, prefix, digest=digest).digest == digest
    with pytest.raises(CorruptCheckpoint, match="it is not the checkpoint that was meant"):
        open_checkpoint(storage, prefix, digest=digest[::-1])


def test_a_commit_finds_its_own_signed_manifest_and_refuses_another_writers_unsigned_one() -> None:
    storage, prefix = _saved()
    manifest = open_checkpoint(storage, prefix).manifest
    assert commit(storage, prefix, manifest, key=KEY) == open_checkpoint(storage, prefix).digest
    storage, prefix = _saved(key=None)
    with pytest.raises(CorruptCheckpoint, match="not signed"):
        commit(storage, prefix, manifest, key=KEY)


def test_the_key_is_taken_from_the_environment_or_from_the_file_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYSHARDED_CHECKPOINT_KEY", raising=False)
    monkeypatch.delenv("RAYSHARDED_CHECKPOINT_KEY_FILE", raising=False)
    assert signing_key_from_environment() is None
    path = tmp_path / "key"
    path.write_bytes(b"\n " + SECRET + b"\r\n")
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY_FILE", str(path))
    assert signing_key_from_environment() == KEY
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", f" {OTHER.secret.decode()}\n")
    assert signing_key_from_environment() == OTHER
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", os.fsdecode(b"\xff" * 16))
    assert signing_key_from_environment() == SigningKey(b"\xff" * 16)


@pytest.mark.parametrize("name", ["RAYSHARDED_CHECKPOINT_KEY", "RAYSHARDED_CHECKPOINT_KEY_FILE"])
@pytest.mark.parametrize("value", ["", " \n"], ids=["empty", "blank"])
def test_a_key_that_is_set_and_blank_is_an_error_and_not_the_absence_of_one(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "forged", {"w": torch.ones(2)}, step=1)
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=rf"\${name} is set and empty: was the secret mounted"):
        checkpoint.load(tmp_path / "forged", {"w": torch.zeros(2)})
    assert f"${name} is set and empty" in fail("checkpoint", "show", tmp_path / "forged")


@pytest.fixture
def unkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYSHARDED_CHECKPOINT_KEY", "RAYSHARDED_CHECKPOINT_KEY_FILE", "RAYSHARDED_REQUIRE_SIGNED"):
        monkeypatch.delenv(name, raising=False)


def test_signatures_can_be_required_so_that_a_missing_key_is_an_error(
    unkeyed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, into = tmp_path / "forged", {"w": torch.zeros(2)}
    checkpoint.save(folder, {"w": torch.ones(2)}, step=1)
    checkpoint.load(folder, into)
    no_key = "signed checkpoints are required .*, and there is no key"
    with pytest.raises(CheckpointError, match=no_key):
        checkpoint.load(folder, into, require_signed=True)
    with pytest.raises(CheckpointError, match=no_key):
        checkpoint.open(folder, require_signed=True)
    with pytest.raises(CorruptCheckpoint, match="is not signed"):
        checkpoint.load(folder, into, require_signed=True, key=KEY)
    checkpoint.save(tmp_path / "signed", {"w": torch.ones(2)}, step=1, key=KEY)
    checkpoint.load(tmp_path / "signed", into, require_signed=True, key=KEY)
    monkeypatch.setenv("RAYSHARDED_REQUIRE_SIGNED", "1")
    with pytest.raises(CheckpointError, match=r"\$RAYSHARDED_REQUIRE_SIGNED"):
        checkpoint.load(folder, into)
    with pytest.raises(CheckpointError, match=r"\$RAYSHARDED_REQUIRE_SIGNED"):
        checkpoint.save(tmp_path / "unsigned", {"w": torch.ones(2)})
    assert "there is no key" in fail("checkpoint", "verify", folder)
    monkeypatch.setenv("RAYSHARDED_REQUIRE_SIGNED", "yes")
    with pytest.raises(CheckpointError, match="'yes': set it to 1, or to 0"):
        checkpoint.load(folder, into)


def test_a_run_that_requires_signatures_does_not_begin_without_a_key(unkeyed: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"signed checkpoints are required \(require_signed\)"):
        key_of(CheckpointConfig(require_signed=True))
    key = tmp_path / "key"
    key.write_bytes(SECRET)
    assert key_of(CheckpointConfig(require_signed=True, signing_key_file=str(key))) == KEY
    with pytest.raises(ConfigError, match="require_signed"):
        CheckpointConfig(require_signed="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (0o600, ""),
        (0o400, ""),
        (0o640, "its group may read it."),
        (0o644, "other users may read it and its group may read it."),
        (0o660, "its group may read it and its group may write to it."),
    ],
    ids=["600", "400", "640", "644", "660"],
)
def test_a_key_file_that_others_may_read_is_a_warning(
    mode: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(mode)
    assert SigningKey.from_file(path) == SigningKey.from_file(path) == KEY
    assert len(caplog.messages) == (1 if told else 0)
    assert told in "".join(caplog.messages)


def test_a_key_file_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o602)
    with pytest.raises(CheckpointError, match=r"may write to the signing key file .*chmod 600") as caught:
        SigningKey.from_file(path)
    assert SECRET.decode() not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's file")
def test_a_key_file_of_another_user_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    assert SigningKey.from_file(path) == KEY
    assert "another user owns it" in "".join(caplog.messages)


def test_a_key_has_a_name_that_does_not_reveal_it() -> None:
    assert KEY.identity == SigningKey(SECRET).identity != OTHER.identity
    assert len(KEY.identity) == 16


def test_a_key_that_is_missing_or_short_is_refused_and_none_is_ever_shown(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*cannot be read"):
        SigningKey.from_file(tmp_path / "nowhere")
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match="0 bytes is too short"):
        SigningKey.from_file(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="15 bytes is too short") as caught:
        SigningKey(SECRET[:15])
    assert SECRET[:15].decode() not in str(caught.value)
    assert SECRET.decode() not in repr(KEY)
