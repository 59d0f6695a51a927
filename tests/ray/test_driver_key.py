"""The key that signs checkpoints is not in a cluster's memory. A Ray that a run starts: test_local_ray.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.experimental import internal_kv

from raysharded.checkpoint import SigningKey, newest_complete, open_storage
from raysharded.errors import CheckpointError
from raysharded.run.hosted.driver_key import take_environment
from raysharded.run.hosted.submission import RunSubmission, absolute, make_order
from tests.ray.driving import hurry, trainer
from tests.ray.test_hosted import no_host_stays as no_host_stays

SECRET = "canary-0123456789abcdef"
KEY = SigningKey(SECRET.encode())


def order_of(folder: Path) -> RunSubmission:
    return make_order(absolute(trainer(folder, 1).spec()), take_over=False)


def test_an_order_names_a_key_and_its_file_but_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", SECRET)
    order = order_of(tmp_path)
    assert (order.environment, order.key_id) == ({}, KEY.identity)
    assert SECRET not in repr(order)
    take_environment(order)  # the environment of this process has it
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", SECRET[::-1])
    with pytest.raises(CheckpointError, match=rf"signed with the key {KEY.identity}, .* has another one"):
        take_environment(order)
    monkeypatch.delenv("RAYSHARDED_CHECKPOINT_KEY")
    with pytest.raises(CheckpointError, match=r"has no .RAYSHARDED_CHECKPOINT_KEY"):
        take_environment(order)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY_FILE", "key")
    order = order_of(tmp_path)
    assert (order.environment, order.key_id) == ({"RAYSHARDED_CHECKPOINT_KEY_FILE": str(tmp_path / "key")}, "")
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY_FILE", "")
    with pytest.raises(CheckpointError, match="KEY_FILE is set and empty"):
        order_of(tmp_path)
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", " ")
    with pytest.raises(CheckpointError, match="KEY is set and empty"):
        order_of(tmp_path)


def stored() -> dict[bytes, bytes]:
    """Everything that raysharded keeps in the cluster's memory."""
    keys = internal_kv._internal_kv_list(b"", namespace=b"raysharded")
    return {key: internal_kv._internal_kv_get(key, namespace=b"raysharded") for key in keys}


@pytest.mark.ray
def test_a_driver_actor_signs_with_the_key_in_the_file_that_its_order_names(
    no_host_stays: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(tmp_path)
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", SECRET)
    run = trainer(tmp_path, 1).start()
    assert any(key.startswith((b"host/", b"runs/driven/")) for key in stored())
    assert not [key for key, value in stored().items() if SECRET.encode() in value]
    with pytest.raises(CheckpointError, match=r"its driver's process has no .*Put the key in a file"):
        run.wait(120)
    assert "its driver's process has no" in run.status().error
    assert not (tmp_path / "driven").exists(), "a refused start makes no run"
    monkeypatch.delenv("RAYSHARDED_CHECKPOINT_KEY")
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(SECRET)
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY_FILE", os.path.relpath(tmp_path / "key"))
    run = trainer(tmp_path, 1).start()
    run.wait(240)
    assert newest_complete(open_storage(run.url), key=KEY).checkpoint is not None
    assert not [key for key, value in stored().items() if SECRET.encode() in value]
