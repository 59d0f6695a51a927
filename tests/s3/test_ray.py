"""A run on Ray whose keys are exchanged within a checkpoint: in a write of a worker, and in one of the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.journal.log import read
from raysharded.locations import join_url
from tests.ray.clusters import own_cluster as own_cluster, run_script
from tests.ray.test_main_job import undisturbed
from tests.s3.fixtures import FaultyS3
from tests.s3.keys import Key
from tests.s3.proxy import Exchange, Request
from tests.s3.test_credentials import Keyring, _apart, keyring as keyring

pytestmark = [pytest.mark.s3, pytest.mark.ray, pytest.mark.long]

STEPS = 6
SCRIPT = f"""
import json, sys
import raysharded as rs
from tests.ray.test_main_job import trainer

kinds = []
made = trainer(sys.argv[1], 2, steps={STEPS}, checkpoint=rs.CheckpointConfig(every_steps=2))
result = made.fit(lambda kind, _: kinds.append(kind))
print(json.dumps({{"fingerprint": result.fingerprint, "kinds": kinds}}))
"""


@dataclass(frozen=True, slots=True)
class ExchangeKeys:
    """The key of this request is replaced and removed before the request reaches the server, which refuses it."""

    ring: Keyring
    keys: list[Key]
    """Gets the new key."""

    def __call__(self, exchange: Exchange) -> None:
        self.ring.exchange()
        self.keys.append(self.ring.key)
        reply = exchange.forward()
        assert reply.status == 403, reply
        exchange.send(reply)


def test_keys_that_are_exchanged_while_a_worker_and_the_driver_write_a_checkpoint_cost_nothing(
    faulty_s3: FaultyS3, keyring: Keyring, own_cluster: dict[str, str]
) -> None:
    def writes(name: str) -> Callable[[Request], bool]:
        return lambda request: "/step-" in request.target and name in request.target

    proxy = faulty_s3.proxy
    keys: list[Key] = []
    of_worker = proxy.inject(ExchangeKeys(keyring, keys), on="PutObject", when=writes(".safetensors"))
    of_driver = proxy.inject(ExchangeKeys(keyring, keys), on="PutObject", when=writes("manifest.json"))
    url = faulty_s3.url.replace("timeout_s=2", "timeout_s=30")
    found = run_script(SCRIPT, url, environment=own_cluster)
    assert (of_worker.fired, of_driver.fired) == (1, 1)
    assert found["fingerprint"] == undisturbed(STEPS).fingerprint
    assert not set(found["kinds"]) & {"checkpoint_failed", "storage_failing", "worker_lost"}
    assert found["kinds"].count("checkpoint") + found["kinds"].count("checkpoint_late") >= STEPS // 2
    storage = open_storage(join_url(_apart(faulty_s3.direct_url), "job"))
    assert [entry["step"] for entry in read(storage) if entry["kind"] == "step"] == list(range(1, STEPS + 1))
    newest = newest_complete(storage).checkpoint
    assert newest is not None
    assert newest.step == STEPS
    assert storage.unfinished() == []
    used = {  # a worker may have written its last part before the driver writes its first manifest
        name: [key for key in keys if any(_is_put(request, key, name) for request in proxy.requests)]
        for name in (".safetensors", "manifest.json", "journal/")
    }
    assert used[".safetensors"], "a new key"
    assert keyring.key in used["manifest.json"]
    assert keyring.key in used["journal/"]


def _is_put(request: Request, key: Key, name: str) -> bool:
    signature = request.header("Authorization") or ""
    return request.method == "PUT" and name in request.target and f"Credential={key.access}/" in signature
