"""Sharded states on a real S3 server."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from raysharded.checkpoint import api, open_storage
from raysharded.errors import CheckpointError
from raysharded.locations import join_url
from tests.checkpoint.state_dict.ranks import run_ranks
from tests.checkpoint.state_dict.test_round_trips import FLAT, HYBRID, differences, laid_out, whole_tensors

pytestmark = [pytest.mark.s3, pytest.mark.procs]


def credentials() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def save_beside(rank: int, uri: str, environment: dict[str, str]) -> Any:
    os.environ.update(environment)  # ranks are forked from a server with an older environment
    with api.AsyncSaver() as saver:
        return saver.save(uri, laid_out(HYBRID), step=12, metadata={"seed": 1}, data={"samples": 7}).result()


def load_there(rank: int, uri: str, environment: dict[str, str]) -> list[str]:
    os.environ.update(environment)
    return differences(uri, FLAT[3])


def test_a_state_is_the_same_after_a_change_of_layout(s3_url: str) -> None:
    uri = join_url(s3_url, "step-12")
    saved = run_ranks(4, save_beside, uri, credentials())
    assert len({one.digest for one in saved}) == 1
    assert run_ranks(3, load_there, uri, credentials()) == [[]] * 3
    for name, tensor in whole_tensors().items():
        assert torch.equal(api.open(uri).read(f"sharded.{name}"), tensor)
    assert api.open(s3_url).digest == saved[0].digest
    files = [key for key in open_storage(s3_url).list() if key.endswith(".safetensors")]
    assert len({key.split("/")[1] for key in files}) > 1  # writers do not share a prefix
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        api.save(uri, {"w": torch.zeros(1)})
